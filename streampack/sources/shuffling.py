"""Readers of parts of files: in their order, or shuffled within windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from streampack.sources.base import BadRecord, Reader, Reading, permutation
from streampack.types import Cursor, Row, RowId

Record = tuple[int, Any, int]  # (offset in its file, raw data, offset of the next record)
_Found = tuple["Part", int, Any]  # (part, offset of the record, raw data or Damage)


class Part(NamedTuple):
    """A slice of a file: the records whose first unit (byte or row) lies in ``[start, stop)``; ``None`` is the end."""

    file: int
    start: int = 0
    stop: int | None = None


class Damage(ValueError):
    """A stretch of a part that can never be read. It counts as one bad record."""

    def __init__(self, reason: str, *, offset: int, resume: int | None) -> None:
        super().__init__(reason)
        self.offset = offset  # where it begins
        self.resume = resume  # where reading can go on; None: not in this part


class InOrder(Reader):
    """Reads parts one after the other. A cursor is ``(part, offset, 0)``: offset ``offset`` of the ``part``-th part.

    For the arguments see `read_parts`.
    """

    cursor: Cursor = ()

    def __init__(
        self,
        parts: Sequence[Part],
        reading: Reading,
        open_part: Callable[[Part, int, Part | None], Iterator[Record]],
        decode: Callable[[Part, int, Any], Mapping[str, Any]],
        place: Callable[[Part, int], str],
        locate: Callable[[RowId], str],
    ) -> None:
        self.parts = parts
        self.reading = reading
        self.open_part = open_part
        self.decode = decode
        self.place = place
        self.locate = locate
        self.part = 0  # the part being read, an index into self.parts
        self.records: Iterator[Record] | None = None  # opened at the first read, in the process that reads
        self.offset = parts[0].start if parts else 0  # of the next record in that part
        if reading.start is not None:
            self.part, self.offset, _ = reading.start
        self.cursor = (self.part, self.offset, 0)  # of the next row
        self.found: _Found | None = None  # the next row's record, until it is yielded

    def __next__(self) -> Row:
        if (found := self.found) is None:
            if (found := self.find()) is None:
                self.skip()
                raise StopIteration
            self.found = found
        part, offset, raw = found
        cursor, row_id = self.cursor, (part.file, offset)
        try:
            if isinstance(raw, Damage):
                raise ValueError(str(raw))
            data = self.decode(part, offset, raw)
        except ValueError as error:
            raise BadRecord(str(error), cursor=cursor, row_id=row_id, locate=self.locate) from None
        self.found, self.cursor = None, (self.part, self.offset, 0)
        return Row(data, cursor, row_id)

    def skip(self) -> None:
        """See `Reader.skip`."""
        self.found, self.cursor = None, (self.part, self.offset, 0)

    def find(self) -> _Found | None:
        """Return the next record; None at the end of the parts."""
        while self.part < len(self.parts):
            part = self.parts[self.part]
            try:
                if self.records is None:
                    following = self.parts[self.part + 1] if self.part + 1 < len(self.parts) else None
                    self.records = self.open_part(part, self.offset, following)
                if record := next(self.records, None):
                    offset, raw, self.offset = record
                    return part, offset, raw
            except Damage as damage:
                if damage.resume is None:
                    self._go_to(self.part + 1)
                else:
                    self.records, self.offset = None, damage.resume
                return part, damage.offset, damage
            except Exception as error:
                # Half a line may be lost in a buffer, and a generator that raised is finished: asked again, either
                # would shorten the corpus silently. Open the part anew, at the record that failed.
                self.records = None
                error.add_note(f"while reading {self.place(part, self.offset)}")
                raise
            self._go_to(self.part + 1)
        return None

    def _go_to(self, part: int) -> None:
        self.part, self.records = part, None
        self.offset = self.parts[part].start if part < len(self.parts) else 0


class WindowReader(Reader):
    """Reads the records of ``ordered`` in a permuted order within windows of ``shuffle_window`` records.

    The permutations, of the parts and within each window, are functions of (seed, epoch, lane, window). So a cursor
    ``(part, offset, index)`` is complete: the window starts at ``offset`` of the ``part``-th part of the permuted
    order, and ``index`` of its records have been read. A resume reads at most one window again. Records are held raw
    and decoded one at a time.
    """

    def __init__(self, ordered: InOrder) -> None:
        self.ordered = ordered  # finds the records, and decodes each when its turn comes
        self.reading = ordered.reading
        self.filling: list[_Found] | None = None  # the next window, until it is complete
        self.window: list[_Found] = []  # records in the order of yielding
        self.window_start = (ordered.part, ordered.offset)
        self.index = 0  # records of the window that were yielded
        if self.reading.start is not None and self.reading.start[-1]:
            self._fill()
            self._go_to(self.reading.start[-1])

    @property
    def cursor(self) -> Cursor:
        """See `Reader.cursor`."""
        return self.ordered.cursor

    def __next__(self) -> Row:
        if self.index >= len(self.window):
            self._fill()
        if self.window:
            self.ordered.found = self.window[self.index]
        row = next(self.ordered)
        self._go_to(self.index + 1)
        return row

    def skip(self) -> None:
        """See `Reader.skip`."""
        self.ordered.skip()
        self._go_to(self.index + 1)

    def _go_to(self, index: int) -> None:
        self.index = index
        if index < len(self.window):
            self.ordered.cursor = (*self.window_start, index)

    def _fill(self) -> None:
        ordered = self.ordered
        if (filling := self.filling) is None:
            filling = self.filling = []
            self.window_start, self.window = (ordered.part, ordered.offset), []
        while len(filling) < self.reading.shuffle_window and (found := ordered.find()):
            filling.append(found)
        order = permutation(len(filling), *self.reading.key, *self.window_start)
        self.window, self.filling, self.index = [filling[i] for i in order], None, 0


def read_parts(
    parts: Sequence[Part],
    reading: Reading,
    *,
    open_part: Callable[[Part, int, Part | None], Iterator[Record]],
    locate: Callable[[RowId], str],
    decode: Callable[[Part, int, Any], Mapping[str, Any]] = lambda part, offset, raw: raw,
    place: Callable[[Part, int], str] | None = None,
) -> InOrder | WindowReader:
    """Open a reader of a lane's parts, in the order that ``reading`` asks for.

    Args:
        parts: of the lane.
        reading: the order, and where to begin.
        open_part: ``(part, offset, following)`` returns the records of a part from ``offset`` on; ``following`` is
            the part after it, for reading ahead.
        locate: see `Source.locate`.
        decode: ``(part, offset, raw)`` makes a row's data, or raises ValueError; by default ``raw`` is that.
        place: ``(part, offset)`` as text, for errors of the storage; by default what ``locate`` returns.
    """
    if reading.shuffle_window:
        parts = [parts[i] for i in permutation(len(parts), *reading.key)]
    if place is None:
        place = lambda part, offset: locate((part.file, offset))  # noqa: E731
    ordered = InOrder(parts, reading, open_part, decode, place, locate)
    return WindowReader(ordered) if reading.shuffle_window else ordered
