"""Rows of ready tokens, and encoders' return values, as samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from streampack.packing.assemble import as_sample, check_sample, pair_of
from streampack.types import IGNORE_INDEX, Sample

TRAINED_MASKS = ("completion_mask", "assistant_masks", "assistant_mask")
"""Columns of rows without labels that say which tokens are trained: TRL's, and `apply_chat_template`'s."""


def sample_of(row: Any) -> Sample:
    """Convert a row of ready tokens, in torchtune's or Hugging Face's convention, to a `Sample`.

    torchtune's has ``tokens`` and ``labels``. Hugging Face's has ``input_ids``, and labels, or a mask of what is
    trained (``completion_mask``, ``assistant_masks``), or neither: then all is trained. A bare sequence of ids is
    ``input_ids`` alone. Lists, numpy arrays and tensors will do.

    >>> sample_of({"input_ids": [1, 5, 2]}).labels.tolist()
    [1, 5, 2]
    >>> sample_of({"input_ids": [1, 5, 2], "completion_mask": [0, 1, 1]}).labels.tolist()
    [-100, 5, 2]

    Raises:
        ValueError: for a row of both conventions, one of another kind of training, and all that
            `as_sample` refuses.
    """
    row = as_mapping(row)
    if "input_ids" not in row:
        if "tokens" not in row and (why := _of_another_kind(row)):
            raise ValueError(why)
        return as_sample(row)
    if "tokens" in row:
        raise ValueError(
            "there are both 'tokens' and 'input_ids'; remove the one that is not to be trained on"
        )
    if "labels" in row:
        if _is_one(row["labels"]):
            raise ValueError(
                "'labels' is one number for the whole row: rows to be classified or scored cannot be packed, only "
                "those whose tokens are predicted; train on them unpacked, with transformers' DataCollatorWithPadding"
            )
        return as_sample(row, tokens="input_ids")
    sample = as_sample(row, tokens="input_ids", labels=None)
    for column in TRAINED_MASKS:
        if column in row:
            mask = np.asarray(row[column])
            if mask.shape != sample.tokens.shape:
                raise ValueError(f"{column!r} has shape {list(mask.shape)} for {sample.tokens.size} tokens")
            return Sample(
                sample.tokens, np.where(mask != 0, sample.tokens, sample.tokens.dtype.type(IGNORE_INDEX))
            )
    return sample


def as_mapping(row: Any) -> Mapping[str, Any]:
    """Return a row as it is, or a bare sequence of ids as ``input_ids``.

    Raises:
        ValueError: for text, a number, or nothing.
    """
    if isinstance(row, Mapping):
        return row
    if _is_one(row):
        raise ValueError(
            f"the row is {_shown(row)}; it must be a dict, or the ids of its tokens. Texts need an encoder: rows of "
            "{'text': ...} and encoder=TextEncoder(tokenizer)"
        )
    return {"input_ids": row}


def read_sample(ds: Any, index: int, *, vocab_size: int | None = None) -> Sample:
    """Read and check sample ``index`` of a map-style dataset; errors name it.

    Raises:
        ValueError: for a row that is not one sample.
    """
    try:
        row = ds[index]
    except Exception as error:
        error.add_note(f"while reading sample {index}")
        raise
    try:
        sample = sample_of(row)
        check_sample(sample, vocab_size)
    except ValueError as error:
        raise ValueError(f"sample {index}: {error}") from None
    return sample


def encode_row(encode: Callable[[Any], Any], row: Any) -> Sample:
    """Encode a row, and copy the result if its memory may be reused.

    An encoder of this package gives one. Any other may give a `Sample`, a pair of tokens and labels, a mapping that
    `sample_of` takes, or a bare sequence of ids, all of which is trained, as lists, arrays or tensors. What it gives is
    copied: it may be a part of an array that the next row overwrites.

    >>> encode_row(lambda row: {"input_ids": row["n"] * [7]}, {"n": 2}).tokens.tolist()
    [7, 7]

    Raises:
        ValueError: for what is none of these.
    """
    encoded = encode(row)
    if type(encode).__module__.startswith("streampack."):
        return encoded  # type: ignore[no-any-return]
    pair = isinstance(encoded, tuple) and len(encoded) == 2 and not _is_one(encoded[0])
    if isinstance(encoded, Sample) or pair:
        return pair_of(*encoded)
    if not isinstance(encoded, Mapping) and _is_one(encoded):
        raise ValueError(
            f"the encoder gave {_shown(encoded)}; it must give a streampack.Sample, a dict with input_ids, or token ids"
        )
    return sample_of(encoded)


def _is_one(value: Any) -> bool:
    """Return whether a value is a number, a text or None, and not a sequence of ids."""
    return not isinstance(value, list | tuple) and (isinstance(value, str | bytes) or np.ndim(value) == 0)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"a {type(value).__name__}, {text if len(text) < 40 else text[:36] + '...'}"


def _of_another_kind(row: Mapping[str, Any]) -> str:
    """Return why a row with a preference pair is refused; an empty string for any other row."""
    kinds = [name for name in row if str(name).startswith(("chosen", "rejected"))]
    if not kinds:
        return ""
    return (
        f"the row is a preference pair ({', '.join(map(repr, kinds))}): its answers share a prompt and a loss, which "
        "packs do not keep together; leave DPO's and reward trainers their own collator"
    )
