"""Checks of one column of a row: token ids, and numbers that go with tokens. All rows come in through these."""

from __future__ import annotations

from array import array as machine_array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.types import INT32, INT64, IntArray

READ_AS: dict[str, np.dtype[Any]] = {"I": INT32, "i": INT32, "Q": INT64, "q": INT64}
"""Type codes of `array.array`, and the type as which its memory is read: signed, for unsigned codes too."""


def ids_from_column(values: Any, column: str, *, type_codes: str, frozen: bool) -> IntArray:
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
                least = int(np.minimum.reduce(parsed))
                if code.islower() or least >= 0:
                    if least <= 1:
                        refuse_booleans(values, parsed, column)
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
        refuse_booleans(values, found, column)
    if found.dtype.kind == "u" and found.itemsize == 8 and np.maximum.reduce(found) >= 2**63:
        raise ValueError(f"column {column!r} holds {np.maximum.reduce(found)}, which is no int64")
    return narrowed(found)


def refuse_booleans(values: Sequence[Any], ids: npt.NDArray[Any], column: str) -> None:
    """Refuse True and False among whole numbers, which Python and numpy take for 1 and 0; ``ids`` are the numbers.

    Only zeros and ones are looked at, because looking at each object of a list takes longer than parsing it.
    """
    for index in np.flatnonzero(ids.view(f"u{ids.itemsize}") <= 1).tolist():
        if type(values[index]) is not int and np.asarray(values[index]).dtype.kind == "b":
            raise ValueError(f"column {column!r} holds {values[index]} among its numbers; give whole numbers")


def mask_from_column(values: Any, column: str, size: int) -> npt.NDArray[np.bool_]:
    """Return a column that says which of ``size`` tokens are trained, as ``[size]`` bool.

    >>> mask_from_column([0, 1, 1], "completion_mask", 3).tolist()
    [False, True, True]

    Raises:
        ValueError: for anything but a flat sequence of that many numbers that are 0 or 1, or of booleans.
    """
    if type(values) is list and len(values) == size:
        with suppress(
            TypeError, ValueError
        ):  # it takes a fifth of the time of an array, which is made below if it fails
            ones = bytes(values)
            if ones.count(0) + ones.count(1) == size:
                return np.frombuffer(ones, np.bool_)
    found = numbers_of_tokens(values, column, size)
    mask: npt.NDArray[np.bool_] = found == 1
    if not (mask | (found == 0)).all():
        odd = found[~mask & (found != 0)][0]
        raise ValueError(f"{column!r} holds {odd}; give one 0 (not trained) or 1 for each token")
    return mask


def numbers_of_tokens(values: Any, column: str, size: int) -> npt.NDArray[Any]:
    """Return a column that has a number or a boolean for each of ``size`` tokens.

    Raises:
        ValueError: for anything but a flat sequence of so many.
    """
    try:
        found = np.asarray(values)
    except ValueError:  # numpy's error for sequences of different lengths
        raise ValueError(f"{column!r} is nested; give one number for each token") from None
    if found.shape != (size,):
        raise ValueError(
            f"{column!r} has shape {list(found.shape)} for {size} tokens; give one number for each token"
        )
    if size and found.dtype.kind not in "biuf":  # a None among numbers makes objects, a text makes texts
        odd = next((each for each in values if not isinstance(each, int | float)), values[0])
        raise ValueError(f"{column!r} holds {shown(odd)}; give one number for each token")
    return found


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


def shown(value: Any) -> str:
    """Return a value's type and the beginning of its repr, for messages."""
    text = repr(value)
    return f"a {type(value).__name__}, {text if len(text) < 40 else text[:36] + '...'}"
