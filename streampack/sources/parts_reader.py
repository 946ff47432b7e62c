"""The reader of a lane's parts: one after the other, or with the records permuted within windows."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any

from typing_extensions import override

from streampack.sources.ahead import Ahead
from streampack.sources.parts import REMOVED_FILE, Damage, OpenPart, Part, Record, in_turns
from streampack.sources.reading import OTHER_RECORDS, BadRecord, Reader, Reading, permutation
from streampack.storage.ranges import Fetcher
from streampack.types import Cursor, Row, RowId

Found = tuple[int, int, Any]
"""(index of the part, offset of the record in the part's file, raw data, or a `Damage`, or `REMOVED`)."""

REMOVED: Any = object()
"""Stands for the raw data of a record whose file was removed since it was read first."""

DamageOf = Callable[[Exception, Part, int], Damage | None]
"""``(error, part, offset)`` returns what an error of the storage means for the rest of a part; None if it may pass."""


class PartsReader(Reader):
    """Reads the records of a lane's parts, one part after the other, and decodes them to rows.

    The cursor is ``(part, offset, 0)``: an index into the parts, which are in the order of reading already, and the
    byte or row number in that part's file where the next record begins or is searched for.

    With a ``shuffle_window``, so many records are read at once, and their rows come in a permuted order. Within a
    window the cursor is ``(part, offset, index, *counts)``: the window begins there, ``index`` of its rows were
    returned, and the counts are those of its records of this part and of each following one. The order of the parts
    and of each window's records is a function of (seed, epoch, lane) and, for a window, of where it begins.

    A resume reads the window again, and no row before it. (A compressed file is also decompressed from its beginning,
    as without shuffling.) If a file of it was removed since, its records keep their places in the order, by their
    count, and are passed over. Records are held as they are stored, and each is decoded when its row is asked for.

    `read_parts` describes the arguments.
    """

    cursor: Cursor = ()

    def __init__(
        self,
        parts: Sequence[Part],
        reading: Reading,
        open_part: Callable[[int, int], Iterator[Record]],
        decode: Callable[[Part, int, Any], Mapping[str, Any]],
        place: Callable[[Part, int], str],
        locate: Callable[[RowId], str],
        damage: DamageOf,
        empty: set[Part],
        prepare: Callable[[int, int], None] | None,
    ) -> None:
        self.parts = parts
        self.reading = reading
        self.empty = empty
        self.open_part = open_part
        self.decode = decode
        self.place = place
        self.locate = locate
        self.damage = damage
        self.prepare_at = prepare
        self.cursor = reading.start or (0, parts[0].start if parts else 0, 0)
        self.position: tuple[int, int] = self.cursor[:2]  # type: ignore[assignment]  # behind what was found
        self.found = self._find(*self.position)
        # With a shuffle window: where it begins, how many records of each part it has, and those that are left of it.
        self.start = self.position
        self.counts: list[int] = []
        self.window: deque[Found] = deque()
        # Of the window in which reading resumes, until it is read.
        self.resumes_at = self.cursor[2]
        self.expected = list(self.cursor[3:])

    @override
    def __next__(self) -> Row:
        if self.reading.shuffle_window:
            found = self._next_of_window()
        else:
            found = next(self.found, None)
            self.cursor = (*self.position, 0)
        if found is None:
            assert self.position[0] >= len(self.parts), "an error has ended this reader"
            raise StopIteration
        part_index, offset, raw = found
        part = self.parts[part_index]
        row_id = (part.file, offset)
        try:
            if not isinstance(raw, Damage):
                return Row(self.decode(part, offset, raw), row_id)
        except ValueError as error:
            raise BadRecord(str(error), row_id=row_id, locate=self.locate) from None
        raise BadRecord(str(raw), row_id=row_id, locate=self.locate) from raw.__cause__

    @override
    def prepare(self) -> None:
        """Let the next records be read; with a shuffle window, if little of the current one is left."""
        if self.prepare_at is not None and len(self.window) <= self.reading.shuffle_window // 4:
            self.prepare_at(*self.position)

    def _next_of_window(self) -> Found | None:
        """Return the next record of the window, or of the next one; None at the end of the parts."""
        while True:
            if not self.window and not self._read_window():
                return None
            found = self.window.popleft()
            if self.window:
                self.cursor = (*self.start, sum(self.counts) - len(self.window), *self.counts)
            else:  # a resume need not read the window again
                self.cursor = (*self.position, 0)
            if found[2] is not REMOVED:
                return found

    def _read_window(self) -> bool:
        """Read and permute windows until one has records left; return False at the end of the parts.

        Raises:
            ValueError: if it was read before a resume, and had other records then.
            FileNotFoundError: if that is so because a file is gone.
        """
        while not self.window:
            self.start = self.position
            if self.prepare_at is not None:
                self.prepare_at(*self.position)
            records = list(islice(self.found, self.reading.shuffle_window))
            of_parts = Counter(map(itemgetter(0), records))
            self.counts = [of_parts[i] for i in range(self.start[0], max(of_parts, default=-1) + 1)]
            if self.expected and self.expected != self.counts:
                for _, _, raw in records:
                    if isinstance(raw, Damage) and isinstance(raw.__cause__, FileNotFoundError):
                        raise raw.__cause__
                raise ValueError(f"lane {self.reading.lane}: {OTHER_RECORDS}")
            order = permutation(len(records), *self.reading.key, *self.start)
            self.window = deque(records[i] for i in order[self.resumes_at :])
            self.expected, self.resumes_at = [], 0
            if not records:
                self.cursor = (*self.position, 0)
                return False
        return True

    def _find(self, first: int, offset: int) -> Iterator[Found]:
        """Yield the records from an offset of a part on, with `position` behind each."""
        removed = dict(enumerate(self.cursor[3:], first))
        for index in range(first, len(self.parts)):
            part = self.parts[index]
            begin = offset if index == first else part.start
            self.position = (index, begin)
            if part.file == REMOVED_FILE:
                yield from [(index, begin, REMOVED)] * removed.get(index, 0)
            elif part not in self.empty:
                yield from self._records_of(index, begin)
        self.position = (len(self.parts), 0)

    def _records_of(self, index: int, begin: int) -> Iterator[Found]:
        part = self.parts[index]
        while True:
            at = begin
            try:
                for offset, raw, at in self.open_part(index, begin):
                    self.position = (index, at)
                    yield index, offset, raw
                if at == part.start:
                    self.empty.add(part)
                return
            except Exception as error:
                damage = error if isinstance(error, Damage) else self.damage(error, part, at)
                if damage is None:
                    error.add_note(f"while reading {self.place(part, at)}")
                    raise
            # A footer or an index that fails lies at 0, and each part of its file is a bad record of its own.
            offset = max(at, damage.offset)
            following = self.parts[index + 1].start if index + 1 < len(self.parts) else 0
            self.position = (index + 1, following) if damage.resume is None else (index, damage.resume)
            yield index, offset, damage
            if damage.resume is None:
                return
            begin = damage.resume


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
) -> PartsReader:
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
    return PartsReader(parts, reading, open_at, decode, place, locate, damage, empty, prepare)
