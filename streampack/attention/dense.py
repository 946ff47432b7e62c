"""Boolean masks, which work with any attention and are the oracle for the other backends."""

from __future__ import annotations

import torch


def document_ids(seq_lens: torch.Tensor, *, max_seq_len: int) -> torch.Tensor:
    """Number the sequence of each token, ``[batch, max_seq_len]`` int64; padding is a sequence of its own.

    ``seq_lens`` ``[batch, segments]`` may have zeros at the end of a row, and may leave out the padding's length. There
    is no host sync.

    >>> document_ids(torch.tensor([[3, 2, 1], [4, 2, 0]], dtype=torch.int32), max_seq_len=6)
    tensor([[0, 0, 0, 1, 1, 2],
            [0, 0, 0, 0, 1, 1]])
    """
    ends = seq_lens.cumsum(1)  # [batch, segments]: the place after each segment
    places = torch.arange(max_seq_len, device=seq_lens.device).repeat(len(seq_lens), 1)
    return torch.searchsorted(ends, places, right=True)  # the number of segments that have ended


def dense_mask(seq_lens: torch.Tensor, *, max_seq_len: int) -> torch.Tensor:
    """Make a mask ``[batch, max_seq_len, max_seq_len]``, True where the row's token sees the column's.

    A token sees itself and the tokens before it in its sequence. Padding sees padding: a row without a True would be
    NaN after softmax.

    >>> dense_mask(torch.tensor([[2, 1]]), max_seq_len=4).int()
    tensor([[[1, 0, 0, 0],
             [1, 1, 0, 0],
             [0, 0, 1, 0],
             [0, 0, 0, 1]]], dtype=torch.int32)
    """
    ids = document_ids(seq_lens, max_seq_len=max_seq_len)
    return (ids[:, :, None] == ids[:, None, :]).tril_()
