"""The packs of an epoch: planned from the lengths of all of its rows, or estimated from a sample of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from streampack.lanes.lane_config import LaneConfig
from streampack.packing.planner import plan_samples
from streampack.packing.settings import Packing
from streampack.packing.strategies import PADDED
from streampack.streaming.epoch_rows import Epoch, Seen, ratio, read_lanes, read_sample, tolerant
from streampack.types import IntArray

COUNTED_ROWS = 4096
COUNTED_TOKENS = 1 << 22
"""A source with no more rows and no more tokens is counted, a larger one is estimated from as many tokens at most."""
FEW_PACKS = 10
"""A sample with fewer packs says nothing about the error of their padding."""

Packs = Any
"""A numpy record array with one record for each pack. Its columns are those of `COLUMNS`."""
COLUMNS = np.dtype(
    [
        ("lane", "i4"),
        ("held", "i8"),  # tokens, without padding
        ("used", "i8"),  # tokens and the padding at the ends of sequences (`pad_seqs_to`)
    ]
)


class PlannedEpoch(NamedTuple):
    """The packs of an epoch: counted, or scaled up from those of a sample."""

    packs: Packs  # of the rows that were read
    number: float
    padding: float  # fraction of the packs' capacity
    error: float  # standard error of ``padding``; 0 if the packs were counted
    last: float  # tokens of padding in the last pack of each lane


def plan_lanes(lanes: Iterable[Sequence[Iterable[int]]], packing: Packing) -> Packs:
    """Plan the packs of each lane from the sizes of its samples: their tokens, with ``max_media`` also their media.

    >>> plan_lanes([[[5, 4, 2, 3, 4]]], Packing(8)).held.tolist()
    [8, 8, 2]
    """

    def records() -> Iterator[tuple[int, ...]]:
        for lane, sizes in enumerate(lanes):
            for pack in plan_samples(zip(count(), *sizes, strict=False), packing):
                lengths = [span.length for span in pack]
                yield lane, sum(lengths), sum(map(packing.padded, lengths))

    return np.fromiter(records(), COLUMNS).view(np.recarray)


def plan_epoch(epoch: Epoch, packing: Packing, *, seed: int) -> PlannedEpoch:
    """Plan the packs of an epoch. Those of a sample are scaled up."""
    width = packing.max_seq_len
    lanes, times = epoch.lanes(packing, seed=seed)
    packs = plan_lanes(lanes, packing)
    ends = np.flatnonzero(np.diff(packs.lane, append=-1))
    last = float(width * len(ends) - packs.used[ends].sum())
    held = max(1, int(packs.held.sum()))
    if epoch.exact:
        return PlannedEpoch(packs, len(packs), 1 - held / max(1, len(packs) * width), 0.0, last)
    # On average, the last pack of each lane is half empty.
    half = epoch.num_lanes * width / 2
    number = (epoch.tokens / held * (len(packs) * width - last) + half) / width
    padding = 1 - epoch.tokens / max(1.0, number * width)
    full = packs.held[:-1]
    error = padding_error(full, np.full_like(full, width), times=times, unknown=padding)
    of_ends = math.sqrt(epoch.num_lanes / 12) / max(1.0, number)
    return PlannedEpoch(packs, number, padding, math.hypot(error, of_ends), half)


def padding_error(held: IntArray, widths: IntArray, *, times: float, unknown: float) -> float:
    """Return the standard error of the padding in packs of a sample whose rows were repeated ``times`` times."""
    if len(held) < FEW_PACKS * times:
        return unknown
    return ratio(held, widths)[1] * math.sqrt(times)


class Estimate(NamedTuple):
    """The packs of an epoch, before it is read."""

    packs: float
    error: float  # the standard error of ``packs``; 0 if they were counted
    samples: int  # how many rows were encoded for it
    padding: float  # fraction of the packs' capacity; 0 with ``"padded"``, where it is that of batches
    long_samples: int  # of ``samples``, those too long for a pack
    cut: float  # fraction of the tokens that are cut off or dropped for that reason
    samples_per_pack: float

    @property
    def at_most(self) -> int:
        """The packs and two standard errors more, for schedules: one that ends too late is better than too early."""
        return max(1, math.ceil(self.packs + 2 * self.error))

    def step(self, packing: Packing, packs: int) -> str:
        """Describe an optimizer step of ``packs`` packs."""
        if packing.strategy == PADDED:
            return f"{packs:,} samples, each padded to the longest of its batch"
        samples = self.samples_per_pack
        return (
            f"{packs:,} pack{'s' * (packs > 1)} of about {samples:.1f} samples: {packs * samples:,.0f} samples in up "
            f"to {packs * packing.max_seq_len:,} tokens"
        )

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


def estimate(config: LaneConfig, *, rows: int, num_lanes: int = 1) -> Estimate:
    """Estimate an epoch from ``rows`` rows of each source; small sources are counted, in the order of epoch 0.

    Rows that the run skips are skipped. If it skips none, an error of the encoder is raised.

    Raises:
        TooLong: if samples are too long for a pack, and ``overlong`` is ``"error"``.
    """
    reading = tolerant(config)
    if config.quarantine is None:
        reading = replace(reading, quarantine=None)
    packing, long = reading.packing, list[Seen]()
    # Samples above ``max_document_tokens`` are dropped whatever ``overlong`` is. Giant texts have a length of 0.
    most = config.max_document_tokens or math.inf

    def see(row: Seen) -> None:
        if row.reason in ("overlong", "truncated") and 0 < row.length <= most:
            long.append(row)

    # Without an end, no lane has a last pack.
    lanes = 0 if config.endless else num_lanes
    epoch = read_sample(reading, num_lanes=lanes, rows=rows, most_tokens=COUNTED_TOKENS, see=see)
    few = epoch.weights.sum() <= COUNTED_ROWS and epoch.weights @ epoch.rows.length <= COUNTED_TOKENS
    if few and config.mix is None and not config.endless:
        long.clear()
        epoch = read_lanes(reading, num_lanes=num_lanes, see=see)
    looked_at, read = len(epoch.rows), max(1, int(epoch.rows.length.sum()))
    cut = sum(row.length - row.kept for row in long) / read
    if long and config.packing.overlong == "error":
        first = min(long)  # by `row_id`; they were read in another order
        raise TooLong(
            f"{len(long):,} of {looked_at:,} samples looked at are too long for max_seq_len={packing.max_seq_len}, "
            f"{cut:.1%} of the tokens, and the run would stop at the first of them: "
            f"{config.source.locate(first.row_id)} has {first.detail}; set overlong to 'truncate', 'drop' or "
            "'split', or raise max_seq_len"
        )
    if packing.strategy == PADDED:
        pieces = -(-epoch.rows.kept // packing.max_seq_len)
        packs, padding, error = float(epoch.weights @ pieces), 0.0, epoch.relative_error(pieces)
    else:
        _, packs, padding, *_ = plan_epoch(epoch, packing, seed=config.seed)
        error = epoch.relative_error(epoch.rows.kept)
    per_pack = epoch.samples / max(1.0, packs)
    return Estimate(packs, packs * error, looked_at, padding, len(long), cut, per_pack)
