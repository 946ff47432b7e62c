"""Parts of files and the records in them, and the reader that takes them one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from streampack.sources.reading import BadRecord, Reader, Reading
from streampack.types import Cursor, Row, RowId

Record = tuple[int, Any, int]
"""(offset, raw data, offset of the next record). An offset counts bytes or rows from the beginning of the file."""

FoundRecord = tuple[int, int, Any]
"""(index of the part, offset of the record in the part's file, raw data, or a `Damage`, or `REMOVED`)."""

REMOVED: Any = object()
"""Stands for the raw data of a record whose file was removed since it was read first."""

REMOVED_FILE = -1
"""The file of a part whose file is no longer in the corpus."""


class Part(NamedTuple):
    """A slice of a file: the records whose first unit (byte or row) lies in ``[start, stop)``.

    ``file`` is the number of the file in its corpus, or `REMOVED_FILE`. ``stop`` is None for a part that ends with its
    file.

    A part that cannot be cut may be shared by several lanes. Each of these ``turns`` lanes reads the whole part, and
    keeps the records whose number in it, modulo ``turns``, is its ``turn``.
    """

    file: int
    start: int = 0
    stop: int | None = None
    turn: int = 0
    turns: int = 1


OpenPart = Callable[[Part, int], Iterator[Record]]
"""``(part, offset)`` returns the records of a part from an offset of its file on, whoever's turn they are."""


class Damage(ValueError):
    """A stretch of a part that can never be read, or all of it. It counts as one bad record.

    Args:
        reason: why it cannot be read.
        offset: the byte or row number in the file where the stretch begins.
        resume: the byte or row number behind the stretch, where reading can go on; None if the rest of the part is
            lost.
    """

    def __init__(self, reason: str, *, offset: int, resume: int | None = None) -> None:
        super().__init__(reason)
        self.offset = offset
        self.resume = resume


DamageOf = Callable[[Exception, Part, int], Damage | None]
"""``(error, part, offset)`` returns what an error of the storage means for the rest of a part; None if it may pass."""


class InOrder(Reader):
    """Reads the records of a lane's parts, one part after the other, and decodes them to rows.

    A cursor is ``(part_index, offset, 0)``: an index into ``parts``, which are in the order of reading already, and the
    byte or row number in that part's file where the next record begins or is searched for. (The third number is only
    used by `WindowReader`.)

    Two places are kept, because a record is found before it is decoded, and decoding may fail::

        parts[part_index]:   ... | record that was found | next record ...
                                 ^ cursor                ^ position

    `find` moves `position` behind the record. The cursor follows when the row is returned or skipped, so after an
    error ``next()`` decodes the same record again. If no record is found, the cursor may still stand at the end of a
    part, while the position is at the beginning of a later one.

    A part whose file was removed is left out.

    A `WindowReader` uses `find`, `row_of`, `position` and `removed`, and keeps a cursor itself. `read_parts` in
    sources/shuffling.py makes both, and describes the arguments.
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
        self.part_index = 0
        self.offset = parts[0].start if parts else 0
        if reading.start is not None:
            self.part_index, self.offset = reading.start[:2]
        # The iterator over the current part's records. It is made at the first read, not here, because the reader may
        # be made in one process and used in another.
        self.records: Iterator[Record] | None = None
        self.found: FoundRecord | None = None
        self.cursor = (*self.position, 0)
        self.removed: dict[int, int] = {}  # how many records of removed parts `find` still has to return

    @property
    def position(self) -> tuple[int, int]:
        """Where `find` goes on: the index of a part, and a byte or row number in its file."""
        return self.part_index, self.offset

    def __next__(self) -> Row:
        if (found := self.found) is None and (found := self.find()) is None:
            self.cursor = (*self.position, 0)  # behind the last part
            raise StopIteration
        self.found = found  # until the row is returned: decoding may fail
        row = self.row_of(found)
        # This is `skip`, written out: as a call, it would make reading of JSON lines 4 % slower.
        self.found, self.cursor = None, (self.part_index, self.offset, 0)
        return row

    def skip(self) -> None:
        """Go on behind the record that was found; see `Reader.skip`."""
        self.found, self.cursor = None, (*self.position, 0)

    def prepare(self) -> None:
        """See `Reader.prepare`."""
        if self.prepare_at is not None:
            self.prepare_at(*self.position)

    def row_of(self, found: FoundRecord) -> Row:
        """Decode a record that `find` returned.

        Raises:
            BadRecord: if the record is damaged or cannot be decoded.
        """
        part_index, offset, raw = found
        part = self.parts[part_index]
        row_id = (part.file, offset)
        try:
            if not isinstance(raw, Damage):
                return Row(self.decode(part, offset, raw), row_id)
        except ValueError as error:
            raise BadRecord(str(error), row_id=row_id, locate=self.locate) from None
        raise BadRecord(str(raw), row_id=row_id, locate=self.locate) from raw.__cause__

    def find(self) -> FoundRecord | None:
        """Return the next record and move `position` behind it; return None at the end of the parts."""
        while self.part_index < len(self.parts):
            part = self.parts[self.part_index]
            if part.file == REMOVED_FILE:
                if left := self.removed.get(self.part_index, 0):
                    self.removed[self.part_index] = left - 1
                    return self.part_index, self.offset, REMOVED
                self._go_to_part(self.part_index + 1)
                continue
            try:
                if self.records is None:
                    if part in self.empty:
                        self._go_to_part(self.part_index + 1)
                        continue
                    self.records = self.open_part(*self.position)
                if record := next(self.records, None):
                    offset, raw, self.offset = record
                    return self.part_index, offset, raw
                if self.offset == part.start:
                    self.empty.add(part)
            except Exception as error:
                # The iterator cannot be used again: half a line may be lost in its buffer, and a generator that raised
                # is finished, so it would end the part early. The next call opens the part anew, at the record that
                # failed.
                self.records = None
                damage = error if isinstance(error, Damage) else self.damage(error, part, self.offset)
                if damage is None:
                    error.add_note(f"while reading {self.place(part, self.offset)}")
                    raise
                # A footer or an index that fails lies at 0, and each part of its file is a bad record of its own.
                part_index, offset = self.part_index, max(self.offset, damage.offset)
                if damage.resume is None:
                    self._go_to_part(part_index + 1)
                else:
                    self.offset = damage.resume
                return part_index, offset, damage
            self._go_to_part(self.part_index + 1)
        return None

    def _go_to_part(self, part_index: int) -> None:
        self.part_index, self.records = part_index, None
        self.offset = self.parts[part_index].start if part_index < len(self.parts) else 0
