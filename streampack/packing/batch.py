"""Conversion of packs to tensors: one pack to torchtune's dict, several to a `Batch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from streampack.packing.assemble import lengthened, positions
from streampack.packing.collated import collate_rows, map_tensors
from streampack.packing.groups import ROOT, path_starts, paths_of
from streampack.packing.media import BatchMedia, stack_media
from streampack.types import IGNORE_INDEX, FloatArray, Fragment, IntArray, Pack, PackGroups


class PackDict(dict[str, Any]):
    """A pack as a dict. torch's default collator makes a `Batch` of several."""


def to_torchtune(pack: Pack) -> PackDict:
    """Convert a pack to the dict of ``torchtune.datasets.PackedDataset``, with four keys more.

    ``seq_lens`` ends with the padding's length: torchtune's collate function needs the sum to be ``max_seq_len``.
    A pack with groups has the key ``groups``, one with images ``media``. With either, lengths are under
    ``segment_lens``: a collator that knows ``seq_lens`` only would hide prompts from answers, or drop images.
    """
    [input_pos] = _positions([pack])
    groups, media = pack.groups, pack.media
    more = media is not None or (groups is not None and any(parent != ROOT for parent in groups.parents))
    lengths = torch.from_numpy(np.array(_segment_lengths(pack)))  # torch.tensor takes ten times as long
    found = {
        "tokens": torch.from_numpy(pack.tokens.astype(np.int64, copy=False)),  # [max_seq_len]
        "labels": torch.from_numpy(pack.labels.astype(np.int64, copy=False)),  # [max_seq_len]
        "input_pos": torch.from_numpy(input_pos),  # [max_seq_len]
        "segment_lens" if more else "seq_lens": lengths,  # [num_seqs (+ 1)]
        "num_seqs": len(pack.seq_lens),
        "fragments": pack.fragments,
        "epoch": pack.epoch,
        "lane": pack.lane,
    }
    own = {name: value for name, value in (("groups", groups), ("media", media)) if value is not None}
    return PackDict({**found, **own})


@dataclass(frozen=True, slots=True)
class BatchGroups:
    """Parents, first labels and fields of the sequences in a batch with groups: `PackGroups` of its packs, stacked."""

    parents: tuple[tuple[int, ...], ...]  # for each pack and sequence the one that it continues, or -1
    # [batch, most segments, depth] int64: the sequences from the root to each, after the number of segments where a
    # path is shorter. The depth is 1 if no sequence continues another.
    paths: torch.Tensor
    first_labels: torch.Tensor  # [batch, most segments] int64: labels of first tokens, which parents predict
    fields: dict[str, torch.Tensor]  # each [batch, most segments] float32
    token_fields: dict[str, torch.Tensor]  # each [batch, max_seq_len] float32

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> BatchGroups:
        """Return a copy with changed tensors."""
        each = [
            {name: change(tensor) for name, tensor in f.items()} for f in (self.fields, self.token_fields)
        ]
        return BatchGroups(self.parents, change(self.paths), change(self.first_labels), *each)


@dataclass(frozen=True, slots=True)
class Batch:
    """Several packs, stacked. Attention masks are made from ``seq_lens`` on the device, by `streampack.attention`."""

    tokens: torch.Tensor  # [batch, max_seq_len] int64
    labels: torch.Tensor  # [batch, max_seq_len] int64, unshifted
    input_pos: torch.Tensor  # [batch, max_seq_len] int64
    # [batch, most segments] int32: lengths of sequences, the padding at their ends (`pad_seqs_to`) included, that of
    # the padding at the pack's end, then zeros.
    seq_lens: torch.Tensor
    fragments: tuple[tuple[Fragment, ...], ...]  # for each pack, where each of its sequences came from
    groups: BatchGroups | None = None  # None: the packs hold plain samples only
    # Tokens of the longest sequence with those that it continues, without the padding at a pack's end: kernels ask the
    # host for it. None: unknown. It must be None where `seq_lens` are not the lengths of the fragments.
    longest: int | None = None
    media: BatchMedia | None = None  # None: the packs hold text only
    extra: dict[str, Any] | None = None  # further inputs of the model, from a config's ``collate_fn``

    def to(self, device: torch.device | str) -> Batch:
        """Return a copy on another device. Pixels take the model's dtype when its inputs are made."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"{device} would be the dtype of ids, too; give a device")
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return a copy in page-locked memory."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        tensors = (self.tokens, self.labels, self.input_pos, self.seq_lens)
        tokens, labels, input_pos, seq_lens = map(change, tensors)
        groups = None if self.groups is None else self.groups.map(change)
        media = None if self.media is None else self.media.map(change)
        extra = map_tensors(self.extra, change)
        return Batch(tokens, labels, input_pos, seq_lens, self.fragments, groups, self.longest, media, extra)

    @property
    def unpadded_lens(self) -> torch.Tensor:
        """``seq_lens`` without the padding that ``pad_seqs_to`` puts at the ends of sequences.

        That at a pack's end is a sequence still, or what kernels leave there could become a NaN.
        """
        padding = [[fragment.padding for fragment in pack] for pack in self.fragments]
        if not any(map(any, padding)):
            return self.seq_lens
        stacked = _stack_rows(padding, self.seq_lens.shape[1], 0, np.int32)
        return self.seq_lens - stacked.to(self.seq_lens.device, non_blocking=True)

    @property
    def sample_lens(self) -> list[list[int]]:
        """Tokens of each sample in each pack, without padding; parts of a sample, or segments of a group, count singly.

        >>> from streampack import IterablePackedDataset
        >>> rows = [{"tokens": [7, 8, 9], "labels": [7, 8, 9]}, {"tokens": [4, 5], "labels": [4, 5]}]
        >>> batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=6)))
        >>> batch.sample_lens, batch.seq_lens.tolist()
        ([[3, 2]], [[3, 2, 1]])
        """
        return [[fragment.stop - fragment.start for fragment in pack] for pack in self.fragments]

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return sum(map(sum, self.sample_lens))

    @property
    def num_seqs(self) -> int:
        """Number of sequences without padding."""
        return sum(map(len, self.fragments))

    @property
    def num_samples(self) -> int:
        """Number of samples that begin in the batch: a group counts once, and so does a sample in several parts."""
        return sum(fragment.start == 0 for pack in self.fragments for fragment in pack)

    @property
    def num_trained(self) -> torch.Tensor:
        """Number of tokens that the loss counts, as a 0-d tensor on the batch's device."""
        trained = (self.labels[:, 1:] != IGNORE_INDEX).sum()  # nothing predicts the first token of a row
        return trained if self.groups is None else trained + (self.groups.first_labels != IGNORE_INDEX).sum()


