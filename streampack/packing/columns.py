"""Checks of one column of a row: token ids, and numbers that go with tokens. All rows come in through these."""

from __future__ import annotations

import struct
from array import array as machine_array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.sources.mechanics.arrow_rows import column_of
from streampack.types import INT32, INT64, IntArray

UINT32 = np.dtype(np.uint32)
FLAT = "it must be a flat sequence of whole numbers"
SEVERAL_SEQUENCES = "its samples would see one another; give the dataset as it was before it was packed"


def ids_from_column(values: Any, column: str, *, frozen: bool = False) -> IntArray:
    """Return a flat column of whole numbers as int32 or int64; it is copied, except for int32 in ``frozen`` memory."""
    if type(values) is np.ndarray:
        if values.dtype is INT32 and values.ndim == 1:
            return values if frozen else values.copy()
    elif type(values) is list and (parsed := _parsed(values)) is not None:
        ids, least = parsed
        if least <= 1:
            _refuse_booleans(values, ids, column)
        return ids
    found = _as_array(values, column)
    if found.ndim == 1 and found.size == 0:
        return found.astype(INT32)
    if found.ndim == 0 and column == "labels" and found.dtype.kind in "iufb":
        raise ValueError(
            "'labels' is one number for the whole row: rows to be classified or scored cannot be packed, only those "
            "whose tokens are predicted; train on them unpacked, with transformers' DataCollatorWithPadding"
        )
    if found.ndim != 1 or found.dtype.kind not in "iu":
        for value in values if isinstance(values, list | tuple) else ():
            if isinstance(value, int) and not -(2**63) <= value < 2**63:
                raise ValueError(f"column {column!r} holds {value}, which is no int64")
        kind = f" and type {found.dtype}" if found.ndim else f" ({shown(values)})"
        raise ValueError(f"column {column!r} has shape {list(found.shape)}{kind}; {FLAT}")
    if isinstance(values, list | tuple):
        _refuse_booleans(values, found, column)
    if found.dtype.kind == "u" and found.itemsize == 8 and found.max() >= 2**63:
        raise ValueError(f"column {column!r} holds {found.max()}, which is no int64")
    return narrowed(found)


def _parsed(values: list[Any]) -> tuple[IntArray, int] | None:
    """Return a list of ints as int32, and the least of them, read as unsigned; None if one does not fit, or is none.

    `array.array` parses unsigned numbers in less time than anything else, and refuses negative ones. numpy is slowest.
    """
    if not values or type(values[0]) not in (int, np.int64):  # np.int64: labels of torchtune's datasets
        return None
    try:
        if values[0] >= 0:
            ids = np.frombuffer(machine_array("I", values), INT32)
            least = ids.item(ids.argmin())
            return (ids, least) if least >= 0 else None
    except (TypeError, OverflowError):
        pass
    try:
        ids = np.frombuffer(struct.pack(f"{len(values)}i", *values), INT32)
    except struct.error:
        return None
    unsigned = ids.view(UINT32)
    return ids, unsigned.item(unsigned.argmin())


def _refuse_booleans(values: Sequence[Any], ids: npt.NDArray[Any], column: str) -> None:
    """Refuse True and False among whole numbers, which Python and numpy take for 1 and 0; ``ids`` are the numbers.

    Only zeros and ones are looked at, because looking at each object of a list takes longer than parsing it.
    """
    for index in np.flatnonzero(ids.view(f"u{ids.itemsize}") <= 1).tolist():
        if type(values[index]) is not int and np.asarray(values[index]).dtype.kind == "b":
            raise ValueError(f"column {column!r} holds {values[index]} among its numbers; give whole numbers")


def mask_from_column(values: Any, column: str, size: int) -> npt.NDArray[np.bool_]:
    """Return a column of zeros and ones, which says which of ``size`` tokens are trained, as ``[size]`` bool."""
    if type(values) is list and len(values) == size:
        # It takes a quarter of the time of an array, which is made below if it fails.
        with suppress(TypeError, ValueError):
            ones = bytes(values)
            if ones.count(0) + ones.count(1) == size:
                return np.frombuffer(ones, np.bool_)
    found = numbers_of_tokens(values, column, size)
    mask: npt.NDArray[np.bool_] = found == 1
    if not (mask | (found == 0)).all():
        odd = found[~mask & (found != 0)][0]
        raise ValueError(f"{column!r} holds {odd}; give one 0 (not trained) or 1 for each token")
    return mask


def require_no_padding(row: Mapping[str, Any], size: int, column: str = "attention_mask") -> None:
    """Refuse a row of ``size`` tokens whose attention mask, if it has one, hides one or numbers several sequences."""
    mask = column_of(row, column)
    # Looking at a list takes a tenth of an array's time.
    if mask is None or (type(mask) is list and len(mask) == size == mask.count(1)):
        return
    numbers = numbers_of_tokens(mask, column, size)
    if (numbers == 0).any():
        raise ValueError(
            f"the {column} hides the row's padding, which would be packed like its tokens; tokenize without "
            "padding (padding=False)"
        )
    if (numbers != 1).any():
        raise ValueError(f"the {column} numbers the row's sequences: {SEVERAL_SEQUENCES}")


def numbers_of_tokens(values: Any, column: str, size: int) -> npt.NDArray[Any]:
    """Return a flat column that has a number or a boolean for each of ``size`` tokens."""
    found = _as_array(values, column)
    if found.shape != (size,):
        raise ValueError(
            f"{column!r} has shape {list(found.shape)} for {size} tokens; give one number for each token"
        )
    if size and found.dtype.kind not in "biuf":  # a None among numbers makes objects, a text makes texts
        odd = next((each for each in values if not isinstance(each, int | float)), values[0])
        raise ValueError(f"{column!r} holds {shown(odd)}; give one number for each token")
    return found


def _as_array(values: Any, column: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:  # numpy's error for sequences of different lengths
        raise ValueError(f"column {column!r} is nested; {FLAT}") from None
    except TypeError as error:  # torch's, for bfloat16 and for tensors on a GPU
        raise ValueError(f"column {column!r} is no array of numpy ({error}); {FLAT}") from None


def narrowed(ids: npt.NDArray[Any]) -> IntArray:
    """Copy ids to int32, or to int64 if one of them needs it."""
    if ids.itemsize < 4 or ids.dtype == INT32 or not ids.size:
        return ids.astype(INT32)
    # `argmin` and `argmax` start in a third of the time that `min` and `max` take to start.
    fit = ids.item(ids.argmin()) >= -(2**31) and ids.item(ids.argmax()) < 2**31
    return ids.astype(INT32 if fit else INT64)


def shown(value: Any) -> str:
    """Return a value's type and the beginning of its repr, for messages."""
    text = repr(value)
    return f"a {type(value).__name__}, {text if len(text) < 40 else text[:36] + '...'}"
