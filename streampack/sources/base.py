"""The contract of a source, and the reader that shuffles any sequential one within windows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from streampack.sources.retry import Retries
from streampack.types import Origin, Position, Row

NO_RETRIES = Retries(attempts=0)


class Reader(Protocol):
    """One lane's rows of one epoch. After an error, ``next()`` tries the same row again."""

    @property
    def position(self) -> Position:
        """Of the row that comes next."""

    def __iter__(self) -> Iterator[Row]: ...
    def __next__(self) -> Row: ...


@runtime_checkable
class Source(Protocol):
    """Rows that several lanes share out, and that each lane can read again from any position."""

    max_lanes: int | None  # None: any number

    def fingerprint(self) -> str:
        """A digest of the corpus; a state made with another one is refused."""

    def read(
        self,
        lane: int,
        *,
        num_lanes: int,
        epoch: int = 0,
        seed: int = 0,
        shuffle_window: int = 0,
        start: Position | None = None,
    ) -> Reader:
        """The rows of one lane in one epoch, from ``start`` on. ``shuffle_window=0`` keeps the order."""

    def locate(self, origin: Origin) -> str:
        """Where a row stands, in words for people: file and line, or row number."""

    def fetch(self, origin: Origin) -> Mapping[str, Any]:
        """Read one row again."""

    def natural_lanes(self) -> int:
        """How many lanes it fills without their last, part-empty packs mattering: a lane per some 100 packs."""

    def probe(self, count: int) -> tuple[list[Mapping[str, Any]], float]:
        """About ``count`` rows from all over the corpus, and how many times as much the whole corpus is."""


def digest(*parts: object) -> str:
    """A short stable digest of plain values; 16 hex digits."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """A row's content as plain values: equal content compares equal, be it lists, arrays or tensors."""
    if isinstance(value, Mapping):
        return sorted((str(key), plain(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


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


Record = tuple[int, Any]  # (offset in its file, raw data)


class Part(NamedTuple):
    """A stretch of a file: the records whose first unit lies in ``[start, stop)``; ``None`` is the end."""

    file: int
    start: int = 0
    stop: int | None = None


class PartReader(Protocol):
    """The raw records of one part, in order."""

    offset: int  # of the record that comes next

    def __next__(self) -> Record: ...


class WindowReader:
    """Reads parts one after the other; within windows of ``shuffle_window`` records, in a permuted order.

    Both permutations, of the parts and within each window, are functions of (seed, epoch, lane, window),
    so a position ``(part, offset, index)`` says all: the window starts at ``offset`` of the ``part``-th
    part of the permuted order, and ``index`` of its records have been read. Starting there reads at most
    one window again. Records are held raw and decoded one at a time. ``open_part(part, offset)`` reads a
    part from ``offset`` on, ``decode(part, offset, raw)`` makes a row's data, ``place(part, offset)`` says in
    words where reading failed.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        open_part: Callable[[Part, int], PartReader],
        decode: Callable[[Part, int, Any], Mapping[str, Any]],
        key: tuple[int, int, int],
        shuffle_window: int = 0,
        start: Position | None = None,
        place: Callable[[Part, int], str] = "{}, offset {}".format,
        retries: Retries = NO_RETRIES,
    ) -> None:
        order = permutation(len(parts), *key) if shuffle_window else range(len(parts))
        self.parts = [parts[i] for i in order]
        self.open_part = open_part
        self.decode = decode
        self.place = place
        self.key = key
        self.retries = retries
        self.shuffle_window = shuffle_window
        self.part = 0  # the part being read, an index into self.parts
        self.reader: PartReader | None = None  # opened at the first read, in the process that reads
        self.offset = self.parts[0].start if self.parts else 0  # of the next record in that part
        self.filling: list[tuple[Part, int, Any]] | None = None  # the next window, until it is complete
        self.window: list[tuple[Part, int, Any]] = []  # records in the order of yielding
        self.index = 0  # records of the window that were yielded
        if start is not None:
            self.part, self.offset, self.index = start
        self.window_start = (self.part, self.offset)
        if self.index:
            self._fill()

    @property
    def position(self) -> Position:
        """The position of the row that comes next."""
        if self.index < len(self.window):
            return (*self.window_start, self.index)
        # While a window is being filled (an error came in between), it starts where filling began.
        return (*(self.window_start if self.filling is not None else (self.part, self.offset)), 0)

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        if self.index >= len(self.window):
            if self.filling is None:
                self.window_start, self.window, self.index = (self.part, self.offset), [], 0
            self._fill()
            if not self.window:
                raise StopIteration
        part, offset, raw = self.window[self.index]
        row = Row(self.decode(part, offset, raw), (*self.window_start, self.index), (part.file, offset))
        self.index += 1
        return row

    def _fill(self) -> None:
        if self.filling is None:
            self.filling = []
        while self.part < len(self.parts) and len(self.filling) < max(1, self.shuffle_window):
            part = self.parts[self.part]
            record = self.retries.call(partial(self._next_record, part))
            if record is not None:
                self.filling.append((part, *record))
            else:
                self.part += 1
                self.offset = self.parts[self.part].start if self.part < len(self.parts) else 0
                self.reader = None
        self.window, self.filling = self.filling, None
        if self.shuffle_window:
            order = permutation(len(self.window), *self.key, *self.window_start)
            self.window = [self.window[i] for i in order]

    def _next_record(self, part: Part) -> Record | None:
        try:
            if self.reader is None:
                self.reader = self.open_part(part, self.offset)
            record = next(self.reader, None)
        except Exception as error:
            # Half a line may be lost in its buffer, and a generator that raised is finished: asked again,
            # either would shorten the corpus in silence. Open it anew, at the record that failed.
            self.reader = None
            error.add_note(f"while reading {self.place(part, self.offset)}")
            raise
        if record is not None:
            self.offset = self.reader.offset
        return record
