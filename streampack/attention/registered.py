"""The attention functions of varlen and flash, as transformers calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from streampack.attention.families import window_of
from streampack.attention.flash import flash_attention
from streampack.attention.shared import unfold_keys
from streampack.attention.varlen import capped_attention, varlen_attention

REGISTERED_NAMES = {"varlen": "streampack_varlen", "flash": "streampack_fa"}
"""Names under which the functions are registered. If one contained "flash", transformers would look for packages."""


def register_functions() -> None:
    """Register the attention functions of varlen and flash with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for attention, kernel in (("varlen", varlen_attention), ("flash", flash_attention)):
        AttentionInterface.register(REGISTERED_NAMES[attention], _make_attention_function(kernel, attention))
        # The mask of calls without boundaries, as in generate.
        AttentionMaskInterface.register(REGISTERED_NAMES[attention], sdpa_mask)


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
        **layer_arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        # `TransformersInputs` passes cu_seqlens as an int32 mask; real masks are bool or float.
        if attention_mask is not None and attention_mask.dtype == torch.int32:
            cu_seq_lens_q = attention_mask
        softcap = layer_arguments.get("softcap")
        if cu_seq_lens_q is None and softcap is not None:  # which transformers' sdpa attention does not have
            scale = layer_arguments.get("scaling")
            out = capped_attention(query, key, value, attention_mask, scale=scale, softcap=softcap)
            return out.transpose(1, 2).contiguous(), None
        if cu_seq_lens_q is None:
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
        batch, heads, max_seq_len, _ = query.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        keys = unfold_keys(cu_seq_lens_q) if cu_seq_lens_q.ndim == 4 else None
        if keys is not None:
            k, v = k[keys.index], v[keys.index]
        out = kernel(
            q,
            k,
            v,
            cu_seqlens=cu_seq_lens_q.flatten() if keys is None else keys.cu_seqlens_q,
            cu_seqlens_k=None if keys is None else keys.cu_seqlens_k,
            max_seqlen=max_seq_len,
            window=window,
            scale=layer_arguments.get("scaling"),
            softcap=softcap,
        )
        return out.view(batch, max_seq_len, heads, -1), None

    return attend