def collate_packed(
    packs: Sequence[Mapping[str, Any]], *, segments: int | None = None, padding_idx: int = 0
) -> Batch:
    """Stack dicts from an `IterablePackedDataset` or a `PackedDataset`; a ``collate_fn`` for any DataLoader.

    ``seq_lens`` is as wide as the pack with the most segments needs, or ``segments`` wide: with
    ``max_seqs_per_pack + 1``, which counts the padding, all batches have the same shapes, and more are refused.
    Packs of ``strategy="padded"`` are padded to the longest with ``padding_idx``.

    >>> from streampack import IterablePackedDataset
    >>> rows = [{"tokens": [7, 8, 9], "labels": [7, 8, 9]}, {"tokens": [4, 5], "labels": [4, 5]}]
    >>> collate_packed(list(IterablePackedDataset(rows, max_seq_len=6))).seq_lens.tolist()
    [[3, 2, 1]]
    """
    found = []
    for pack in packs:
        tokens, labels, input_pos = (pack[name].numpy() for name in ("tokens", "labels", "input_pos"))
        fragments = pack["fragments"]
        lengths = tuple([fragment.length for fragment in fragments])
        own = Pack(tokens, labels, lengths, fragments, input_pos=input_pos)
        own.groups, own.media = pack.get("groups"), pack.get("media")
        found.append(own)
    return stack_packs(found, segments=segments, padding_idx=padding_idx)


def _collate_by_default(packs: Sequence[PackDict], *, collate_fn_map: Any = None) -> Batch:
    return collate_packed(packs)


default_collate_fn_map[PackDict] = _collate_by_default  # as torch's documentation of default_collate says


def stack_packs(packs: Sequence[Pack], *, segments: int | None = None, padding_idx: int = 0) -> Batch:
    """Stack packs to a batch, as `collate_packed` does with dicts."""
    made = collate_rows(packs)
    size = max([pack.tokens.size for pack in packs]) if made is None else made[0].shape[1]
    packs = [pack if pack.tokens.size == size else lengthened(pack, size, padding_idx) for pack in packs]
    lengths = [_segment_lengths(pack) for pack in packs]
    most = max(map(len, lengths))
    width = most if segments is None else segments
    if most > width:
        raise ValueError(
            f"a pack has {most} segments, padding included, and segments={width}; give max_seqs_per_pack + 1"
        )
    input_pos = torch.from_numpy(_positions(packs))
    # Otherwise several fragments are one sequence, as with the method `fixed_length`.
    told = all(pack.seq_lens == tuple([each.length for each in pack.fragments]) for pack in packs)
    tokens, labels, extra = made or (
        _stack_ids([pack.tokens for pack in packs]), _stack_ids([pack.labels for pack in packs]), None,
    )  # fmt: skip
    return Batch(
        tokens=tokens,
        labels=labels,
        input_pos=input_pos,
        seq_lens=_stack_rows(lengths, width, 0, np.int32),
        fragments=tuple(pack.fragments for pack in packs),
        groups=_stack_groups(packs, width),
        longest=max(map(_longest_path, packs)) if told else None,
        media=stack_media(packs, input_pos) if made is None else None,
        extra=extra,
    )


