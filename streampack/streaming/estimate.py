"""The packs of an epoch: planned from the lengths of all of its rows, or estimated from a sample of them."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np

from streampack.packing.groups import attention_cost
from streampack.packing.planner import plan_samples
from streampack.packing.settings import Packing
from streampack.packing.strategies import PADDED
from streampack.sources import MapSource
from streampack.sources.bad_records import Quarantine
from streampack.sources.reading import Reading
from streampack.streaming.epoch_rows import Epoch, Sizes, Tally, ratio, read_lanes, read_sample
from streampack.streaming.first_look import Seen, tolerant
from streampack.streaming.lane_config import LaneConfig
from streampack.streaming.piece_reader import PieceReader
from streampack.types import IntArray

COUNTED_ROWS = 4096
COUNTED_TOKENS = 1 << 22
"""A source with no more rows and no more tokens is counted, a larger one is estimated from as many tokens at most."""
ENOUGH_PACKS, ENOUGH_PIECES = 200, 50_000
"""A sample with fewer packs is planned again and again, because its last packs are not full; up to so many pieces."""
BLOCKS = 10
"""Consecutive stretches of a sample's packs, from whose differences the standard error of the padding is taken."""


class Estimate(NamedTuple):
    """The packs of an epoch, before it is read."""

    packs: float
    error: float  # the standard error of ``packs``; 0 if they were counted
    samples: int  # how many rows were encoded for it
    lost: float  # fraction of their tokens that are truncated or dropped
    padding: float  # fraction of the packs' capacity; 0 with ``"padded"``, where it is that of batches
    long_samples: int  # of ``samples``, those too long for a pack
    cut: float  # fraction of the tokens that are truncated or dropped for that reason
    samples_per_pack: float

    @property
    def at_most(self) -> int:
        """The packs and two standard errors more, for schedules: one that ends too late is better than too early."""
        return max(1, math.ceil(self.packs + 2 * self.error))

    def losses(self, packing: Packing) -> str | None:
        """Return what ``overlong`` loses of the samples looked at; None for nothing."""
        if not self.cut:
            return None
        return (
            f"{self.long_samples:,} of {self.samples:,} samples looked at are too long for max_seq_len="
            f"{packing.max_seq_len}: overlong={packing.overlong} loses {self.cut:.1%} of the tokens"
        )


class TooLong(ValueError):
    """Samples are too long for a pack, and the run would stop at the first of them, by ``overlong="error"``."""


@dataclass(frozen=True)
class Plan:
    """The packs of some lanes."""

    held: IntArray  # [packs] tokens of each, padding left out
    pairs: IntArray  # [packs] cost of the attention
    lanes: tuple[int, ...]  # packs of each lane
    last: int  # padding in the last pack of each lane
    ends: int  # padding at the ends of sequences (`pad_seqs_to`)


def plan_lanes(lanes: Iterable[Sizes], packing: Packing, *, most: int | None = None) -> Plan:
    """Plan the packs of each lane, or its first ``most``, from the sizes of its samples.

    >>> plan = plan_lanes([[array("i", [5, 4, 2, 3, 4])]], Packing(8))
    >>> plan.held.tolist(), plan.lanes, plan.last
    ([8, 8, 2], (3,), 6)
    """
    held, pairs, counts, last, ends = array("q"), array("q"), [], 0, 0
    for lane in lanes:
        before = len(held)
        for pack in islice(plan_samples(zip(count(), *lane), packing), most):
            lengths = [stop - start for _, start, stop in pack]
            padded = [packing.padded(length) for length in lengths]
            held.append(sum(lengths))
            pairs.append(attention_cost(padded))
            ends += sum(padded) - held[-1]
        counts.append(len(held) - before)
        last += packing.max_seq_len - sum(padded) if counts[-1] else 0
    return Plan(np.array(held, np.int64), np.array(pairs, np.int64), tuple(counts), last, ends)


class PlannedEpoch(NamedTuple):
    """The packs of an epoch, counted, or scaled up from those of a sample."""

    plan: Plan  # of the rows that were looked at
    packs: float
    padding: float  # fraction of the packs' capacity
    error: float  # standard error of ``padding``; 0 if the packs were counted
    last: float  # padding in the last pack of each lane


def plan_epoch(epoch: Epoch, packing: Packing) -> PlannedEpoch:
    """Plan the packs of an epoch, or those of a sample, from which the numbers are scaled up."""
    width = packing.max_seq_len
    # A sample is planned as often as it takes for its end not to count, and each lane has a last pack that is half
    # empty. How full those of an epoch's lanes are is chance.
    again = 1 if epoch.exact else _times(epoch, packing)
    most = 2 * ENOUGH_PACKS if again > 1 else None
    plan = plan_lanes([[sizes * again for sizes in lane] for lane in epoch.lanes], packing, most=most)
    held = int(plan.held.sum())
    if epoch.exact:
        return PlannedEpoch(plan, len(plan.held), 1 - held / max(1, len(plan.held) * width), 0.0, plan.last)
    last = epoch.num_lanes * width / 2
    packs = (epoch.tokens / max(1, held) * (len(plan.held) * width - plan.last) + last) / width
    padding = 1 - epoch.tokens / max(1.0, packs * width)
    full = plan.held[:-1]
    differs = padding_error(full, np.full_like(full, width), unknown=padding, again=again)
    error = math.hypot(differs, math.sqrt(epoch.num_lanes / 12) / max(1.0, packs))
    return PlannedEpoch(plan, packs, padding, error, last)


