"""The reader of a lane's parts: one after the other, or with the records permuted within windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any

from typing_extensions import override

from streampack.sources.mechanics.parts import (
    REMOVED_FILE,
    Damage,
    DamageOf,
    OpenPart,
    Part,
    Record,
    strided,
)
from streampack.sources.mechanics.prefetcher import Prefetcher
from streampack.sources.reading import OTHER_RECORDS, BadRecord, Reader, Reading, permutation
from streampack.storage.ranges import Fetcher
from streampack.types import Cursor, Row, RowId

REMOVED: Any = object()
"""Stands for the raw data of a record whose file was removed since it was read first."""


class PartsReader(Reader):
    """Reads the records of a lane's parts, one part after the other, and decodes them to rows.

    The cursor is ``(part, offset, 0)``: an index into the parts, in the order of reading, and the byte or row number in
    that part's file where the next record begins or is searched for.

    With a ``shuffle_window``, up to that number of records are read at once, and permuted. Within a
    window the cursor is ``(part, offset, index, *counts)``: the window begins there, ``index`` of its rows were
    returned, and the counts are those of its records of this part and of each following one. The order of the parts
    and of each window's records is a function of (seed, epoch, lane) and, for a window, of where it begins.

    A resume reads the window again, and no row before it. (A compressed file is also decompressed from its beginning,
    as without shuffling.) If a file of it was removed since, its records keep their places in the order, by their
    count, and are passed over. Records are held as they are stored, and each is decoded when its row is asked for.

    Args:
        parts: the lane's parts, in corpus order.
        reading: says whether to shuffle, by which key, and at which cursor to begin.
        open_part: opens a part.
        locate: see `Source.locate`.
        decode: ``(part, offset, raw)`` makes a row's data of a record's raw data, or raises ValueError; by default the
            raw data is the row's data.
        place: ``(part, offset)`` describes the position, for errors of the storage; by default `locate` does.
        prefetch: fetcher of the parts, if threads read them before they are asked for.
        empty: parts without records, which are not opened; the reader adds those that it finds.
        damage: see `DamageOf`.
    """

    cursor: Cursor = ()

    def __init__(
        self,
        parts: Sequence[Part],
        reading: Reading,
        *,
        open_part: OpenPart,
        locate: Callable[[RowId], str],
        decode: Callable[[Part, int, Any], Mapping[str, Any]] = lambda part, offset, raw: raw,
        place: Callable[[Part, int], str] | None = None,
        prefetch: Fetcher | None = None,
        empty: set[Part] | None = None,
        damage: DamageOf = lambda error, part, offset: None,
    ) -> None:
        window = reading.shuffle_window
        self.parts = [parts[i] for i in permutation(len(parts), *reading.key)] if window else parts
        self.reading = reading
        self.locate = locate
        self.decode = decode
        self.place = place or (lambda part, offset: locate((part.file, offset)))
        self.empty = set() if empty is None else empty
        self.damage = damage
        opened = strided(open_part)
        self.open: Callable[[int, int], Iterator[Record]] = lambda i, offset: opened(self.parts[i], offset)
        self.prefetcher = None
        if prefetch is not None:
            self.prefetcher = Prefetcher(self.parts, self.empty, opened, fetcher=prefetch, window=window)
            self.open = self.prefetcher.open
        self.cursor = reading.start or (0, self.parts[0].start if parts else 0, 0)
        self.position: tuple[int, int, int] = (*self.cursor[:2], 0)  # type: ignore[assignment] # after what was read
        # What is left of the window, the next record last: (index of the part, offset, raw data).
        self.window: list[tuple[int, int, Any]] = []
        self.found = self._windows() if window else self._records()

    @override
    def __next__(self) -> Row:
        found = next(self.found, None)
        if not self.reading.shuffle_window:
            self.cursor = self.position
        if found is None:
            assert self.position[0] >= len(self.parts), "an error has ended this reader"
            raise StopIteration
        part, offset, raw = self.parts[found[0]], *found[1:]
        try:
            if isinstance(raw, Damage):
                raise raw
            return Row(self.decode(part, offset, raw), (part.file, offset))
        except ValueError as error:
            reason, cause = str(error), error.__cause__ if error is raw else None
        raise BadRecord(reason, row_id=(part.file, offset), locate=self.locate) from cause

    @override
    def prepare(self) -> None:
        """Let the next records be read; with a shuffle window, if little of the current one is left."""
        if self.prefetcher is not None and len(self.window) <= self.reading.shuffle_window // 4:
            self.prefetcher.prepare(*self.position[:2])

    @override
    def lacks(self, until: Cursor) -> bool:
        last = until[0] + len(until[4:])  # the last part of the window that is open there
        return any(part.file == REMOVED_FILE for part in self.parts[self.cursor[0] : last + 1])

    def _windows(self) -> Iterator[tuple[int, int, Any]]:
        """Yield the records of one window after the other, and move the cursor after each."""
        records = self._records()
        done, expected = self.cursor[2], list(self.cursor[3:])  # of the window in which reading resumes
        while True:
            first, begin, _ = self.position
            self.prepare()
            read = list(islice(records, self.reading.shuffle_window))
            of_parts = Counter(map(itemgetter(0), read))
            counts = [of_parts[i] for i in range(first, max(of_parts, default=-1) + 1)]
            if expected and expected != counts:
                for _, _, raw in read:
                    if isinstance(raw, Damage) and isinstance(raw.__cause__, FileNotFoundError):
                        raise raw.__cause__
                raise ValueError(f"lane {self.reading.lane}: {OTHER_RECORDS}")
            size = len(read)
            order = permutation(size, *self.reading.key, first, begin)
            self.window = window = [read[i] for i in order[done:][::-1]]
            del read  # so that each record is freed when its row was made
            while window:
                found = window.pop()
                # After its last record, a resume need not read the window again.
                self.cursor = (first, begin, size - len(window), *counts) if window else self.position
                if found[2] is not REMOVED:
                    yield found
            if not size:
                self.cursor = self.position
                return
            done, expected = 0, []

    def _records(self) -> Iterator[tuple[int, int, Any]]:
        """Yield the records after `position`, and move it after each."""
        first, offset_of_first, _ = self.position
        removed = dict(enumerate(self.cursor[3:], first))
        for index in range(first, len(self.parts)):
            part = self.parts[index]
            at = offset_of_first if index == first else part.start
            self.position = (index, at, 0)
            if part.file == REMOVED_FILE:
                yield from [(index, at, REMOVED)] * removed.get(index, 0)
            begin = None if part.file == REMOVED_FILE or part in self.empty else at
            while begin is not None:
                at = begin
                try:
                    for offset, raw, at in self.open(index, begin):
                        self.position = (index, at, 0)
                        yield index, offset, raw
                    if at == part.start:
                        self.empty.add(part)
                    break
                except Exception as error:
                    damage = error if isinstance(error, Damage) else self.damage(error, part, at)
                    if damage is None:
                        error.add_note(f"while reading {self.place(part, at)}")
                        raise
                following = self.parts[index + 1].start if index + 1 < len(self.parts) else 0
                begin = damage.resume
                self.position = (index + 1, following, 0) if begin is None else (index, begin, 0)
                # A footer or an index that fails is at 0, and each part of its file is a bad record of its own.
                yield index, max(at, damage.offset), damage
        self.position = (len(self.parts), 0, 0)
