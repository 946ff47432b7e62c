"""Checks of samples, and their concatenation into the tokens and labels of a pack."""

from __future__ import annotations

import operator
from array import array as machine_array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.accounting import trained_tokens
from streampack.packing.boundaries import require_one_sequence
from streampack.packing.settings import Packing
from streampack.types import IGNORE_INDEX, IntArray, Sample
from streampack.validation import require_positive

# numpy looks types up by their classes for every array otherwise.
INT32, INT64, UINT32, UINT64 = map(np.dtype, (np.int32, np.int64, np.uint32, np.uint64))
UNSIGNED = {
    INT32: (UINT32, 2**31),
    INT64: (UINT64, 2**63),
}  # its unsigned twin, and the first id that does not fit
MACHINE = {"I": INT32, "i": INT32, "Q": INT64, "q": INT64}  # how the numbers of a machine array are read


def as_sample(row: Mapping[str, Any], *, tokens: str = "tokens", labels: str | None = "labels") -> Sample:
    """Check a row of ready tokens and make it a `Sample`. Accepts lists, numpy arrays and tensors.

    ``labels=None`` trains on every token: the labels are the tokens themselves. Ids that fit become int32.

    >>> as_sample({"tokens": [1, 5, 2], "labels": [-100, 5, 2]}).labels.tolist()
    [-100, 5, 2]

    Raises:
        ValueError: for a missing column, anything but a flat sequence of whole numbers, tokens and labels of
            different length, and a row that holds several sequences or padding (see `require_one_sequence`).
    """
    require_one_sequence(row)
    if tokens not in row:
        raise missing_column(row, tokens)
    if labels is not None and labels not in row:
        raise missing_column(row, labels)
    return pair_of(row[tokens], row[tokens if labels is None else labels], tokens=tokens, labels=labels or "")


def pair_of(ids: Any, targets: Any, *, tokens: str = "tokens", labels: str = "labels") -> Sample:
    """Copy ids and labels, as lists, arrays or tensors, to a `Sample`; ``tokens`` and ``labels`` name them in errors.

    Raises:
        ValueError: for anything but a flat sequence of whole numbers, and for ids and labels of different length.
    """
    own = _integers(ids, tokens, codes="IQq")
    if targets is ids:  # all of it is trained, as where no mask is stored
        return Sample(own, own)
    own_targets = _integers(targets, labels, codes="Iiq")
    if own.size != own_targets.size:
        raise ValueError(
            f"{tokens!r} has {own.size} entries and {labels!r} has {own_targets.size}; "
            f"labels are unshifted, one per token, {IGNORE_INDEX} where nothing is trained"
        )
    return Sample(own, own_targets)


def _integers(values: Any, column: str, *, codes: str) -> IntArray:
    """Return a column as int32 or int64. Lists go through machine arrays of the first type code that holds them."""
    if type(values) is np.ndarray:
        if values.dtype is INT64 and values.ndim == 1:
            return narrowed(values)
        if values.dtype is INT32 and values.ndim == 1:
            # A read-only array that owns its memory cannot change, so it needs no copy.
            return values.copy() if values.flags.writeable or values.base is not None else values
    elif type(values) is list and values and type(values[0]) is int:
        # Lists of ints, as tokenizers give them. The unsigned codes "I" and "Q" are parsed in a third of the time
        # of "i", "q" and numpy, but read as signed, so a negative number means that an id did not fit. What
        # no code takes is left to numpy.
        for code in codes:
            with suppress(TypeError, OverflowError):
                found = np.frombuffer(machine_array(code, values), MACHINE[code])
                if code.islower() or int(np.minimum.reduce(found)) >= 0:
                    return found
    try:
        found = np.asarray(values)
    except ValueError:  # sequences of several lengths
        raise ValueError(
            f"column {column!r} is nested; it must be a flat sequence of whole numbers"
        ) from None
    if found.ndim == 1 and found.size == 0:
        return found.astype(INT32)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ValueError(
            f"column {column!r} has shape {list(found.shape)} and type {found.dtype}; "
            "it must be a flat sequence of whole numbers"
        )
    if found.dtype.kind == "u" and found.itemsize == 8 and np.maximum.reduce(found) >= 2**63:
        raise ValueError(f"column {column!r} holds {np.maximum.reduce(found)}, which is no int64")
    return narrowed(found)


