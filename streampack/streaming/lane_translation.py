"""The state of a lane of a mixture, translated to a mixture with other sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streampack.accounting import SourceStats
from streampack.sources.mixture_scheduler import FRONT, SourceState
from streampack.streaming.lane_state import DAMAGED, LaneState
from streampack.streaming.row_log import RowLog


def translated(state: LaneState, before: Sequence[str], now: Sequence[str]) -> LaneState:
    """Return a lane's state for the sources ``now``, given by name, of one for the sources ``before``.

    A source that is new begins with a deficit of 0. The deficit of one that is gone is divided among the others, so
    that deficits still add up to 0. Rows that were read of it keep their numbers, and are dropped.

    Raises:
        ValueError: if the state is not one of these sources.
    """
    size = len(before)
    if len(state.front) != FRONT * size or len(state.source_stats) != size:
        raise ValueError(f"the state of a lane is not that of {size} sources" + DAMAGED)
    fronts = [state.front[FRONT * i : FRONT * (i + 1)] for i in range(size)]
    cursor = iter(state.cursor)
    try:
        sources = [SourceState.at(cursor) for _ in before]
    except StopIteration:
        raise ValueError(f"the cursor of a lane is not that of {size} sources" + DAMAGED) from None
    for source, numbers_of_front in zip(sources, fronts, strict=True):
        source.restore_front(*numbers_of_front)
    lost = sum(source.deficit for source, name in zip(sources, before, strict=True) if name not in now)
    kept = [name for name in before if name in now]
    for i, name in enumerate(kept):
        sources[before.index(name)].deficit += lost // len(kept) + (i < lost % len(kept))
    at = {name: i for i, name in enumerate(before)}
    to = {i: now.index(name) for i, name in enumerate(before) if name in now}
    places: list[int] = []
    front: list[int] = []
    stats: list[SourceStats] = []
    for name in now:
        old = at.get(name)
        source = SourceState() if old is None else sources[old]
        restarts = 0 if old is None else fronts[old][1]
        places += source.place()
        front += [*source.front()[:1], restarts, *source.front()[2:]]
        stats.append(SourceStats() if old is None else state.source_stats[old])
    return replace(
        state,
        cursor=tuple(places),
        front=tuple(front),
        source_stats=tuple(stats),
        bad_in_pass=(),
        rows=_rows(state, size, to, len(now)),
        windows=tuple(
            (to[source], number, numbers) for source, number, numbers in state.windows if source in to
        ),
    )


def _rows(state: LaneState, sources: int, to: dict[int, int], size: int) -> int:
    """Return the digits of the rows for ``size`` sources; source i is now source ``to[i]``, or gone."""
    count = state.next_piece - state.first
    log = RowLog(
        sources=sources, first=state.first, count=count, digits=state.rows, epochs=[(state.first, 0)]
    )
    translated_log = RowLog(sources=size, first=state.first)
    for row in log.rows():
        source = None if row.source is None else to.get(row.source)
        for i in range(row.pieces):
            translated_log.add(source, None, epoch=0, another=i > 0)
    return translated_log.digits
