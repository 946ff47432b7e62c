"""Rows of a corpus as samples with their lengths, read as a run reads them, or a sample of them from all over it."""

from __future__ import annotations

import heapq
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from streampack.accounting import trained_tokens
from streampack.sources.bad_records import Quarantine, kind_of
from streampack.sources.reading import BadRecord, Reading
from streampack.sources.source import Source
from streampack.streaming.estimate import relative_error
from streampack.streaming.lane_config import LaneConfig
from streampack.types import Row, RowId, Sample

EXAMPLES_OF_A_LOSS = 3
LONGEST = 5
Progress = Callable[[int], None]
"""Called with the number of rows read so far."""


class Seen(NamedTuple):
    """The result of reading one row: its lengths and trained tokens, or why it was dropped."""

    row_id: RowId
    length: int  # tokens of the whole sample
    trained: int
    kept: int  # tokens of its pieces
    kept_trained: int
    reason: str | None  # one of DROP_REASONS
    detail: str


def tolerant(config: LaneConfig) -> LaneConfig:
    """Return a configuration that drops what would stop the run, so that it can be counted."""
    packing = config.packing
    return replace(
        config,
        endless=False,
        untrained="drop" if config.untrained == "error" else config.untrained,
        packing=replace(packing, overlong="drop") if packing.overlong == "error" else packing,
        quarantine=Quarantine(limit=sys.maxsize, quiet=True),
    )


def stops(config: LaneConfig) -> set[str]:
    """Return the reasons of `Seen` at which a run with this configuration stops."""
    return {
        reason
        for reason, error in (
            ("overlong", config.packing.overlong == "error"),
            ("untrained", config.untrained == "error"),
            ("bad", config.quarantine is None),
        )
        if error
    }


def look(config: LaneConfig, row: Row) -> tuple[Seen, list[Sample]]:
    """Encode and cut a row as a lane of a `tolerant` configuration does; return its counts and its pieces."""
    sample = config.sample(row)
    if isinstance(sample, str):
        return Seen(row.row_id, 0, 0, 0, 0, "bad", sample), []
    length = sample.tokens.size
    trained = trained_tokens(sample)
    pieces = [piece for _, piece in config.cut(sample)]
    kept = sum(piece.tokens.size for piece in pieces)
    kept_trained = sum(map(trained_tokens, pieces)) if kept < length or len(pieces) > 1 else trained
    reason, detail = None, ""
    if pieces and not kept_trained and config.untrained == "drop":
        pieces, kept, reason, detail = [], 0, "untrained", "no token is trained"
    elif not pieces:
        reason, detail = "overlong", f"{length:,} tokens"
    elif kept < length:
        reason, detail = "truncated", f"{length:,} tokens, {trained - kept_trained:,} trained ones cut off"
    return Seen(row.row_id, length, trained, kept, kept_trained, reason, detail), pieces


def lane_rows(config: LaneConfig, *, lane: int, num_lanes: int) -> Iterator[Seen]:
    """Yield the rows of a lane in its first epoch, in the order of a run."""
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
            reader.skip()
            continue
        if row is None:
            return
        seen, pieces = look(config, row)
        yield seen
        reader.charge(pieces)


@dataclass
class Counts:
    """Rows, tokens and trained tokens of one source."""

    rows: int = 0
    tokens: int = 0  # kept
    trained: int = 0  # kept


