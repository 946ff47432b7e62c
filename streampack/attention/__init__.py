"""What a model's attention needs to keep a pack's sequences apart, made on the batch's device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn.attention.flex_attention import BlockMask

from streampack.attention.dense import dense_mask, document_ids
from streampack.attention.flex import flex_mask
from streampack.plan import require

__all__ = ["dense_mask", "document_ids", "flex_mask", "make_mask"]

_MASKS: dict[str, Callable[..., torch.Tensor | BlockMask]] = {"dense": dense_mask, "flex": flex_mask}


class Packed(Protocol):
    """What a mask is made from. A `Batch` is one."""

    @property
    def tokens(self) -> torch.Tensor:
        """``[batch, max_seq_len]``; only its shape and device count."""

    @property
    def seq_lens(self) -> torch.Tensor:
        """``[batch, most segments]`` int32, zeros at the end."""


def make_mask(batch: Packed, *, attention: str = "auto") -> torch.Tensor | BlockMask:
    """The ``mask`` argument of a torchtune model for a packed batch; call it where the batch has arrived.

    ``"dense"`` is a boolean tensor and works anywhere; ``"flex"`` is a `BlockMask`, which needs CUDA to
    train (on a CPU, torch's flex attention has no backward). ``"auto"`` is flex on CUDA and dense elsewhere.

    >>> from streampack import IterablePackedDataset, collate_packed
    >>> rows = [{"tokens": [7, 8, 9], "labels": [7, 8, 9]}, {"tokens": [4, 5], "labels": [4, 5]}]
    >>> batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=6)))
    >>> make_mask(batch).shape
    torch.Size([1, 6, 6])

    Raises:
        ValueError: for an unknown ``attention``.
    """
    require(attention, "attention", ("auto", *_MASKS))
    if attention == "auto":
        attention = "flex" if batch.tokens.device.type == "cuda" else "dense"
    return _MASKS[attention](batch.seq_lens, max_seq_len=batch.tokens.shape[1])
