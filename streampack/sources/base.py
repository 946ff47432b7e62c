"""What sources and those who read them exchange: what to read, a reader, a record that cannot be read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeVar

import numpy as np

from streampack.sources.row_copies import own_row
from streampack.types import Cursor, Row, RowId, Sample

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Reading:
    """What one lane reads in one epoch, in which order, and from where on.

    >>> Reading(2, num_lanes=8, epoch=1)
    Reading(lane=2, num_lanes=8, epoch=1, seed=0, shuffle_window=0, start=None)
    """

    lane: int = 0
    _: KW_ONLY
    num_lanes: int = 1
    epoch: int = 0
    seed: int = 0
    shuffle_window: int = 0  # rows among which the order is permuted; 0 keeps the order
    start: Cursor | None = None  # None: the beginning
    stagger: int = 0  # tokens that the lanes of a mixture begin apart at most; the longest sample is enough
    replayed: int = 0  # pieces that are read a second time, behind ``start``

    @property
    def key(self) -> tuple[int, int, int]:
        """What the order is a function of."""
        return (self.seed, self.epoch, self.lane)


class BadRecord(ValueError):
    """A row that is there and cannot be read. Asked again, it is raised again; `Reader.skip` goes on behind it."""

    def __init__(self, reason: str, *, cursor: Cursor, row_id: RowId, locate: Callable[[RowId], str]) -> None:
        super().__init__(reason)
        self.reason = reason
        self.cursor = cursor
        self.row_id = row_id
        self.locate = locate  # asked only for the message: it may read a file to count lines

    def __str__(self) -> str:
        return f"{self.locate(self.row_id)}: {self.reason}"

    def unskipped(self) -> Exception:
        """Return what to raise where no record is skipped: a `BadRecord` cannot leave its process."""
        cause = self.__cause__
        if not isinstance(cause, Exception) or isinstance(cause, ValueError):
            return ValueError(str(self))
        cause.add_note(f"while reading {self.locate(self.row_id)}")
        return cause


class Reader(ABC):
    """One lane's rows of one epoch. After an error, ``next()`` tries the same row again.

    A lane tells its reader what became of each row (`charge`); a mixture chooses the next source by it.
    """

    @property
    def begins(self) -> bool:
        """Whether the newest row is the first that its source, one of a mixture's, gives since it began anew."""
        return False

    @property
    @abstractmethod
    def cursor(self) -> Cursor:
        """Where reading can resume: at the row that comes next."""

    def __iter__(self) -> Iterator[Row]:
        return self

    @abstractmethod
    def __next__(self) -> Row: ...

    @abstractmethod
    def skip(self) -> None:
        """Skip the record that `BadRecord` was raised for."""

    def charge(self, parts: Sequence[Sample]) -> None:  # noqa: B027  # only a mixture has a use for it
        """Take note of the samples, cut to pieces, that the newest row became; none if it was dropped."""

    def succeed(self, ended: Reader) -> None:  # noqa: B027  # only a mixture has a use for it
        """Begin an epoch where that of another reader of the same source ended."""


def reason_of(error: Exception) -> str:
    """Say in a list of bad records why one is there; a ValueError's message says it alone."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def readable(
    fetch: Callable[[Item], Mapping[str, Any]], bad: type[Exception] = ValueError
) -> Callable[[Item], list[Mapping[str, Any]]]:
    """``fetch`` for a probe: a list of the row, or none if its record is broken, which is found when it is read."""

    def call(item: Item) -> list[Mapping[str, Any]]:
        try:
            return [own_row(fetch(item))]
        except OSError:
            raise
        except bad:
            return []

    return call


def permutation(count: int, *key: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The permutation of ``range(count)`` that belongs to ``key``; touches no global state."""
    return np.random.default_rng(key).permutation(count)


def spread(size: int, count: int) -> list[int]:
    """About ``count`` numbers below ``size``, one at random from each of as many equal stretches; always the same.

    Evenly spaced ones would see only one row of every period of a periodic corpus.
    """
    if count >= size:
        return list(range(size))
    places = (np.arange(count) + np.random.default_rng(count).random(count)) * size / count
    return sorted({int(place) for place in places})