def narrowed(ids: npt.NDArray[Any]) -> IntArray:
    """Copy ids to int32, or to int64 if one needs it. A copy, because the caller may reuse the array.

    >>> narrowed(np.array([5, -100])).dtype, narrowed(np.array([5, 2**31])).dtype
    (dtype('int32'), dtype('int64'))
    """
    if ids.itemsize < 4 or ids.dtype == INT32 or not ids.size:
        return ids.astype(INT32)
    # By `argmin` and `argmax`, which begin in a third of the time that `min` and `max` take.
    fit = ids.item(ids.argmin()) >= -(2**31) and ids.item(ids.argmax()) < 2**31
    return ids.astype(INT32 if fit else INT64)


def missing_column(row: Mapping[str, Any], column: str) -> ValueError:
    """Make the error for a row without ``column``; it names the columns that are there."""
    there = ", ".join(repr(name) for name in row) or "none"
    return ValueError(f"column {column!r} is missing; the row's columns are {there}")


def check_sample(sample: Sample, vocab_size: int | None = None) -> None:
    """Raise unless a sample is two flat arrays of equal length, int32 or int64, ids from 0 and below ``vocab_size``.

    Encoders are users' code, and an id past the embedding's end is a device-side assert on CUDA, far from
    the sample that caused it.
    """
    if not isinstance(sample, Sample):
        raise ValueError(f"the encoder gave a {type(sample).__name__}; it must give a streampack.Sample")
    tokens, labels = sample
    same = labels is tokens  # all of it is trained: what holds for one holds for the other
    for array in (tokens,) if same else sample:
        # The usual case, looked at first: every sample of a run passes here.
        if type(array) is np.ndarray and array.dtype is INT32 and array.ndim == 1:
            continue
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype not in UNSIGNED:
            kind = f"of shape {list(array.shape)} and type {array.dtype}" if hasattr(array, "dtype") else ""
            raise ValueError(
                f"a sample holds a {type(array).__name__} {kind}; it must be a flat array of int32 or int64"
            )
    if tokens.size != labels.size:
        raise ValueError(
            f"a sample has {tokens.size} tokens and {labels.size} labels; give one label per token"
        )
    if not tokens.size:
        return
    unsigned, limit = UNSIGNED[tokens.dtype]
    if vocab_size is not None and vocab_size < limit:
        limit = vocab_size
    # As unsigned numbers, negative ones are huge: one pass finds both ends. np.max takes twice as long to begin.
    ids = tokens.view(unsigned)
    if ids.item(ids.argmax()) >= limit:
        bad = tokens[(tokens < 0) | (tokens >= limit)][0]
        raise ValueError(f"token id {bad} is outside the vocabulary of {_bounds(vocab_size)}")
    if not same and not _good_labels(labels, vocab_size):
        outside = (labels < 0) & (labels != IGNORE_INDEX)
        if vocab_size is not None:
            outside |= labels >= vocab_size
        raise ValueError(
            f"label {labels[outside][0]} is neither {IGNORE_INDEX} nor in the vocabulary of {_bounds(vocab_size)}"
        )


def _good_labels(labels: IntArray, vocab_size: int | None) -> bool:
    if vocab_size is not None and labels.item(labels.argmax()) >= vocab_size:
        return False
    if labels.item(labels.argmin()) >= 0:
        return True
    # Same as np.array_equal on the two masks, with a third of its call overhead.
    return bool((labels < 0).tobytes() == (labels == IGNORE_INDEX).tobytes())


def require_id(value: object, name: str, *, vocab_size: int | None) -> int:
    """Return a setting as a token id; raise if it is not one, or outside the vocabulary.

    >>> require_id(5, "padding_idx", vocab_size=10)
    5
    """
    number = require_positive(value, name, least=0)
    if vocab_size is not None and number >= vocab_size:
        raise ValueError(
            f"{name}={number} is outside the vocabulary of {_bounds(vocab_size)}; give a token of the model's"
        )
    return number


def _bounds(vocab_size: int | None) -> str:
    return "ids from 0" if vocab_size is None else f"{vocab_size} ids (0 to {vocab_size - 1})"


def untrained_error(length: int, packing: Packing) -> ValueError:
    """Make the error for a sample of ``length`` tokens that trains nothing; the caller adds its place."""
    kept = sum(stop - start for start, stop in packing.pieces_of(length))
    way_out = "set untrained to 'drop' or 'keep'"
    if kept == 1:
        why = "one token is packed, and the first label of a sequence is never trained"
    elif kept < length:
        left = f"of the {kept} tokens that overlong={packing.overlong!r} leaves of its {length}"
        why = f"{left}, none has a label to train"
        way_out = f"raise max_seq_len, choose another overlong, or {way_out}"
    else:
        why = f"none of its {length} tokens has a label to train"
        way_out = f"look at its labels, or {way_out}"
    return ValueError(f"trains nothing: {why}; {way_out}")


