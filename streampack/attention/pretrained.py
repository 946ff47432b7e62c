"""How prepared models of transformers call attention, and all that is private there and must be used.

- ``config._attn_implementation``: which attention function a model calls. There is a public function that sets it
  (``set_attn_implementation``) and none that reads it.
- ``_supports_sdpa``, ``_supports_flex_attn``, ``_can_set_attn_implementation``: what can be set. Otherwise only the
  error, or the silence, of setting it would tell, and the model would be changed by then.
- ``_is_stateful``: whether layers carry a state from token to token. No config says so for all families.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from streampack.attention.backends import flash_attention
from streampack.attention.families import window_of
from streampack.attention.varlen import Boundaries, capped_attention, varlen_attention

REGISTERED_NAMES = {"varlen": "streampack_varlen", "flash": "streampack_fa"}
"""Names under which the functions are registered. If one contained "flash", transformers would look for packages."""


def find_pretrained(model: nn.Module) -> Any:
    """Return the outermost ``PreTrainedModel`` in a model and its wrappers, or None."""
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def current_attention(pretrained: Any) -> str:
    """Return transformers' name of the attention function that a model's text calls; a tower may have another."""
    name: str = pretrained.config.get_text_config()._attn_implementation
    return name


def stock_attention(pretrained: Any) -> str:
    """Return transformers' name of the masked attention: ``sdpa`` or ``eager``, whichever the model uses."""
    current = current_attention(pretrained)
    return current if current in ("sdpa", "eager") else "sdpa" if pretrained._supports_sdpa else "eager"


def why_not_settable(pretrained: Any, *, flex: bool) -> str | None:
    """Return why a model's attention cannot be set to a function of ours, or to flex attention; None if it can."""
    kind = pretrained.config.get_text_config().model_type
    if not pretrained._can_set_attn_implementation():
        return f"{kind} has its attention written into its layers"
    return (
        f"transformers has no flex attention for {kind}"
        if flex and not pretrained._supports_flex_attn
        else None
    )


def is_stateful(pretrained: Any) -> bool:
    """Return whether layers of a model carry a state from token to token."""
    return bool(pretrained._is_stateful)


def set_attention(pretrained: Any, name: str) -> None:
    """Set the attention function, without warnings about sub-configs that have no model of their own (dbrx's).

    Towers of images keep theirs, which packs do not change.
    """
    if current_attention(pretrained) == name:
        return
    from transformers.utils import logging

    parts = ["", *(part for part in pretrained.config.sub_configs if "vision" not in part)]
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        pretrained.set_attn_implementation(dict.fromkeys(parts, name))
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def unprepared(pretrained: Any) -> Iterator[None]:
    """Let a prepared model use transformers' own attention within the block."""
    prepared = current_attention(pretrained)
    set_attention(pretrained, stock_attention(pretrained))
    try:
        yield
    finally:
        set_attention(pretrained, prepared)


def disable_cache(model: nn.Module) -> None:
    """Let forward passes make no cache unless asked for one: a packed pass has no use for it.

    ``config.use_cache`` is not changed, because it is saved with the model, and generating would be slow without a
    cache.
    """
    for module in model.modules():
        takes_it = hasattr(module, "config") and "use_cache" in inspect.signature(module.forward).parameters
        if takes_it and without_cache not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(without_cache, with_kwargs=True)


def without_cache(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Switch the cache off where none is asked for or given; a forward pre-hook of prepared models."""
    if kwargs.get("use_cache") is None and kwargs.get("past_key_values") is None:
        kwargs = {**kwargs, "use_cache": False}
    return args, kwargs


@cache
def register_functions() -> None:
    """Register the attention functions of varlen and flash with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for attention, kernel in (("varlen", varlen_attention), ("flash", flash_attention)):
        AttentionInterface.register(REGISTERED_NAMES[attention], _make_attention_function(kernel, attention))
        # The mask of calls without boundaries, as in generate.
        AttentionMaskInterface.register(REGISTERED_NAMES[attention], sdpa_mask)


def keywords_of(boundaries: Boundaries, tokens: torch.Tensor) -> dict[str, Any]:
    """Return boundaries by the keywords that transformers has for them, as a model's ``forward`` takes them.

    A mask comes along that hides nothing, or transformers would make one of ``max_seq_len ** 2`` for each row. The loss
    of a router reads it, too, as one of padding.
    """
    batch, max_seq_len = tokens.shape
    mask = torch.ones((), dtype=torch.bool, device=tokens.device).expand(batch, 1, 1, max_seq_len)
    keywords = {
        "attention_mask": mask,
        "cu_seq_lens_q": boundaries.cu_seqlens_q,
        "cu_seq_lens_k": boundaries.cu_seqlens_k,
        "max_length_q": boundaries.max_seqlen,
        "max_length_k": boundaries.max_seqlen,
    }
    return keywords if boundaries.keys is None else keywords | {"key_index": boundaries.keys}


def _make_attention_function(kernel: Callable[..., torch.Tensor], attention: str) -> Callable[..., Any]:
    """Make an attention function of transformers; without boundaries, as in ``generate``, it computes its sdpa."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(
        module: nn.Module,
        query: torch.Tensor,  # [batch, heads, max_seq_len, head_dim]
        key: torch.Tensor,  # [batch, kv_heads, max_seq_len, head_dim]
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        cu_seq_lens_q: torch.Tensor | None = None,
        cu_seq_lens_k: torch.Tensor | None = None,
        max_length_k: int = 0,
        key_index: torch.Tensor | None = None,
        **layer_arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        scale, softcap = layer_arguments.get("scaling"), layer_arguments.get("softcap")
        if cu_seq_lens_q is None or cu_seq_lens_k is None:
            if attention_mask is not None and attention_mask.shape[-2] == 1 < query.shape[2]:
                raise ValueError(
                    f"{type(module).__name__} is not given the boundaries of samples (cu_seq_lens_q); use "
                    "attention='dense' or 'flex'"
                )
            if softcap is not None:  # which transformers' sdpa attention does not have
                out = capped_attention(query, key, value, attention_mask, scale=scale, softcap=softcap)
                return out.transpose(1, 2).contiguous(), None
            plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, **layer_arguments
            )
            return plain
        sinks = layer_arguments.get("s_aux") is not None
        if sinks or layer_arguments.get("dropout"):
            what = "attention sinks" if sinks else "dropout on attention weights"
            raise ValueError(f"attention={attention!r} has no {what}; use attention='dense' or 'flex'")
        if "sliding_window" in layer_arguments:
            window = layer_arguments["sliding_window"]
        else:
            window = window_of(module.config, module.layer_idx)  # type: ignore[arg-type]
        boundaries = Boundaries(cu_seq_lens_q, cu_seq_lens_k, max_length_k, key_index)
        return boundaries.attend(kernel, query, key, value, window=window, scale=scale, softcap=softcap), None

    return attend
