"""Facts about families of Hugging Face models: which can be packed, with which attention, and how long packs may be.

Tests prove these facts with transformers 5.23, and write the table of docs/guides/models.md. A model of a family that
is not listed here is tried with the leak probe when its first inputs are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

KNOWN = frozenset((
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba", "beam", "biogpt",
    "bitnet", "codegen", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "dbrx",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "diffllama", "doge", "dots1", "dots3_note_text",
    "ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe_text", "exaone4", "exaone_moe", "falcon", "falcon_h1",
    "falcon_mamba", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "glm", "glm4",
    "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm4v_text", "glm_moe_dsa", "glm_ocr_text", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite", "granite_swa",
    "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium", "hrm_text",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "hy_v3", "hy_v4", "hyperclovax",
    "inkling2_text", "inkling_text", "internlm3", "iquestcoder", "jais2", "jamba", "jetmoe", "kimi_linear",
    "kolibri1", "laguna", "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text", "longcat_flash", "mamba",
    "mamba2", "mellum", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "ministral", "ministral3",
    "mistral", "mixtral", "modernbert-decoder", "moshi", "nanochat", "nemotron", "nemotron_h", "olmo",
    "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt", "paddleocr_vl_text", "persimmon", "phi", "phi3",
    "phimoe", "qwen2", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_moe_text", "qwen3_vl_text", "qwen4_exp_text",
    "recurrent_gemma", "rwkv", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma",
    "xglm", "xlstm", "youtu", "zamba", "zamba2", "zaya",
))  # fmt: skip
"""Families (``model_type`` of the text's config) for which a test shows that samples in packs are as they are alone."""

RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "mamba", "recurrent"})
"""Types of layers that read no mask of pairs of tokens."""

_STATEFUL_LAYERS = RECURRENT_LAYERS | {"hybrid", "hybrid_sliding"}
_STATE = "carries a state from token to token, over the ends of samples, and attention masks do not reach it"
_NO_PACK = "train it on padded batches, one sample a row"
_FROM_THE_ROW = {
    **dict.fromkeys(("bloom", "mpt"), "counts its bias (ALiBi) from the beginning of a row"),
    **dict.fromkeys(
        ("deepseek_v4", "minimax_m3_vl_text"), "puts keys into blocks from the beginning of a row"
    ),
}

# Families that make their masks without ``position_ids``, so that only finished ones keep samples apart.
_IGNORE_POSITIONS = frozenset({"falcon", "gpt_oss", "granitemoehybrid"})

_NOT_BY_BOUNDARIES = {
    **dict.fromkeys(("stablelm", "nemotron"), "does not hand boundaries on to its attention"),
    **dict.fromkeys(("inkling_text", "inkling2_text", "doge"), "adds numbers of its own to its masks"),
}
# How many keys, or blocks of keys, a query attends to of those before it.
_INDEXERS = ("index_topk", "index_topk_blocks", "indexer_budget")


def why_not_packable(config: Any, *, stateful: bool = False, split: bool = False) -> str | None:
    """Return why a model with this config cannot be packed at all, and what to do; None if no reason is known.

    ``stateful`` is what transformers says of the model's class; with ``split``, its mixers are known, and run one
    sequence at a time.
    """
    reason = _FROM_THE_ROW.get(config.model_type)
    if getattr(config, "alibi", False):
        reason = _FROM_THE_ROW["bloom"]
    elif (
        not reason
        and not split
        and (stateful or _STATEFUL_LAYERS.intersection(getattr(config, "layer_types", None) or ()))
    ):
        reason = _STATE
    elif getattr(config, "is_encoder_decoder", False):
        reason = "is an encoder-decoder model; a pack has no source and target side"
    elif not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        reason = "sees tokens to the right; its masks do not look at where samples begin"
    return reason and f"{config.model_type} {reason}; {_NO_PACK}"


def why_not_family(config: Any, attention: str, *, sinks: bool = False) -> str | None:
    """Return why this backend cannot pack a model with this config, or None if it can."""
    kind = config.model_type
    if attention not in ("varlen", "flash"):
        no_masks = kind in _IGNORE_POSITIONS or any("mrope_section" in rope for rope in _ropes(config))
        if takes_no_masks(config) and no_masks:
            return f"{kind} needs packed masks, which its router's loss (output_router_logits) cannot read"
        return None
    if sinks:
        return f"{kind} has attention sinks, which {attention} does not compute"
    if any(getattr(config, name, None) for name in _INDEXERS):
        return f"{kind} selects keys under a mask, which {attention} does not read"
    if why := _NOT_BY_BOUNDARIES.get(kind):
        return f"{kind} {why}"
    dropout = getattr(config, "attention_dropout", None) or getattr(config, "attn_pdrop", None)
    if dropout:
        return f"the model drops out attention weights ({dropout}), which {attention} cannot"
    return None


def takes_no_masks(config: Any) -> bool:
    """Return whether a router's loss reads the model's mask as one of padding, so that it cannot be one of pairs."""
    return bool(getattr(config, "output_router_logits", False))


