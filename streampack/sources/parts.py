"""Parts of files, the records in them, and how parts are dealt out to lanes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

Record = tuple[int, Any, int]
"""(offset, raw data, offset of the next record). An offset counts bytes or rows from the beginning of the file."""

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


def share(
    parts: Sequence[tuple[Part, float]], num_lanes: int, *, rest: float = 0.0
) -> list[tuple[Part, float]]:
    """Return parts that cannot be cut, (part, bytes), each as many times as there are lanes that are to read it.

    If there are fewer parts than lanes, one lane after the other is added to the part that has most bytes for a lane.
    The ``rest`` are bytes of other parts, which can be cut, and fill lanes, too.

    >>> [(part.file, part.turn, size) for part, size in share([(Part(0), 300), (Part(1), 100)], 3)]
    [(0, 0, 150.0), (0, 1, 150.0), (1, 0, 100.0)]
    """
    sizes = [rest, *(size for _, size in parts)]
    lanes = [1] * len(sizes)
    for _ in range(num_lanes - len(parts)):
        lanes[max(range(len(sizes)), key=lambda i: sizes[i] / lanes[i])] += 1
    return [
        (part._replace(turn=turn, turns=count), size / count)
        for (part, size), count in zip(parts, lanes[1:], strict=True)
        for turn in range(count)
    ]


def deal(parts: Iterable[tuple[Part, float]], num_lanes: int) -> list[list[Part]]:
    """Give each of ``parts``, (part, bytes), to the lane with the fewest bytes so far; of several, to the first."""
    lanes: list[list[Part]] = [[] for _ in range(num_lanes)]
    load = [(0.0, lane) for lane in range(num_lanes)]  # a heap of (bytes so far, lane)
    for part, size in parts:
        least, lane = load[0]
        lanes[lane].append(part)
        heapq.heapreplace(load, (least + size, lane))
    return lanes


def in_turns(open_part: OpenPart) -> OpenPart:
    """Return an ``open_part`` that leaves out the records of a shared part that are other lanes' turns."""
    return lambda part, offset: (
        open_part(part, offset) if part.turns == 1 else _own_records(part, offset, open_part)
    )


def _own_records(part: Part, offset: int, open_part: OpenPart) -> Iterator[Record]:
    """Yield a lane's records of a shared part from ``offset`` on. All are counted, from the part's beginning.

    A damaged stretch counts as one record, and is yielded as one: it is the turn of a single lane.
    """
    number, at = 0, part.start
    while True:
        try:
            for record in open_part(part, at):
                if number % part.turns == part.turn and record[0] >= offset:
                    yield record
                number += 1
            return
        except Damage as error:
            damage = error
        if number % part.turns == part.turn and damage.offset >= offset:
            yield damage.offset, damage, damage.offset + 1 if damage.resume is None else damage.resume
        if damage.resume is None:
            return
        number, at = number + 1, damage.resume


def sharing(lanes: Sequence[Sequence[Part]], *, what: str) -> list[str]:
    """Return a sentence about parts that are shared, if there are any.

    >>> parts = [Part(0), *(Part(1, turn=turn, turns=4) for turn in range(4))]
    >>> sharing([parts], what="compressed file")
    ['1 compressed file is shared by 4 lanes: each is read by 4 of them, which take turns with its rows']
    """
    several = [part.turns for parts in lanes for part in parts if part.turns > 1 and not part.turn]
    if not several:
        return []
    are = f"{what} is" if len(several) == 1 else f"{what}s are"
    each = " to ".join(map(str, sorted({min(several), max(several)})))
    return [
        f"{len(several)} {are} shared by {sum(several)} lanes: each is read by {each} of them, which take turns with "
        "its rows"
    ]
