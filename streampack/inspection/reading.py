"""The rows of an epoch, all of them by lanes or a sample from all over the corpus, as columns of numbers."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streampack.accounting import DROP_REASONS
from streampack.sources.bad_records import kind_of
from streampack.sources.mixture import Mix
from streampack.sources.reading import BadRecord, Reading, permutation
from streampack.sources.source import Source
from streampack.streaming.estimate import Seen, look, sample_epoch
from streampack.streaming.lane_config import LaneConfig
from streampack.types import RowId

EXAMPLES_OF_A_LOSS = 3
LONGEST = 5
FIRST_LOOK = 256
"""Rows from which the number of rows of files is estimated, to see whether all of them are few enough."""
WHOLE = 1.5
"""A corpus with up to so many times the rows asked for is read whole: of rows drawn by bytes, many come twice."""

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Progress = Callable[[int], None]
"""Called with the number of rows read so far."""


class Rows(NamedTuple):
    """Token counts of the rows that were read, one column for each count: ``[rows]`` each, in the order of reading."""

    source: Ints  # its number in a mixture
    length: Ints  # tokens of the whole sample
    trained: Ints
    kept: Ints  # tokens of its pieces, 0 if it is dropped
    kept_trained: Ints
    reason: Ints  # 0, or 1 + the number of one of DROP_REASONS

    def lost_by(self, reason: str) -> npt.NDArray[np.bool_]:
        """Return which rows lost tokens, or all, for this reason."""
        return np.equal(self.reason, 1 + DROP_REASONS.index(reason))

    @property
    def untrained(self) -> npt.NDArray[np.bool_]:
        """Which rows have tokens, and none that is trained."""
        trained = np.where(self.kept > 0, self.kept_trained, self.trained)
        return np.greater(self.length, 0) & np.equal(trained, 0)


class Tally:
    """Keeps six numbers of each row, in 24 bytes, and nothing else that grows."""

    def __init__(self, source: Source, progress: Progress) -> None:
        self.source, self.progress = source, progress
        self.numbers = array("i")
        self.examples: dict[str, list[str]] = {}  # by the reason
        self.bad_kinds: Counter[str] = Counter()  # rows by what is bad in them; an example of each
        self.longest: list[tuple[int, int, RowId]] = []  # a heap of (length, trained, row_id)

    def __len__(self) -> int:
        return len(self.numbers) // len(Rows._fields)

    def add(self, seen: Seen) -> None:
        """Count a row."""
        number = self.source.source_index(seen.row_id)
        reason = 0 if seen.reason is None else 1 + DROP_REASONS.index(seen.reason)
        self.numbers.extend((number, seen.length, seen.trained, seen.kept, seen.kept_trained, reason))
        self.progress(len(self))
        if (seen.length, seen.trained, seen.row_id) not in self.longest:  # a mixture reads rows again
            push = heapq.heappush if len(self.longest) < LONGEST else heapq.heappushpop
            push(self.longest, (seen.length, seen.trained, seen.row_id))
        if seen.reason:
            self._exemplify(seen.reason, seen)
        if (
            seen.length
            and seen.reason != "untrained"
            and not (seen.kept_trained if seen.kept else seen.trained)
        ):
            self._exemplify("untrained", seen._replace(detail="no token is trained"))

    def _exemplify(self, reason: str, seen: Seen) -> None:
        examples = self.examples.setdefault(reason, [])
        if reason == "bad":
            self.bad_kinds[kind := kind_of(seen.detail)] += 1
            if self.bad_kinds[kind] > 1:
                return
        if len(examples) < EXAMPLES_OF_A_LOSS:
            examples.append(f"{self.source.locate(seen.row_id)}: {seen.detail}")

    @property
    def rows(self) -> Rows:
        """The token counts of all rows added so far; a view, and no row can be added while it is in use."""
        return Rows(*np.frombuffer(self.numbers, np.int32).reshape(-1, len(Rows._fields)).T)


@dataclass(frozen=True)
class Epoch:
    """The rows that were looked at, and the epoch that they stand for.

    ``lanes`` holds for each lane the tokens that each sample keeps, in the order of reading; of a sample of the corpus,
    one list in an order that stands for that of a lane. ``scale`` and ``times`` are of each source of a mixture:
    rows that it has for each that was looked at, and how often an epoch reads it.
    """

    rows: Rows
    lanes: Sequence[Sequence[int]]
    num_lanes: int
    exact: bool
    known: bool  # whether the source tells its size
    scale: Floats
    times: Floats
    error: float  # relative standard error of ``tokens``

    @property
    def weights(self) -> Floats:
        """``[rows]``, how many rows of the epoch each stands for."""
        return (self.scale * self.times)[self.rows.source]

    @property
    def samples(self) -> float:
        """Samples that are packed in the epoch."""
        return float(self.weights[self.rows.kept > 0].sum())

    @property
    def tokens(self) -> float:
        """Tokens that are packed in the epoch, padding left out."""
        return float(self.weights @ self.rows.kept)


def read_epoch(config: LaneConfig, tally: Tally, *, num_lanes: int, rows: int | None) -> Epoch:
    """Read an epoch, or about ``rows`` rows of it from all over the corpus; ``config`` is a `tolerant` one.

    A corpus with no more than ``WHOLE * rows`` rows is read as a whole; of a stream of unknown length, its first rows.
    A mixture that never ends is read until each of its sources was read once.
    """
    mix = config.mix
    if mix is not None and mix.stop == "never":
        config = replace(config, source=Mix(mix.entries, stop="all_exhausted"))
    size = None if mix is not None else rows_of(config.source)
    ones = np.ones(1)
    if rows is None or (size is not None and size <= WHOLE * rows):
        lanes = [_read_lane(config, tally, lane, num_lanes, None) for lane in range(num_lanes)]
        times = ones if mix is None else _times_read(mix, tally.rows)
        return Epoch(tally.rows, lanes, num_lanes, True, True, 1 / np.maximum(times, 1e-9), times, 0.0)
    if mix is None and size is None:
        lane = _read_lane(config, tally, 0, 1, rows)
        return Epoch(tally.rows, [lane], num_lanes, False, False, ones, ones, 0.0)
    entries = 1 if mix is None else len(mix.entries)
    scale, times, error = np.zeros(entries), np.zeros(entries), 0.0
    read_from = 1 if mix is None else sum(entry.weight > 0 for entry in mix.entries)
    for number, (each, often) in sample_epoch(config, max(1, rows // read_from), see=tally.add).items():
        scale[number], times[number], error = each.scale, often, max(error, each.error)
    return Epoch(tally.rows, [_mixed(tally.rows, config)], num_lanes, False, True, scale, times, error)


def _times_read(mix: Mix, rows: Rows) -> Floats:
    """Return about how often each source of a mixture was read."""
    read = np.bincount(rows.source, minlength=len(mix.entries))
    sizes = [rows_of(entry.source) or own for entry, own in zip(mix.entries, read.tolist(), strict=True)]
    return read / np.maximum(1, sizes)


def rows_of(source: Source) -> float | None:
    """Return about how many rows one pass over a source has; None if it cannot tell."""
    try:
        found, scale = source.sample(FIRST_LOOK)
    except ValueError:
        return None
    return len(found) * scale


def _read_lane(config: LaneConfig, tally: Tally, lane: int, num_lanes: int, rows: int | None) -> array[int]:
    """Read a lane of the first epoch, or its first rows; return how many tokens each sample keeps."""
    kept = array("i")
    for seen in islice(_lane_rows(config, lane, num_lanes), rows):
        tally.add(seen)
        if seen.kept:
            kept.append(seen.kept)
    return kept


def _lane_rows(config: LaneConfig, lane: int, num_lanes: int) -> Iterator[Seen]:
    reading = Reading(
        lane,
        num_lanes=num_lanes,
        seed=config.seed,
        shuffle_window=config.shuffle_window,
        stagger=config.packing.max_seq_len,
    )
    reader = config.source.read(reading)
    while True:
        try:
            row = next(reader, None)
        except BadRecord as error:
            yield Seen(error.row_id, 0, 0, 0, 0, "bad", error.reason)
            continue
        if row is None:
            return
        seen, pieces = look(config, row)
        yield seen
        reader.charge(pieces)


def _mixed(rows: Rows, config: LaneConfig) -> Sequence[int]:
    """Return the tokens kept of as many rows as were sampled, in an order like that of a run.

    Each row of a mixture has a place, the trained tokens of its source before it over the source's weight; rows of
    a source that is sampled too little come again.
    """
    mix, found = config.mix, []
    for number in np.unique(rows.source).tolist():
        own = np.flatnonzero((rows.source == number) & (rows.kept > 0))
        if config.shuffle_window:
            own = own[permutation(len(own), config.seed, number)]
        trained = np.ones(len(own)) if mix is None else rows.kept_trained[own] / mix.entries[number].weight
        found.append((own, trained))
    end = sum(len(own) for own, _ in found) / sum(
        len(own) / trained.sum() for own, trained in found if len(own)
    )
    places, drawn = [], []
    for own, trained in found:
        again = int(np.ceil(end / trained.sum())) if len(own) else 0
        place = np.cumsum(np.tile(trained, again)) - np.tile(trained, again)
        places.append(place[place < end])
        drawn.append(np.tile(own, again)[place < end])
    order = np.argsort(np.concatenate(places), kind="stable")
    return array("i", rows.kept[np.concatenate(drawn)[order]].tobytes())
