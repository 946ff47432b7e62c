"""Context parallelism: the part of a batch that each rank computes, in the zigzag order, and the whole again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from streampack.attention.dense import document_ids
from streampack.packing.batch import Batch
from streampack.types import IGNORE_INDEX
from streampack.validation import require_positive


@dataclass(frozen=True, slots=True)
class ContextParallelShard:
    """The part of a batch that one rank of a context-parallel group computes. All tensors are on the batch's device.

    ``cu_seqlens`` are cumulative lengths of sequences, all packs laid end to end: ``[sequences + 1]`` int32. Those
    called ``padded`` say where a sequence lies, and the others how many of its tokens are real, as in TransformerEngine
    (format ``thd``). They differ where ``pad_seqs_to`` has padded sequences. The padding at a pack's end is a sequence,
    and empty ones stand after it where another pack of the batch has more.
    """

    tokens: torch.Tensor  # [batch, max_seq_len / size] int64
    labels: torch.Tensor  # [batch, max_seq_len / size] int64, shifted: labels[i] is what token i predicts
    input_pos: torch.Tensor  # [batch, max_seq_len / size] int64: positions in the sequences
    cu_seqlens: torch.Tensor  # of the whole batch
    cu_seqlens_padded: torch.Tensor  # of the whole batch
    rank_cu_seqlens: torch.Tensor  # of this rank's tokens
    rank_cu_seqlens_padded: torch.Tensor  # of this rank's tokens
    indices: torch.Tensor  # [batch, max_seq_len / size] int64: where each token lies in its pack

    def to(self, device: torch.device | str) -> ContextParallelShard:
        """Return a copy on another device."""
        moved = (getattr(self, field.name).to(device, non_blocking=True) for field in fields(self))
        return ContextParallelShard(*moved)


def shard_for_context_parallel(batch: Batch, *, rank: int, size: int) -> ContextParallelShard:
    """Return the part of a batch that a rank of a context-parallel group computes. Call it before `Batch.to`.

    Each sequence is cut into ``2 * size`` chunks of equal length, of which rank r gets number r and number
    ``2 * size - 1 - r``: with causal attention, an early chunk costs little and a late one much, so all ranks have the
    same work. It is the order of Megatron and of TransformerEngine (``thd_get_partitioned_indices``).

    Labels are shifted before the cut, so the last token of a chunk predicts the first one of the next, wherever that
    is: compare them with the logits at the same place, without another shift, and divide the sum over all ranks by
    ``batch.num_trained``.

    >>> from streampack import IterablePackedDataset, collate_packed
    >>> rows = [{"input_ids": [1, 2, 3, 4, 5, 6, 7]}, {"input_ids": [11, 12, 13]}]
    >>> data = IterablePackedDataset(rows, max_seq_len=12, pad_seqs_to=4)
    >>> batch = collate_packed(list(data))
    >>> shard = shard_for_context_parallel(batch, rank=0, size=2)
    >>> shard.tokens.tolist(), shard.labels.tolist()
    ([[1, 2, 7, 0, 11, 0]], [[2, 3, -100, -100, 12, -100]])
    >>> shard.cu_seqlens.tolist(), shard.cu_seqlens_padded.tolist()
    ([0, 7, 10], [0, 8, 12])
    >>> shard.rank_cu_seqlens.tolist(), shard.rank_cu_seqlens_padded.tolist()
    ([0, 3, 4], [0, 4, 6])

    Args:
        batch: whose sequences' lengths are multiples of ``2 * size``, by ``pad_seqs_to``.
        rank: of this process in its context-parallel group, from 0.
        size: number of ranks of the group.

    Raises:
        ValueError: for a length that is no such multiple, a rank outside the group, and a batch with groups.
    """
    require_positive(size, "size")
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank} is not among the size={size} ranks of the group, which count from 0")
    if batch.groups is not None:
        raise ValueError(
            "the batch has groups, whose answers attend to a prompt that lies elsewhere, and a context-parallel kernel "
            "knows sequences only; encode with share_prefix=False, and without fields"
        )
    indices = _indices(batch.seq_lens, batch.tokens.shape[1], rank=rank, size=size)
    labels = torch.nn.functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    # Tokens of a chunk, and those of this rank's two chunks that are no padding.
    chunk = batch.seq_lens // (2 * size)
    first, second = (
        (batch.unpadded_lens - number * chunk).clamp(min=0).minimum(chunk)
        for number in (rank, 2 * size - 1 - rank)
    )
    return ContextParallelShard(
        tokens=batch.tokens.gather(1, indices),
        labels=labels.gather(1, indices),
        input_pos=batch.input_pos.gather(1, indices),
        cu_seqlens=_cumulative(batch.unpadded_lens),
        cu_seqlens_padded=_cumulative(batch.seq_lens),
        rank_cu_seqlens=_cumulative(first + second),
        rank_cu_seqlens_padded=_cumulative(2 * chunk),
        indices=indices,
    )


def unshard_context_parallel(parts: Sequence[torch.Tensor], batch: Batch) -> torch.Tensor:
    """Put the values that the ranks computed for their tokens into the order of the batch again.

    >>> from streampack import IterablePackedDataset, collate_packed
    >>> rows = [{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8]}]
    >>> batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=8)))
    >>> parts = [shard_for_context_parallel(batch, rank=rank, size=2).tokens for rank in range(2)]
    >>> unshard_context_parallel(parts, batch).tolist()
    [[1, 2, 3, 4, 5, 6, 7, 8]]

    Args:
        parts: of all ranks in their order, such as gathered logits; each ``[batch, max_seq_len / ranks, ...]``.
        batch: that was sharded, on the device of the parts.

    Returns:
        ``[batch, max_seq_len, ...]``.

    Raises:
        ValueError: for parts of another shape than the batch's shards have.
    """
    count, max_seq_len = batch.tokens.shape
    wanted = (count, max_seq_len // len(parts))
    for rank, part in enumerate(parts):
        if part.shape[:2] != wanted:
            raise ValueError(
                f"the part of rank {rank} has shape {list(part.shape)}, and a batch of {count} packs of {max_seq_len} "
                f"tokens has parts of {list(wanted)} over {len(parts)} ranks; give one of each rank, of this batch"
            )
    indices = [
        _indices(batch.seq_lens, max_seq_len, rank=rank, size=len(parts)) for rank in range(len(parts))
    ]
    order = torch.cat(indices, 1).argsort(1)  # [batch, max_seq_len]: where each token lies among the parts
    rows = torch.arange(count, device=order.device)[:, None]
    return torch.cat(list(parts), 1)[rows, order]


def _indices(seq_lens: torch.Tensor, max_seq_len: int, *, rank: int, size: int) -> torch.Tensor:
    """Return where a rank's tokens lie in their packs: ``[batch, max_seq_len / size]`` int64."""
    _require_chunks(seq_lens, 2 * size)
    lengths = seq_lens.long()
    ids = document_ids(lengths // size, max_seq_len=max_seq_len // size)
    starts = (lengths.cumsum(1) - lengths).gather(1, ids)
    chunk = (lengths // (2 * size)).gather(1, ids)
    places = (
        torch.arange(max_seq_len // size, device=ids.device) - starts // size
    )  # among those of the sequence
    first = starts + rank * chunk + places
    second = starts + (2 * size - 1 - rank) * chunk + places - chunk
    return torch.where(places < chunk, first, second)


def _require_chunks(seq_lens: torch.Tensor, chunks: int) -> None:
    """Refuse sequences that cannot be cut into so many chunks of equal length."""
    uneven = seq_lens % chunks != 0
    if uneven.any():
        pack, number = uneven.nonzero()[0].tolist()
        raise ValueError(
            f"sequence {number} of pack {pack} has {int(seq_lens[pack, number])} tokens, which {chunks // 2} ranks "
            f"with two chunks each cannot share; set pad_seqs_to={chunks} where the packs are made, or a multiple of it"
        )


def _cumulative(lengths: torch.Tensor) -> torch.Tensor:
    """Return ``[batch * segments + 1]`` int32: the cumulative lengths of all packs' sequences, from 0."""
    return torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0)).int()
