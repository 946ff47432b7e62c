"""The lengths that an epoch packs: all of them by lanes, or a sample of them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import NamedTuple

from streampack.inspection.reading import (
    Counts,
    Progress,
    Tally,
    lane_rows,
    read_lanes,
)
from streampack.inspection.report import SourceShare
from streampack.sources.mixture import Mix
from streampack.sources.reading import permutation
from streampack.sources.source import Source
from streampack.streaming.lane_config import LaneConfig
from streampack.streaming.sampling import SampledSource, Seen, sample_source
from streampack.types import RowId

FIRST_LOOK = 256
"""Rows from which the number of rows of files is estimated, to see whether all of them are few enough."""
WHOLE = 1.5
"""A corpus with up to so many times the rows asked for is read whole: of rows drawn by bytes, many come twice."""


@dataclass(frozen=True)
class Epoch:
    """The lengths that an epoch packs.

    ``lanes`` holds for each lane the tokens that each sample keeps, in the order of reading; of a sample of the corpus,
    one list in an order that stands for that of a lane.
    """

    lanes: Sequence[array[int]]
    num_lanes: int
    exact: bool
    rows: float | None  # read in an epoch; None if it is unknown
    samples: float  # packed in an epoch
    tokens: float  # packed in an epoch, padding left out
    error: float  # relative standard error of ``tokens``


def read_epoch(
    config: LaneConfig, *, num_lanes: int, rows: int | None, progress: Progress
) -> tuple[Epoch, Tally, list[SourceShare]]:
    """Read an epoch, or about ``rows`` rows of it from all over the corpus; ``config`` is a `tolerant` one.

    A corpus with no more than ``WHOLE * rows`` rows is read as a whole. A mixture that never ends is read until
    each of its sources was read once.
    """
    if config.mix is not None and config.mix.stop == "never":
        config = replace(config, source=Mix(config.mix.entries, stop="all_exhausted"))
    tally = Tally(config.source, config.source.names)
    if rows is None or _has_at_most(config, rows):
        lanes = read_lanes(config, num_lanes, tally, progress=progress)
        epoch = Epoch(lanes, num_lanes, True, tally.rows, sum(map(len, lanes)), tally.kept, 0.0)
        return epoch, tally, _shares_read(config.mix, tally.by_source) if config.mix else []
    if config.mix is not None:
        return _sample_mixture(config, config.mix, num_lanes, rows, tally, progress)
    try:
        sampled = _sample(config, config.source, (), rows, tally, progress)
    except ValueError:  # a stream that does not know its length
        return _first_rows(config, num_lanes, rows, tally, progress), tally, []
    kept = _ordered(sampled.kept, config)
    epoch = Epoch(
        [kept],
        num_lanes,
        False,
        len(sampled.kept) * sampled.scale,
        len(kept) * sampled.scale,
        sum(kept) * sampled.scale,
        sampled.error,
    )
    return epoch, tally, []


def _sample(
    config: LaneConfig, source: Source, prefix: RowId, rows: int, tally: Tally, progress: Progress
) -> SampledSource:
    def see(seen: Seen) -> None:
        tally.add(seen)
        progress(tally.rows)

    return sample_source(config, source, prefix, rows, see=see)


def _has_at_most(config: LaneConfig, rows: int) -> bool:
    """Return whether a source has so few rows, as far as it can tell. A mixture may read a source many times."""
    if config.mix is not None:
        return False
    try:
        found, scale = config.source.sample(FIRST_LOOK)
    except ValueError:
        return False
    return len(found) * scale <= WHOLE * rows


def _first_rows(config: LaneConfig, num_lanes: int, rows: int, tally: Tally, progress: Progress) -> Epoch:
    """Read the first rows of a stream of unknown length; they stand for an epoch."""
    kept = array("i")
    for seen in islice(lane_rows(config, lane=0, num_lanes=1), rows):
        tally.add(seen)
        progress(tally.rows)
        if seen.kept:
            kept.append(seen.kept)
    return Epoch([kept], num_lanes, False, None, len(kept), sum(kept), 0.0)


def _ordered(kept: Sequence[int], config: LaneConfig) -> array[int]:
    """Return the lengths of rows that are kept, in an order like that of a run."""
    order = permutation(len(kept), config.seed).tolist() if config.shuffle_window else range(len(kept))
    return array("i", (kept[i] for i in order if kept[i]))


class _Pass(NamedTuple):
    """One pass over a source of a mixture."""

    rows: float
    samples: float
    tokens: float
    trained: float


def _sample_mixture(
    config: LaneConfig, mix: Mix, num_lanes: int, rows: int, tally: Tally, progress: Progress
) -> tuple[Epoch, Tally, list[SourceShare]]:
    """Read some rows of each source, and mix their lengths by the weights."""
    read = [number for number, entry in enumerate(mix.entries) if entry.weight]
    sampled, passes = {}, {}
    for number in read:
        source = mix.entries[number].source
        each = _sample(config, source, (number,), max(1, rows // len(read)), tally, progress)
        if not sum(each.trained):
            name = mix.entries[number].name
            raise ValueError(
                f"no token of source {name!r} is trained, in {len(each.kept):,} rows from all over it, so its weight "
                "cannot be reached; look at its labels, or leave it out"
            )
        sampled[number] = each
        samples = sum(1 for kept in each.kept if kept)
        counts = len(each.kept), samples, sum(each.kept), sum(each.trained)
        passes[number] = _Pass(*(count * each.scale for count in counts))
    ends = min if mix.stop == "first_exhausted" else max
    trained = ends(passes[number].trained / mix.entries[number].weight for number in read)
    times = {number: trained * mix.entries[number].weight / passes[number].trained for number in read}
    epoch = Epoch(
        [_mixed(sampled, {number: mix.entries[number].weight for number in read}, seed=config.seed)],
        num_lanes,
        False,
        sum(times[number] * passes[number].rows for number in read),
        sum(times[number] * passes[number].samples for number in read),
        sum(times[number] * passes[number].tokens for number in read),
        max(each.error for each in sampled.values()),
    )
    shares = []
    for number, entry in enumerate(mix.entries):
        one = passes.get(number, _Pass(0, 0, 0, 0))
        shares.append(
            SourceShare(
                name=entry.name,
                weight=entry.weight,
                rows=one.rows,
                tokens=one.tokens,
                trained=one.trained,
                fraction=times.get(number, 0.0) * one.trained / trained,
                passes=times.get(number, 0.0),
                passes_in_run=None,
            )
        )
    return epoch, tally, shares


def _mixed(sampled: Mapping[int, SampledSource], weights: Mapping[int, float], *, seed: int) -> array[int]:
    """Draw as many rows as were sampled, each from the source that is furthest behind its weight; return their lengths.

    >>> short = SampledSource(array("i", [2]), array("i", [2]), 2, 1.0, 0.0)
    >>> long = SampledSource(array("i", [6]), array("i", [6]), 6, 1.0, 0.0)
    >>> _mixed({0: short, 1: long}, {0: 0.25, 1: 0.75}, seed=0).tolist()
    [2, 6]
    """
    rows = {}
    for number, each in sampled.items():
        order = permutation(len(each.kept), seed, number).tolist()
        rows[number] = cycle([(each.kept[i], each.trained[i]) for i in order if each.kept[i]])
    own, drawn, trained = dict.fromkeys(sampled, 0), array("i"), 0
    for _ in range(sum(len(each.kept) for each in sampled.values())):
        number = max(sampled, key=lambda number: weights[number] * trained - own[number])
        kept, trains = next(rows[number])
        drawn.append(kept)
        own[number] += trains
        trained += trains
    return drawn


def _shares_read(mix: Mix, counts: Sequence[Counts]) -> list[SourceShare]:
    """Return the fractions that were read, and about how often each source was."""
    whole = max(1, sum(each.trained for each in counts))
    found = []
    for entry, each in zip(mix.entries, counts, strict=True):
        rows = _rows_of(entry.source, each.rows)
        times = each.rows / max(1.0, rows)
        found.append(
            SourceShare(
                name=entry.name,
                weight=entry.weight,
                rows=rows,
                tokens=each.tokens / max(times, 1e-9),
                trained=each.trained / max(times, 1e-9),
                fraction=each.trained / whole,
                passes=times,
                passes_in_run=None,
            )
        )
    return found


def _rows_of(source: Source, read: int) -> float:
    """Return how many rows one pass over a source has; those that were read if it cannot tell."""
    try:
        found, scale = source.sample(FIRST_LOOK)
    except ValueError:
        return read
    return len(found) * scale
