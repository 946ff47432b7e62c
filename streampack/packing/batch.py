"""Conversion of packs to tensors: one pack to torchtune's dict, several to a `Batch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from streampack.packing.assemble import assemble, positions
from streampack.types import IGNORE_INDEX, Fragment, IntArray, Pack


def to_torchtune(pack: Pack, input_pos: IntArray | None = None) -> dict[str, Any]:
    """Convert a pack to the dict of ``torchtune.datasets.PackedDataset``, with four keys more.

    ``seq_lens`` ends with the padding's length where there is padding, because torchtune's collate function needs
    the sum to be ``max_seq_len``; ``num_seqs`` counts the real sequences. By default, positions restart in every
    sequence and in the padding; ``input_pos`` gives others.
    """
    if input_pos is None:
        [input_pos] = positions([pack.seq_lens], pack.tokens.size)
    return {
        "tokens": torch.from_numpy(pack.tokens.astype(np.int64, copy=False)),  # [max_seq_len]
        "labels": torch.from_numpy(pack.labels.astype(np.int64, copy=False)),  # [max_seq_len]
        "input_pos": torch.from_numpy(input_pos),  # [max_seq_len]
        "seq_lens": torch.tensor(_segment_lengths(pack)),  # [num_seqs (+ 1)]
        "num_seqs": len(pack.seq_lens),
        "fragments": pack.fragments,
        "epoch": pack.epoch,
        "lane": pack.lane,
    }


def null_pack(max_seq_len: int, *, padding_idx: int = 0) -> Pack:
    """Make a pack of padding only. It trains nothing; a rank takes it where it has no pack and others do."""
    tokens, labels = assemble([], max_seq_len=max_seq_len, padding_idx=padding_idx)
    return Pack(tokens, labels, (), (), epoch=-1, number=-1, lane=-1)


@dataclass(frozen=True, slots=True)
class Batch:
    """Several packs, stacked. Attention masks are made from ``seq_lens`` on the device, by `streampack.attention`."""

    tokens: torch.Tensor  # [batch, max_seq_len] int64
    labels: torch.Tensor  # [batch, max_seq_len] int64, unshifted
    input_pos: torch.Tensor  # [batch, max_seq_len] int64
    # [batch, most segments] int32: lengths of sequences, that of the padding, then zeros.
    seq_lens: torch.Tensor
    fragments: tuple[tuple[Fragment, ...], ...]  # for each pack, where each of its sequences came from

    def to(self, device: torch.device | str) -> Batch:
        """Return a copy on another device."""
        tokens, labels, input_pos, seq_lens = (
            tensor.to(device, non_blocking=True)
            for tensor in (self.tokens, self.labels, self.input_pos, self.seq_lens)
        )
        return Batch(tokens, labels, input_pos, seq_lens, self.fragments)

    def pin_memory(self) -> Batch:
        """Return a copy in page-locked memory."""
        return Batch(
            self.tokens.pin_memory(),
            self.labels.pin_memory(),
            self.input_pos.pin_memory(),
            self.seq_lens.pin_memory(),
            self.fragments,
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding excluded."""
        return sum(f.stop - f.start for pack in self.fragments for f in pack)

    @property
    def num_seqs(self) -> int:
        """Number of sequences, padding excluded."""
        return sum(map(len, self.fragments))

    @property
    def num_trained(self) -> torch.Tensor:
        """Number of tokens that the loss counts, as a 0-d tensor on the batch's device."""
        return (self.labels[:, 1:] != IGNORE_INDEX).sum()  # nothing predicts the first token of a row


def collate_packed(packs: Sequence[Mapping[str, Any]], *, segments: int | None = None) -> Batch:
    """Stack dicts from an `IterablePackedDataset` or a `PackedDataset`; a ``collate_fn`` for any DataLoader.

    ``seq_lens`` is as wide as the pack with the most segments needs, or ``segments`` wide: with
    ``max_seqs_per_pack + 1``, which counts the padding, all batches have the same shapes.

    >>> import numpy as np
    >>> from streampack import IterablePackedDataset
    >>> rows = [{"tokens": [7, 8, 9], "labels": [7, 8, 9]}, {"tokens": [4, 5], "labels": [4, 5]}]
    >>> batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=6)))
    >>> batch.tokens.tolist(), batch.seq_lens.tolist()
    ([[7, 8, 9, 4, 5, 0]], [[3, 2, 1]])

    Raises:
        ValueError: if a pack has more than ``segments``.
    """
    return Batch(
        tokens=torch.stack([pack["tokens"] for pack in packs]),
        labels=torch.stack([pack["labels"] for pack in packs]),
        input_pos=torch.stack([pack["input_pos"] for pack in packs]),
        seq_lens=_stack_seq_lens([pack["seq_lens"].tolist() for pack in packs], segments),
        fragments=tuple(tuple(pack["fragments"]) for pack in packs),
    )


def stack_packs(packs: Sequence[Pack], *, segments: int | None = None) -> Batch:
    """Stack packs to the batch that `collate_packed` makes of their dicts, but without four small tensors a pack.

    Ids become int64.

    Raises:
        ValueError: as `collate_packed`.
    """
    return Batch(
        tokens=_stack_ids([pack.tokens for pack in packs]),
        labels=_stack_ids([pack.labels for pack in packs]),
        input_pos=torch.from_numpy(positions([pack.seq_lens for pack in packs], packs[0].tokens.size)),
        seq_lens=_stack_seq_lens([_segment_lengths(pack) for pack in packs], segments),
        fragments=tuple(pack.fragments for pack in packs),
    )


def _stack_ids(rows: list[IntArray]) -> torch.Tensor:
    """Stack rows of equal length as ``[len(rows), length]`` int64."""
    if len(rows) == 1:
        return torch.from_numpy(rows[0].astype(np.int64, copy=False)[np.newaxis])
    return torch.from_numpy(np.array(rows, np.int64))


def _segment_lengths(pack: Pack) -> tuple[int, ...]:
    """Return the lengths of a pack's sequences, followed by that of its padding if there is any."""
    padding = pack.tokens.size - sum(pack.seq_lens)
    return (*pack.seq_lens, padding) if padding else pack.seq_lens


def _stack_seq_lens(rows: Sequence[Sequence[int]], width: int | None) -> torch.Tensor:
    """Stack segment lengths as ``[len(rows), width]`` int32, padded with zeros. Default width: that of the longest."""
    most = max(map(len, rows))
    if width is None:
        width = most
    elif most > width:
        raise ValueError(
            f"a pack has {most} segments, padding included, and segments={width}; give max_seqs_per_pack + 1"
        )
    padded = [[*row, *[0] * (width - len(row))] for row in rows]
    return torch.from_numpy(np.array(padded, np.int32))  # torch.tensor takes twice as long
