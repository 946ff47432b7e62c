"""Block masks for ``torch.nn.attention.flex_attention``, which skips the blocks that no token sees."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from streampack.attention.dense import document_ids


def flex_mask(seq_lens: torch.Tensor, *, max_seq_len: int) -> BlockMask:
    """The mask of `dense_mask` as a `BlockMask`, on the device of ``seq_lens``. torchtune models take it as it is.

    >>> mask = flex_mask(torch.tensor([[256, 128]]), max_seq_len=512)  # blocks of 128 tokens
    >>> mask.to_dense().int()
    tensor([[[[1, 0, 0, 0],
              [1, 1, 0, 0],
              [0, 0, 1, 0],
              [0, 0, 0, 1]]]], dtype=torch.int32)
    """
    ids = document_ids(seq_lens, max_seq_len=max_seq_len)

    def sees(
        batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (ids[batch, query] == ids[batch, key]) & (query >= key)

    return create_block_mask(sees, len(ids), None, max_seq_len, max_seq_len, device=ids.device)
