"""Masks of packs: boolean ones, which work with any attention, and block masks for ``flex_attention``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from streampack.attention.layout import document_ids, positions_of

BLOCK_SIZE = 128
"""Queries and keys of one block of a mask; flex attention's default."""


def dense_mask(
    seq_lens: torch.Tensor,
    *,
    max_seq_len: int,
    window: int | None = None,
    chunk: int | None = None,
    visible: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
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
        seq_lens: ``[batch, segments]``, as in a `Batch`; the padding's length may be missing.
        max_seq_len: the length of a pack.
        window: how many tokens a query attends to, its own included; None: all before it in its sequence.
        chunk: length of the chunks, counted from each sequence's beginning, that do not see one another.
        visible: ``[batch, segments + 1, segments + 1]``, whether a sequence sees another; None: only itself.
        positions: ``[batch, max_seq_len]``, by which windows and chunks are counted; None: as `positions_of` has them.
        blocks: ``[batch, max_seq_len]``, numbers of runs of tokens that see one another both ways if they are of one
            sequence, -1 for other tokens; None: there is none.
    """
    ids = document_ids(seq_lens, max_seq_len=max_seq_len)
    if visible is None:
        allowed = (ids[:, :, None] == ids[:, None, :]).tril_()
    else:
        packs = torch.arange(len(ids), device=ids.device)[:, None, None]
        allowed = visible[packs, ids[:, :, None], ids[:, None, :]].tril_()
    if blocks is not None:
        same = (ids[:, :, None] == ids[:, None, :]) & (blocks[:, :, None] == blocks[:, None, :])
        allowed |= same & (blocks >= 0)[:, :, None]
    if window is not None or chunk is not None:
        places = positions_of(seq_lens, max_seq_len=max_seq_len) if positions is None else positions
        if window is not None:
            allowed &= places[:, :, None] - places[:, None, :] < window
        if chunk is not None:
            allowed &= places[:, :, None] // chunk == places[:, None, :] // chunk
    return allowed


def flex_mask(
    seq_lens: torch.Tensor,
    *,
    max_seq_len: int,
    window: int | None = None,
    chunk: int | None = None,
    visible: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    blocks: torch.Tensor | None = None,
) -> BlockMask:
    """Make the mask of `dense_mask`, with its arguments, as a `BlockMask` on the device of ``seq_lens``.

    The result equals that of torch's ``create_block_mask``, which evaluates the mask for every pair of tokens. This
    function compares only the sequence ids at both ends of each block: for a pack of 16,384 tokens on one core of a CPU
    it takes 2 ms and 11 MiB instead of 2.1 s and 2.5 GiB. Blocks in which every query attends to every key are marked
    as full, and the kernel evaluates no mask in them. Where sequences see others, a block is full only if both of its
    sides hold a part of one sequence; with a window besides, or with chunks, none is.

    >>> mask = flex_mask(torch.tensor([[256, 128]]), max_seq_len=512)  # blocks of 128 tokens
    >>> mask.to_dense().int()
    tensor([[[[1, 0, 0, 0],
              [1, 1, 0, 0],
              [0, 0, 1, 0],
              [0, 0, 0, 1]]]], dtype=torch.int32)
    """
    ids = document_ids(seq_lens, max_seq_len=max_seq_len)
    places = torch.arange(max_seq_len, device=ids.device).expand_as(ids)
    if chunk is not None or (visible is not None and window is not None):
        places = positions_of(seq_lens, max_seq_len=max_seq_len) if positions is None else positions

    def may_attend(
        batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        own, other = ids[batch, query], ids[batch, key]
        ordered = query >= key
        if blocks is not None:
            ordered = ordered | ((blocks[batch, query] == blocks[batch, key]) & (blocks[batch, query] >= 0))
        allowed = (own == other if visible is None else visible[batch, own, other]) & ordered
        if window is not None:
            allowed = allowed & (places[batch, query] - places[batch, key] < window)
        if chunk is not None:
            allowed = allowed & (places[batch, query] // chunk == places[batch, key] // chunk)
        return allowed

    first_ids = ids[:, ::BLOCK_SIZE]  # [batch, blocks]
    numbers = torch.arange(first_ids.shape[1], device=ids.device)
    # [blocks, blocks]: how many blocks separate the keys from the queries after them
    distance = numbers[:, None] - numbers
    # A block that reaches past the end of the pack is never full.
    whole = (distance > 0) & ((numbers + 1) * BLOCK_SIZE <= max_seq_len)[:, None]
    if visible is None:
        # Ids never decrease along a pack. So a block of queries shares a sequence with an earlier block of keys only if
        # the first id of the queries is the last id of the keys. Both blocks lie wholly in one sequence if the last id
        # of the queries is the first id of the keys.
        last_ids = ids[:, (numbers * BLOCK_SIZE + BLOCK_SIZE - 1).clamp(max=max_seq_len - 1)]
        some = (first_ids[:, :, None] == last_ids[:, None, :]) & (distance > 0) | (distance == 0)
        full = (last_ids[:, :, None] == first_ids[:, None, :]) & whole
        if window is not None:
            some &= (distance - 1) * BLOCK_SIZE + 1 < window  # the closest query and key of both blocks
            full &= (distance + 1) * BLOCK_SIZE - 1 < window  # the two that are farthest apart
    else:
        # [batch, blocks, segments + 1]: whether a block holds a part of a sequence
        held = torch.zeros(len(ids), len(numbers), visible.shape[1], device=ids.device)
        packs = torch.arange(len(ids), device=ids.device)[:, None]
        held[packs, torch.arange(max_seq_len, device=ids.device) // BLOCK_SIZE, ids] = 1
        some = (held @ visible.float() @ held.mT > 0) & (distance >= 0)
        single = held.sum(-1) == 1
        full = some & single[:, :, None] & single[:, None, :] & whole & (window is None)
    full = full & (chunk is None)
    if blocks is not None:
        # A run that continues after a block of queries holds its last token, and the first of the next.
        first, last = blocks[:, ::BLOCK_SIZE], blocks[:, BLOCK_SIZE - 1 :: BLOCK_SIZE]
        last = nn.functional.pad(last, (0, first.shape[1] - last.shape[1]), value=-1)
        some = some | (distance < 0) & (last[:, :, None] == first[:, None, :]) & (first >= 0)[:, None, :]
    return BlockMask.from_kv_blocks(
        *_key_blocks(some & ~full),
        *_key_blocks(full),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=may_attend,
        seq_lengths=(max_seq_len, max_seq_len),
    )


def _key_blocks(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many key blocks each query block has, and their indices first in a row, as `BlockMask` takes them."""
    table = table[:, None].int()  # one mask for all heads
    return table.sum(-1, dtype=torch.int32), table.argsort(stable=True, dim=-1, descending=True).int()


def flex_attention_of(
    q: torch.Tensor,  # [batch, heads, max_seq_len, head_dim]
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_mask: BlockMask,
) -> torch.Tensor:
    """Compute attention under a block mask, compiled on CUDA, where uncompiled flex attention is slow."""
    attend: Callable[..., Any] = flex_attention
    if q.is_cuda and not torch.compiler.is_compiling():
        attend = _compiled_flex_attention()
    out: torch.Tensor = attend(q, k, v, block_mask=block_mask)
    return out


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    # The second length compiles for all lengths. With dynamic=False, the ninth would run uncompiled, with all scores.
    return torch.compile(flex_attention)
