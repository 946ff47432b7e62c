"""`MixtureScheduler`: draws each row of a mixture from the source that is furthest behind its weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np

from streampack.accounting import trained_tokens
from streampack.sources.passes import passes_by_all
from streampack.sources.reading import BadRecord, Reader, Reading
from streampack.types import Cursor, Row, RowId, Sample

STOPS = ("first_exhausted", "all_exhausted", "never")
MOST_RESTARTS = 1 << 20  # of a source in an epoch of the mixture
UNTRAINED_ROWS = 1000
"""A source is refused if, at the end of a pass, so many of the last rows that a lane read of it trained no token. With
fewer, a run could end late because of a small source of which few rows are trained."""


OpenSource = Callable[[int, int, Cursor | None], Reader]
"""``(source_index, restarts, start)`` returns a reader of one pass over a source; see `MixtureScheduler`."""


@dataclass(slots=True)
class SourceState:
    """The state of one source of a mixture in one lane's epoch.

    Attributes:
        deficit: how many trained tokens the source is behind its target fraction, times the sum of the weights.
        restarts: how often the source was begun anew in this epoch: the number of the pass over it.
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

    @property
    def exhausted(self) -> bool:
        """Whether the source was read to its end at least once in this epoch."""
        return self.restarts > 0

    def numbers(self) -> tuple[int, ...]:
        """Return the state as a part of the mixture's cursor."""
        # A lane state holds no negative numbers, so the sign becomes the lowest bit.
        zigzag = self.deficit << 1 if self.deficit >= 0 else ~self.deficit << 1 | 1
        return (zigzag, self.restarts, self.untrained, self.begun, len(self.cursor), *self.cursor)


def states_at(cursor: Cursor, sources: int) -> list[SourceState]:
    """Return the states of the sources that a mixture's cursor holds.

    Raises:
        ValueError: if it is not the cursor of so many sources.
    """
    numbers, found = iter(cursor), []
    for _ in range(sources):
        zigzag, restarts, untrained, begun, size = [*islice(numbers, 5), *[-1] * 5][:5]
        own = tuple(islice(numbers, max(0, size)))
        if len(own) != size or restarts >= MOST_RESTARTS:
            raise ValueError(f"the cursor of a lane is not that of {sources} sources")
        deficit = ~(zigzag >> 1) if zigzag & 1 else zigzag >> 1
        found.append(SourceState(deficit, restarts, untrained, begun, own))
    if next(numbers, None) is not None:
        raise ValueError(f"the cursor of a lane is that of more than {sources} sources")
    return found


def cursor_of(states: Iterable[SourceState]) -> Cursor:
    """Return the cursor that holds the states of sources; inverts `states_at`."""
    return tuple(number for state in states for number in state.numbers())


def translated(cursor: Cursor, before: Sequence[str], now: Sequence[str]) -> Cursor:
    """Return the cursor for the sources ``now``, given by name, of one for the sources ``before``.

    A source that is new begins with a deficit of 0. The deficits of those that are gone are divided among the others,
    so that deficits still add up to 0.

    >>> translated((4, 0, 0, 0, 1, 7, 3, 0, 0, 0, 1, 8), ["a", "b"], ["b", "c"])
    (0, 0, 0, 0, 1, 8, 0, 0, 0, 1, 0)
    """
    states = dict(zip(before, states_at(cursor, len(before)), strict=True))
    lost = sum(state.deficit for name, state in states.items() if name not in now)
    kept = [state for name, state in states.items() if name in now]
    for i, state in enumerate(kept):
        state.deficit += lost // len(kept) + (i < lost % len(kept))
    return cursor_of(states.get(name, SourceState()) for name in now)


