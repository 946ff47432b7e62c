"""Shared prefixes: which segments of a batch's groups a segment sees, as a table for masks and as keys for kernels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from streampack.packing.batch import Batch
from streampack.packing.groups import ROOT, paths_of

if TYPE_CHECKING:
    from streampack.attention.mappings import Packed


@dataclass(frozen=True)
class SharedKeys:
    """The keys of each sequence of a batch, from the root of its group to itself, for kernels without a mask.

    Sequence i has the queries ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]`` of the batch, and the keys
    ``cu_seqlens_k[i]`` to ``cu_seqlens_k[i + 1]`` of those that ``index`` selects, of which the last are its own.
    """

    cu_seqlens_q: torch.Tensor  # [sequences + 1] int32
    cu_seqlens_k: torch.Tensor  # [sequences + 1] int32
    index: torch.Tensor  # [keys] int32: tokens of the batch, its packs laid end to end


class SharedPrefixes:
    """The segments of a batch in which some continue others.

    Args:
        parents: for each pack and sequence the sequence that it continues, or -1.
        lengths: of the sequences of each pack.
        max_seq_len: of a pack.
        segments: the width of the batch's ``seq_lens``.
        device: of the tensors that are made.
    """

    def __init__(
        self,
        parents: tuple[tuple[int, ...], ...],
        lengths: tuple[tuple[int, ...], ...],
        *,
        max_seq_len: int,
        segments: int,
        device: torch.device,
    ) -> None:
        self.parents = parents
        self.lengths = lengths
        self.max_seq_len = max_seq_len
        self.segments = segments
        self.device = device

    @classmethod
    def of(cls, batch: Packed) -> SharedPrefixes | None:
        """Return the shared prefixes of a batch; None if no sequence of it continues another."""
        if not isinstance(batch, Batch) or batch.groups is None:
            return None
        parents = batch.groups.parents
        if all(parent == ROOT for pack in parents for parent in pack):
            return None
        lengths = tuple(
            tuple(fragment.stop - fragment.start for fragment in pack) for pack in batch.fragments
        )
        return cls(
            parents,
            lengths,
            max_seq_len=batch.tokens.shape[1],
            segments=batch.seq_lens.shape[1],
            device=batch.tokens.device,
        )

    def visible(self) -> torch.Tensor:
        """Return ``[batch, segments + 1, segments + 1]`` bool: whether a segment sees another, as it or its prefix.

        The numbers are those of `document_ids`, which may be as large as ``segments`` for padding.
        """
        size = self.segments + 1
        table = np.zeros((len(self.parents), size, size), np.bool_)
        table[:, np.arange(size), np.arange(size)] = True
        for seen, parents in zip(table, self.parents, strict=True):
            for path in paths_of(parents):
                seen[path[-1], path] = True
        return torch.from_numpy(table).to(self.device, non_blocking=True)

    def keys(self) -> SharedKeys:
        """Return the keys of each sequence; padding is a sequence of its own at the end of its pack."""
        parts, queries, keys = [], [0], [0]
        for number, (parents, lengths) in enumerate(zip(self.parents, self.lengths, strict=True)):
            start, end = number * self.max_seq_len, (number + 1) * self.max_seq_len
            bounds = list(pairwise(accumulate(lengths, initial=start)))
            paths = [[bounds[each] for each in path] for path in paths_of(parents)]  # from the root on
            if start + sum(lengths) < end:
                paths.append([(start + sum(lengths), end)])
            for path in paths:
                parts += [np.arange(*each, dtype=np.int32) for each in path]
                queries.append(path[-1][1])
                keys.append(keys[-1] + sum(stop - start for start, stop in path))
        index = np.concatenate(parts)
        tensors = (np.array(queries, np.int32), np.array(keys, np.int32), index)
        on_device = [torch.from_numpy(each).to(self.device, non_blocking=True) for each in tensors]
        for tensor in on_device:  # else torch.compile would compile again for each new length
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return SharedKeys(*on_device)


def fold_keys(keys: SharedKeys) -> torch.Tensor:
    """Return keys as one tensor ``[1, sequences + 1, 1, numbers]`` int32, which passes through a model like a mask.

    Its rows are one and the same, of which there are as many as cumulative lengths: so the shape says where each part
    is, and `unfold_keys` copies nothing to the host. The numbers end with the last key. Kernels write no gradient for
    keys that no sequence has, and what memory held there would be added to the gradient of a token.
    """
    numbers = torch.cat([keys.cu_seqlens_q, keys.cu_seqlens_k, keys.index])
    folded = numbers.expand(1, keys.cu_seqlens_q.numel(), 1, -1)
    torch._dynamo.maybe_mark_dynamic(folded, (1, 3))
    return folded


def unfold_keys(folded: torch.Tensor) -> SharedKeys | None:
    """Invert `fold_keys`; None for a tensor of one row, which holds ``cu_seqlens`` only."""
    rows = folded.shape[1]
    if rows == 1:
        return None
    numbers = folded[0, 0, 0]
    return SharedKeys(numbers[:rows], numbers[rows : 2 * rows], numbers[2 * rows :])
