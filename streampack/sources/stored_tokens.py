"""Token ids as other programs store them: mapped files, and rows made of the stored integers."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.storage.base import File, resized
from streampack.types import IGNORE_INDEX, IntArray

Stored = npt.NDArray[np.integer[Any]]
"""Ids in the type of their file, ``[length]``."""

TOKENS_PER_LANE = 1 << 18  # tokens per lane by default: 64 packs of 4,096


def mapped(file: File, dtype: np.dtype[Any], *, first: int = 0, count: int = -1) -> npt.NDArray[Any]:
    """Return integers of a file of this machine, from byte ``first`` on, as a view of the file.

    The file stays mapped while the array, or a view of it, is held.

    Raises:
        ValueError: if the file has another size than when it was listed.
    """
    with Path(file.path).open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    if len(data) != file.size:
        raise resized(file, len(data))
    return np.frombuffer(data, dtype, count, first)


def signed(stored: Stored) -> IntArray:
    """Return ids as int32, or int64 if the file has 8 bytes an id or an id of 4 bytes needs it; read-only.

    Ids of 4 and 8 bytes are not copied, unless one of 4 bytes is 2**31 or more.

    >>> stored = np.array([5, 2**31 - 1], "<u4")
    >>> signed(stored).dtype, np.shares_memory(signed(stored), stored)
    (dtype('int32'), True)
    >>> signed(np.array([2**31], "<u4")), signed(np.array([7], "<u2")).dtype
    (array([2147483648]), dtype('int32'))
    """
    width = stored.itemsize
    if width < 4:
        ids: IntArray = stored.astype(np.int32)
    else:
        ids = stored.view(f"<i{width}")
        if width == 4 and stored.dtype.kind == "u" and ids.size and np.minimum.reduce(ids) < 0:
            ids = stored.astype(np.int64)
    ids.setflags(write=False)  # An array that cannot change need not be copied again.
    return ids


def row_of(stored: Stored, trained: npt.NDArray[np.uint8] | None) -> Mapping[str, Any]:
    """Make a row of a document's ids, ``[length]``, and the bytes that are 0 where a token is not trained on, if any.

    >>> row_of(np.array([5, 6, 7], "<u2"), np.array([0, 1, 1], np.uint8))
    {'tokens': array([5, 6, 7], dtype=int32), 'labels': array([-100,    6,    7], dtype=int32)}
    """
    tokens = signed(stored)
    if trained is None:
        return {"tokens": tokens, "labels": tokens}
    labels = np.where(trained, tokens, IGNORE_INDEX).astype(tokens.dtype, copy=False)
    labels.setflags(write=False)
    return {"tokens": tokens, "labels": labels}


def bound_of(dtypes: Iterable[np.dtype[Any]]) -> int | None:
    """Return a number that all ids of these types are below and none is negative; None if the types allow others.

    >>> bound_of([np.dtype("<u2")]), bound_of([np.dtype("<u2"), np.dtype("<i4")])
    (65536, None)
    """
    found = list(dtypes)
    if not found or any(dtype.kind != "u" or dtype.itemsize > 4 for dtype in found):
        return None
    return 1 << 8 * max(dtype.itemsize for dtype in found)
