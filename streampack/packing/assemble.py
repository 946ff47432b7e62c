"""The assembler: lays samples end to end, as the tokens, labels and positions of packs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from streampack.types import IGNORE_INDEX, INT32, INT64, IntArray, Pack, Sample


def assemble(
    sequences: Sequence[Sample], *, max_seq_len: int, padding_idx: int = 0, pad_seqs_to: int = 1
) -> tuple[IntArray, IntArray]:
    """Lay sequences end to end and pad: ``(tokens, labels)``, each ``[max_seq_len]``, fresh memory.

    Each is int32 if all that goes into it is, otherwise int64. The first label of every sequence becomes
    ``IGNORE_INDEX``: recipes shift labels by one, so that the previous sequence's last token would predict it.

    >>> a, b = Sample(np.array([7, 8, 9]), np.array([7, 8, 9])), Sample(np.array([4, 5]), np.array([-100, 5]))
    >>> [row.tolist() for row in assemble([a, b], max_seq_len=8, pad_seqs_to=4)]
    [[7, 8, 9, 0, 4, 5, 0, 0], [-100, 8, 9, -100, -100, 5, -100, -100]]
    """
    if pad_seqs_to > 1:
        filler = _padding(pad_seqs_to, padding_idx)
        padded = ((each, filler.cut(0, -each.tokens.size % pad_seqs_to)) for each in sequences)
        sequences = [part for pair in padded for part in pair if part.tokens.size]
    tokens, labels = [each.tokens for each in sequences], [each.labels for each in sequences]
    starts = list(accumulate(map(len, tokens), initial=0))
    padding = max_seq_len - starts.pop()
    assert padding >= 0, f"{max_seq_len - padding} tokens planned into a pack of {max_seq_len}"
    if padding:
        filler = _padding(max_seq_len, padding_idx)
        tokens.append(filler.tokens[:padding])
        labels.append(filler.labels[:padding])
    row = np.concatenate(tokens)
    # If every sample's labels are its tokens, copying the row takes a quarter of the time of concatenating again.
    targets = row.copy() if all(map(operator.is_, tokens, labels)) else np.concatenate(labels)
    for start in starts:  # numpy takes longer to convert the list to an index
        targets[start] = IGNORE_INDEX
    return row, targets


def lengthened(pack: Pack, size: int, padding_idx: int) -> Pack:
    """Return a pack with more padding at its end, ``size`` tokens in all."""
    missing, input_pos, groups = size - pack.tokens.size, pack.input_pos, pack.groups

    def longer(values: Any, fill: float) -> Any:
        return np.concatenate([values, np.full(missing, fill)])

    if input_pos is not None:
        input_pos = np.append(input_pos, pack.tokens.size - sum(pack.seq_lens) + np.arange(missing))
    if groups is not None:
        fields = {name: longer(values, np.nan) for name, values in groups.token_fields.items()}
        groups = replace(groups, token_fields=fields)
    tokens, labels = longer(pack.tokens, padding_idx), longer(pack.labels, IGNORE_INDEX)
    return replace(pack, tokens=tokens, labels=labels, input_pos=input_pos, groups=groups)


@lru_cache(maxsize=4)
def _padding(length: int, padding_idx: int) -> Sample:
    """Return ``n`` tokens of padding in read-only arrays that are cached."""
    ids = np.full(length, padding_idx, INT32 if padding_idx < 2**31 else INT64)
    labels = np.full(length, IGNORE_INDEX, INT32)
    ids.flags.writeable = labels.flags.writeable = False
    return Sample(ids, labels)


def positions(
    packs: Sequence[Sequence[int]], max_seq_len: int, *, starts: Sequence[Sequence[int]] | None = None
) -> IntArray:
    """Return ``input_pos`` of packs with these ``seq_lens``: it counts from 0 in every sequence and in the padding.

    With ``starts``, each sequence counts from a position of its own, as where it continues another.

    >>> positions([[3, 2], [6]], 6).tolist()
    [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    """
    count = _count(max_seq_len)
    parts = []
    for number, seq_lens in enumerate(packs):
        if starts is None:
            parts += [count[:length] for length in seq_lens]
        else:
            begin = starts[number]
            parts += [count[at : at + length] for at, length in zip(begin, seq_lens, strict=True)]
        if padding := max_seq_len - sum(seq_lens):
            parts.append(count[:padding])
    return np.concatenate(parts).reshape(len(packs), max_seq_len)


@lru_cache(maxsize=4)
def _count(length: int) -> IntArray:
    """Return a cached, read-only ``0, 1, ..., length - 1``; to make it each time took a fifth of a pack's time."""
    count = np.arange(length)
    count.flags.writeable = False
    return count


def null_pack(max_seq_len: int, *, padding_idx: int = 0) -> Pack:
    """Make a pack of padding only. It trains nothing; a rank takes it where it has no pack and others do."""
    tokens, labels = assemble([], max_seq_len=max_seq_len, padding_idx=padding_idx)
    return Pack(tokens, labels, (), ())


def trains(pack: Pack) -> bool:
    """Return whether the loss counts any token of a pack."""
    labels, end = pack.labels, pack.seq_lens[0] if pack.seq_lens else 0
    if end > 1 and labels.item(end - 1) != IGNORE_INDEX:  # most first sequences end in a trained token
        return True
    first_labels = () if pack.groups is None else pack.groups.first_labels
    return bool((labels[1:] != IGNORE_INDEX).any()) or any(label != IGNORE_INDEX for label in first_labels)