def _times(epoch: Epoch, packing: Packing) -> int:
    """Return how often the rows of a sample are planned, one after another."""
    [[tokens, *_]] = epoch.lanes
    whole = max(1, sum(tokens))
    again = -(-ENOUGH_PACKS * packing.max_seq_len // whole)
    if packing.max_media is not None:
        # Pieces that fill only one of the budgets pile up in the buffer until a lane ends, so its end counts.
        again = min(again, round(epoch.tokens / max(1, epoch.num_lanes) / whole))
    return max(1, min(again, ENOUGH_PIECES // max(1, len(tokens))))


def padding_error(held: IntArray, widths: IntArray, *, unknown: float, again: int = 1) -> float:
    """Return the standard error of the padding, from the differences between parts of the rows of batches.

    The rows are those of a sample that was read so many times ``again``. Fewer than ten of them tell nothing, nor do
    parts that each hold more than half of the sample, and so hardly differ: the error is ``unknown`` then.
    """
    if len(held) < BLOCKS * again or again > BLOCKS / 2:
        return unknown
    parts = [np.array([part.sum() for part in np.array_split(each, BLOCKS)]) for each in (held, widths)]
    return ratio(*parts)[1] * math.sqrt(again)


def estimate(config: LaneConfig, *, rows: int, num_lanes: int = 1) -> Estimate:
    """Estimate an epoch from ``rows`` rows of each source; small sources are counted, in the order of epoch 0.

    Rows that the run skips are left out; where it skips none, what the encoder raises for a row is raised.

    Raises:
        TooLong: if samples are too long for a pack, and ``overlong`` is ``"error"``.
    """
    reading = replace(tolerant(config), quarantine=_one_epoch(config).quarantine)
    packing, long = reading.packing, list[Seen]()
    # What ``max_document_tokens`` leaves out is no matter of ``overlong``; giant texts have a length of 0.
    most = config.max_document_tokens or math.inf

    def see(row: Seen) -> None:
        if row.reason in ("overlong", "truncated") and 0 < row.length <= most:
            long.append(row)

    # Without an end, no lane has a last pack.
    lanes = 0 if config.endless else num_lanes
    epoch = read_sample(reading, Tally(reading, see), num_lanes=lanes, rows=rows, most_tokens=COUNTED_TOKENS)
    few = epoch.weights.sum() <= COUNTED_ROWS and epoch.weights @ epoch.rows.length <= COUNTED_TOKENS
    if few and config.mix is None and not config.endless:
        long.clear()
        epoch = read_lanes(reading, Tally(reading, see), num_lanes=num_lanes)
    looked_at, read = len(epoch.rows.length), max(1, int(epoch.rows.length.sum()))
    cut = sum(row.length - row.kept for row in long) / read
    if long and config.packing.overlong == "error":
        first = min(long)  # by `row_id`; they were looked at in another order
        raise TooLong(
            f"{len(long):,} of {looked_at:,} samples looked at are too long for max_seq_len={packing.max_seq_len}, "
            f"{cut:.1%} of the tokens, and the run would stop at the first of them: "
            f"{config.source.locate(first.row_id)} has {first.detail}; set overlong to 'truncate', 'drop' or "
            "'split', or raise max_seq_len"
        )
    if packing.strategy == PADDED:
        packs, padding = float(epoch.weights @ -(-epoch.rows.kept // packing.max_seq_len)), 0.0
    else:
        _, packs, padding, *_ = plan_epoch(epoch, packing)
    lost = 1 - int(epoch.rows.kept.sum()) / read
    error, each = packs * epoch.error, epoch.samples / max(1.0, packs)
    return Estimate(packs, error, looked_at, lost, padding, len(long), cut, each)


def _one_epoch(config: LaneConfig) -> LaneConfig:
    """Return the configuration of a pass before the run, which lists no bad records."""
    quiet = None if config.quarantine is None else Quarantine(limit=sys.maxsize, quiet=True)
    return replace(config, endless=False, quarantine=quiet)


def packed_lengths(config: LaneConfig, rows: range) -> list[int]:
    """Return how many tokens are packed of every n-th row of map-style data, 0 for rows that are dropped."""
    reader = PieceReader(replace(_one_epoch(config), shuffle_window=0), lane=rows.start, num_lanes=rows.step)
    reader.open(0)
    lengths = dict.fromkeys(rows, 0)
    for piece in iter(reader.next, None):
        lengths[piece.address.row_id[0]] += piece.length
    return list(lengths.values())


def count_packs(config: LaneConfig, lengths: list[int], *, epoch: int, lane: int, num_lanes: int) -> int:
    """Count the packs that one lane makes of an epoch of map-style data, whose `packed_lengths` are given.

    >>> from streampack.packing.settings import Packing
    >>> config = LaneConfig(MapSource([{"tokens": [1] * n} for n in (5, 4, 3)]), len, Packing(8))
    >>> count_packs(config, [5, 4, 3], epoch=0, lane=0, num_lanes=1)
    2
    """
    reading = Reading(
        lane, num_lanes=num_lanes, epoch=epoch, seed=config.seed, shuffle_window=config.shuffle_window
    )
    rows: Any = range(len(lengths))
    numbers = (row.row_id[0] for row in MapSource(rows).read(reading))
    kept = ((number, lengths[number]) for number in numbers if lengths[number])
    return sum(1 for _ in plan_samples(kept, config.packing))
