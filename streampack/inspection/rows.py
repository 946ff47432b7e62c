"""The rows of an epoch, all of them by lanes or a sample from all over the corpus, as columns of numbers."""

from __future__ import annotations

import heapq
from array import array
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
from streampack.types import IntArray, RowId

EXAMPLES_OF_A_LOSS = 3
LONGEST = 5
FIRST_LOOK = 256
"""Rows of a source from which the number of an epoch's rows is estimated, to see whether all of them are few enough."""
WHOLE = 2.5
"""An epoch with up to so many times the rows asked for is read whole. Of half of 800 rows, what is dropped was off by
0.3 points."""

Floats = npt.NDArray[np.float64]
Progress = Callable[[int], None]
"""Called with the number of rows read so far."""


class Rows(NamedTuple):
    """Token counts of the rows that were read, one column for each count: ``[rows]`` each, in the order of reading."""

    source: IntArray  # its number in a mixture
    length: IntArray  # tokens of the whole sample
    trained: IntArray
    kept: IntArray  # tokens of its pieces, 0 if it is dropped
    kept_trained: IntArray
    reason: IntArray  # 0, or 1 + the number of one of DROP_REASONS
    media: IntArray | None = None  # of its pieces; None without ``max_media``

    def lost_by(self, reason: str) -> npt.NDArray[np.bool_]:
        """Return which rows lost tokens, or all, for this reason."""
        return np.equal(self.reason, 1 + DROP_REASONS.index(reason))

    @property
    def untrained(self) -> npt.NDArray[np.bool_]:
        """Which rows have tokens, and none that is trained."""
        trained = np.where(self.kept > 0, self.kept_trained, self.trained)
        return np.greater(self.length, 0) & np.equal(trained, 0)


class Tally:
    """Keeps six numbers of each row, in 24 bytes, with ``max_media`` seven, and nothing else that grows."""

    def __init__(self, config: LaneConfig, progress: Progress) -> None:
        self.source, self.progress = config.source, progress
        self.columns = len(Rows._fields) - (config.packing.max_media is None)
        self.numbers = array("i")
        # By the reason the first rows of the corpus; of bad rows, one of each kind.
        self.firsts: dict[str, dict[object, tuple[RowId, str]]] = {}
        self.longest: list[tuple[int, int, RowId]] = []  # a heap of (length, trained, row_id)

    def __len__(self) -> int:
        return len(self.numbers) // self.columns

    def add(self, seen: Seen) -> None:
        """Count a row."""
        number = self.source.source_index(seen.row_id)
        reason = 0 if seen.reason is None else 1 + DROP_REASONS.index(seen.reason)
        found = (number, seen.length, seen.trained, seen.kept, seen.kept_trained, reason, seen.media)
        self.numbers.extend(found[: self.columns])
        self.progress(len(self))
        long = (seen.length, seen.trained, seen.row_id)
        if long not in self.longest:  # a mixture reads rows again
            push = heapq.heappush if len(self.longest) < LONGEST else heapq.heappushpop
            push(self.longest, long)
        if seen.reason:
            self._exemplify(seen.reason, seen, seen.detail)
        if seen.length and not (seen.kept_trained if seen.kept else seen.trained):
            self._exemplify("untrained", seen, "no token is trained")

    def _exemplify(self, reason: str, seen: Seen, detail: str) -> None:
        firsts = self.firsts.setdefault(reason, {})
        kind = kind_of(detail) if reason == "bad" else seen.row_id
        if kind not in firsts or seen.row_id < firsts[kind][0]:
            firsts[kind] = seen.row_id, detail
            if len(firsts) > EXAMPLES_OF_A_LOSS:
                del firsts[max(firsts, key=lambda each: firsts[each][0])]

    def examples(self, reason: str) -> list[str]:
        """Return the first rows of the corpus that were lost by this reason, one of each kind, with their places."""
        return [
            f"{self.source.locate(row_id)}: {detail}"
            for row_id, detail in sorted(self.firsts[reason].values())
        ]

    @property
    def rows(self) -> Rows:
        """The token counts of all rows added so far; a view, and no row can be added while it is in use."""
        return Rows(*np.frombuffer(self.numbers, np.int32).reshape(-1, self.columns).T)


Sizes = Sequence["array[int]"]
"""The tokens that some samples keep, one number for each; with ``max_media``, their media as a second array."""