def trained_if_split(
    sample: Sample, start: int, stop: int, *, packing: Packing, isolated: bool = True
) -> int | None:
    """Count the trained tokens in all fragments of a sample, ``[start, stop)`` being one; None if it is not split.

    Unless samples are ``isolated``, a fragment's first label is trained too, except where the fragment begins a pack.

    >>> whole = Sample(np.arange(10), np.arange(10))
    >>> trained_if_split(whole, 4, 8, packing=Packing(4, overlong="split"))
    7
    >>> trained_if_split(whole, 3, 7, packing=Packing(4, split_across_pack=True), isolated=False)
    8
    """
    if start == 0 and stop == sample.tokens.size:
        return None
    bounds = packing.pieces_of(sample.tokens.size)
    base, end = bounds[0][0], bounds[-1][1]
    cuts = packing.cuts(end - base, start - base, stop - base)
    if not cuts:
        return None
    part = sample.cut(base, end)
    if isolated:
        return trained_tokens(part, cuts)
    # Each cut begins a pack. So does the sample, if its first fragment fills one.
    firsts = [0, *cuts] if cuts[0] == packing.max_seq_len else cuts
    lost = sum(1 for first in firsts if part.labels[first] != IGNORE_INDEX)
    return int(np.count_nonzero(part.labels != IGNORE_INDEX)) - lost


def with_eos(sample: Sample, eos: int) -> Sample:
    """Replace the last token of a truncated sample by ``eos``, and its label if it was trained."""
    tokens, labels = (array.astype(array.dtype if eos < 2**31 else INT64) for array in sample)
    tokens[-1] = eos
    if labels[-1] != IGNORE_INDEX:
        labels[-1] = eos
    return Sample(tokens, labels)


def assemble(
    sequences: Sequence[Sample], *, max_seq_len: int, padding_idx: int = 0
) -> tuple[IntArray, IntArray]:
    """Lay sequences end to end and pad: ``(tokens, labels)``, each ``[max_seq_len]``, fresh memory.

    Each is int32 if all that goes into it is, otherwise int64.

    The first label of every sequence is ``IGNORE_INDEX``: recipes shift labels by one, so it would be
    predicted from the previous sequence's last token. No sequences at all make a null pack, which trains nothing.

    >>> a, b = Sample(np.array([7, 8, 9]), np.array([7, 8, 9])), Sample(np.array([4, 5]), np.array([-100, 5]))
    >>> for row in assemble([a, b], max_seq_len=6):
    ...     print(row.tolist())
    [7, 8, 9, 4, 5, 0]
    [-100, 8, 9, -100, 5, -100]
    """
    tokens, labels = map(list, zip(*sequences, strict=True)) if sequences else ([], [])
    starts = list(accumulate(map(len, tokens), initial=0))
    padding = max_seq_len - starts.pop()
    assert padding >= 0, f"{max_seq_len - padding} tokens planned into a pack of {max_seq_len}"
    if padding:
        tokens.append(np.full(padding, padding_idx, INT32 if padding_idx < 2**31 else INT64))
        labels.append(np.full(padding, IGNORE_INDEX, INT32))
    row = np.concatenate(tokens)
    # Where every label array is its token array, copying the row takes a quarter of concatenating again.
    targets = row.copy() if all(map(operator.is_, tokens, labels)) else np.concatenate(labels)
    for start in starts:  # numpy takes longer to make an index of a list
        targets[start] = IGNORE_INDEX
    return row, targets


def positions(packs: Sequence[Sequence[int]], max_seq_len: int) -> IntArray:
    """Return ``input_pos`` of packs with these ``seq_lens``: from 0 in every sequence and in the padding.

    >>> positions([[3, 2], [6]], 6).tolist()
    [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    """
    count = _count(max_seq_len)
    parts = []
    for seq_lens in packs:
        parts += [count[:length] for length in seq_lens]
        if padding := max_seq_len - sum(seq_lens):
            parts.append(count[:padding])
    return np.concatenate(parts).reshape(len(packs), max_seq_len)


@lru_cache(maxsize=4)
def _count(length: int) -> IntArray:
    """Return a cached, read-only ``0, 1, ..., length - 1``; making it anew took a fifth of a pack's time."""
    count = np.arange(length)
    count.flags.writeable = False
    return count
