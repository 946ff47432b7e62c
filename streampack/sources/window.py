"""The reader that shuffles any sequential source within windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from streampack.sources.base import BadRecord, Reading, permutation
from streampack.types import Origin, Position, Row

Record = tuple[int, Any]  # (offset in its file, raw data)


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


class PartReader(Protocol):
    """The raw records of one part, in order."""

    offset: int  # of the record that comes next

    def __next__(self) -> Record: ...


class WindowReader:
    """Reads parts one after the other; within windows of ``shuffle_window`` records, in a permuted order.

    Both permutations, of the parts and within each window, are functions of (seed, epoch, lane, window),
    so a position ``(part, offset, index)`` says all: the window starts at ``offset`` of the ``part``-th
    part of the permuted order, and ``index`` of its records have been read. Starting there reads at most
    one window again. Records are held raw and decoded one at a time. A stretch that is damaged is one record of
    its window, and raised when its turn comes.

    Args:
        parts: of the lane.
        reading: the order, and where to begin.
        open_part: ``(part, offset, following)`` reads a part from ``offset`` on; ``following`` is the part that
            comes then, for whoever reads ahead.
        decode: ``(part, offset, raw)`` makes a row's data, or raises ValueError.
        place: ``(part, offset)`` in words, for errors of the storage.
        locate: see `Source.locate`.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        reading: Reading,
        *,
        open_part: Callable[[Part, int, Part | None], PartReader],
        decode: Callable[[Part, int, Any], Mapping[str, Any]],
        place: Callable[[Part, int], str] = "{}, offset {}".format,
        locate: Callable[[Origin], str] = "{}".format,
    ) -> None:
        order = permutation(len(parts), *reading.key) if reading.shuffle_window else range(len(parts))
        self.parts = [parts[i] for i in order]
        self.reading = reading
        self.size = max(1, reading.shuffle_window)
        self.open_part = open_part
        self.decode = decode
        self.place = place
        self.locate = locate
        self.part = 0  # the part being read, an index into self.parts
        self.reader: PartReader | None = None  # opened at the first read, in the process that reads
        self.offset = self.parts[0].start if self.parts else 0  # of the next record in that part
        self.filling: list[tuple[Part, int, Any]] | None = None  # the next window, until it is complete
        self.window: list[tuple[Part, int, Any]] = []  # records in the order of yielding
        self.index = 0  # records of the window that were yielded
        if reading.start is not None:
            self.part, self.offset, self.index = reading.start
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
            self.index = 0
            self._fill()
            if not self.window:
                raise StopIteration
        index = self.index
        part, offset, raw = self.window[index]
        first, start = self.window_start
        position, origin = (first, start, index), (part.file, offset)
        try:
            if isinstance(raw, Damage):
                raise ValueError(str(raw))
            data = self.decode(part, offset, raw)
        except ValueError as error:
            raise BadRecord(str(error), position=position, origin=origin, locate=self.locate) from None
        self.index = index + 1
        return Row(data, position, origin)

    def skip(self) -> None:
        """See `Reader.skip`."""
        self.index += 1

    def _fill(self) -> None:
        if (filling := self.filling) is None:
            filling = self.filling = []
            self.window_start, self.window = (self.part, self.offset), []
        while self.part < len(self.parts) and len(filling) < self.size:
            part = self.parts[self.part]
            try:
                if self.reader is None:
                    following = self.parts[self.part + 1] if self.part + 1 < len(self.parts) else None
                    self.reader = self.open_part(part, self.offset, following)
                if (record := next(self.reader, None)) is not None:
                    self.offset = self.reader.offset
            except Damage as damage:
                filling.append((part, damage.offset, damage))
                self.reader = record = None
                if damage.resume is not None:
                    self.offset = damage.resume
                    continue
            except Exception as error:
                # Half a line may be lost in its buffer, and a generator that raised is finished: asked again,
                # either would shorten the corpus in silence. Open it anew, at the record that failed.
                self.reader = None
                error.add_note(f"while reading {self.place(part, self.offset)}")
                raise
            if record is not None:
                filling.append((part, *record))
            else:
                self.part += 1
                self.offset = self.parts[self.part].start if self.part < len(self.parts) else 0
                self.reader = None
        self.window, self.filling = filling, None
        if self.reading.shuffle_window:
            order = permutation(len(self.window), *self.reading.key, *self.window_start)
            self.window = [self.window[i] for i in order]
