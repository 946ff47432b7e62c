"""Masks of Hugging Face models for batches with shared prefixes, one for each type of layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from streampack.attention.dense import dense_mask
from streampack.attention.flex import flex_mask
from streampack.attention.mappings import Packed
from streampack.attention.pretrained import stock_attention
from streampack.attention.shared import SharedPrefixes

Mask = torch.Tensor | BlockMask


def shared_masks(
    model: Any, batch: Packed, shared: SharedPrefixes, *, attention: str
) -> Mask | dict[str, Mask]:
    """Return the ``attention_mask`` of a model: a mask, or one for each type of layer if its config names types.

    Windows and chunks are counted by positions, because other answers may lie between a token and its prefix.

    Args:
        model: a PreTrainedModel.
        batch: on the model's device.
        shared: the batch's.
        attention: ``"dense"`` or ``"flex"``.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    limits = {
        "full_attention": (None, None),
        "sliding_attention": (window, None),
        "chunked_attention": (None, chunk),
    }
    visible = shared.visible()

    def mask(window: int | None, chunk: int | None) -> Mask:
        size, positions = batch.tokens.shape[1], batch.input_pos
        if attention == "flex":
            assert chunk is None, "TransformersInputs.why_not_shared refuses chunks"
            return flex_mask(
                batch.seq_lens, max_seq_len=size, window=window, visible=visible, positions=positions
            )
        allowed = dense_mask(batch.seq_lens, max_seq_len=size, visible=visible)
        if window is not None:
            allowed &= positions[:, :, None] - positions[:, None, :] < window
        if chunk is not None:
            allowed &= positions[:, :, None] // chunk == positions[:, None, :] // chunk
        if stock_attention(model) == "sdpa":
            return allowed[:, None]
        added = torch.zeros(allowed.shape, dtype=model.dtype, device=allowed.device)
        return added.masked_fill_(~allowed, torch.finfo(model.dtype).min)[:, None]

    if kinds := getattr(config, "layer_types", None):
        return {kind: mask(*limits[kind]) for kind in sorted(set(kinds))}
    return mask(window, chunk if window is None else None)
