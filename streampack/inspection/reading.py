"""Rows of a corpus as samples with their lengths, read as a run reads them, or a sample of them from all over it."""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from streampack.sources.bad_records import kind_of
from streampack.sources.reading import BadRecord, Reading
from streampack.sources.source import Source
from streampack.streaming.lane_config import LaneConfig
from streampack.streaming.sampling import Seen, look
from streampack.types import RowId

EXAMPLES_OF_A_LOSS = 3
LONGEST = 5
Progress = Callable[[int], None]
"""Called with the number of rows read so far."""


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
