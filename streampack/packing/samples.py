"""From a row of ready tokens, or from what an encoder returned, to a checked `Sample`.

`sample_from_row` and `sample_from_encoded` find out which form of data they were given, `sample_from_columns` and
`sample_from_pair` convert it, and `check_sample` checks the ids. No function here calls an encoder.
"""

from __future__ import annotations

from array import array as machine_array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.packing.boundaries import require_one_sequence
from streampack.packing.groups import Group
from streampack.sources.arrow_rows import ArrowRow, column_of
from streampack.types import IGNORE_INDEX, INT32, INT64, IntArray, Sample
from streampack.validation import vocabulary_text

TRAINED_MASKS = ("completion_mask", "assistant_masks", "assistant_mask")
"""Columns that say which tokens are trained, for rows without labels: TRL's, and those of `apply_chat_template`.

A row may have several, as TRL's rows with ``assistant_only_loss``: a token is trained if all of them train it.
"""

AS_UNSIGNED: dict[np.dtype[Any], tuple[np.dtype[Any], int]] = {
    INT32: (np.dtype(np.uint32), 2**31),
    INT64: (np.dtype(np.uint64), 2**63),
}
"""For each type of ids: the unsigned type of the same width, and the lowest number that the signed type cannot hold."""

READ_AS: dict[str, np.dtype[Any]] = {"I": INT32, "i": INT32, "Q": INT64, "q": INT64}
"""Type codes of `array.array`, and the type as which its memory is read: signed, for unsigned codes too."""


def sample_from_row(row: Any) -> Sample:
    """Convert a row of ready tokens, in torchtune's or Hugging Face's convention, to a `Sample`.

    torchtune's has ``tokens`` and ``labels``. Hugging Face's has ``input_ids``, and labels, or a mask of what is
    trained (``completion_mask``, ``assistant_masks``; if both, what both train), or none: then all is trained. A bare
    sequence of ids is treated as ``input_ids`` alone. Columns may be lists, numpy arrays or tensors.

    >>> sample_from_row({"input_ids": [1, 5, 2]}).labels.tolist()
    [1, 5, 2]
    >>> sample_from_row({"input_ids": [1, 5, 2], "completion_mask": [0, 1, 1]}).labels.tolist()
    [-100, 5, 2]

    Raises:
        ValueError: for a row with the columns of both conventions, a row for another kind of training (preference
            pairs, classification), and all that `sample_from_columns` refuses.
    """
    row = as_mapping(row)
    if "input_ids" not in row:
        if "tokens" not in row and (why := _preference_pair(row)):
            raise ValueError(why)
        return sample_from_columns(row)
    if "tokens" in row:
        raise ValueError(
            "there are both 'tokens' and 'input_ids'; remove the one that is not to be trained on"
        )
    if "labels" in row:
        if _is_scalar(column_of(row, "labels")):
            raise ValueError(
                "'labels' is one number for the whole row: rows to be classified or scored cannot be packed, only "
                "those whose tokens are predicted; train on them unpacked, with transformers' DataCollatorWithPadding"
            )
        return sample_from_columns(row, tokens="input_ids")
    sample = sample_from_columns(row, tokens="input_ids", labels=None)
    tokens, labels = sample
    for column in TRAINED_MASKS:
        if column in row:
            mask = mask_from_column(column_of(row, column), column, tokens.size)
            labels = np.where(mask, labels, tokens.dtype.type(IGNORE_INDEX))
    return Sample(tokens, labels)


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
        return encoded.copied()
    pair = isinstance(encoded, tuple) and len(encoded) == 2 and not _is_scalar(encoded[0])
    if isinstance(encoded, Sample) or pair:
        return sample_from_pair(*encoded)
    if not isinstance(encoded, Mapping) and _is_scalar(encoded):
        raise ValueError(
            f"the encoder gave {_shown(encoded)}; it must give a streampack.Sample, a dict with input_ids, or token ids"
        )
    return sample_from_row(encoded)