@dataclass(frozen=True)
class Epoch:
    """The rows that were looked at, and the epoch that they stand for.

    ``lanes`` holds the sizes of each lane's samples in the order of reading; of a sample of the corpus, those of one
    lane, in an order that stands for that of a run.
    """

    rows: Rows
    lanes: Sequence[Sizes]
    num_lanes: int
    weights: Floats  # [rows], how many rows of the epoch each stands for
    passes: Floats  # [sources], how often the epoch reads each source
    exact: bool = True
    known: bool = True  # whether the source tells its size
    error: float = 0.0  # relative standard error of ``tokens``

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

    Of a stream of unknown length, its first rows are read. A mixture that never ends is read until each of its sources
    was read once.
    """
    mix = config.mix
    if mix is not None and mix.stop == "never":
        config = replace(config, source=Mix(mix.entries, stop="all_exhausted"))
    sources = [config.source] if mix is None else [entry.source for entry in mix.entries]
    size = None if rows is None else _rows_in(config)
    if rows is None or (size is not None and size <= WHOLE * rows):
        lanes = [_read_lane(config, tally, lane, num_lanes, None) for lane in range(num_lanes)]
        passes = np.ones(1)
        if mix is not None:
            read = np.bincount(tally.rows.source, minlength=len(sources))
            sizes = [_size(source) or own for source, own in zip(sources, read.tolist(), strict=True)]
            passes = read / np.maximum(1, sizes)
        return Epoch(tally.rows, lanes, num_lanes, np.ones(len(tally)), passes)
    if mix is None and size is None:
        lane = _read_lane(config, tally, 0, 1, rows)
        return Epoch(tally.rows, [lane], num_lanes, np.ones(len(tally)), np.ones(1), exact=False, known=False)
    scale, passes, error = np.zeros(len(sources)), np.zeros(len(sources)), 0.0
    read_from = 1 if mix is None else sum(entry.weight > 0 for entry in mix.entries)
    for number, (each, times) in sample_epoch(config, max(1, rows // read_from), see=tally.add).items():
        scale[number], passes[number], error = each.scale, times, max(error, each.error)
    weights = (scale * passes)[tally.rows.source]
    lane = _in_order(tally.rows, weights, config)
    return Epoch(tally.rows, [lane], num_lanes, weights, passes, exact=False, error=error)


def _rows_in(config: LaneConfig) -> float | None:
    """Return about how many rows an epoch has; None if its source cannot tell."""
    if config.mix is None:
        return _size(config.source)
    try:
        found = sample_epoch(config, FIRST_LOOK).values()
    except ValueError:  # of a source that cannot tell its size, or of which so few rows train nothing
        return None
    return sum(len(each.kept) * each.scale * passes for each, passes in found)


def _size(source: Source) -> float | None:
    """Return about how many rows one pass over a source has; None if it cannot tell."""
    try:
        found, scale = source.sample(FIRST_LOOK)
    except ValueError:
        return None
    return len(found) * scale


def _read_lane(config: LaneConfig, tally: Tally, lane: int, num_lanes: int, rows: int | None) -> Sizes:
    """Read a lane of the first epoch, or its first rows; return the sizes of its samples."""
    first = len(tally)
    for seen in islice(_lane_rows(config, lane, num_lanes), rows):
        tally.add(seen)
    return _sizes(tally.rows, slice(first, None))


def _sizes(rows: Rows, own: slice | npt.NDArray[np.intp]) -> Sizes:
    """Return the sizes of the samples that some rows make."""
    columns = [rows.kept] if rows.media is None else [rows.kept, rows.media]
    return [array("i", column[own][rows.kept[own] > 0].tobytes()) for column in columns]


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


def _in_order(rows: Rows, weights: Floats, config: LaneConfig) -> Sizes:
    """Return the sizes of as many samples as rows were read, by their weights, in an order like that of a run."""
    packed = np.flatnonzero(rows.kept)
    if not len(packed):
        return _sizes(rows, packed)
    ends = np.cumsum(weights[packed]) * (len(packed) / weights[packed].sum())
    drawn = np.repeat(packed, np.diff(np.floor(ends + 0.5).astype(np.int64), prepend=0))
    if config.shuffle_window:
        drawn = drawn[permutation(len(drawn), config.seed, 0)]
    else:  # the sources lie one behind another, and a run reads them side by side
        _, counts = np.unique(rows.source[drawn], return_counts=True)
        drawn = drawn[np.argsort(np.concatenate([np.arange(n) / n for n in counts]), kind="stable")]
    return _sizes(rows, drawn)
