"""Shuffling within windows: the reader of permuted records, and the choice between it and the order of the parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from streampack.sources.ahead import Ahead
from streampack.sources.parts import (
    REMOVED,
    Damage,
    DamageOf,
    FoundRecord,
    InOrder,
    OpenPart,
    Part,
    Record,
)
from streampack.sources.reading import OTHER_RECORDS, Reader, Reading, permutation
from streampack.sources.turns import in_turns
from streampack.storage.ranges import Fetcher
from streampack.types import Cursor, Row, RowId


class WindowReader(Reader):
    """Reads the records of ``ordered`` in a permuted order within windows of ``shuffle_window`` records.

    Within a window the cursor is ``(part, offset, index, *counts)``: its first record is the one at ``offset`` (a byte
    or row number) in the file of ``parts[part]``, ``index`` of its rows have been returned or skipped, and the counts
    are those of its records of this part and of each following one. At its beginning it is ``(part, offset, 0)``. The
    order of the parts and of each window's records is a function of (seed, epoch, lane) and, for a window, of where it
    begins.

    A resume reads the window again, and no row before it. (A compressed file is also decompressed from its beginning,
    as without shuffling.) If a file of it was removed since, its records keep their places in the order, by their
    count, and are passed over. Records are held as they are stored, and each is decoded when its row is asked for.
    """

    cursor: Cursor = ()

    def __init__(self, ordered: InOrder) -> None:
        self.ordered = ordered
        self.reading = ordered.reading
        # The records of the current window, in permuted order; those that were returned or skipped are let go.
        self.window: list[FoundRecord | None] = []
        self.counts: list[int] = []  # of the current window's records, see above
        self.index = 0  # how many rows of the window have been returned or skipped
        # The records of the next window while it is being read. An error in the middle leaves them here, so that the
        # next call goes on behind them.
        self.filling: list[FoundRecord] | None = None
        self.start = ordered.position  # of the window that is read next
        start = self.reading.start
        # Of the window in which reading resumes, until it is read.
        self.resumes_at: int = start[2] if start is not None else 0
        self.expected: list[int] = [] if start is None else list(start[3:])
        ordered.removed = dict(enumerate(self.expected, self.start[0]))
        self.cursor = (*self.start, self.resumes_at, *self.expected)

    def __next__(self) -> Row:
        while True:
            while self.index >= len(self.window):
                if not self._read_window():
                    raise StopIteration
            found = self.window[self.index]
            assert found is not None
            if found[2] is not REMOVED:
                break
            self._go_to(self.index + 1)
        row = self.ordered.row_of(found)
        self._go_to(self.index + 1)
        return row

    def prepare(self) -> None:
        """See `Reader.prepare`: read the next window, if little of this one is left."""
        if len(self.window) - self.index <= self.reading.shuffle_window // 4:
            self.ordered.prepare()

    def skip(self) -> None:
        """See `Reader.skip`."""
        self._go_to(self.index + 1)

    def _go_to(self, index: int) -> None:
        if 0 < index <= len(self.window):
            self.window[index - 1] = None
        self.index = index
        # At a window's end, the cursor is that of the next window: a resume need not read the old one again.
        if index >= len(self.window):
            self.cursor = (*self.ordered.position, 0)
        else:  # as long as no row was returned, a resume may find other records
            self.cursor = (*self.start, index, *self.counts) if index else (*self.start, 0)

    def _read_window(self) -> bool:
        """Read and permute the next window; return False at the end of the parts.

        Raises:
            ValueError: if it was read before a resume, and had other records then.
            FileNotFoundError: if that is so because a file is gone.
        """
        ordered = self.ordered
        if self.filling is None:
            self.filling, self.window = [], []
            self.start = ordered.position
        ordered.prepare()
        while len(self.filling) < self.reading.shuffle_window and (found := ordered.find()):
            self.filling.append(found)
        counts = self._counts(self.filling)
        if self.expected and self.expected != counts:
            for _, _, raw in self.filling:
                if isinstance(raw, Damage) and isinstance(raw.__cause__, FileNotFoundError):
                    raise raw.__cause__
            raise ValueError(f"lane {self.reading.lane}: {OTHER_RECORDS}")
        order = permutation(len(self.filling), *self.reading.key, *self.start)
        self.window, self.filling = [self.filling[i] for i in order], None
        self.counts, self.expected = counts, []
        index, self.resumes_at = min(self.resumes_at, len(self.window)), 0
        self.window[:index] = [None] * index
        self._go_to(index)
        return bool(self.window)

    def _counts(self, found: list[FoundRecord]) -> list[int]:
        """Count the records of the part where the window begins, and of each following one up to the last."""
        counts = Counter(map(itemgetter(0), found))
        return [counts[i] for i in range(self.start[0], max(counts, default=-1) + 1)]


def read_parts(
    parts: Sequence[Part],
    reading: Reading,
    *,
    open_part: OpenPart,
    locate: Callable[[RowId], str],
    decode: Callable[[Part, int, Any], Mapping[str, Any]] = lambda part, offset, raw: raw,
    place: Callable[[Part, int], str] | None = None,
    ahead: Fetcher | None = None,
    empty: set[Part] | None = None,
    damage: DamageOf = lambda error, part, offset: None,
) -> InOrder | WindowReader:
    """Open a reader of a lane's parts, in the order that ``reading`` asks for.

    Args:
        parts: the lane's parts, in corpus order.
        reading: says whether to shuffle, by which key, and at which cursor to begin.
        open_part: opens a part.
        locate: see `Source.locate`.
        decode: ``(part, offset, raw)`` makes a row's data of a record's raw data, or raises ValueError; by default the
            raw data is the row's data.
        place: ``(part, offset)`` describes where reading stands, for errors of the storage; by default `locate` does.
        ahead: what parts are read by, if threads read them before they are asked for.
        empty: parts without records, which are not opened; the reader adds those that it finds.
        damage: see `DamageOf`.
    """
    if reading.shuffle_window:
        parts = [parts[i] for i in permutation(len(parts), *reading.key)]
    if place is None:
        place = lambda part, offset: locate((part.file, offset))  # noqa: E731
    empty = set() if empty is None else empty
    opened = in_turns(open_part)
    open_at: Callable[[int, int], Iterator[Record]] = lambda i, offset: opened(parts[i], offset)  # noqa: E731
    prepare = None
    if ahead is not None:
        threads = Ahead(parts, empty, opened, fetcher=ahead, window=reading.shuffle_window)
        open_at, prepare = threads.open, threads.prepare
    ordered = InOrder(parts, reading, open_at, decode, place, locate, damage, empty, prepare)
    return WindowReader(ordered) if reading.shuffle_window else ordered
