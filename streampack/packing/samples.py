"""Conversion of rows of ready tokens, and of what encoders return, to samples; the check of their ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from streampack.packing.columns import (
    SEVERAL_SEQUENCES,
    UINT32,
    ids_from_column,
    mask_from_column,
    numbers_of_tokens,
    require_no_padding,
    shown,
)
from streampack.packing.groups import Group
from streampack.packing.media import MediaSample
from streampack.packing.shapes import BY_KEY, QUESTION, SHAPES, TOKENS
from streampack.sources.mechanics.arrow_rows import ArrowRow, column_of
from streampack.types import IGNORE_INDEX, INT32, INT64, IntArray, Sample
from streampack.validation import vocabulary_text

TRAINED_MASKS = ("completion_mask", "assistant_masks", "assistant_mask", "loss_mask")
"""Columns that say which tokens are trained, for rows without labels: TRL's, those of `apply_chat_template`, verl's."""
LENGTHS = "seq_lengths"  # TRL's
POSITIONS = ("position_ids", "input_pos")
BOUNDARY_COLUMNS = (LENGTHS, *POSITIONS, "attention_mask")
"""Columns that say where sequences begin in a row, or whether it has padding."""

REFUSED_COLUMNS = {
    "seq_lens": "it is a pack already; give the dataset that was packed, or leave packing to one of the two",
    "encoder_input": "it has images, which a pack has no place for; train on it unpacked",
    "pixel_values": "an encoder must make a streampack.MediaSample of it, as VisionEncoder does of images and messages",
}
AS_UNSIGNED: dict[np.dtype[Any], tuple[np.dtype[Any], int]] = {
    INT32: (UINT32, 2**31),
    INT64: (np.dtype(np.uint64), 2**63),
}
"""For each type of ids: the unsigned type of the same width, and the lowest number that the signed type cannot hold."""


class Columns(NamedTuple):
    """Which columns of a row to read."""

    tokens: str
    labels: str | None  # None: all tokens are trained, or those of the masks
    masks: tuple[str, ...]  # of `TRAINED_MASKS`
    boundaries: tuple[str, ...]  # of `BOUNDARY_COLUMNS`


@lru_cache(maxsize=256)
def columns_of(names: tuple[str, ...], tokens: str | None = None, labels: str | None = "labels") -> Columns:
    """Choose the columns to read of rows that have these columns, or refuse them; see `sample_from_row`."""
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
        fits = encoder_in_words(names)
        need = f"such rows need an encoder: encoder={fits or 'AnswersEncoder(tokenizer)'}, or data.encoder in a config"
        if pair := [name for name in names if str(name).startswith(("chosen", "rejected"))]:
            need += "; leave TRL's own trainers of pairs their collator"
            if any(str(name).endswith("_ids") for name in pair):  # no encoder reads pairs of tokens
                need = (
                    "torchtune's and TRL's trainers of pairs take no packs: leave them their dataset and collator, or "
                    "pack pairs with streampack_recipes/dpo"
                )
            raise ValueError(
                f"the row is a preference pair ({', '.join(map(repr, pair))}), whose answers must stay in one pack; "
                f"{need}"
            )
        if not fits:
            need = (
                "rows of text or messages need an encoder: encoder=TextEncoder(tokenizer) or ChatEncoder(tokenizer), "
                "data.encoder in a config; ids under another name need TokensEncoder(tokens=COLUMN, labels=COLUMN or "
                "None)"
            )
        raise ValueError(f"{missing_column(dict.fromkeys(names), tokens)}; {need}")
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
    """Make a `Sample` of a row of ready tokens, or of what a user's encoder returned; ids that fit become int32.

    It has memory of its own, because datasets and encoders may overwrite theirs. By default a mapping is in torchtune's
    or Hugging Face's convention. torchtune's has ``tokens`` and ``labels``. Hugging Face's has ``input_ids``, and
    labels, or a mask of what is trained (``completion_mask``, ``assistant_masks``, ``loss_mask``; if several, what all
    train), or none: then all is trained. A bare sequence of ids is ``input_ids`` alone.

    >>> sample_from_row({"input_ids": [1, 5, 2], "completion_mask": [0, 1, 1]}).labels.tolist()
    [-100, 5, 2]

    Args:
        row: a mapping, a sequence of ids, a `Sample`, or a tuple of ids and labels; as lists, arrays or tensors.
        tokens: the name of the column of ids.
        labels: the name of the column of labels; None: all tokens are trained.

    Raises:
        ValueError: for a missing column, the columns of both conventions, a row for another kind of training
            (preference pairs, classification), anything but flat sequences of whole numbers of equal length, and a row
            that holds several sequences or padding.
    """
    if type(row) is not dict and type(row) is not ArrowRow:
        if isinstance(row, tuple):
            if isinstance(row, Group | MediaSample):  # it has copied its arrays
                return row
            if isinstance(row, Sample) or (len(row) == 2 and not _is_scalar(row[0])):
                return sample_from_pair(*row)
        row = as_mapping(row)
    columns = columns_of(tuple(row), tokens, labels)
    frozen = type(row) is ArrowRow
    get = row.stored if frozen else row.get
    ids = get(columns.tokens)
    targets = ids if columns.labels is None else get(columns.labels)
    sample = sample_from_pair(
        ids, targets, tokens=columns.tokens, labels=columns.labels or columns.tokens, frozen=frozen
    )
    if columns.boundaries and (count := len(sequence_lengths(row, sample.tokens.size))) > 1:
        where = " or ".join(name for name in columns.boundaries if name != "attention_mask")
        raise ValueError(f"the row holds {count} sequences, as {where} says: {SEVERAL_SEQUENCES}")
    for column in columns.masks:
        mask = mask_from_column(get(column), column, sample.tokens.size)
        trained = np.where(mask, sample.labels, sample.tokens.dtype.type(IGNORE_INDEX))
        sample = Sample(sample.tokens, trained)
    return sample


def sample_from_pair(
    ids: Any, targets: Any, *, tokens: str = "tokens", labels: str = "labels", frozen: bool = False
) -> Sample:
    """Make a `Sample` of ids and labels, called ``tokens`` and ``labels`` in errors; see `ids_from_column`."""
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


def sequence_lengths(row: Mapping[str, Any], size: int) -> list[int]:
    """Return the lengths of the sequences in a row of ``size`` tokens, by its ``seq_lengths`` or its positions.

    >>> sequence_lengths({"input_ids": [5, 6, 7], "position_ids": [0, 0, 1]}, 3)
    [1, 2]
    """
    require_no_padding(row, size)
    if (given := column_of(row, LENGTHS)) is not None:
        lengths = [int(length) for length in given]
        if sum(lengths) != size or min(lengths, default=1) < 1:
            raise ValueError(
                f"column {LENGTHS!r} holds {lengths}, and the row has {size} tokens; they must add up to it"
            )
        return lengths
    for column in POSITIONS:
        if (given := column_of(row, column)) is not None:
            steps = np.diff(numbers_of_tokens(given, column, size))
            starts = (np.flatnonzero(steps != 1) + 1).tolist()
            return np.diff([0, *starts, size]).tolist()  # type: ignore[no-any-return]
    return [size]


def with_eos_of(whole: Sample, beginning: Sample, eos_ids: Collection[int | None]) -> Sample:
    """Return the beginning of a sample, in a copy with the EOS for its last token if the sample ended with it."""
    eos = int(whole.tokens[-1])
    if eos not in eos_ids:
        return beginning
    tokens, labels = (array.astype(array.dtype if eos < 2**31 else INT64) for array in beginning)
    tokens[-1] = eos
    if labels[-1] != IGNORE_INDEX:
        labels[-1] = eos
    return Sample(tokens, labels)


def check_ids(samples: Sequence[Sample], vocab_size: int | None = None) -> None:
    """Raise unless all ids of these samples, at least one, are from 0 and below ``vocab_size``.

    Encoders are users' code, and an id past the embedding's end would be a device-side assert on CUDA, far from the
    sample that caused it. Labels may also be ``IGNORE_INDEX``.
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
    """Return a mapping as it is, and a bare sequence of ids as the column ``input_ids``; refuse anything else."""
    if isinstance(row, Mapping):
        return row
    if _is_scalar(row):
        raise ValueError(
            f"{shown(row)}, is no sample; give a dict with input_ids or tokens, the ids alone, or a streampack.Sample. "
            "Texts need an encoder: rows of {'text': ...} and encoder=TextEncoder(tokenizer)"
        )
    return {"input_ids": row}


