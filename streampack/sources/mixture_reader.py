"""`MixtureReader`: draws each row of a mixture from the source that is furthest behind its weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any
from zlib import crc32

import numpy as np
from typing_extensions import override

from streampack.accounting import trained_tokens
from streampack.sources.reading import BadRecord, Reader, Reading
from streampack.sources.source import Source
from streampack.types import Cursor, Row, RowId, Sample

STOPS = ("first_exhausted", "all_exhausted", "never")
MOST_RESTARTS = 1 << 20  # of a source in an epoch of the mixture
GOLDEN = 0x9E3779B97F4A7C15
"""The golden ratio less 1, times 2^64. Its multiples, modulo 2^64, are spread evenly however many are taken."""
UNTRAINED_ROWS = 1000
"""A source is refused if a pass over it ends with this number of rows of a lane that trained no token."""


@dataclass(frozen=True)
class Entry:
    """One source of a mixture.

    Attributes:
        name: such as ``"code"``.
        source: yields the rows.
        weight: target fraction of the trained tokens, up to a factor that all sources have in common.
        encoder: for the rows of this source; None if they are encoded with the run's encoder.
    """

    name: str
    source: Source
    weight: float
    encoder: Callable[[Mapping[str, Any]], Sample] | None = None


@dataclass(slots=True)
class SourceState:
    """The state of one source of a mixture in one lane's epoch.

    Attributes:
        deficit: trained tokens that the source lacks to its target fraction, times the sum of the weights.
        restarts: how often the source was restarted in this epoch: the number of the pass over it.
        untrained: how many rows were read since the newest one with a trained token.
        begun: how many passes were begun since the newest row; above 1 if the lane had no rows in some.
        cursor: the source's own cursor of its next row; empty if a pass was begun and no row was read yet.
        reader: reads the source; None until its first row is needed.
    """

    deficit: int = 0
    restarts: int = 0
    untrained: int = 0
    begun: int = 1
    cursor: Cursor = ()
    reader: Reader | None = None


def states_at(cursor: Cursor, sources: int) -> list[SourceState]:
    """Return the states that a cursor holds; raise ValueError if it is not of this number of sources."""
    numbers, found = iter(cursor), []
    for _ in range(sources):
        deficit, restarts, untrained, begun, size = [*islice(numbers, 5), *[-1] * 5][:5]
        own = tuple(islice(numbers, max(0, size)))
        found.append(SourceState(deficit, restarts, untrained, begun, own))
        if len(own) != size or restarts >= MOST_RESTARTS:
            raise ValueError(f"the cursor of a lane is not that of {sources} sources")
    if next(numbers, None) is not None:
        raise ValueError(f"the cursor of a lane is that of more than {sources} sources")
    return found


def cursor_of(states: Iterable[SourceState]) -> Cursor:
    """Return the cursor that holds the states of sources; inverts `states_at`."""
    found: list[int] = []
    for each in states:
        found += (each.deficit, each.restarts, each.untrained, each.begun, len(each.cursor), *each.cursor)
    return tuple(found)


def remapped(cursor: Cursor, before: Sequence[str], now: Sequence[str]) -> Cursor:
    """Return the cursor for the sources ``now``, given by name, of one for the sources ``before``.

    A source that is new begins with a deficit of 0. The deficits of those that are gone are divided among the others,
    so that deficits still add up to 0.

    >>> remapped((2, 0, 0, 0, 1, 7, -2, 0, 0, 0, 1, 8), ["a", "b"], ["b", "c"])
    (0, 0, 0, 0, 1, 8, 0, 0, 0, 1, 0)
    """
    states = dict(zip(before, states_at(cursor, len(before)), strict=True))
    lost = sum(state.deficit for name, state in states.items() if name not in now)
    kept = [state for name, state in states.items() if name in now]
    for i, state in enumerate(kept):
        state.deficit += lost // len(kept) + (i < lost % len(kept))
    return cursor_of(states.get(name, SourceState()) for name in now)


def passes_by_all(num_lanes: int) -> int:
    """Return a number of passes in a row in which each lane surely reads every lane of a source.

    By the three-distance theorem, n multiples of the golden ratio leave no gap above 1.9 / n.
    """
    return 2 * num_lanes


def pass_number(epoch: int, restarts: int) -> int:
    """Return the number of a pass over a source, which it reads as its epoch: each has an order of its own."""
    return epoch * MOST_RESTARTS + restarts


class MixtureReader(Reader):
    """One lane's rows of a mixture in one epoch, each from the source that lacks most to its weight.

    After each row, the lane calls `charge` with the samples made of it, whose trained tokens are counted. A source's
    deficit is ``its weight * the trained tokens of all sources - the sum of weights * its own trained
    tokens``. Deficits are integers, so the choice is the same on every machine. The next row comes from the source with
    the largest deficit; of several with the same deficit, from the first. (Deficit round robin, Shreedhar and Varghese
    1996, in which sources take fixed turns instead.)

    If all lanes began with deficits of 0, all would choose the same sources at the same time, and train too many tokens
    of long rows first. So each lane draws its first deficits by (seed, epoch, lane): they add up to 0, are at most
    ``stagger`` tokens apart, and a source has the largest one with the probability of its target fraction.

    How far can a source's fraction be off after T trained tokens of a lane's epoch? Let S be the number of sources and
    M the larger of ``stagger`` and the most trained tokens of a row, and let deficits be in tokens (divided by the sum
    of weights). Deficits add up to 0, so the largest is never negative, and a source that is drawn falls to -M at the
    lowest. Hence all stay between -M and (S - 1) M. They began no further than M (S - 1) / S from 0, and
    their change since then is the error in tokens, so the fraction is off by at most S M / T.

    The arguments are those of the `Mix`; a source of weight 0 is not read.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        reading: Reading,
        *,
        locate: Callable[[RowId], str],
        stop: str,
        weights: Sequence[int],
    ) -> None:
        self.entries = entries
        self.reading = reading
        self.locate = locate
        self.stop = stop
        self.weights = weights
        self.place = f"lane {reading.lane} of {reading.num_lanes}"
        # Sources without a row before the epoch ends, because their files were removed.
        self.emptied: set[int] = set()
        start = reading.start
        self.states = self._first_states() if start is None else states_at(start, len(entries))
        self.current = 0  # index of the source that the newest row is from
        self.awaits_charge = False  # whether `charge` must still be called for the newest row

    @property
    def cursor(self) -> Cursor:
        """The cursor of the newest row until `charge` is called for it, then of the next row."""
        return cursor_of(self.states)

    @override
    def __next__(self) -> Row:
        if self.awaits_charge:
            name = self.entries[self.current].name
            raise RuntimeError(
                f"{self.place}: a mixture was read on before the row of source {name!r} was charged; "
                "read it by an IterablePackedDataset, and hold rows out of its sources, not of the whole"
            )
        while True:
            self.current = current = self._largest_deficit()
            reader = self._reader(current)
            self.passes_begun = self.states[current].begun
            try:
                row = next(reader, None)
            except BadRecord as error:
                self._count_row(0)  # as of a row without trained tokens
                row_id = (current, *error.row_id)
                raise BadRecord(error.reason, row_id=row_id, locate=self.locate) from error.__cause__
            if row is not None:
                break
            self._restart(current)
        self.awaits_charge = True
        return row._replace(row_id=(current, *row.row_id))

    @override
    def prepare(self) -> None:
        for number, entry in enumerate(self.entries):
            if not entry.source.local:
                with suppress(Exception):  # it is raised where the first row is read
                    self._reader(number).prepare()

    @override
    def lacks(self, until: Cursor) -> bool:
        changed = [i for i, entry in enumerate(self.entries) if self.reading.earlier.get(entry.name)]
        states = states_at(until, len(self.entries))
        return any(
            self.states[i].restarts != states[i].restarts
            or (states[i].cursor and self._reader(i).lacks(states[i].cursor))
            for i in changed
        )

    @override
    def charge(self, parts: Sequence[Sample]) -> None:
        if self.awaits_charge:  # a record that was skipped is counted already
            self.awaits_charge = False
            self._count_row(sum(map(trained_tokens, parts)))

    def _count_row(self, trained: int) -> None:
        state = self.states[self.current]
        state.cursor = self._reader(self.current).cursor
        state.untrained, state.begun = 0 if trained else state.untrained + 1, 0
        for other, weight in zip(self.states, self.weights, strict=True):
            other.deficit += weight * trained
        state.deficit -= sum(self.weights) * trained

    def _largest_deficit(self) -> int:
        """Return the source with the largest deficit, of those that have a weight."""
        return max(
            (i for i, weight in enumerate(self.weights) if weight and i not in self.emptied),
            key=lambda i: self.states[i].deficit,
        )

    def _reader(self, index: int) -> Reader:
        state = self.states[index]
        if state.reader is None:
            entry, reader = self.entries[index], self._open(index, state.restarts, state.cursor or None)
            state.reader = self.reading.wrap(reader, entry.source, entry.encoder)
        return state.reader

    def _open(self, index: int, restarts: int, start: Cursor | None = None) -> Reader:
        """Open a source that was restarted ``restarts`` times in the epoch."""
        entry, reading, number = self.entries[index], self.reading, pass_number(self.reading.epoch, restarts)
        # In each pass all lanes move on by the same distance. So together they still read every row once, and a source
        # with fewer rows than lanes gives its rows to other lanes each time.
        distance = number * GOLDEN % 2**64 * reading.num_lanes >> 64
        own = replace(
            reading,
            lane=(reading.lane + distance) % reading.num_lanes,
            epoch=number,
            # Without a seed per source, two sources of equal size get the same permutation, and row i of one always
            # meets row i of the other.
            seed=crc32(f"{reading.seed} {entry.name}".encode()),
            start=start,
            prefetch=reading.prefetch and reading.prefetch.part(entry.weight),
            earlier={"": reading.earlier.get(entry.name, ())},
        )
        return entry.source.read(own)

    def _first_states(self) -> list[SourceState]:
        """Return the states that an epoch begins with: a deficit is the mean of the delays, minus the source's own."""
        rng, count = np.random.default_rng(self.reading.key), len(self.weights)
        delays = sorted(rng.integers(0, self.reading.stagger + 1, count).tolist())  # trained tokens
        waits = rng.exponential(size=count).tolist()
        # Exponential random numbers are divided by the weights, and the source with the smallest quotient gets the
        # shortest delay, so the largest deficit. The i-th quotient is the smallest with probability w_i / sum(w).
        quotients = [
            wait / weight if weight else math.inf for wait, weight in zip(waits, self.weights, strict=True)
        ]
        total = sum(self.weights)
        middle = total * sum(delays) // count
        return [SourceState(middle - total * delays[rank]) for rank in np.argsort(np.argsort(quotients))]

    def _restart(self, index: int) -> None:
        """Restart a source that was read to its end. If the lane had no rows in this pass, go to one in which it has.

        Raises:
            StopIteration: without changing anything, if this is the end of the epoch.
            ValueError: if the source has no rows, or no token was trained of many.
        """
        state, name = self.states[index], self.entries[index].name
        following = self._next_pass(index) if state.begun else state.restarts + 1
        ended = [
            self.states[i].restarts > 0 or i in self.emptied
            for i, weight in enumerate(self.weights)
            if weight and i != index
        ]
        if self.stop == "first_exhausted" or (self.stop == "all_exhausted" and all(ended)):
            raise StopIteration
        if following is None:
            self.emptied.add(index)
            return
        if state.untrained >= UNTRAINED_ROWS:
            raise ValueError(
                f"{self.place}: the last {state.untrained} rows of source {name!r} trained no token, so its weight "
                "cannot be reached; look at what is dropped or masked, or leave the source out"
            )
        begun = state.begun + following - state.restarts
        self.states[index] = SourceState(state.deficit, following, state.untrained, begun)

    def _next_pass(self, index: int) -> int | None:
        """Return the next pass that has a row of a source for this lane; None if those of this epoch have none.

        That is so where its files were removed, and those that were added are read from the next epoch on.
        """
        reading, entry, following = self.reading, self.entries[index], self.states[index].restarts + 1
        lists = [each.until - pass_number(reading.epoch, 0) for each in reading.earlier.get(entry.name, ())]
        tries = passes_by_all(reading.num_lanes)
        for first in (following, *(begin for begin in lists if begin > following)):
            if first >= MOST_RESTARTS:
                return None
            for restarts in range(first, first + tries):
                with suppress(BadRecord):  # is a row
                    if next(self._open(index, restarts), None) is None:
                        continue
                return restarts
        raise ValueError(
            f"{self.place}: source {entry.name!r} has no rows in {tries + 1} passes over it, so its "
            "weight cannot be reached; leave the source out"
        )
