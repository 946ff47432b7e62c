"""`MixtureScheduler`: draws each row of a mixture from the source that is furthest behind its weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from streampack.accounting import trained_tokens
from streampack.sources.base import BadRecord, Reader, Reading
from streampack.sources.passes import passes_by_all
from streampack.types import Cursor, Row, RowId, Sample

STOPS = ("first_exhausted", "all_exhausted", "never")
UNTRAINED_ROWS = 1000
"""A source is refused if, at the end of a pass, so many of the last rows that a lane read of it trained no token. With
fewer, a run could end late because of a small source of which few rows are trained."""


class WeightSchedule:
    """The weights of a mixture's sources, and the earlier weights that a replay still needs.

    A resume reads again the rows whose pieces were not packed yet. If the weights were changed, those rows must be read
    in the order that the old weights gave; the new weights apply after them.

    >>> schedule = WeightSchedule((1, 3))
    >>> _ = schedule.change((2, 2), after=5)  # five pieces are replayed, then the new weights hold
    >>> schedule.tick(4), schedule.now, schedule.tick(1), schedule.now
    (None, (1, 3), None, (2, 2))

    Args:
        last: the weights of the sources that apply when all earlier ones have been used up.
        past: earlier weights, the oldest first, as (number of pieces for which they still apply, weights).
    """

    def __init__(self, last: Sequence[int], past: Sequence[tuple[int, tuple[int, ...]]] = ()) -> None:
        self.last = tuple(last)
        self.past = list(past)

    @property
    def now(self) -> tuple[int, ...]:
        """The weights that choose the next row."""
        return self.past[0][1] if self.past else self.last

    def change(self, weights: Sequence[int], *, after: int) -> None:
        """Use other weights as soon as ``after`` more pieces have been read."""
        if tuple(weights) != self.last:
            left = after - sum(pieces for pieces, _ in self.past)
            if left > 0:
                self.past.append((left, self.last))
            self.last = tuple(weights)

    def tick(self, pieces: int) -> None:
        """Count pieces that were read. If a row's pieces use up the current weights, the rest counts for the next."""
        while self.past and pieces:
            left, weights = self.past[0]
            if pieces < left:
                self.past[0] = (left - pieces, weights)
                return
            pieces -= left
            del self.past[0]

    def numbers(self) -> list[int]:
        """Return the weights as the beginning of a cursor."""
        past = [number for pieces, weights in self.past for number in (pieces, *weights)]
        return [len(self.past), *past, *self.last]

    @classmethod
    def from_numbers(cls, numbers: Iterator[int], *, count: int) -> WeightSchedule:
        """Invert `numbers`, for ``count`` sources."""
        past = [(next(numbers), _take(numbers, count)) for _ in range(next(numbers))]
        return cls(_take(numbers, count), past)


@dataclass(slots=True)
class SourceState:
    """The state of one source of a mixture in one lane's epoch.

    Attributes:
        deficit: how many trained tokens the source is behind its target fraction, times the sum of the weights.
        restarts: how often the source was begun anew in this epoch: the number of the pass over it.
        exhausted: whether the source was read to its end at least once in this epoch.
        untrained: how many rows were read since the newest one with a trained token.
        begun: how many passes were begun since the newest row; above 1 if the lane had no rows in some.
        cursor: the source's own cursor of its next row; empty if a pass was begun and no row was read yet.
        reader: reads the source; None until its first row is needed.
    """

    deficit: int
    restarts: int = 0
    exhausted: bool = False
    untrained: int = 0
    begun: int = 1
    cursor: Cursor = ()
    reader: Reader | None = None

    def numbers(self) -> list[int]:
        """Return the state, without the reader, as a part of a cursor."""
        # A cursor holds no negative numbers, so the sign becomes the lowest bit.
        zigzag = self.deficit << 1 if self.deficit >= 0 else ~self.deficit << 1 | 1
        counts = (self.restarts, self.exhausted, self.untrained, self.begun, len(self.cursor))
        return [zigzag, *map(int, counts), *self.cursor]

    @classmethod
    def from_numbers(cls, numbers: Iterator[int]) -> SourceState:
        """Invert `numbers`."""
        zigzag, restarts, exhausted, untrained, begun, size = _take(numbers, 6)
        deficit = ~(zigzag >> 1) if zigzag & 1 else zigzag >> 1
        return cls(deficit, restarts, bool(exhausted), untrained, begun, _take(numbers, size))


class MixtureScheduler(Reader):
    """One lane's rows of a mixture in one epoch, each from the source that is furthest behind its weight.

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
        weights: the sources' weights. If the cursor to start at holds others, those apply to the rows that are read
            again.
        reading: the lane and epoch to read, and where to begin.
        remote: indices of the sources whose rows can be fetched before they are needed.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        open_source: Callable[[int, int, Cursor | None], Reader],
        locate: Callable[[RowId], str],
        stop: str,
        weights: Sequence[int],
        reading: Reading,
        remote: Sequence[int] = (),
    ) -> None:
        self.names = names
        self.open_source = open_source
        self.remote = remote
        self.locate = locate
        self.stop = stop
        self.place = f"lane {reading.lane} of {reading.num_lanes}"
        self.tries = passes_by_all(
            reading.num_lanes
        )  # passes over a source that may be without rows for this lane
        rng = np.random.default_rng(reading.key)
        # Two sets of random numbers, from which `_begin` makes the deficits that the epoch begins with.
        self.delays = sorted(rng.integers(0, reading.stagger + 1, len(names)).tolist())  # trained tokens
        self.waits = rng.exponential(size=len(names))
        self.states: list[SourceState] = []
        if reading.start is None:
            self.schedule = WeightSchedule(weights)
            self._begin()
        else:
            numbers = iter(reading.start)
            self.schedule = WeightSchedule.from_numbers(numbers, count=len(names))
            self.schedule.change(weights, after=reading.replayed)
            self.states = [SourceState.from_numbers(numbers) for _ in names]
        self.current = 0  # index of the source that the newest row is from
        self.awaits_charge = False  # whether `charge` must still be called for the newest row

    @property
    def cursor(self) -> Cursor:
        """The cursor of the newest row until `charge` is called for it, then of the next row."""
        numbers = self.schedule.numbers()
        for state in self.states:
            numbers += state.numbers()
        return tuple(numbers)

    @property
    def reached(self) -> tuple[int, ...]:
        """See `Reader.reached`: the cursors of the sources. Weights may change at a resume."""
        return tuple(number for state in self.states for number in (state.restarts, *(state.cursor or ())))

    def __next__(self) -> Row:
        if self.awaits_charge:
            name = self.names[self.current]
            raise RuntimeError(
                f"{self.place}: a mixture was read on before the row of source {name!r} was charged; "
                "read it by an IterablePackedDataset, and hold rows out of its sources, not of the whole"
            )
        while True:
            self.current = max(range(len(self.states)), key=lambda i: self.states[i].deficit)
            state = self.states[self.current]
            if state.reader is None:
                state.reader = self.open_source(self.current, state.restarts, state.cursor or None)
            self.passes_begun = state.begun
            try:
                row = next(state.reader, None)
            except BadRecord as error:
                raise BadRecord(
                    error.reason,
                    cursor=self.cursor,
                    row_id=(self.current, *error.row_id),
                    locate=self.locate,
                    lost=error.lost,
                ) from error.__cause__
            if row is not None:
                break
            self._restart(self.current)
        self.awaits_charge = True
        return Row(row.data, self.cursor, (self.current, *row.row_id))

    def skip(self) -> None:
        """See `Reader.skip`. The record counts as a row of one piece without trained tokens."""
        reader = self.states[self.current].reader
        assert reader is not None
        reader.skip()
        self._count_row(0, pieces=1)

    def prepare(self) -> None:
        """See `Reader.prepare`."""
        for number in self.remote:
            state = self.states[number]
            if state.reader is None:
                with suppress(Exception):  # it is raised where the first row is read
                    state.reader = self.open_source(number, state.restarts, state.cursor or None)
            if state.reader is not None:
                state.reader.prepare()

    def consumed(self) -> tuple[float | None, ...]:
        """See `Reader.consumed`."""
        return tuple(None if state.reader is None else state.reader.consumed()[0] for state in self.states)

    def charge(self, parts: Sequence[Sample]) -> None:
        """See `Reader.charge`. A row that was dropped counts as one piece without trained tokens."""
        assert self.awaits_charge, "every row is charged once"
        self.awaits_charge = False
        self._count_row(sum(map(trained_tokens, parts)), pieces=max(1, len(parts)))

    def _count_row(self, trained: int, *, pieces: int) -> None:
        state = self.states[self.current]
        assert state.reader is not None
        state.untrained = 0 if trained else state.untrained + 1
        state.begun, state.cursor = 0, state.reader.cursor
        weights = self.schedule.now
        for other, weight in zip(self.states, weights, strict=True):
            other.deficit += weight * trained
        state.deficit -= sum(weights) * trained
        self.schedule.tick(pieces)

    def continue_from(self, ended: Reader) -> None:
        """See `Reader.continue_from`. Takes over earlier weights, as a replay may go on in the next epoch."""
        assert isinstance(ended, MixtureScheduler)
        self.schedule = ended.schedule
        self._begin()

    def _begin(self) -> None:
        """Set the deficits that an epoch begins with: the mean of the delays, minus a delay for each source."""
        # Exponential random numbers are divided by the weights, and the source with the smallest quotient gets the
        # shortest delay, so the largest deficit. The i-th quotient is the smallest with probability w_i / sum(w).
        weights = self.schedule.now
        ranks = np.argsort(np.argsort(self.waits / np.array(weights))).tolist()
        middle = sum(weights) * sum(self.delays) // len(weights)
        self.states = [SourceState(middle - sum(weights) * self.delays[rank]) for rank in ranks]

    def _restart(self, source_index: int) -> None:
        """Restart a source that was read to its end. If the lane had no rows in this pass, go to one in which it has.

        Raises:
            StopIteration: without changing anything, if this is the end of the epoch.
            ValueError: if the source has no rows, or no token was trained of many.
        """
        state, name = self.states[source_index], self.names[source_index]
        skipped = self._passes_without_rows(source_index) if state.begun else 0
        others = (other for other in self.states if other is not state)
        if self.stop == "first_exhausted" or (
            self.stop == "all_exhausted" and all(other.exhausted for other in others)
        ):
            raise StopIteration
        if state.untrained >= UNTRAINED_ROWS:
            raise ValueError(
                f"{self.place}: the last {state.untrained} rows of source {name!r} trained no token, so its weight "
                "cannot be reached; look at what is dropped or masked, or leave the source out"
            )
        self.states[source_index] = SourceState(
            state.deficit,
            state.restarts + skipped + 1,
            exhausted=True,
            untrained=state.untrained,
            begun=state.begun + skipped + 1,
        )

    def _passes_without_rows(self, source_index: int) -> int:
        """Return how many passes after the current one have no row of a source for this lane.

        Raises:
            ValueError: if there is none in so many passes that each row came by this lane.
        """
        for skipped in range(self.tries):
            restarts = self.states[source_index].restarts + skipped + 1
            with suppress(BadRecord):  # is a row
                if next(self.open_source(source_index, restarts, None), None) is None:
                    continue
            return skipped
        raise ValueError(
            f"{self.place}: source {self.names[source_index]!r} has no rows in {self.tries + 1} passes over it, so its "
            "weight cannot be reached; leave the source out"
        )


def _take(numbers: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(next(numbers) for _ in range(count))
