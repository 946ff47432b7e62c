"""Hugging Face models on packed batches: prepare the model once, make the arguments of each forward pass.

Samples are kept apart in one of three ways. With ``dense`` and ``flex``, transformers makes a packed mask from
``position_ids`` that restart, if there is neither a cache nor an ``attention_mask``. Families that ignore
``position_ids`` get masks, one for each type of layer. With ``varlen`` and ``flash``, an attention function registered
with transformers gets the boundaries in place of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from streampack.attention.backends import auto_backends, unfit
from streampack.attention.calls import PREPARED
from streampack.attention.families import BLIND, PROVEN, longest_pack, missing, refusal, window_of
from streampack.attention.flash import flash_attention
from streampack.attention.mappings import labels_of, packed_of, positions_of
from streampack.attention.positions import position_table
from streampack.attention.pretrained import disable_cache, find_pretrained, set_attention, stock_attention
from streampack.attention.probe import find_leaks
from streampack.attention.varlen import cu_seqlens_of, varlen_attention

if TYPE_CHECKING:
    from streampack.attention.mappings import Packed

# Names under which the functions are registered. With "flash" in a name, transformers would look for packages.
_REGISTERED = {"varlen": "streampack_varlen", "flash": "streampack_fa"}
ATTENTIONS = ("dense", "flex", *_REGISTERED)


@dataclass(frozen=True)
class TransformersInputs:
    """Makes the forward arguments of a prepared model for a packed batch: ``model(**inputs(batch))``."""

    attention: str  # "dense", "flex", "varlen" or "flash"
    model: Any  # the PreTrainedModel inside any wrappers
    table: int | None = None  # positions in its table, if it has one

    def __call__(self, batch: Packed | Mapping[str, Any]) -> dict[str, Any]:
        """Return keyword arguments on the batch's device; with ``labels`` where a dict has them.

        Positions are made from ``seq_lens``: after a sequence of a single token, transformers takes one that does not
        begin at 0 for its continuation.

        Raises:
            ValueError: if packs are too long for the model, or a dict does not say where its samples begin (see
                `packed_of`).
        """
        if isinstance(batch, Mapping):
            packed = packed_of(batch)
            labels = labels_of(batch, packed)
            return self(packed) if labels is None else self(packed) | {"labels": labels}
        config, max_seq_len = self.model.config.get_text_config(), batch.tokens.shape[1]
        self.require_length(max_seq_len)
        positions = positions_of(batch.seq_lens, max_seq_len=max_seq_len)
        inputs = {"input_ids": batch.tokens, "position_ids": positions, "use_cache": False}
        if self.attention in _REGISTERED:
            cu_seqlens = cu_seqlens_of(batch.seq_lens, max_seq_len=max_seq_len)
            # A router's loss would read the mask as a mask of tokens.
            if getattr(config, "output_router_logits", False):
                return inputs | {"cu_seq_lens_q": cu_seqlens}
            # With 4 dimensions they pass for a finished mask, which every family passes on to its attention function;
            # keyword arguments some do not (stablelm).
            cu_seqlens = cu_seqlens[None, None, None]
            torch._dynamo.maybe_mark_dynamic(cu_seqlens, 3)  # or torch.compile makes two graphs
            return inputs | {"attention_mask": cu_seqlens}
        if config.model_type in BLIND:
            inputs["attention_mask"] = self._masks(config, positions)
        return inputs

    def require_length(self, max_seq_len: int) -> None:
        """Check that packs are not longer than the model's table of positions, nor too long to keep samples apart.

        Raises:
            ValueError: if they are.
        """
        config = self.model.config.get_text_config()
        if self.table is not None and max_seq_len > self.table:
            raise ValueError(
                f"max_seq_len is {max_seq_len}, and this {config.model_type} model has {self.table} positions; set "
                f"max_seq_len={self.table} or less"
            )
        limit = longest_pack(config, self.attention)
        if limit is not None and max_seq_len > limit[0]:
            raise ValueError(
                f"max_seq_len is {max_seq_len}, but a packed {config.model_type} model with this config keeps "
                f"samples apart up to {limit[0]}: {limit[1]}; set max_seq_len={limit[0]} or less"
            )

    def _masks(self, config: Any, positions: torch.Tensor) -> Any:
        """Make the masks that transformers would make if the model passed on its positions."""
        from transformers.masking_utils import create_masks_for_generate

        shaped = torch.empty(*positions.shape, 0, dtype=self.model.dtype, device=positions.device)
        return create_masks_for_generate(config, shaped, None, None, positions)


def prepare(model: nn.Module, *, attention: str) -> TransformersInputs:
    """Prepare a causal language model with its weights, bare or wrapped; see `prepare_model_for_packing`.

    Raises:
        ValueError: if samples would see one another in this model, or it lacks this kind of attention; with the
            reason and the way out. Families without a test are tried with `find_leaks`.
    """
    inner = find_pretrained(model)
    if inner is None:
        raise ValueError(
            f"{type(model).__name__} holds no PreTrainedModel, so nothing is known of its attention; give it a mask of "
            "streampack.make_mask(batch), or call streampack.attention.varlen_attention in it"
        )
    config = inner.config.get_text_config()
    if why := refusal(config, stateful=bool(inner._is_stateful)) or _virtual_tokens(model):
        raise ValueError(f"this model cannot be packed: {why}")
    before = inner.config._attn_implementation
    reasons = {}
    for word in auto_backends(inner.device) if attention == "auto" else (attention,):
        if why := _lacks(inner, word):
            reasons[word] = why
            continue
        set_attention(inner, _implementation(inner, word))
        inputs = _inputs(word, inner)
        why = None if config.model_type in PROVEN else _failed(model, inputs)
        if why is None:
            disable_cache(inner)
            PREPARED[inner] = partial(_inputs, word)
            return inputs
        reasons[word] = f"nothing is known of {config.model_type}, and it failed a try: {why}"
        set_attention(inner, before)
    others = [repr(word) for word in ATTENTIONS[:3] if word not in reasons and _lacks(inner, word) is None]
    raise ValueError(
        "; ".join(f"attention={word!r} will not do: {why}" for word, why in reasons.items())
        + f"; use {' or '.join(others) or 'padded batches, one sample a row'}"
    )


def _failed(model: nn.Module, inputs: TransformersInputs) -> str | None:
    """Try a model of an unknown family on a small pack; return what went wrong, None if samples were kept apart."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return "it has no weights yet; prepare it when they are loaded"
    try:
        report = find_leaks(model, inputs=inputs)
    except Exception as error:  # third-party code may raise anything
        return f"{type(error).__name__}: {error}"
    return None if report.ok else str(report)