class MixtureScheduler(Reader):
    """One lane's rows of a mixture in one epoch, each from the source that is furthest behind its weight.

    A cursor holds the deficit, the restarts and the cursor of each source.

    After each row, the lane that reads calls `charge` with the samples made of it, whose trained tokens are counted. A
    source's deficit is ``its weight * the trained tokens of all sources - the sum of weights * its own trained
    tokens``. Deficits are integers, so the choice is the same on every machine. The next row comes from the source with
    the largest deficit; of several with the same deficit, from the first. (Deficit round robin, Shreedhar and Varghese
    1996, in which sources take fixed turns instead.)

    If all lanes began with deficits of 0, all would choose the same sources at the same time, and after the first rows
    all would have trained too many tokens of the sources with long rows. So each lane begins with other deficits, drawn
    at random by (seed, epoch, lane), which add up to 0 and are at most ``stagger`` tokens apart. The probability that a
    source has the largest one is its target fraction.

    How far can a source's fraction be off after T trained tokens of a lane's epoch? Let S be the number of sources and
    M the larger of ``stagger`` and the most trained tokens of a row, and let deficits be in tokens (divided by the sum
    of weights). Deficits add up to 0, so the largest is never negative, and a source that is drawn falls to -M at the
    lowest. Hence all stay between -M and (S - 1) M. They began no further than M (S - 1) / S from 0, and
    their change since then is the error in tokens, so the fraction is off by at most S M / T.

    Args:
        names: the sources' names, for errors.
        open_source: ``(source_index, restarts, start)`` opens a source that was restarted ``restarts`` times in this
            epoch, at the cursor ``start``, or at its beginning if that is None.
        locate: the mixture's `Source.locate`.
        stop: when an epoch ends, one of `STOPS`.
        weights: the sources' weights. A source of weight 0 is not read.
        reading: the lane and epoch to read, and where to begin.
        remote: indices of the sources whose rows can be fetched before they are needed.
        begins: for each source whose files were changed, the restarts with which another list of them begins. A number
            that no epoch reaches is in a later one.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        open_source: OpenSource,
        locate: Callable[[RowId], str],
        stop: str,
        weights: Sequence[int],
        reading: Reading,
        remote: Sequence[int] = (),
        begins: Sequence[Sequence[int]] = (),
    ) -> None:
        self.names = names
        self.open_source = open_source
        self.remote = remote
        self.begins = begins or [()] * len(names)
        # Sources that have no rows before the epoch ends, as their files were removed.
        self.emptied: set[int] = set()
        self.missed = False  # whether a reader of a pass that has ended missed files
        self.locate = locate
        self.stop = stop
        self.place = f"lane {reading.lane} of {reading.num_lanes}"
        # Passes over a source that may be without rows for this lane.
        self.tries = passes_by_all(reading.num_lanes)
        rng = np.random.default_rng(reading.key)
        # Two sets of random numbers, from which `_begin` makes the deficits that the epoch begins with.
        self.delays = sorted(rng.integers(0, reading.stagger + 1, len(names)).tolist())  # trained tokens
        self.waits = rng.exponential(size=len(names))
        self.weights = tuple(weights)
        self.states = self._first_states()
        if reading.start is not None:
            self.states = states_at(reading.start, len(names))
        self.current = 0  # index of the source that the newest row is from
        self.awaits_charge = False  # whether `charge` must still be called for the newest row

    @property
    def cursor(self) -> Cursor:
        """The cursor of the newest row until `charge` is called for it, then of the next row."""
        return cursor_of(self.states)

    @property
    def missed_files(self) -> bool:  # type: ignore[override]
        """See `Reader.missed_files`; also whether a source has no rows left because its files were removed."""
        readers = [state.reader for state in self.states if state.reader is not None]
        return self.missed or bool(self.emptied) or any(reader.missed_files for reader in readers)

    def weigh(self, weights: Sequence[int]) -> None:
        """See `Reader.weigh`."""
        self.weights = tuple(weights)

    def __next__(self) -> Row:
        if self.awaits_charge:
            name = self.names[self.current]
            raise RuntimeError(
                f"{self.place}: a mixture was read on before the row of source {name!r} was charged; "
                "read it by an IterablePackedDataset, and hold rows out of its sources, not of the whole"
            )
        while True:
            self.current = self._furthest_behind()
            state = self.states[self.current]
            if state.reader is None:
                state.reader = self.open_source(self.current, state.restarts, state.cursor or None)
            self.passes_begun = state.begun
            try:
                row = next(state.reader, None)
            except BadRecord as error:
                raise BadRecord(
                    error.reason,
                    row_id=(self.current, *error.row_id),
                    locate=self.locate,
                ) from error.__cause__
            if row is not None:
                break
            self._restart(self.current)
        self.awaits_charge = True
        return Row(row.data, self.cursor, (self.current, *row.row_id))

    def skip(self) -> None:
        """See `Reader.skip`. The record counts as a row without trained tokens."""
        reader = self.states[self.current].reader
        assert reader is not None
        reader.skip()
        self._count_row(0)

    def prepare(self) -> None:
        """See `Reader.prepare`."""
        for number in self.remote:
            state = self.states[number]
            if state.reader is None:
                with suppress(Exception):  # it is raised where the first row is read
                    state.reader = self.open_source(number, state.restarts, state.cursor or None)
            if state.reader is not None:
                state.reader.prepare()

    def charge(self, parts: Sequence[Sample]) -> None:
        """See `Reader.charge`."""
        if self.awaits_charge:  # a record that was skipped is counted already
            self.awaits_charge = False
            self._count_row(sum(map(trained_tokens, parts)))

    def _count_row(self, trained: int) -> None:
        state = self.states[self.current]
        assert state.reader is not None
        state.cursor = state.reader.cursor
        state.untrained, state.begun = 0 if trained else state.untrained + 1, 0
        for other, weight in zip(self.states, self.weights, strict=True):
            other.deficit += weight * trained
        state.deficit -= sum(self.weights) * trained

    def _furthest_behind(self) -> int:
        """Return the source with the largest deficit, of those that have a weight."""
        return max(
            (i for i, weight in enumerate(self.weights) if weight and i not in self.emptied),
            key=lambda i: self.states[i].deficit,
        )

    def _first_states(self) -> list[SourceState]:
        """Return the states that an epoch begins with: a deficit is the mean of the delays, minus the source's own."""
        # Exponential random numbers are divided by the weights, and the source with the smallest quotient gets the
        # shortest delay, so the largest deficit. The i-th quotient is the smallest with probability w_i / sum(w).
        total = sum(self.weights)
        quotients = [
            wait / weight if weight else math.inf
            for wait, weight in zip(self.waits.tolist(), self.weights, strict=True)
        ]
        ranks = np.argsort(np.argsort(quotients)).tolist()
        middle = total * sum(self.delays) // len(self.weights)
        return [SourceState(middle - total * self.delays[rank]) for rank in ranks]

    def _restart(self, source_index: int) -> None:
        """Restart a source that was read to its end. If the lane had no rows in this pass, go to one in which it has.

        Raises:
            StopIteration: without changing anything, if this is the end of the epoch.
            ValueError: if the source has no rows, or no token was trained of many.
        """
        state, name = self.states[source_index], self.names[source_index]
        skipped = self._passes_without_rows(source_index) if state.begun else 0
        others = [
            other.exhausted or i in self.emptied
            for i, (other, weight) in enumerate(zip(self.states, self.weights, strict=True))
            if weight and other is not state
        ]
        ends = self.stop == "first_exhausted" or (self.stop == "all_exhausted" and all(others))
        if ends:
            raise StopIteration
        if skipped is None:
            self.emptied.add(source_index)
            return
        if state.untrained >= UNTRAINED_ROWS:
            raise ValueError(
                f"{self.place}: the last {state.untrained} rows of source {name!r} trained no token, so its weight "
                "cannot be reached; look at what is dropped or masked, or leave the source out"
            )
        self.missed |= state.reader is not None and state.reader.missed_files
        self.states[source_index] = SourceState(
            state.deficit,
            state.restarts + skipped + 1,
            untrained=state.untrained,
            begun=state.begun + skipped + 1,
        )

    def _passes_without_rows(self, source_index: int) -> int | None:
        """Return how many passes after the current one have no row of a source for this lane; None if all have none.

        That is so where its files were removed, and those that were added are read from the next epoch on.

        Raises:
            ValueError: if there is none in so many passes over one list of files that each row came by this lane.
        """
        following = self.states[source_index].restarts + 1
        later = [restarts for restarts in self.begins[source_index] if restarts > following]
        for first in (following, *later):
            if first >= MOST_RESTARTS:
                return None
            for restarts in range(first, first + self.tries):
                with suppress(BadRecord):  # is a row
                    reader = self.open_source(source_index, restarts, None)
                    if next(reader, None) is None:
                        continue
                return restarts - following
        raise ValueError(
            f"{self.place}: source {self.names[source_index]!r} has no rows in {self.tries + 1} passes over it, so its "
            "weight cannot be reached; leave the source out"
        )
