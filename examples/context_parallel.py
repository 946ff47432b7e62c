"""Context parallelism: divide a batch among ranks in zigzag order, and put it together again.

All ranks of a context-parallel group receive the same batch, by ``PackedDataLoader(..., data_ranks=...)``:

    data = IterablePackedDataset(source, max_seq_len=8192, pad_seqs_to=2 * cp_size)
    for batch in PackedDataLoader(data, data_ranks=mesh["dp"]):
        shard = shard_for_context_parallel(batch, rank=cp_rank, size=cp_size)

TransformerEngine's attention takes the lengths of the whole batch, on a rank too: ``cu_seqlens_q=shard.cu_seqlens``,
``cu_seqlens_q_padded=shard.cu_seqlens_padded``, both for keys too, ``qkv_format="thd"`` and
``attn_mask_type="padding_causal"``. With the unpadded ones alone, it divides real lengths by the number of ranks and
skips tokens. If sequences are not padded, the two are equal, and its kernel without padding is faster: pass only the
unpadded ones. These kernels were not run, because TransformerEngine was not at hand.
tests/attention/test_context_parallel.py compares the shards with complete packs, and with an attention written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from streampack import IGNORE_INDEX, Batch
from streampack.attention import document_ids


@dataclass(frozen=True)
class Shard:
    """The part of a batch that one rank of a context-parallel group computes, on the batch's device.

    ``cu_seqlens_padded`` has the boundaries of sequences with the padding of ``pad_seqs_to``, ``cu_seqlens`` without
    it. The padding at a pack's end is a sequence.
    """

    tokens: torch.Tensor  # [batch, max_seq_len / size]
    labels: torch.Tensor  # as tokens; shifted: labels[i] is what token i predicts
    input_pos: torch.Tensor  # as tokens: positions in the sequences
    indices: torch.Tensor  # as tokens: index of each token in its pack
    cu_seqlens: torch.Tensor  # [sequences + 1] int32: of the whole batch, packs laid end to end
    cu_seqlens_padded: torch.Tensor
    rank_cu_seqlens: torch.Tensor  # of this rank's tokens
    rank_cu_seqlens_padded: torch.Tensor


def shard_for_context_parallel(batch: Batch, *, rank: int, size: int) -> Shard:
    """Return the part of a batch that a rank of a context-parallel group computes. Call it before `Batch.to`.

    Each sequence is cut into ``2 * size`` chunks of equal length. Rank r computes number r and number
    ``2 * size - 1 - r``. With causal attention an early chunk costs little and a late one much, so all ranks have the
    same work. Megatron and TransformerEngine (``thd_get_partitioned_indices``) use the same order.

    Labels are shifted before the cut, so the last token of a chunk predicts the first token of the next one, on
    whatever rank that is. Compare labels and logits at the same index, and divide the sum of the losses over all ranks
    by ``batch.num_trained``.

    Args:
        batch: the lengths of its sequences are multiples of ``2 * size``, by ``pad_seqs_to``.
        rank: of this process in its context-parallel group, from 0.
        size: number of ranks of the group.

    Raises:
        ValueError: for a length that is not such a multiple, and for a batch with groups.
    """
    assert 0 <= rank < size
    if batch.groups is not None:
        raise ValueError("the batch has groups, and their answers attend to a prompt on other ranks")
    indices = _indices(batch.seq_lens, batch.tokens.shape[1], rank=rank, size=size)
    # Tokens of a chunk, then the real tokens in each of this rank's two chunks.
    chunk = batch.seq_lens // (2 * size)
    first, second = (
        (batch.unpadded_lens - number * chunk).clamp(min=0).minimum(chunk)
        for number in (rank, 2 * size - 1 - rank)
    )
    return Shard(
        tokens=batch.tokens.gather(1, indices),
        labels=pad(batch.labels[:, 1:], (0, 1), value=IGNORE_INDEX).gather(1, indices),
        input_pos=batch.input_pos.gather(1, indices),
        indices=indices,
        cu_seqlens=_cumulative(batch.unpadded_lens),
        cu_seqlens_padded=_cumulative(batch.seq_lens),
        rank_cu_seqlens=_cumulative(first + second),
        rank_cu_seqlens_padded=_cumulative(2 * chunk),
    )


def unshard_context_parallel(parts: Sequence[torch.Tensor], batch: Batch) -> torch.Tensor:
    """Put the values that the ranks computed for their tokens back into the order of the batch.

    Args:
        parts: of all ranks in their order, such as gathered logits; each ``[batch, max_seq_len / ranks, ...]``.
        batch: the batch that was sharded, on the device of the parts.

    Returns:
        ``[batch, max_seq_len, ...]``.
    """
    count, max_seq_len = batch.tokens.shape
    size = len(parts)
    indices = [_indices(batch.seq_lens, max_seq_len, rank=rank, size=size) for rank in range(size)]
    order = torch.cat(indices, 1).argsort(1)  # [batch, max_seq_len]: index of each token among the parts
    return torch.cat(list(parts), 1)[torch.arange(count, device=order.device)[:, None], order]


def _indices(seq_lens: torch.Tensor, max_seq_len: int, *, rank: int, size: int) -> torch.Tensor:
    """Return the indices of a rank's tokens in their packs: ``[batch, max_seq_len / size]`` int64."""
    lengths = seq_lens.long()
    if (uneven := lengths[lengths % (2 * size) != 0]).numel():
        raise ValueError(
            f"a sequence has {int(uneven[0])} tokens, which {size} ranks with two chunks each cannot share; set "
            f"pad_seqs_to={2 * size} where the packs are made, or a multiple of it"
        )
    ids = document_ids(lengths // size, max_seq_len=max_seq_len // size)
    starts = (lengths.cumsum(1) - lengths).gather(1, ids)
    chunk = (lengths // (2 * size)).gather(1, ids)
    # among the rank's tokens of the sequence
    places = torch.arange(max_seq_len // size, device=ids.device) - starts // size
    second = starts + (2 * size - 1 - rank) * chunk + places - chunk
    return torch.where(places < chunk, starts + rank * chunk + places, second)


def _cumulative(lengths: torch.Tensor) -> torch.Tensor:
    return pad(lengths.flatten().cumsum(0), (1, 0)).int()
