"""Parts that several lanes share by taking turns, and how parts are dealt out to lanes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from streampack.sources.parts import Damage, OpenPart, Part, Record


def share(
    parts: Sequence[tuple[Part, float]], num_lanes: int, *, rest: float = 0.0
) -> list[tuple[Part, float]]:
    """Return parts that cannot be cut, each as many times as there are lanes that are to read it.

    If there are fewer parts than lanes, one lane after the other is added to the part that has most bytes for a lane.

    >>> share([(Part(0), 300), (Part(1), 100)], 3)
    [(Part(file=0, start=0, stop=None, turn=0, turns=2), 150.0), \
(Part(file=0, start=0, stop=None, turn=1, turns=2), 150.0), (Part(file=1, start=0, stop=None, turn=0, turns=1), 100.0)]

    Args:
        parts: (part, bytes).
        num_lanes: how many lanes.
        rest: bytes of other parts, which can be cut, and fill lanes, too.
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
        damage: Damage | None = None
        try:
            for record in open_part(part, at):
                if number % part.turns == part.turn and record[0] >= offset:
                    yield record
                number += 1
        except Damage as error:
            damage = error
        if damage is None:
            return
        end = damage.offset + 1 if damage.resume is None else damage.resume
        if number % part.turns == part.turn and damage.offset >= offset:
            yield damage.offset, damage, end
        if damage.resume is None:
            return
        number, at = number + 1, damage.resume


def sharing(turns: Iterable[int], *, what: str) -> list[str]:
    """Describe parts that are shared, given how many lanes read each; return nothing if none is shared.

    >>> sharing([1, 4, 4], what="compressed file")
    ['2 compressed files are shared by 8 lanes: each is read by 4 of them, which take turns with its rows']
    """
    several = [count for count in turns if count > 1]
    if not several:
        return []
    few, most = min(several), max(several)
    are = f"{what} is" if len(several) == 1 else f"{what}s are"
    each = f"{few}" if few == most else f"{few} to {most}"
    return [
        f"{len(several)} {are} shared by {sum(several)} lanes: each is read by {each} of them, which take turns with "
        "its rows"
    ]
