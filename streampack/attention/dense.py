"""Boolean masks: they work with any attention, and are the oracle for the other backends."""

from __future__ import annotations

import torch


def document_ids(seq_lens: torch.Tensor, *, max_seq_len: int) -> torch.Tensor:
    """The number of the sequence that each token belongs to; padding is a sequence of its own.

    ``seq_lens`` are the lengths of a pack's segments, with zeros at the end where a pack has fewer than
    another; the padding's length may be the last of them or be left out. The ids ``[batch, max_seq_len]``
    are int64, on its device, and nothing waits for the host.

    >>> document_ids(torch.tensor([[3, 2, 1], [4, 2, 0]], dtype=torch.int32), max_seq_len=6)
    tensor([[0, 0, 0, 1, 1, 2],
            [0, 0, 0, 0, 1, 1]])
    """
    ends = seq_lens.cumsum(1)  # [batch, segments]: the place after each segment
    places = torch.arange(max_seq_len, device=seq_lens.device).repeat(len(seq_lens), 1)
    return torch.searchsorted(ends, places, right=True)  # how many segments have ended


def dense_mask(seq_lens: torch.Tensor, *, max_seq_len: int) -> torch.Tensor:
    """``[batch, max_seq_len, max_seq_len]`` bool: True where the row's token sees the column's.

    That is, itself and those before it in its own sequence. Padding sees padding, so that no row is
    without a True, of which softmax would make NaN.

    >>> dense_mask(torch.tensor([[2, 1]]), max_seq_len=4).int()
    tensor([[[1, 0, 0, 0],
             [1, 1, 0, 0],
             [0, 0, 1, 0],
             [0, 0, 0, 1]]], dtype=torch.int32)
    """
    ids = document_ids(seq_lens, max_seq_len=max_seq_len)
    return (ids[:, :, None] == ids[:, None, :]).tril_()