def missing_column(row: Any, column: str, *, option: str | None = None) -> ValueError:
    """Make the error for a row without ``column``, which an encoder's ``option`` names: it names those there are."""
    if not isinstance(row, Mapping):
        return ValueError(f"the row is {shown(row)}; it must be a dict with a column {column!r}")
    there = ", ".join(repr(name) for name in row) or "none"
    hint = f"; the encoder's option {option}= names the one to read" if option else ""
    if option and (fits := encoder_in_words(row)):
        hint = f"; such rows need an encoder: {fits}"
    return ValueError(f"column {column!r} is missing; the row's columns are {there}{hint}")


def encoder_in_words(columns: Collection[str]) -> str:
    """Return how to write the encoder of rows of messages, answers or questions; empty for any others.

    >>> encoder_in_words(["question", "answer"])
    "ShapeEncoder(tokenizer, shape='completion', columns={'question': 'prompt', 'answer': 'completion'})"
    """
    fitting = (shape for shape in SHAPES if set(shape.needs).issubset(columns))
    shape = next((shape for shape in fitting if shape.encoder != TOKENS), None)
    if set(QUESTION).issubset(columns) and (shape is None or shape.encoder == "TextEncoder"):
        mapped = dict(zip(QUESTION, BY_KEY["completion"].needs, strict=True))
        return f"ShapeEncoder(tokenizer, shape='completion', columns={mapped})"
    if shape is None or shape.encoder == "TextEncoder":
        return ""
    if shape.key in ("alpaca", "pair_messages"):
        return f"ShapeEncoder(tokenizer, shape={shape.key!r})"
    return f"{shape.encoder}(tokenizer)"


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, list | tuple) and (isinstance(value, str | bytes) or np.ndim(value) == 0)


def read_sample(ds: Any, index: int, *, vocab_size: int | None, planned: int | None = None) -> Sample:
    """Read sample ``index`` of a map-style dataset and check it; ``planned`` is the length that it must still have.

    Raises:
        ValueError: for a row that is not one sample, an id outside the vocabulary, or another length, naming the index.
    """
    try:
        row = ds[index]
    except Exception as error:
        error.add_note(f"while reading sample {index}")
        raise
    try:
        if isinstance(row, Group | MediaSample):
            raise ValueError("is a group of segments, or has images; only IterablePackedDataset packs those")
        sample = sample_from_row(row)
        check_ids([sample], vocab_size)
    except ValueError as error:
        raise ValueError(f"sample {index}: {error}") from None
    if planned is not None and sample.tokens.size != planned:
        raise ValueError(
            f"sample {index} has {sample.tokens.size} tokens and had {planned} when the packs were planned; make the "
            "dataset give the same sample each time (no random transforms, no file that changes)"
        )
    return sample
