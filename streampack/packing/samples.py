"""From a row of ready tokens, or from what an encoder returned, to a checked `Sample`.

`columns_of` finds out by the names of a row's columns which of them to read, `sample_from_row` reads them, and
`check_sample` checks the ids. No function here calls an encoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from streampack.packing.boundaries import BOUNDARY_COLUMNS, REFUSED_COLUMNS, require_one_sequence
from streampack.packing.columns import UINT32, ids_from_column, mask_from_column, shown
from streampack.packing.groups import Group
from streampack.sources.arrow_rows import ArrowRow, column_of
from streampack.types import IGNORE_INDEX, INT32, INT64, IntArray, Sample
from streampack.validation import vocabulary_text

TRAINED_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
"""Columns that say which tokens are trained, for rows without labels: TRL's, those of `apply_chat_template`, verl's.

A row may have several, as TRL's rows with ``assistant_only_loss``: a token is trained if all of them train it.
"""

AS_UNSIGNED: dict[np.dtype[Any], tuple[np.dtype[Any], int]] = {
    INT32: (UINT32, 2**31),
    INT64: (np.dtype(np.uint64), 2**63),
}
"""For each type of ids: the unsigned type of the same width, and the lowest number that the signed type cannot hold."""


class Columns(NamedTuple):
    """Which columns of a row to read."""

    tokens: str
    labels: str | None  # None: all tokens are trained, or those of the masks
    masks: tuple[str, ...]  # see `TRAINED_MASKS`
    boundaries: tuple[str, ...]  # that say whether the row is one sequence, see `require_one_sequence`


@lru_cache(maxsize=256)
def columns_of(names: tuple[str, ...], tokens: str | None = None, labels: str | None = "labels") -> Columns:
    """Choose the columns to read of rows that have these columns; see `sample_from_row`.

    >>> columns_of(("input_ids", "attention_mask", "completion_mask"))
    Columns(tokens='input_ids', labels=None, masks=('completion_mask',), boundaries=('attention_mask',))

    Raises:
        ValueError: if one is missing, for the columns of both conventions, and for a row for another kind of training.
    """
    for column, why in REFUSED_COLUMNS.items():
        if column in names:
            raise ValueError(f"there is a column {column!r}: {why}")
    if tokens is None:
        tokens = "input_ids" if "input_ids" in names else "tokens"
        if labels == "labels" and {"input_ids", "tokens"}.issubset(names):
            raise ValueError(
                "there are both 'tokens' and 'input_ids'; remove the one that is not to be trained on"
            )
    if tokens not in names:
        if pair := [name for name in names if str(name).startswith(("chosen", "rejected"))]:
            raise ValueError(
                f"the row is a preference pair ({', '.join(map(repr, pair))}), whose answers must stay in one pack; "
                "such rows need an encoder: encoder=AnswersEncoder(tokenizer), or data.encoder in a config; leave "
                "TRL's own trainers of pairs their collator"
            )
        raise missing_column(dict.fromkeys(names), tokens)
    masks: tuple[str, ...] = ()
    if labels is not None and labels not in names:
        if (tokens, labels) != ("input_ids", "labels"):
            raise missing_column(dict.fromkeys(names), labels)
        if "mask" in names:
            raise ValueError(
                "there are no labels, and 'mask' may be 1 where a token is trained, or, as torchtune's, where it is "
                "not; name it completion_mask (1: trained), or remove it"
            )
        labels, masks = None, tuple(name for name in TRAINED_MASKS if name in names)
    return Columns(tokens, labels, masks, tuple(name for name in BOUNDARY_COLUMNS if name in names))


def sample_from_row(row: Any, *, tokens: str | None = None, labels: str | None = "labels") -> Sample:
    """Convert a row of ready tokens to a `Sample`, which has memory of its own; ids that fit become int32.

    By default the row is in torchtune's or Hugging Face's convention. torchtune's has ``tokens`` and ``labels``.
    Hugging Face's has ``input_ids``, and labels, or a mask of what is trained (``completion_mask``,
    ``assistant_masks``, ``loss_mask``; if several, what all train), or none: then all is trained. A bare sequence of
    ids is treated as ``input_ids`` alone. Columns may be lists, numpy arrays or tensors.

    >>> sample_from_row({"input_ids": [1, 5, 2]}).labels.tolist()
    [1, 5, 2]
    >>> sample_from_row({"input_ids": [1, 5, 2], "completion_mask": [0, 1, 1]}).labels.tolist()
    [-100, 5, 2]

    Args:
        row: a mapping, or a sequence of ids.
        tokens: the name of the column of ids.
        labels: the name of the column of labels; None: all tokens are trained.

    Raises:
        ValueError: for a missing column, the columns of both conventions, a row for another kind of training
            (preference pairs, classification), anything but flat sequences of whole numbers of equal length, and a row
            that holds several sequences or padding.
    """
    if type(row) is not dict:
        row = as_mapping(row)
    columns = columns_of(tuple(row), tokens, labels)
    frozen = type(row) is ArrowRow
    get = row.stored if frozen else row.get
    ids = get(columns.tokens)
    targets = ids if columns.labels is None else get(columns.labels)
    sample = sample_from_pair(
        ids, targets, tokens=columns.tokens, labels=columns.labels or columns.tokens, frozen=frozen
    )
    if columns.boundaries:
        require_one_sequence(row, sample.tokens.size)
    for column in columns.masks:
        mask = mask_from_column(column_of(row, column), column, sample.tokens.size)
        trained = np.where(mask, sample.labels, sample.tokens.dtype.type(IGNORE_INDEX))
        sample = Sample(sample.tokens, trained)
    return sample


def sample_from_encoded(encoded: Any) -> Sample:
    """Convert what an encoder of the user's returned to a `Sample` with memory of its own.

    It may be a `Sample`, a pair of tokens and labels, a mapping that `sample_from_row` takes, or a bare sequence of
    ids, all of which is trained; as lists, arrays or tensors. It is copied, because an encoder may return a part of
    an array that it overwrites at the next row.

    >>> sample_from_encoded([7, 7]).tokens.tolist()
    [7, 7]

    Raises:
        ValueError: for what is none of these.
    """
    if isinstance(encoded, Group):
        return encoded
    pair = isinstance(encoded, tuple) and len(encoded) == 2 and not _is_scalar(encoded[0])
    if isinstance(encoded, Sample) or pair:
        return sample_from_pair(*encoded)
    if not isinstance(encoded, Mapping) and _is_scalar(encoded):
        raise ValueError(
            f"the encoder gave {shown(encoded)}; it must give a streampack.Sample, a dict with input_ids, or token ids"
        )
    return sample_from_row(encoded)


def sample_from_pair(
    ids: Any, targets: Any, *, tokens: str = "tokens", labels: str = "labels", frozen: bool = False
) -> Sample:
    """Make a `Sample` of ids and labels, as lists, arrays or tensors; ``tokens`` and ``labels`` name them in errors.

    They are copied, except for int32 arrays in ``frozen`` memory, which nothing will change.

    Raises:
        ValueError: for anything but a flat sequence of whole numbers, and for ids and labels of different length.
    """
    id_array = ids_from_column(ids, tokens, frozen=frozen)
    if targets is ids:
        # Every token is trained. Sharing one array lets `trained_tokens`, `assemble` and others see that at once.
        return Sample(id_array, id_array)
    label_array = ids_from_column(targets, labels, frozen=frozen)
    if id_array.size != label_array.size:
        raise ValueError(
            f"{tokens!r} has {id_array.size} entries and {labels!r} has {label_array.size}; "
            f"labels are unshifted, one per token, {IGNORE_INDEX} where nothing is trained"
        )
    return Sample(id_array, label_array)


def check_sample(sample: Sample, vocab_size: int | None = None) -> None:
    """Raise unless a sample is two flat arrays of equal length, int32 or int64, of ids from 0 and below ``vocab_size``.

    Labels may also be ``IGNORE_INDEX``. Encoders are users' code, and an id past the embedding's end would be a
    device-side assert on CUDA, far from the sample that caused it.

    Raises:
        ValueError: for anything else.
    """
    check_arrays(sample)
    check_ids([sample], vocab_size)


def check_arrays(sample: Sample) -> None:
    """Raise unless a sample is two flat arrays of equal length, int32 or int64.

    Raises:
        ValueError: for anything else.
    """
    if not isinstance(sample, Sample):
        raise ValueError(f"the encoder gave a {type(sample).__name__}; it must give a streampack.Sample")
    tokens, labels = sample
    for array in sample:
        # The usual case comes first, because every sample of a run passes here.
        if type(array) is np.ndarray and array.dtype is INT32 and array.ndim == 1:
            continue
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype not in AS_UNSIGNED:
            kind = f"of shape {list(array.shape)} and type {array.dtype}" if hasattr(array, "dtype") else ""
            raise ValueError(
                f"a sample holds a {type(array).__name__} {kind}; it must be a flat array of int32 or int64"
            )
    if tokens.size != labels.size:
        raise ValueError(
            f"a sample has {tokens.size} tokens and {labels.size} labels; give one label per token"
        )


def check_ids(samples: Sequence[Sample], vocab_size: int | None) -> None:
    """Raise unless all ids of these samples, at least one, are from 0 and below ``vocab_size``.

    Raises:
        ValueError: which names an id, and not the sample that has it.
    """
    bad = _outside([sample.tokens for sample in samples], vocab_size)
    if bad is not None:
        hint = "; use the model's own tokenizer, or resize the model's embeddings" if bad >= 0 else ""
        raise ValueError(f"token id {bad} is outside the vocabulary of {vocabulary_text(vocab_size)}{hint}")
    labels = [sample.labels for sample in samples if sample.labels is not sample.tokens]
    if labels and (bad := _outside(labels, vocab_size, ignored=True)) is not None:
        raise ValueError(
            f"label {bad} is neither {IGNORE_INDEX} nor in the vocabulary of {vocabulary_text(vocab_size)}"
        )


def _outside(arrays: list[IntArray], vocab_size: int | None, *, ignored: bool = False) -> int | None:
    """Return the first number that is no id of the vocabulary, nor, if those are ``ignored``, ``IGNORE_INDEX``."""
    ids = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    if not ids.size:
        return None
    unsigned_type, half = AS_UNSIGNED[ids.dtype]
    limit = half if vocab_size is None else min(half, vocab_size)
    # A negative number, read as unsigned, is above all ids, and the higher the nearer it is to 0. So one pass finds ids
    # that are too low and ids that are too high. `argmax` starts in half of the time that `max` takes to start.
    unsigned = ids.view(unsigned_type)
    most = unsigned.item(unsigned.argmax())
    if most < limit:
        return None
    if (
        ignored
        and most == 2 * half + IGNORE_INDEX
        and ids.item(ids.argmin()) == IGNORE_INDEX  # the only negative number, then
        and (limit == half or ids.item(ids.argmax()) < limit)
    ):
        return None
    bad = (ids < 0) | (ids >= limit)
    return int(ids[bad & (ids != IGNORE_INDEX) if ignored else bad][0])


def as_mapping(row: Any) -> Mapping[str, Any]:
    """Return a mapping as it is, and a bare sequence of ids as the column ``input_ids``.

    Raises:
        ValueError: for text, a number, or None.
    """
    if isinstance(row, Mapping):
        return row
    if _is_scalar(row):
        raise ValueError(
            f"the row is {shown(row)}; it must be a dict, or the ids of its tokens. Texts need an encoder: rows of "
            "{'text': ...} and encoder=TextEncoder(tokenizer)"
        )
    return {"input_ids": row}


def missing_column(row: Any, column: str, *, option: str | None = None) -> ValueError:
    """Make the error for a row without ``column``: it names the columns that are there.

    Args:
        row: without it.
        column: the name of the column.
        option: the encoder's option that names the column to read.
    """
    if not isinstance(row, Mapping):
        return ValueError(f"the row is {shown(row)}; it must be a dict with a column {column!r}")
    there = ", ".join(repr(name) for name in row) or "none"
    hint = f"; the encoder's option {option}= names the one to read" if option else ""
    return ValueError(f"column {column!r} is missing; the row's columns are {there}{hint}")


def _is_scalar(value: Any) -> bool:
    """Return whether a value is a number, a text or None, rather than a sequence of ids."""
    return not isinstance(value, list | tuple) and (isinstance(value, str | bytes) or np.ndim(value) == 0)