def sample_from_columns(
    row: Mapping[str, Any], *, tokens: str = "tokens", labels: str | None = "labels"
) -> Sample:
    """Convert two columns of a row, named ``tokens`` and ``labels``, to a `Sample`.

    The columns may be lists, numpy arrays or tensors. ``labels=None`` trains on every token: the labels are the tokens
    themselves. Ids that fit become int32.

    >>> sample_from_columns({"tokens": [1, 5, 2], "labels": [-100, 5, 2]}).labels.tolist()
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
    ids, frozen = column_of(row, tokens), type(row) is ArrowRow
    if labels is None:
        return sample_from_pair(ids, ids, tokens=tokens, frozen=frozen)
    return sample_from_pair(ids, column_of(row, labels), tokens=tokens, labels=labels, frozen=frozen)


def sample_from_pair(
    ids: Any, targets: Any, *, tokens: str = "tokens", labels: str = "labels", frozen: bool = False
) -> Sample:
    """Make a `Sample` of ids and labels, as lists, arrays or tensors; ``tokens`` and ``labels`` name them in errors.

    They are copied, except for int32 arrays in ``frozen`` memory, which nothing will change.

    Raises:
        ValueError: for anything but a flat sequence of whole numbers, and for ids and labels of different length.
    """
    id_array = _ids_from_column(ids, tokens, type_codes="IQq", frozen=frozen)
    if targets is ids:
        # Every token is trained. Sharing one array lets `trained_tokens`, `assemble` and others see that at once.
        return Sample(id_array, id_array)
    label_array = _ids_from_column(targets, labels, type_codes="Iiq", frozen=frozen)
    if id_array.size != label_array.size:
        raise ValueError(
            f"{tokens!r} has {id_array.size} entries and {labels!r} has {label_array.size}; "
            f"labels are unshifted, one per token, {IGNORE_INDEX} where nothing is trained"
        )
    return Sample(id_array, label_array)


def mask_from_column(values: Any, column: str, size: int) -> npt.NDArray[np.bool_]:
    """Return a column that says which of ``size`` tokens are trained, as ``[size]`` bool.

    >>> mask_from_column([0, 1, 1], "completion_mask", 3).tolist()
    [False, True, True]

    Raises:
        ValueError: for anything but a flat sequence of that many numbers that are 0 or 1, or of booleans.
    """
    try:
        found = np.asarray(values)
    except ValueError:  # numpy's error for sequences of different lengths
        raise ValueError(f"{column!r} is nested; give one 0 or 1 for each token") from None
    if found.shape != (size,):
        raise ValueError(f"{column!r} has shape {list(found.shape)} for {size} tokens")
    if found.dtype.kind == "b" or not size:
        return found.astype(np.bool_)
    if found.dtype.kind not in "iuf":  # a None among numbers makes objects, a text makes texts
        odd = next((each for each in values if not isinstance(each, int | float)), values[0])
        raise ValueError(f"{column!r} holds {_shown(odd)}; give one 0 (not trained) or 1 for each token")
    mask: npt.NDArray[np.bool_] = found == 1
    if not (mask | (found == 0)).all():
        odd = found[~mask & (found != 0)][0]
        raise ValueError(f"{column!r} holds {odd}; give one 0 (not trained) or 1 for each token")
    return mask


def check_sample(sample: Sample, vocab_size: int | None = None) -> None:
    """Raise unless a sample is two flat arrays of equal length, int32 or int64, of ids from 0 and below ``vocab_size``.

    Labels may also be ``IGNORE_INDEX``. Encoders are users' code, and an id past the embedding's end would be a
    device-side assert on CUDA, far from the sample that caused it.

    Raises:
        ValueError: for anything else.
    """
    if not isinstance(sample, Sample):
        raise ValueError(f"the encoder gave a {type(sample).__name__}; it must give a streampack.Sample")
    tokens, labels = sample
    labels_are_tokens = labels is tokens
    for array in (tokens,) if labels_are_tokens else sample:
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
    if not tokens.size:
        return
    unsigned, limit = AS_UNSIGNED[tokens.dtype]
    if vocab_size is not None and vocab_size < limit:
        limit = vocab_size
    # A negative id, read as unsigned, is above every limit, so one pass finds ids that are too low and ids that are too
    # high. `argmax` starts in half of the time that `max` takes to start.
    ids = tokens.view(unsigned)
    if ids.item(ids.argmax()) >= limit:
        bad = tokens[(tokens < 0) | (tokens >= limit)][0]
        hint = "; use the model's own tokenizer, or resize the model's embeddings" if bad >= 0 else ""
        raise ValueError(f"token id {bad} is outside the vocabulary of {vocabulary_text(vocab_size)}{hint}")
    if not labels_are_tokens and not _are_labels(labels, vocab_size):
        outside = (labels < 0) & (labels != IGNORE_INDEX)
        if vocab_size is not None:
            outside |= labels >= vocab_size
        raise ValueError(
            f"label {labels[outside][0]} is neither {IGNORE_INDEX} nor in the vocabulary of "
            f"{vocabulary_text(vocab_size)}"
        )


def _are_labels(labels: IntArray, vocab_size: int | None) -> bool:
    """Return whether every label is ``IGNORE_INDEX`` or an id of the vocabulary."""
    if vocab_size is not None and labels.item(labels.argmax()) >= vocab_size:
        return False
    if labels.item(labels.argmin()) >= 0:
        return True
    # Comparing bytes gives the same as np.array_equal on the two masks, with a third of its call overhead.
    return bool((labels < 0).tobytes() == (labels == IGNORE_INDEX).tobytes())


def as_mapping(row: Any) -> Mapping[str, Any]:
    """Return a mapping as it is, and a bare sequence of ids as the column ``input_ids``.

    Raises:
        ValueError: for text, a number, or None.
    """
    if isinstance(row, Mapping):
        return row
    if _is_scalar(row):
        raise ValueError(
            f"the row is {_shown(row)}; it must be a dict, or the ids of its tokens. Texts need an encoder: rows of "
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
        return ValueError(f"the row is {_shown(row)}; it must be a dict with a column {column!r}")
    there = ", ".join(repr(name) for name in row) or "none"
    hint = f"; the encoder's option {option}= names the one to read" if option else ""
    return ValueError(f"column {column!r} is missing; the row's columns are {there}{hint}")


def narrowed(ids: npt.NDArray[Any]) -> IntArray:
    """Copy ids to int32, or to int64 if one of them needs it. It always copies, because the caller may reuse the array.

    >>> narrowed(np.array([5, -100])).dtype, narrowed(np.array([5, 2**31])).dtype
    (dtype('int32'), dtype('int64'))
    """
    if ids.itemsize < 4 or ids.dtype == INT32 or not ids.size:
        return ids.astype(INT32)
    # `argmin` and `argmax` start in a third of the time that `min` and `max` take to start.
    fit = ids.item(ids.argmin()) >= -(2**31) and ids.item(ids.argmax()) < 2**31
    return ids.astype(INT32 if fit else INT64)


def _ids_from_column(values: Any, column: str, *, type_codes: str, frozen: bool) -> IntArray:
    """Return a column as int32 or int64, in memory that nothing else will change.

    A list of ints goes through an `array.array` of the first of the ``type_codes`` that holds all of them.

    Raises:
        ValueError: for anything but a flat sequence of whole numbers.
    """
    if type(values) is np.ndarray:
        if values.dtype is INT64 and values.ndim == 1:
            return narrowed(values)
        if values.dtype is INT32 and values.ndim == 1:
            # A read-only array that owns its memory cannot change, so it needs no copy.
            frozen = frozen or not (values.flags.writeable or values.base is not None)
            return values if frozen else values.copy()
    elif type(values) is list and values and type(values[0]) is int:
        # Tokenizers return lists of ints. `array.array` parses the unsigned codes "I" and "Q" in a third of the time
        # of "i", "q" and numpy. Their memory is read as signed, so a negative number means that an id did not fit. A
        # list that fits none of the codes is left to numpy, below.
        for code in type_codes:
            with suppress(TypeError, OverflowError):
                parsed = np.frombuffer(machine_array(code, values), READ_AS[code])
                if code.islower() or int(np.minimum.reduce(parsed)) >= 0:
                    _refuse_booleans(values, parsed, column)
                    return parsed
    try:
        found = np.asarray(values)
    except ValueError:  # numpy's error for sequences of different lengths
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
    if isinstance(values, list | tuple):
        _refuse_booleans(values, found, column)
    if found.dtype.kind == "u" and found.itemsize == 8 and np.maximum.reduce(found) >= 2**63:
        raise ValueError(f"column {column!r} holds {np.maximum.reduce(found)}, which is no int64")
    return narrowed(found)


def _refuse_booleans(values: Sequence[Any], ids: npt.NDArray[Any], column: str) -> None:
    """Refuse True and False among whole numbers, which Python and numpy take for 1 and 0; ``ids`` are the numbers.

    Only zeros and ones are looked at, because looking at each object of a list takes longer than parsing it.
    """
    for index in np.flatnonzero(ids.view(f"u{ids.itemsize}") <= 1).tolist():
        if isinstance(values[index], bool):
            raise ValueError(f"column {column!r} holds {values[index]} among its numbers; give whole numbers")


def _is_scalar(value: Any) -> bool:
    """Return whether a value is a number, a text or None, rather than a sequence of ids."""
    return not isinstance(value, list | tuple) and (isinstance(value, str | bytes) or np.ndim(value) == 0)


def _shown(value: Any) -> str:
    """Return a value's type and the beginning of its repr, for messages."""
    text = repr(value)
    return f"a {type(value).__name__}, {text if len(text) < 40 else text[:36] + '...'}"


def _preference_pair(row: Mapping[str, Any]) -> str:
    """Return why a row with a preference pair is refused; an empty string for any other row."""
    columns = [name for name in row if str(name).startswith(("chosen", "rejected"))]
    if not columns:
        return ""
    return (
        f"the row is a preference pair ({', '.join(map(repr, columns))}), whose answers must stay in one pack; "
        "such rows need an encoder: encoder=PreferenceEncoder(tokenizer), or data.encoder in a config; leave TRL's own "
        "trainers of pairs their collator"
    )
