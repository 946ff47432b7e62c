"""Parts of files, the records in them, and how parts are assigned to lanes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

Record = tuple[int, Any, int]
"""(offset, raw data or a `Damage`, offset of the next record). An offset counts bytes or rows from the beginning of the
file."""

REMOVED_FILE = -1
"""The file of a part whose file is no longer in the corpus."""


class Part(NamedTuple):
    """A slice of a file: the records whose first unit (byte or row) is in ``[start, stop)``.

    ``file`` is the number of the file in its corpus, or `REMOVED_FILE`. ``stop`` is None for a part that ends with its
    file.

    Several lanes may read a part that cannot be cut. Each of them reads the complete part, and keeps the records whose
    number in it, modulo ``stride``, is ``phase``.
    """

    file: int
    start: int = 0
    stop: int | None = None
    phase: int = 0
    stride: int = 1


OpenPart = Callable[[Part, int], Iterator[Record]]
"""``(part, offset)`` returns the records of a part from an offset of its file on, those of all lanes."""


class Damage(ValueError):
    """A stretch of a part that can never be read. It counts as one bad record.

    A format yields it as a record's data, or raises it; the reader makes a record of it then.

    Args:
        reason: why it cannot be read.
        offset: the byte or row number in the file where the stretch begins.
        resume: the byte or row number after the stretch, where reading continues; None if the rest of the part is lost.
    """

    def __init__(self, reason: str, *, offset: int, resume: int | None = None) -> None:
        super().__init__(reason)
        self.offset = offset
        self.resume = resume


DamageOf = Callable[[Exception, Part, int], Damage | None]
"""``(error, part, offset)`` returns what an error of the storage means for the rest of a part; None if it may pass."""


def strided(open_part: OpenPart) -> OpenPart:
    """Return an ``open_part`` that skips other lanes' records of a part that several lanes read."""
    return lambda part, offset: (
        open_part(part, offset) if part.stride == 1 else _own_records(part, offset, open_part)
    )


def _own_records(part: Part, offset: int, open_part: OpenPart) -> Iterator[Record]:
    """Yield a lane's records from ``offset`` on. All are counted, from the part's beginning; damage is one record."""
    number, at = 0, part.start
    while True:
        try:
            for record in open_part(part, at):
                if number % part.stride == part.phase and record[0] >= offset:
                    yield record
                number += 1
            return
        except Damage as error:
            damage = error
        if number % part.stride == part.phase and damage.offset >= offset:
            yield damage.offset, damage, damage.offset + 1 if damage.resume is None else damage.resume
        if damage.resume is None:
            return
        number, at = number + 1, damage.resume


def for_lanes(
    parts: Sequence[tuple[Part, float]], num_lanes: int, *, rest: float = 0.0
) -> list[tuple[Part, float]]:
    """Return parts that cannot be cut, (part, bytes), each once for every lane that is to read it.

    If there are fewer parts than lanes, one lane after the other is added to the part that has most bytes for a lane.
    The ``rest`` are bytes of other parts, which can be cut, and fill lanes, too.

    >>> [(part.file, part.phase, size) for part, size in for_lanes([(Part(0), 300), (Part(1), 100)], 3)]
    [(0, 0, 150.0), (0, 1, 150.0), (1, 0, 100.0)]
    """
    sizes = [rest, *(size for _, size in parts)]
    lanes = [1] * len(sizes)
    for _ in range(num_lanes - len(parts)):
        lanes[max(range(len(sizes)), key=lambda i: sizes[i] / lanes[i])] += 1
    return [
        (part._replace(phase=phase, stride=count), size / count)
        for (part, size), count in zip(parts, lanes[1:], strict=True)
        for phase in range(count)
    ]


def assign(parts: Iterable[tuple[Part, float]], num_lanes: int) -> list[list[Part]]:
    """Give each of ``parts``, (part, bytes), to the lane with the fewest bytes so far; of several, to the first."""
    lanes: list[list[Part]] = [[] for _ in range(num_lanes)]
    load = [(0.0, lane) for lane in range(num_lanes)]  # a heap of (bytes so far, lane)
    for part, size in parts:
        least, lane = load[0]
        lanes[lane].append(part)
        heapq.heapreplace(load, (least + size, lane))
    return lanes


def shared_parts(lanes: Sequence[Sequence[Part]], *, what: str) -> list[str]:
    """Return a sentence about parts that several lanes read, if there are any.

    >>> parts = [Part(0), *(Part(1, phase=phase, stride=4) for phase in range(4))]
    >>> shared_parts([parts], what="compressed file")
    ['1 compressed file is shared by 4 lanes: each is read by 4 of them, which take turns with its rows']
    """
    several = [part.stride for parts in lanes for part in parts if part.stride > 1 and not part.phase]
    if not several:
        return []
    are = f"{what} is" if len(several) == 1 else f"{what}s are"
    each = " to ".join(map(str, sorted({min(several), max(several)})))
    return [
        f"{len(several)} {are} shared by {sum(several)} lanes: each is read by {each} of them, which take turns with "
        "its rows"
    ]