def unstack_packs(batch: Batch) -> list[Pack]:
    """Return the packs of a batch in memory of their own, without media and without null packs.

    Where they came from is unknown.
    """
    packs = []
    for number, fragments in enumerate(batch.fragments):
        if not fragments:
            continue
        groups, count = None, len(fragments)
        if batch.groups is not None:
            groups = PackGroups(
                batch.groups.parents[number],
                tuple(batch.groups.first_labels[number, :count].tolist()),
                {name: values[number, :count].numpy().copy() for name, values in batch.groups.fields.items()},
                {name: values[number].numpy().copy() for name, values in batch.groups.token_fields.items()},
            )
        tokens, labels = (ids[number].numpy().copy() for ids in (batch.tokens, batch.labels))
        lengths = tuple(fragment.length for fragment in fragments)
        packs.append(Pack(tokens, labels, lengths, fragments, groups=groups))
    return packs


def _positions(packs: Sequence[Pack]) -> IntArray:
    """Return positions ``[len(packs), max_seq_len]``; a sequence that continues another continues its positions."""
    if packs[0].input_pos is not None:
        return np.array([pack.input_pos for pack in packs])
    groups, starts = _groups(packs), None
    if groups is not None:
        starts = [path_starts(pack.seq_lens, each.parents) for pack, each in zip(packs, groups, strict=True)]
    return positions([pack.seq_lens for pack in packs], packs[0].tokens.size, starts=starts)


def _groups(packs: Sequence[Pack]) -> list[PackGroups] | None:
    """Return what packs say of their groups, those without included; None if none has any."""
    if all(pack.groups is None for pack in packs):
        return None
    return [
        pack.groups or PackGroups((ROOT,) * len(pack.seq_lens), (IGNORE_INDEX,) * len(pack.seq_lens), {}, {})
        for pack in packs
    ]


def _stack_groups(packs: Sequence[Pack], width: int) -> BatchGroups | None:
    """Stack what packs say of their groups, for a batch with ``seq_lens`` of this ``width``."""
    if (groups := _groups(packs)) is None:
        return None
    fields, token_fields = (
        {
            name: _stack_rows([each.get(name, ()) for each in of_packs], size, np.nan, np.float32)
            for name in dict.fromkeys(name for each in of_packs for name in each)
        }
        for of_packs, size in (
            ([each.fields for each in groups], width),
            ([each.token_fields for each in groups], packs[0].tokens.size),
        )
    )
    first_labels = _stack_rows([each.first_labels for each in groups], width, IGNORE_INDEX, np.int64)
    parents = tuple(each.parents for each in groups)
    return BatchGroups(parents, stack_paths(parents, width), first_labels, fields, token_fields)


def stack_paths(parents: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """Return the `BatchGroups.paths` of a batch with ``seq_lens`` of this ``width``.

    >>> stack_paths([[-1, 0, 0]], 4).tolist()
    [[[4, 0], [0, 1], [0, 2], [4, 4]]]
    """
    packs = [paths_of(each) for each in parents]
    depth = max((len(path) for paths in packs for path in paths), default=1)
    stacked = np.full((len(packs), width, depth), width)
    for of_pack, paths in zip(stacked, packs, strict=True):
        for line, path in zip(of_pack, paths, strict=False):
            line[depth - len(path) :] = path
    return torch.from_numpy(stacked)


def _stack_ids(rows: list[IntArray]) -> torch.Tensor:
    """Stack rows of equal length as ``[len(rows), length]`` int64."""
    if len(rows) == 1:
        return torch.from_numpy(rows[0].astype(np.int64, copy=False)[np.newaxis])
    return torch.from_numpy(np.array(rows, np.int64))


def _longest_path(pack: Pack) -> int:
    """Return the most tokens of a sequence with those that it continues; 0 without a sequence."""
    lengths: Sequence[int] = pack.seq_lens
    if pack.groups is not None:
        starts = path_starts(lengths, pack.groups.parents)
        lengths = [start + length for start, length in zip(starts, lengths, strict=True)]
    return max(lengths, default=0)


def _segment_lengths(pack: Pack) -> tuple[int, ...]:
    """Return the lengths of a pack's sequences, followed by that of its padding if there is any."""
    padding = pack.tokens.size - sum(pack.seq_lens)
    return (*pack.seq_lens, padding) if padding else pack.seq_lens


def _stack_rows(
    rows: Sequence[Sequence[int] | FloatArray], width: int, fill: float, dtype: type
) -> torch.Tensor:
    """Stack rows of numbers as ``[len(rows), width]``, filled up at their ends."""
    stacked: Any = np.full((len(rows), width), fill, dtype)
    for line, row in zip(stacked, rows, strict=True):
        line[: len(row)] = row
    return torch.from_numpy(stacked)  # torch.tensor takes twice as long