def _inputs(attention: str, inner: nn.Module) -> TransformersInputs:
    return TransformersInputs(attention, inner, position_table(inner))


def _lacks(inner: Any, attention: str) -> str | None:
    """Return why this model cannot use a backend on its device, or None if it can."""
    config = inner.config.get_text_config()
    routed = getattr(config, "output_router_logits", False)
    if routed and config.model_type in BLIND and attention not in _REGISTERED:
        return f"{config.model_type} needs packed masks, which its router's loss (output_router_logits) cannot read"
    if attention == "dense":
        return None
    if not inner._can_set_attn_implementation():
        return f"{config.model_type} has its attention written into its layers"
    if attention == "flex" and not inner._supports_flex_attn:
        return f"transformers has no flex attention for {config.model_type}"
    if inner.device.type == "cuda" or attention == "flash":
        why = unfit(
            attention,
            device=inner.device,
            dtype=inner.dtype,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            softcap=getattr(config, "attn_logit_softcapping", None),
        )
        if why:
            return why
    return missing(config, attention)


def _implementation(inner: Any, attention: str) -> str:
    """Return transformers' name of a backend. Between sdpa and eager, the user's choice stands."""
    if attention in _REGISTERED:
        _register()
        return _REGISTERED[attention]
    return "flex_attention" if attention == "flex" else stock_attention(inner)


def _virtual_tokens(model: nn.Module) -> str | None:
    """Return why a model with PEFT's prompt or prefix tuning cannot be packed; None for any other.

    Trained tokens are put before each row, so only the first sample of a pack would have them.
    """
    for module in model.modules():
        if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
            return "prompt tuning trains tokens before each row, not before each sample; use LoRA, or padded batches"
    return None


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for attention, kernel in (("varlen", varlen_attention), ("flash", flash_attention)):
        AttentionInterface.register(_REGISTERED[attention], _attention_function(kernel, attention))
        AttentionMaskInterface.register(_REGISTERED[attention], sdpa_mask)  # for calls without boundaries


def _attention_function(kernel: Callable[..., torch.Tensor], attention: str) -> Callable[..., Any]:
    """Make an attention function as transformers calls it; without boundaries, as in ``generate``, it is sdpa."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(
        module: nn.Module,
        query: torch.Tensor,  # [batch, heads, max_seq_len, head_dim]
        key: torch.Tensor,  # [batch, kv_heads, max_seq_len, head_dim]
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        cu_seq_lens_q: torch.Tensor | None = None,
        **of_layer: Any,
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is not None and attention_mask.dtype == torch.int32:
            cu_seq_lens_q = attention_mask.flatten()
        if cu_seq_lens_q is None:
            plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, **of_layer
            )
            return plain
        for name, what in (("dropout", "dropout on attention weights"), ("s_aux", "attention sinks")):
            if of_layer.get(name) not in (None, 0.0):
                raise ValueError(f"attention={attention!r} has no {what}; use attention='dense' or 'flex'")
        if "sliding_window" in of_layer:
            window = of_layer["sliding_window"]
        else:
            window = window_of(module.config, module.layer_idx)  # type: ignore[arg-type]
        batch, heads, max_seq_len, _ = query.shape
        out = kernel(
            *(x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)),
            cu_seqlens=cu_seq_lens_q,
            max_seqlen=max_seq_len,
            window=window,
            scale=of_layer.get("scaling"),
            softcap=of_layer.get("softcap"),
        )
        return out.view(batch, max_seq_len, heads, -1), None

    return attend
