"""Boolean masks, which work with any attention; tests compare the other backends with them."""

from __future__ import annotations

import torch


def document_ids(seq_lens: torch.Tensor, *, max_seq_len: int) -> torch.Tensor:
    """Return the number of each token's sequence in its pack, ``[batch, max_seq_len]`` int64, from 0.

    Padding is a sequence of its own.

    ``seq_lens`` ``[batch, segments]`` may have zeros at the end of a row, and may leave out the padding's length.
    Nothing is copied to the host.

    >>> document_ids(torch.tensor([[3, 2, 1], [4, 2, 0]], dtype=torch.int32), max_seq_len=6)
    tensor([[0, 0, 0, 1, 1, 2],
            [0, 0, 0, 0, 1, 1]])
    """
    ends = seq_lens.cumsum(1)  # [batch, segments]: the index after each segment's last token
    indices = torch.arange(max_seq_len, device=seq_lens.device).repeat(len(seq_lens), 1)
    return torch.searchsorted(ends, indices, right=True)  # counts the segments that end before a token


def dense_mask(
    seq_lens: torch.Tensor, *, max_seq_len: int, visible: torch.Tensor | None = None
) -> torch.Tensor:
    """Make a mask ``[batch, query, key]``, True where a query attends to a key; both count ``max_seq_len`` tokens.

    A token attends to itself and to the tokens before it in its sequence. Padding attends to padding, because a row
    without a True would be NaN after softmax.

    >>> dense_mask(torch.tensor([[2, 1]]), max_seq_len=4).int()
    tensor([[[1, 0, 0, 0],
             [1, 1, 0, 0],
             [0, 0, 1, 0],
             [0, 0, 0, 1]]], dtype=torch.int32)

    Args:
        seq_lens: ``[batch, segments]``, as in a `Batch`; the padding's length may be left out.
        max_seq_len: the length of a pack.
        visible: ``[batch, segments + 1, segments + 1]``, whether a sequence sees another; None: only itself.
    """
    ids = document_ids(seq_lens, max_seq_len=max_seq_len)
    if visible is None:
        return (ids[:, :, None] == ids[:, None, :]).tril_()
    packs = torch.arange(len(ids), device=ids.device)[:, None, None]
    return visible[packs, ids[:, :, None], ids[:, None, :]].tril_()
