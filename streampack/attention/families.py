"""Facts about families of Hugging Face models: which can be packed, and with which attention.

Tests prove these facts with transformers 5.23, and write the table of docs/guides/models.md. A model of a family that
is not listed here is probed with `find_leaks`.
"""

from __future__ import annotations

from typing import Any

PROVEN = frozenset(
    (
        *("dbrx", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granite"),
        *("llama", "llama4_text", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "phi", "phi3"),
        *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"),
    )
)
"""Families (``config.model_type``) for which a test shows that a packed sample has the logits of the sample alone."""

IGNORE_POSITIONS = frozenset({"falcon", "gpt_oss", "granitemoehybrid"})
"""Families that make their masks without ``position_ids``, so that the masks of packs must be made for them."""

_STATE = "carries a state from token to token, over the ends of samples, and attention masks do not reach it"
_NO_PACK = "train it on padded batches, one sample a row"

_STATEFUL_LAYERS = frozenset({"linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding"})


# How many keys, or blocks of keys, a query attends to of those before it. In packs shorter than that, the probe sees no
# difference.
_INDEXERS = ("index_topk", "index_topk_blocks", "indexer_budget")


def why_not_packable(config: Any, *, stateful: bool = False, split: bool = False) -> str | None:
    """Return why a model with this config cannot be packed at all, and what to do; None if no reason is known.

    ``stateful`` is ``_is_stateful`` of the model's class in transformers; with ``split``, its mixers are known, and run
    one sequence at a time.

    >>> class Config:
    ...     model_type, is_encoder_decoder = "t5", True
    >>> print(why_not_packable(Config()))
    t5 is an encoder-decoder model; a pack has no source and target side; train it on padded batches, one sample a row
    """
    reason = None
    if not split and (stateful or _STATEFUL_LAYERS.intersection(getattr(config, "layer_types", None) or ())):
        reason = _STATE
    elif getattr(config, "is_encoder_decoder", False):
        reason = "is an encoder-decoder model; a pack has no source and target side"
    elif not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        reason = "sees tokens to the right; its masks do not look at where samples begin"
    return reason and f"{config.model_type} {reason}; {_NO_PACK}"


def why_not_family(config: Any, attention: str) -> str | None:
    """Return why this backend cannot pack a model with this config, or None if it can.

    >>> class Config:
    ...     model_type, attention_dropout = "llama", 0.1
    >>> why_not_family(Config(), "varlen")
    'the model drops out attention weights (0.1), which varlen cannot'
    """
    if attention not in ("varlen", "flash"):
        return None
    if config.model_type == "gpt_oss":
        return f"gpt_oss has attention sinks, which {attention} does not compute"
    if any(getattr(config, name, None) for name in _INDEXERS):
        return f"{config.model_type} selects keys under a mask, which {attention} does not read"
    dropout = getattr(config, "attention_dropout", None) or getattr(config, "attn_pdrop", None)
    if dropout:
        return f"the model drops out attention weights ({dropout}), which {attention} cannot"
    return None


def longest_pack(config: Any) -> tuple[int, str] | None:
    """Return the length of the longest pack that keeps samples apart, and what limits it; None if nothing does.

    In a longer pack, the logits of a sample would depend on its place in the pack.
    """
    if config.model_type == "llama4_text" and config.attn_temperature_tuning and 0 in config.no_rope_layers:
        why = "layers without RoPE scale queries by their place in the pack (attn_temperature_tuning)"
        return config.floor_scale - 1, why
    return None


def longest_sample(config: Any, attention: str) -> tuple[int, str] | None:
    """Return the length of the longest sample that packs may hold, and what limits it; None if nothing does.

    With a longer one, the logits of others would depend on its length, or its own would be others than alone.
    """
    limits = []
    for rope in _rope_settings(getattr(config, "rope_parameters", None) or {}):
        kind = rope.get("rope_type", "default")
        if kind == "longrope" or "dynamic" in kind:
            length = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            limits.append((length, f"{kind} RoPE turns all samples of a pack by the longest one"))
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    if chunked and attention in ("varlen", "flash"):
        limits.append((config.attention_chunk_size, f"{attention} does not cut samples into chunks"))
    return min(limits, default=None)


def _rope_settings(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the RoPE settings of a config: one set, or one for each type of layer."""
    return [value for value in parameters.values() if isinstance(value, dict)] or [parameters]


def window_of(config: Any, layer: int) -> int | None:
    """Return how many tokens a query of this layer attends to, its own included; None if to all before it.

    Attention functions need it for families such as qwen2_moe, which pass their window to masks only.

    >>> class Config:
    ...     sliding_window, layer_types = 4096, ["sliding_attention", "full_attention"]
    >>> window_of(Config(), 0), window_of(Config(), 1)
    (4096, None)
    """
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return window or None if kinds is None or kinds[layer] == "sliding_attention" else None
