"""Block masks for ``torch.nn.attention.flex_attention``, which skips blocks that no token sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from streampack.attention.dense import document_ids

BLOCK = 128  # tokens on a side, flex attention's default


def flex_mask(seq_lens: torch.Tensor, *, max_seq_len: int, window: int | None = None) -> BlockMask:
    """Make the mask of `dense_mask` as a `BlockMask` on the device of ``seq_lens``, which torchtune models accept.

    The result is that of torch's ``create_block_mask``, which evaluates the mask for every pair of tokens; here the
    sequence ids at the ends of each block suffice. For a pack of 16,384 on one core of a CPU that is 2 ms and 11 MiB
    instead of 2.1 s and 2.5 GiB. Blocks without a hidden pair are marked as full, so the kernel applies no mask there.

    >>> mask = flex_mask(torch.tensor([[256, 128]]), max_seq_len=512)  # blocks of 128 tokens
    >>> mask.to_dense().int()
    tensor([[[[1, 0, 0, 0],
              [1, 1, 0, 0],
              [0, 0, 1, 0],
              [0, 0, 0, 1]]]], dtype=torch.int32)

    Args:
        seq_lens: ``[batch, segments]``, as in a `Batch`; the padding's length may be left out.
        max_seq_len: the length of a pack.
        window: tokens that a query sees, itself included; None: all before it in its sequence.
    """
    ids = document_ids(seq_lens, max_seq_len=max_seq_len)

    def sees(
        batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        seen = (ids[batch, query] == ids[batch, key]) & (query >= key)
        return seen if window is None else seen & (query - key < window)

    # Ids never decrease along a pack. So an earlier block of keys shares a sequence with a block of queries only if its
    # last id is their first, and both lie in one sequence if its first id is their last. A block that reaches past the
    # end of the pack is never full.
    first = ids[:, ::BLOCK]  # [batch, blocks]
    blocks = torch.arange(first.shape[1], device=ids.device)
    last = ids[:, (blocks * BLOCK + BLOCK - 1).clamp(max=max_seq_len - 1)]
    # [blocks, blocks]: distance from the block of queries back to that of keys
    back = blocks[:, None] - blocks
    filled = (blocks + 1) * BLOCK <= max_seq_len
    partly = (first[:, :, None] == last[:, None, :]) & (back > 0) | (back == 0)
    wholly = (last[:, :, None] == first[:, None, :]) & (back > 0) & filled[:, None]
    if window is not None:
        partly &= (back - 1) * BLOCK + 1 < window  # the closest pair of tokens
        wholly &= (back + 1) * BLOCK - 1 < window  # the farthest
    return BlockMask.from_kv_blocks(
        *_listed(partly & ~wholly),
        *_listed(wholly),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(max_seq_len, max_seq_len),
    )


def _listed(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many blocks of keys each block of queries has in ``[batch, blocks, blocks]``, and their numbers."""
    table = table[:, None].int()  # [batch, 1, blocks, blocks]: the same for all heads
    return table.sum(-1, dtype=torch.int32), table.argsort(stable=True, dim=-1, descending=True).int()


def flex_attention_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_mask: BlockMask,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute attention under a block mask, compiled on CUDA, where uncompiled flex attention is slow.

    Args:
        q: ``[batch, heads, max_seq_len, head_dim]``.
        k: ``[batch, kv_heads, max_seq_len, head_dim]``; ``heads`` is a multiple of ``kv_heads``.
        v: as ``k``.
        block_mask: of `flex_mask`.
        scale: of the scores; None: ``head_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``.

    Returns:
        ``[batch, heads, max_seq_len, head_dim]``. On a CPU, torch has no backward pass for it.
    """
    attend: Callable[..., Any] = flex_attention
    if q.is_cuda and not torch.compiler.is_compiling():
        attend = _compiled()
    out: torch.Tensor = attend(
        q,
        k,
        v,
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out


def flex_unfit(*, head_dim: int) -> str | None:
    """Return why torch's flex attention on CUDA cannot compute this attention, or None if it can."""
    if head_dim < 16:
        return f"torch's flex attention needs a head_dim of at least 16 on CUDA, the model's is {head_dim}"
    return None


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def cap(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap
