"""`MixtureScheduler`: draws each row of a mixture from the source that is furthest behind its weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from streampack.accounting import trained_tokens
from streampack.sources.base import BadRecord, Reader, Reading
from streampack.types import Cursor, Row, RowId, Sample

STOPS = ("first_exhausted", "all_exhausted", "never")


class WeightSchedule:
    """The weights of a mixture's sources, and the earlier weights that a replay still needs.

    After a resume with other weights, rows that still wait to be packed are read again in the order that the old
    weights gave; then the new ones apply. ``past`` holds (pieces still to replay, weights), oldest first.

    >>> schedule = WeightSchedule((1, 3))
    >>> _ = schedule.change((2, 2), after=5)  # five pieces are replayed, then the new weights hold
    >>> schedule.tick(4), schedule.now, schedule.tick(1), schedule.now
    (None, (1, 3), None, (2, 2))
    """

    def __init__(self, last: Sequence[int], past: Sequence[tuple[int, tuple[int, ...]]] = ()) -> None:
        self.last = tuple(last)
        self.past = list(past)  # (pieces, weights)

    @property
    def now(self) -> tuple[int, ...]:
        """The weights that choose the next row."""
        return self.past[0][1] if self.past else self.last

    def change(self, weights: Sequence[int], *, after: int) -> None:
        """Use other weights when ``after`` pieces have been read."""
        if tuple(weights) != self.last:
            left = after - sum(pieces for pieces, _ in self.past)
            if left > 0:
                self.past.append((left, self.last))
            self.last = tuple(weights)

    def tick(self, pieces: int) -> None:
        """Count pieces that were read. A row's pieces beyond a change of weights count for the weights after it."""
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
    """The state of one source of a mixture in one lane's epoch."""

    deficit: int  # trained tokens that it is behind its target fraction, times the sum of the weights
    restarts: int = 0
    exhausted: bool = False  # it was read to its end at least once
    fed: bool = False  # has trained something since its restart
    cursor: Cursor | None = None  # of its next row; None before the first
    reader: Reader | None = None  # opened when it is due

    def numbers(self) -> list[int]:
        """Return the state, without the reader, as a part of a cursor."""
        cursor = self.cursor
        flags = self.restarts << 2 | self.exhausted << 1 | self.fed
        # Cursors hold no negative numbers.
        zigzag = self.deficit << 1 if self.deficit >= 0 else ~self.deficit << 1 | 1
        return [zigzag, flags, *((0,) if cursor is None else (len(cursor) + 1, *cursor))]

    @classmethod
    def from_numbers(cls, numbers: Iterator[int]) -> SourceState:
        """Invert `numbers`."""
        zigzag, flags, size = next(numbers), next(numbers), next(numbers)
        deficit = ~(zigzag >> 1) if zigzag & 1 else zigzag >> 1
        cursor = _take(numbers, size - 1) if size else None
        return cls(deficit, flags >> 2, bool(flags & 2), bool(flags & 1), cursor)


class MixtureScheduler(Reader):
    """One lane's rows of a mixture in one epoch, each from the source that is furthest behind its weight.

    The reader's user reports after each row, with `charge`, how many tokens the row trains. A source's deficit is ``its
    weight * the trained tokens of all - the sum of weights * its own trained tokens``, an integer, so the choice is the
    same on every machine. The next row comes from the source with the largest deficit, of equals the first. So no
    deficit falls below minus the longest sample, and as they add up to 0, none of S exceeds S - 1 of the longest.
    (Deficit round robin, Shreedhar and Varghese 1996, with the choice by deficit instead of in turns.)

    If all lanes began at 0, they would draw from the same sources at the same time, and from all of them at once: far
    too much from those with long samples. So a lane begins with deficits that add up to 0 and are up to ``stagger``
    tokens apart, by (seed, epoch, lane); a source is the first with the probability of its weight. In all, the fraction
    of a source after T tokens is off by at most S * max(longest, stagger) / T.

    Args:
        names: of the sources, for errors.
        opens: ``(number, turn, start)`` opens a source in its ``turn``-th turn, at the beginning or at a cursor.
        locate: see `Source.locate`, of the mixture.
        stop: one of `STOPS`.
        weights: of the sources; a cursor to start at may hold earlier ones.
        reading: of the lane.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        opens: Callable[[int, int, Cursor | None], Reader],
        locate: Callable[[RowId], str],
        stop: str,
        weights: Sequence[int],
        reading: Reading,
    ) -> None:
        self.names = names
        self.opens = opens
        self.locate = locate
        self.stop = stop
        self.place = f"lane {reading.lane} of {reading.num_lanes}"
        rng = np.random.default_rng(reading.key)
        self.delays = sorted(rng.integers(0, reading.stagger + 1, len(names)).tolist())
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
        self.due = 0  # the source that the newest row is from
        self.drawn = False  # and that row is not charged yet
        self.begins = False  # it is the first of its source's turn

    @property
    def cursor(self) -> Cursor:
        """The cursor of the newest row until that is charged, then of the next row."""
        numbers = self.schedule.numbers()
        for state in self.states:
            numbers += state.numbers()
        return tuple(numbers)

    def __next__(self) -> Row:
        if self.drawn:
            raise RuntimeError(
                f"{self.place}: a mixture was read on before the row of source {self.names[self.due]!r} was charged; "
                "read it by an IterablePackedDataset, and hold rows out of its sources, not of the whole"
            )
        while True:
            self.due = max(range(len(self.states)), key=lambda i: self.states[i].deficit)
            state = self.states[self.due]
            if state.reader is None:
                state.reader = self.opens(self.due, state.restarts, state.cursor)
            self.begins = state.cursor is None
            try:
                row = next(state.reader, None)
            except BadRecord as error:
                raise BadRecord(
                    error.reason,
                    cursor=self.cursor,
                    row_id=(self.due, *error.row_id),
                    locate=self.locate,
                ) from error.__cause__
            if row is not None:
                break
            self._turn(self.due)
        self.drawn = True
        return Row(row.data, self.cursor, (self.due, *row.row_id))

    def skip(self) -> None:
        """See `Reader.skip`; the record counts as a row that trains nothing."""
        reader = self.states[self.due].reader
        assert reader is not None
        reader.skip()
        self._count(0, pieces=1)

    def charge(self, parts: Sequence[Sample]) -> None:
        """See `Reader.charge`. A row that was dropped counts as one piece."""
        assert self.drawn, "every row is charged once"
        self.drawn = False
        self._count(sum(map(trained_tokens, parts)), pieces=max(1, len(parts)))

    def _count(self, trained: int, *, pieces: int) -> None:
        state = self.states[self.due]
        assert state.reader is not None
        state.fed |= trained > 0
        state.cursor = state.reader.cursor
        weights = self.schedule.now
        for other, weight in zip(self.states, weights, strict=True):
            other.deficit += weight * trained
        state.deficit -= sum(weights) * trained
        self.schedule.tick(pieces)

    def continue_from(self, ended: Reader) -> None:
        """See `Reader.continue_from`: a replay with earlier weights goes on in the next epoch."""
        assert isinstance(ended, MixtureScheduler)
        self.schedule = ended.schedule
        self._begin()

    def _begin(self) -> None:
        # Of exponential random numbers with rates w_i, the i-th is the smallest with probability w_i, its source's
        # share of the tokens at any time. The smallest has the shortest delay.
        weights = self.schedule.now
        ranks = np.argsort(np.argsort(self.waits / np.array(weights))).tolist()
        middle = sum(weights) * sum(self.delays) // len(weights)
        self.states = [SourceState(middle - sum(weights) * self.delays[rank]) for rank in ranks]

    def _turn(self, number: int) -> None:
        """End the epoch, or restart a source that was read to its end. At the end of the epoch, nothing changes."""
        state, name = self.states[number], self.names[number]
        if state.cursor is None:
            raise ValueError(
                f"{self.place} has no rows of source {name!r}, and a mixture needs some of every source in every lane; "
                "use fewer lanes (num_lanes), or leave the source out"
            )
        others = (other for other in self.states if other is not state)
        if self.stop == "first_exhausted" or (
            self.stop == "all_exhausted" and all(other.exhausted for other in others)
        ):
            raise StopIteration
        if not state.fed:
            raise ValueError(
                f"{self.place}: source {name!r} trains no token from its beginning to its end, so its weight cannot be "
                "reached; look at what is dropped or masked, or leave the source out"
            )
        self.states[number] = SourceState(state.deficit, state.restarts + 1, exhausted=True)


def _take(numbers: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(next(numbers) for _ in range(count))