def head_dim_of(config: Any) -> int:
    """Return the channels of a head's queries and keys; those of multi-head latent attention have two parts."""
    parts = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if all(parts):
        return int(sum(parts))  # type: ignore[arg-type]
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def longest_pack(model: nn.Module, config: Any) -> tuple[int, str] | None:
    """Return the length of the longest pack that a model takes, and what limits it; None if nothing does."""
    if config.model_type == "llama4_text" and config.attn_temperature_tuning and 0 in config.no_rope_layers:
        limit = config.floor_scale - 1
        return limit, (
            f"but a packed {config.model_type} model with this config keeps samples apart up to {limit}: layers "
            "without RoPE scale queries by their place in the pack (attn_temperature_tuning)"
        )
    table = position_table(model)
    return None if table is None else (table, f"and this {config.model_type} model has {table} positions")


def longest_sample(config: Any, attention: str) -> tuple[int, str] | None:
    """Return the length of the longest sample that packs may hold, and what limits it; None if nothing does.

    With a longer one, the logits of others would depend on its length, or its own would be others than alone.
    """
    limits = []
    for rope in _ropes(config):
        kind = rope.get("rope_type", "default")
        if kind == "longrope" or "dynamic" in kind:
            length = rope.get("original_max_position_embeddings") or config.max_position_embeddings
            limits.append((length, f"{kind} RoPE turns all samples of a pack by the longest one"))
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    if chunked and attention in ("varlen", "flash"):
        limits.append((config.attention_chunk_size, f"{attention} does not cut samples into chunks"))
    return min(limits, default=None)


def why_not_auto(model: nn.Module, config: Any, attention: str) -> str | None:
    """Return why a backend takes only shorter samples than the model's packs may hold; None if it takes all."""
    limit, pack = longest_sample(config, attention), longest_pack(model, config)
    if limit in (None, longest_sample(config, "dense")) or (pack and limit and pack[0] <= limit[0]):
        return None
    return (
        limit and f"{config.model_type} with this config takes samples of up to {limit[0]} tokens: {limit[1]}"
    )


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Return the RoPE settings of a config: one set, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [value for value in parameters.values() if isinstance(value, dict)] or [parameters]


def limits_of(config: Any, kind: str | None) -> tuple[int | None, int | None]:
    """Return the window and the chunk of a type of layers, in tokens; None is the type of a config that names none.

    A window counts the query's own token; chunks begin at multiples of their length.
    """
    window: int | None = getattr(config, "sliding_window", None) or None
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    if config.model_type == "moshi":  # it gives its cache a window, and its masks none
        return None, None
    if kind is None:
        return window, chunk if window is None else None
    if "sliding" in kind or config.model_type == "minimax":  # whose full layers have the window, too
        return window, None
    return None, chunk if "chunked" in kind else None


def window_of(config: Any, layer: int) -> int | None:
    """Return the window of a layer, for families such as qwen2_moe, which pass it to masks only."""
    kinds = getattr(config, "layer_types", None)
    return limits_of(config, None if kinds is None or layer is None else kinds[layer])[0]


def position_table(model: nn.Module) -> int | None:
    """Return how many positions a model's tables hold, learned or precomputed; None if it has no table.

    Tables of another modality, such as the patches of an image, do not count.
    """
    counts = [table.num_embeddings - getattr(table, "offset", 0) for table in _learned_tables(model)]
    for _, module in _text_modules(model):
        tables = [getattr(module, "embed_positions", None)]  # as GPT-J calls it
        if hasattr(module, "rope_init"):  # a rotary embedding of torchtune
            tables.append(getattr(module, "cache", None))
        counts += [table.shape[0] for table in tables if torch.is_tensor(table)]
    return min(counts, default=None)


def why_not_positions(model: nn.Module, config: Any) -> str | None:
    """Return why a model's positions cannot restart at 0 where a sample begins; None if no reason is known."""
    for table in _learned_tables(model):
        if table.padding_idx is not None:
            first = f"{table.padding_idx + 1} (pad_token_id + 1)"
            return f"{config.model_type} counts positions from {first}, and a pack's positions begin at 0; {_NO_PACK}"
    return None


def _learned_tables(model: nn.Module) -> Iterator[nn.Embedding]:
    for name, module in _text_modules(model):
        named = name == "wpe" or ("position" in name and "relative" not in name)
        if named and isinstance(module, nn.Embedding):
            yield module


def _text_modules(
    model: nn.Module, name: str = "", model_type: str | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of a model's parts, without inner models of another modality."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        own = config.get_text_config().model_type
        if model_type is not None and own != model_type:
            return
        model_type = own
    yield name, model
    for child, module in model.named_children():
        yield from _text_modules(module, child, model_type)


def media_tokens(model: nn.Module) -> tuple[int, ...]:
    """Return the token ids that stand for images, video or sound in a Hugging Face model, in ascending order."""
    names = [f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index")]
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    found = {getattr(config, name, None) for config in configs for name in names}
    return tuple(sorted(token for token in found if type(token) is int and token >= 0))
