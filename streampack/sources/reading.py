"""The interface of sources and their readers: `Reading`, `Reader` and `BadRecord`. Helpers for rows and their order."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from streampack.storage.prefetch import Prefetch
from streampack.types import Cursor, Row, RowId, Sample

OTHER_RECORDS = (
    "other records are read than when the state was made: a shard that could not be read then can be read now, or the "
    "other way round; make it as it was, or resume from another checkpoint"
)

IMMUTABLE = (str, int, float, bool, bytes, type(None))


class Division(NamedTuple):
    """The parts of each lane by an earlier list of the files. It holds for the epochs before ``until``."""

    until: int
    lanes: Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Reading:
    """The part of a source to read: one lane in one epoch, its order, and where to begin.

    >>> Reading(2, num_lanes=8, epoch=1).key
    (0, 1, 2)

    Attributes:
        lane: which lane to read, from 0.
        num_lanes: into how many lanes the source is divided.
        epoch: which epoch to read, from 0.
        seed: seed of the order.
        shuffle_window: the number of rows among which the order is permuted; 0 keeps the order.
        start: the cursor to begin at; None is the beginning.
        stagger: how many trained tokens the deficits of a mixture's sources are apart at most when an epoch begins;
            the length of the longest sample is enough. See `MixtureReader`.
        prefetch: what the reader may fetch before it is needed; None for the reader of one lane alone.
        earlier: for each source of files, by its name in a mixture (otherwise an empty one), the divisions of the
            epochs that began before its files changed, in order.
        wrap: called by a mixture with each reader that it opens, its source and the encoder of that; returns the reader
            to use in its place.
    """

    lane: int = 0
    _: KW_ONLY
    num_lanes: int = 1
    epoch: int = 0
    seed: int = 0
    shuffle_window: int = 0
    start: Cursor | None = None
    stagger: int = 0
    prefetch: Prefetch | None = None
    earlier: Mapping[str, Sequence[Division]] = field(default_factory=dict)
    wrap: Callable[[Reader, Any, Any], Reader] = lambda reader, source, encoder: reader

    @property
    def key(self) -> tuple[int, int, int]:
        """The key of the permutations that make the order: (seed, epoch, lane)."""
        return (self.seed, self.epoch, self.lane)


class BadRecord(ValueError):
    """A record that cannot be read. The reader that raises it continues after it.

    Args:
        reason: why it cannot be read.
        row_id: which row of the corpus it is.
        locate: turns the ``row_id`` into a place for the message. It is called only when the message is made, because
            it may read a file to count lines.
    """

    def __init__(
        self,
        reason: str,
        *,
        row_id: RowId,
        locate: Callable[[RowId], str],
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.row_id = row_id
        self.locate = locate

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
    """An iterator over one lane's rows of one epoch, which continues after a `BadRecord`, and after no other error.

    Its cursor is all that a resume needs to continue with the next row.

    A lane calls `charge` with the samples made of each row, before it reads the next row. A mixture chooses the source
    of the next row by their trained tokens; other readers ignore them.
    """

    passes_begun = 0
    """How many passes over its source in a mixture were begun since that source's row before the newest row."""

    @property
    @abstractmethod
    def cursor(self) -> Cursor:
        """The cursor to resume at the next row."""

    def __iter__(self) -> Reader:
        return self

    @abstractmethod
    def __next__(self) -> Row: ...

    def prepare(self) -> None:  # noqa: B027  # only a reader of files behind a URL has a use for it
        """Begin to fetch what the next rows need, because they will be asked for soon. It changes no row or error."""

    def lacks(self, until: Cursor) -> bool:
        """Return whether records were removed before a cursor further on, or in the shuffle window open there."""
        return False

    def charge(self, parts: Sequence[Sample]) -> None:  # noqa: B027  # only a mixture has a use for it
        """Count the trained tokens of the newest row. ``parts`` are its pieces, none if the row was dropped."""


def reason_of(error: Exception) -> str:
    """Return an error as the reason in a list of bad records: its message, with its class unless it is a ValueError."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def own_row(value: Any) -> Any:
    """Copy a row with the dicts, lists, arrays and tensors in it, as an iterable may reuse them for its next row.

    Other objects stay shared. A list that begins with a number or text is copied without looking at its other items:
    1,000 ids take a microsecond.

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


def picked(rows: Iterator[Mapping[str, Any]], numbers: Sequence[int]) -> dict[int, Mapping[str, Any]]:
    """Return copies of the rows with these numbers, which rise. ``rows`` begin with the first of them."""
    first, wanted = numbers[0], {*numbers}
    between = islice(enumerate(rows, first), numbers[-1] - first + 1)
    found = {number: own_row(row) for number, row in between if number in wanted}
    if lacking := wanted - found.keys():
        raise ValueError(f"the rows end before row {min(lacking)}; the data changed")
    return found


def permutation(count: int, *key: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the permutation of ``range(count)`` that belongs to ``key``; touches no global generator."""
    return np.random.default_rng(key).permutation(count)


def spread(size: int, count: int) -> list[int]:
    """Return about ``count`` numbers from all over ``range(size)``, in order, the same ones at every call.

    The range is cut into ``count`` stretches, and a number is drawn at random from each. In a corpus that repeats a
    pattern, evenly spaced numbers could always hit the same place of the pattern.
    """
    if count >= size:
        return list(range(size))
    places = (np.arange(count) + np.random.default_rng(count).random(count)) * size / count
    return sorted({int(place) for place in places})
