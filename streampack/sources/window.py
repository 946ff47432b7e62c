"""The readers of any sequential source: in its order, or shuffled within windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from streampack.sources.base import BadRecord, Reading, permutation
from streampack.types import Origin, Position, Row

Record = tuple[int, Any, int]  # (offset in its file, raw data, offset of what comes next)
_Found = tuple["Part", int, Any]  # a record's part, its offset, and the raw data, or the damage in its place


class Part(NamedTuple):
    """A stretch of a file: the records whose first unit lies in ``[start, stop)``; ``None`` is the end."""

    file: int
    start: int = 0
    stop: int | None = None


class Damage(ValueError):
    """A stretch of a part that cannot be read, however often one tries."""

    def __init__(self, reason: str, *, offset: int, resume: int | None) -> None:
        super().__init__(reason)
        self.offset = offset  # where it begins
        self.resume = resume  # where reading can go on; None: not in this part


class InOrder:
    """Reads parts one after the other. A position is ``(part, offset, 0)``: offset ``offset`` of the ``part``-th part.

    A stretch that is damaged is one record, and raised when its turn comes.

    Args:
        parts: of the lane.
        reading: where to begin.
        open_part: ``(part, offset, following)`` gives the records of a part from ``offset`` on; ``following`` is the
            part that comes then, for whoever reads ahead.
        decode: ``(part, offset, raw)`` makes a row's data, or raises ValueError.
        place: ``(part, offset)`` in words, for errors of the storage.
        locate: see `Source.locate`.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        reading: Reading,
        *,
        open_part: Callable[[Part, int, Part | None], Iterator[Record]],
        decode: Callable[[Part, int, Any], Mapping[str, Any]],
        place: Callable[[Part, int], str] = "{}, offset {}".format,
        locate: Callable[[Origin], str] = "{}".format,
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
        self.begin: Position = (self.part, self.offset, 0)  # where the search for the next row begins
        self.found: _Found | None = None  # that row's record, until it is yielded

    @property
    def position(self) -> Position:
        """The position of the row that comes next."""
        return self.begin

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        if (found := self.found) is None:
            if (found := self._find()) is None:
                self.skip()
                raise StopIteration
            self.found = found
        part, offset, raw = found
        position, origin = self.begin, (part.file, offset)
        try:
            if isinstance(raw, Damage):
                raise ValueError(str(raw))
            data = self.decode(part, offset, raw)
        except ValueError as error:
            raise BadRecord(str(error), position=position, origin=origin, locate=self.locate) from None
        self.found, self.begin = None, (self.part, self.offset, 0)
        return Row(data, position, origin)

    def skip(self) -> None:
        """See `Reader.skip`."""
        self.found, self.begin = None, (self.part, self.offset, 0)

    def _find(self) -> _Found | None:
        """The next record of the parts, and where it is found; None at their end."""
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
                # Half a line may be lost in its buffer, and a generator that raised is finished: asked again,
                # either would shorten the corpus in silence. Open it anew, at the record that failed.
                self.records = None
                error.add_note(f"while reading {self.place(part, self.offset)}")
                raise
            self._go_to(self.part + 1)
        return None

    def _go_to(self, part: int) -> None:
        self.part, self.records = part, None
        self.offset = self.parts[part].start if part < len(self.parts) else 0


class WindowReader(InOrder):
    """Within windows of ``shuffle_window`` records, in a permuted order; so the parts.

    Both permutations, of the parts and within each window, are functions of (seed, epoch, lane, window),
    so a position ``(part, offset, index)`` says all: the window starts at ``offset`` of the ``part``-th
    part of the permuted order, and ``index`` of its records have been read. Starting there reads at most
    one window again. Records are held raw and decoded one at a time.
    """

    def __init__(self, parts: Sequence[Part], reading: Reading, **how: Any) -> None:
        order = permutation(len(parts), *reading.key)
        super().__init__([parts[i] for i in order], reading, **how)
        self.filling: list[_Found] | None = None  # the next window, until it is complete
        self.window: list[_Found] = []  # records in the order of yielding
        self.window_start = (self.part, self.offset)
        self.index = 0  # records of the window that were found
        if reading.start is not None and reading.start[-1]:
            self._fill()
            self.index = reading.start[-1]
            self._stay()

    def __next__(self) -> Row:
        row = super().__next__()
        self._stay()
        return row

    def skip(self) -> None:
        """See `Reader.skip`."""
        super().skip()
        self._stay()

    def _stay(self) -> None:
        """In the window, as long as it has records."""
        if self.index < len(self.window):
            self.begin = (*self.window_start, self.index)

    def _find(self) -> _Found | None:
        if self.index >= len(self.window):
            self._fill()
            if not self.window:
                return None
        self.index += 1
        return self.window[self.index - 1]

    def _fill(self) -> None:
        if (filling := self.filling) is None:
            filling = self.filling = []
            self.window_start, self.window = (self.part, self.offset), []
        while len(filling) < self.reading.shuffle_window and (found := super()._find()):
            filling.append(found)
        order = permutation(len(filling), *self.reading.key, *self.window_start)
        self.window, self.filling, self.index = [filling[i] for i in order], None, 0


def read_parts(parts: Sequence[Part], reading: Reading, **how: Any) -> InOrder:
    """The reader for what ``reading`` asks; see `InOrder` for the arguments."""
    return (WindowReader if reading.shuffle_window else InOrder)(parts, reading, **how)