@dataclass
class Tally:
    """Counts over all rows read. Of each row it keeps its length, 4 bytes, and nothing else that grows."""

    source: Source
    names: list[str]
    whole: array[int] = field(
        default_factory=lambda: array("i")
    )  # lengths of samples, in the order of reading
    trained: int = 0
    kept: int = 0
    kept_trained: int = 0
    untrained: int = 0  # samples of which nothing is trained
    losses: dict[str, list[int]] = field(
        default_factory=dict
    )  # reason -> [rows, tokens, sum of squared tokens]
    examples: dict[str, list[str]] = field(default_factory=dict)
    bad_kinds: Counter[str] = field(
        default_factory=Counter
    )  # rows by what is bad in them; an example of each
    longest: list[tuple[int, int, RowId]] = field(default_factory=list)  # a heap of (length, trained, row_id)
    rows: int = 0
    by_source: list[Counts] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.by_source = [Counts() for _ in self.names]

    def add(self, seen: Seen) -> None:
        """Count a row."""
        self.rows += 1
        if seen.reason != "bad":
            self.whole.append(seen.length)
        self.trained += seen.trained
        self.kept += seen.kept
        self.kept_trained += seen.kept_trained
        untrained = bool(seen.length) and not (seen.kept_trained if seen.kept else seen.trained)
        self.untrained += untrained
        if self.names:
            counts = self.by_source[self.source.source_index(seen.row_id)]
            counts.rows += 1
            counts.tokens += seen.kept
            counts.trained += seen.kept_trained
        if (seen.length, seen.trained, seen.row_id) not in self.longest:  # a mixture reads rows again
            push = heapq.heappush if len(self.longest) < LONGEST else heapq.heappushpop
            push(self.longest, (seen.length, seen.trained, seen.row_id))
        reason = seen.reason
        if reason:
            lost = seen.length - seen.kept
            counted = self.losses.setdefault(reason, [0, 0, 0])
            for i, number in enumerate((1, lost, lost * lost)):
                counted[i] += number
            self._exemplify(reason, seen.row_id, seen.detail)
        if untrained and reason != "untrained":
            self._exemplify("untrained", seen.row_id, "no token is trained")

    def _exemplify(self, reason: str, row_id: RowId, detail: str) -> None:
        examples = self.examples.setdefault(reason, [])
        if reason == "bad":
            self.bad_kinds[kind := kind_of(detail)] += 1
            if self.bad_kinds[kind] > 1:
                return
        if len(examples) < EXAMPLES_OF_A_LOSS:
            examples.append(f"{self.source.locate(row_id)}: {detail}")


def read_lanes(config: LaneConfig, num_lanes: int, tally: Tally, *, progress: Progress) -> list[array[int]]:
    """Read all rows of an epoch; return for each lane how many tokens each sample keeps, in the order of the run."""
    lanes = []
    for lane in range(num_lanes):
        kept = array("i")
        for seen in lane_rows(config, lane=lane, num_lanes=num_lanes):
            tally.add(seen)
            progress(tally.rows)
            if seen.kept:
                kept.append(seen.kept)
        lanes.append(kept)
    return lanes


class SampledSource(NamedTuple):
    """A sample of a source's rows."""

    kept: array[int]  # tokens that each row keeps, 0 if it is dropped
    trained: array[int]  # of those
    scale: float  # how many times as large the source is
    error: float  # relative standard error of its tokens


def sample_source(
    config: LaneConfig, source: Source, prefix: RowId, rows: int, tally: Tally, *, progress: Progress
) -> SampledSource:
    """Read about ``rows`` rows from all over a source, whose row ids begin with ``prefix`` in a mixture.

    Raises:
        ValueError: if the source cannot tell its size.
    """
    found, scale = source.sample(rows)
    kept, trained, sizes = array("i"), array("i"), array("i")
    for example in found:
        row_id = (*prefix, *example.row_id)
        if example.data is None:
            seen = Seen(row_id, 0, 0, 0, 0, "bad", "it cannot be read")
        else:
            seen, _ = look(config, Row(example.data, (), row_id))
        tally.add(seen)
        progress(tally.rows)
        kept.append(seen.kept)
        trained.append(seen.kept_trained)
        sizes.append(_stored(example.data) if source.probed_by_bytes else 1)
    return SampledSource(kept, trained, scale, relative_error(kept, sizes, scale))


def _stored(data: Mapping[str, Any] | None) -> int:
    return len(str(dict(data or {})))
