"""From a row of ready tokens, or from what an encoder returned, to a checked `Sample`.

`sample_from_row` and `sample_from_encoded` find out which form of data they were given, `sample_from_columns` and
`sample_from_pair` convert it, and `check_sample` checks the ids. No function here calls an encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from streampack.packing.boundaries import require_no_padding, require_one_sequence
from streampack.packing.columns import ids_from_column, mask_from_column, shown
from streampack.packing.groups import Group
from streampack.sources.arrow_rows import ArrowRow, column_of
from streampack.types import IGNORE_INDEX, INT32, INT64, IntArray, Sample
from streampack.validation import vocabulary_text

TRAINED_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
"""Columns that say which tokens are trained, for rows without labels: TRL's, those of `apply_chat_template`, verl's.

A row may have several, as TRL's rows with ``assistant_only_loss``: a token is trained if all of them train it.
"""

AS_UNSIGNED: dict[np.dtype[Any], tuple[np.dtype[Any], int]] = {
    INT32: (np.dtype(np.uint32), 2**31),
    INT64: (np.dtype(np.uint64), 2**63),
}
"""For each type of ids: the unsigned type of the same width, and the lowest number that the signed type cannot hold."""


def sample_from_row(row: Any) -> Sample:
    """Convert a row of ready tokens, in torchtune's or Hugging Face's convention, to a `Sample`.

    torchtune's has ``tokens`` and ``labels``. Hugging Face's has ``input_ids``, and labels, or a mask of what is
    trained (``completion_mask``, ``assistant_masks``, ``loss_mask``; if several, what all train), or none: then all is
    trained. A bare sequence of ids is treated as ``input_ids`` alone. Columns may be lists, numpy arrays or tensors.

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
    if "mask" in row:
        raise ValueError(
            "there are no labels, and 'mask' may be 1 where a token is trained, or, as torchtune's, where it is not; "
            "name it completion_mask (1: trained), or remove it"
        )
    tokens, labels = sample_from_columns(row, tokens="input_ids", labels=None)
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
            f"the encoder gave {shown(encoded)}; it must give a streampack.Sample, a dict with input_ids, or token ids"
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
            different length, and a row that holds several sequences or padding.
    """
    require_one_sequence(row)
    if tokens not in row:
        raise missing_column(row, tokens)
    if labels is not None and labels not in row:
        raise missing_column(row, labels)
    ids, frozen = column_of(row, tokens), type(row) is ArrowRow
    targets = ids if labels is None else column_of(row, labels)
    sample = sample_from_pair(ids, targets, tokens=tokens, labels=labels or tokens, frozen=frozen)
    require_no_padding(row, sample.tokens.size)
    return sample


def sample_from_pair(
    ids: Any, targets: Any, *, tokens: str = "tokens", labels: str = "labels", frozen: bool = False
) -> Sample:
    """Make a `Sample` of ids and labels, as lists, arrays or tensors; ``tokens`` and ``labels`` name them in errors.

    They are copied, except for int32 arrays in ``frozen`` memory, which nothing will change.

    Raises:
        ValueError: for anything but a flat sequence of whole numbers, and for ids and labels of different length.
    """
    id_array = ids_from_column(ids, tokens, type_codes="IQq", frozen=frozen)
    if targets is ids:
        # Every token is trained. Sharing one array lets `trained_tokens`, `assemble` and others see that at once.
        return Sample(id_array, id_array)
    label_array = ids_from_column(targets, labels, type_codes="Iiq", frozen=frozen)
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


def _preference_pair(row: Mapping[str, Any]) -> str:
    """Return why a row with a preference pair is refused; an empty string for any other row."""
    columns = [name for name in row if str(name).startswith(("chosen", "rejected"))]
    if not columns:
        return ""
    return (
        f"the row is a preference pair ({', '.join(map(repr, columns))}), whose answers must stay in one pack; "
        "such rows need an encoder: encoder=AnswersEncoder(tokenizer), or data.encoder in a config; leave TRL's own "
        "trainers of pairs their collator"
    )
