"""The attention functions of varlen and flash, as transformers calls them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from streampack.attention.families import window_of
from streampack.attention.flash import flash_attention
from streampack.attention.varlen import Boundaries, capped_attention, varlen_attention

REGISTERED_NAMES = {"varlen": "streampack_varlen", "flash": "streampack_fa"}
"""Names under which the functions are registered. If one contained "flash", transformers would look for packages."""


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
    """Make an attention function as transformers calls it.

    Called without boundaries, as in ``generate``, it computes transformers' sdpa attention.
    """
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
