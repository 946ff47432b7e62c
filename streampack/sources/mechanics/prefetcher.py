"""Prefetching of records in threads, by the format's own `FileSource.records`."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from streampack.sources.mechanics.parts import REMOVED_FILE, OpenPart, Part, Record
from streampack.storage.ranges import Fetcher

RECORDS = 64  # that are read at a time, and of a lane that shuffles, at most
MOST_RECORDS = 256  # of a lane that does not
PARTS_AT_ONCE = 32  # of one lane, where each has few records


@dataclass(eq=False, slots=True)
class Stretch:
    """The records of a part from an offset on, as far as threads have read them."""

    index: int  # of the part
    begin: int
    records: Iterator[Record] | None = None
    found: deque[list[Record]] = field(default_factory=deque)  # that were not taken yet
    count: int = 0  # of all that were found
    future: Future[None] | None = None  # of the thread that reads on
    ended: bool = False
    error: Exception | None = None  # for which a thread could not read on

    @property
    def ready(self) -> int:
        """How many records there are that were not taken yet."""
        return sum(map(len, self.found))


class Prefetcher:
    """Prefetches records of a lane's parts: threads read up to ``wanted`` of them, each thread those of one part.

    Args:
        parts: the lane's parts, in the order of reading.
        empty: parts that have no records.
        open_part: opens a part; reads by ``fetcher``.
        fetcher: says how much may be prefetched, and has the threads.
        window: how many records are asked for at once; 0 if they are asked for one by one.
    """

    def __init__(
        self, parts: Sequence[Part], empty: set[Part], open_part: OpenPart, *, fetcher: Fetcher, window: int
    ) -> None:
        self.parts = parts
        self.empty = empty
        self.open_part = open_part
        self.fetcher = fetcher
        self.window = window
        self.count = 0  # of all records that threads have found
        self.most = RECORDS if window else MOST_RECORDS
        # Records that a part is expected to have. Parts may be of any length, the last of a file above all: so one that
        # has fewer halves this only, or many long ones would be opened at once after it.
        self.each = max(window, self.most)
        # By the index of their part, in order; the first one is read from.
        self.stretches: dict[int, Stretch] = {}
        self.lock = threading.Lock()
        self.process = os.getpid()

    @property
    def wanted(self) -> int:
        """How many records may be there before they are asked for: a window, and if it is less, ``room`` bytes."""
        fitting = self.fetcher.prefetch.room * max(1, self.count) // max(1, self.fetcher.bytes)
        return max(1, self.window, min(self.most, fitting))

    def prepare(self, index: int, offset: int) -> None:
        """Begin to read the next records, which begin at an offset of a part, because they are needed soon."""
        self._after_fork()
        with self.lock:
            if not self.stretches and (first := self._next(index)) is not None:
                begin = offset if first == index else self.parts[first].start
                self.stretches[first] = Stretch(first, begin)
            self._read_on()

    def open(self, index: int, offset: int) -> Iterator[Record]:
        """Return the records of a part from an offset on."""
        self._after_fork()
        with self.lock:
            stretch = self.stretches.get(index)
            later = {i: each for i, each in self.stretches.items() if i > index}
            if stretch is None or stretch.begin != offset or stretch.count > stretch.ready:
                stretch = Stretch(index, offset)
            self.stretches = {index: stretch, **later}
        return self._records(stretch)

    def _after_fork(self) -> None:
        if self.process != os.getpid():  # a fork copied this object, but none of the threads that read
            self.process, self.lock, self.stretches = os.getpid(), threading.Lock(), {}

    def _records(self, stretch: Stretch) -> Iterator[Record]:
        process, at = os.getpid(), stretch.begin
        while True:
            if process != os.getpid():
                yield from self.open_part(self.parts[stretch.index], at)
                return
            with self.lock:
                records = stretch.found.popleft() if stretch.found else []
                if not records and (stretch.ended or stretch.error is not None):
                    break
                if not self.window:  # a window is asked for at once, and the next one by `prepare`
                    self._read_on()
                if not records and stretch.future is None:
                    self._start(stretch, self.wanted)
                future = stretch.future
            if records:
                at = records[-1][2]
                yield from records
            elif future is not None and future.cancel():  # no thread has begun it
                self._read(stretch, self.wanted)
            elif future is not None:
                future.result()
        with self.lock:
            self.stretches.pop(stretch.index, None)
        if stretch.error is not None:  # where its record should come
            raise stretch.error

    def _read_on(self) -> None:
        """Start threads until all records that are wanted are there, or expected of those that read. Needs the lock."""
        left = wanted = self.wanted
        busy = sum(stretch.future is not None for stretch in self.stretches.values())
        left -= sum(stretch.ready for stretch in self.stretches.values()) + busy * self.each
        if not self.window and left < wanted // 2:
            return
        newest = next(reversed(self.stretches.values()), None)
        while newest is not None and left > 0 and busy < PARTS_AT_ONCE:
            if newest.future is not None or newest.ended or newest.error is not None:
                if (index := self._next(newest.index + 1)) is None:
                    return
                newest = self.stretches[index] = Stretch(index, self.parts[index].start)
            self._start(newest, left)
            left, busy = left - self.each, busy + 1

    def _next(self, index: int) -> int | None:
        """Return the index of the first part from this one on that has records, as far as is known."""
        for i in range(index, len(self.parts)):
            if self.parts[i].file != REMOVED_FILE and self.parts[i] not in self.empty:
                return i
        return None

    def _start(self, stretch: Stretch, count: int) -> None:
        stretch.future = self.fetcher.prefetch.parts.submit(partial(self._read, stretch, count))

    def _read(self, stretch: Stretch, count: int) -> None:
        """Read up to ``count`` further records of a part, in a thread."""
        most, before = self.fetcher.bytes + self.fetcher.prefetch.room, stretch.count
        ended, error = False, None
        try:
            if stretch.records is None:
                stretch.records = self.open_part(self.parts[stretch.index], stretch.begin)
            read = 0
            while read < count and not ended and (read < max(1, self.window) or self.fetcher.bytes <= most):
                at_once = min(max(1, read), RECORDS, count - read)  # few first: they may be large
                found: list[Record] = []
                try:
                    found.extend(islice(stretch.records, at_once))
                finally:  # also those before an error
                    with self.lock:
                        stretch.count += len(found)
                        stretch.found.extend([found] if found else [])
                read, ended = read + at_once, len(found) < at_once
        except Exception as caught:
            error = caught
        with self.lock:
            self.count += stretch.count - before
            stretch.ended, stretch.error, stretch.future = ended, error, None
            whole = ended and stretch.begin == self.parts[stretch.index].start
            self.each = max(1, stretch.count, self.each // 2 if whole else self.each)
            if self.stretches.get(stretch.index) is stretch:
                self._read_on()
