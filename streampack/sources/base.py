"""`Reading`, `Reader` and `BadRecord`, the interface of sources and their readers; copies and samples of rows."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from streampack.types import Cursor, Row, RowId, Sample

IMMUTABLE = (str, int, float, bool, bytes, type(None))


@dataclass(frozen=True, slots=True)
class Reading:
    """The part of a source to read: one lane in one epoch, its order, and where to begin.

    >>> Reading(2, num_lanes=8, epoch=1).key
    (0, 1, 2)
    """

    lane: int = 0
    _: KW_ONLY
    num_lanes: int = 1
    epoch: int = 0
    seed: int = 0
    shuffle_window: int = 0  # rows among which the order is permuted; 0 keeps the order
    start: Cursor | None = None  # None: the beginning
    stagger: int = 0  # most tokens that the lanes of a mixture begin apart; the longest sample is enough
    replayed: int = 0  # pieces that a resume reads a second time, from ``start`` on

    @property
    def key(self) -> tuple[int, int, int]:
        """The key of the order's permutations."""
        return (self.seed, self.epoch, self.lane)


class BadRecord(ValueError):
    """A record that cannot be read. ``next()`` raises it again until `Reader.skip` goes on behind the record."""

    def __init__(self, reason: str, *, cursor: Cursor, row_id: RowId, locate: Callable[[RowId], str]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.cursor = cursor
        self.row_id = row_id
        self.locate = locate  # called only for the message: it may read a file to count lines

    def __str__(self) -> str:
        return f"{self.locate(self.row_id)}: {self.reason}"

    def unskipped(self) -> Exception:
        """Return the error to raise where no record is skipped: a `BadRecord` cannot be pickled."""
        cause = self.__cause__
        if not isinstance(cause, Exception) or isinstance(cause, ValueError):
            return ValueError(str(self))
        cause.add_note(f"while reading {self.locate(self.row_id)}")
        return cause


class Reader(ABC):
    """An iterator over one lane's rows of one epoch. After an error, ``next()`` tries the same row again.

    A lane reports the samples of each row with `charge`; a mixture chooses the next source by them.
    """

    begins = False
    """Whether the newest row is the first of a turn of its source in a mixture."""

    @property
    @abstractmethod
    def cursor(self) -> Cursor:
        """The cursor to resume at the next row."""

    def __iter__(self) -> Reader:
        return self

    @abstractmethod
    def __next__(self) -> Row: ...

    @abstractmethod
    def skip(self) -> None:
        """Skip the record that `BadRecord` was raised for."""

    def charge(self, parts: Sequence[Sample]) -> None:  # noqa: B027  # only a mixture has a use for it
        """Count the pieces that the newest row was cut into; none if the row was dropped."""

    def continue_from(self, ended: Reader) -> None:  # noqa: B027  # only a mixture has a use for it
        """Take over what outlives an epoch from the reader of the epoch before."""


def reason_of(error: Exception) -> str:
    """Return the reason for a list of bad records: a ValueError's message, other errors with their class."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def own_row(value: Any) -> Any:
    """Copy a row, and the dicts, lists, arrays and tensors in it; its maker may reuse their memory for the next one.

    Other objects stay shared. A list of numbers or texts is copied as a whole: 1,000 ids take a microsecond.

    >>> ids = [1, 2]
    >>> row = own_row({"messages": [{"ids": ids}]})
    >>> ids.append(3)
    >>> row
    {'messages': [{'ids': [1, 2]}]}
    """
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind is dict:
        return {name: own_row(item) for name, item in value.items()}
    if kind is list or kind is tuple:
        flat = not value or type(value[0]) in IMMUTABLE
        return kind(value) if flat else kind(map(own_row, value))
    if hasattr(value, "__array__") and hasattr(value, "shape"):
        return value.clone() if hasattr(value, "clone") else value.copy()
    return copy.copy(value) if isinstance(value, Mapping) else value


def permutation(count: int, *key: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the permutation of ``range(count)`` that belongs to ``key``; touches no global generator."""
    return np.random.default_rng(key).permutation(count)


def spread(size: int, count: int) -> list[int]:
    """Return about ``count`` numbers below ``size``, always the same: a random one of each of as many stretches.

    Evenly spaced numbers would see only one row of each period of a periodic corpus.
    """
    if count >= size:
        return list(range(size))
    places = (np.arange(count) + np.random.default_rng(count).random(count)) * size / count
    return sorted({int(place) for place in places})
