"""Counts and estimates of an epoch's packs, and of what truncation costs, before the epoch is read."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count, islice
from typing import Any, NamedTuple

from streampack.accounting import Ledger, trained_tokens
from streampack.packing.planner import plan_samples
from streampack.packing.samples import check_sample, sample_from_encoded
from streampack.sources import MapSource
from streampack.sources.bad_records import Quarantine
from streampack.sources.base import Reading, permutation
from streampack.sources.mixture import Mix
from streampack.sources.source import Source
from streampack.streaming.lane import Lane
from streampack.streaming.lane_config import Encode, LaneConfig
from streampack.streaming.piece_reader import PieceReader
from streampack.types import Sample

COUNTED_ROWS = 4096
COUNTED_TOKENS = 1 << 22
"""A source with no more rows and no more tokens is counted, a larger one is estimated."""
ENOUGH_ROWS = 64
"""Once so many rows with `COUNTED_TOKENS` tokens are encoded, the estimate takes no more."""
SIMULATED_PACKS = 100
"""About so many packs are planned from the sampled lengths, to find how full the strategy makes them."""
ENDLESS_PACKS, ENDLESS_PIECES = 400, 50_000
"""So many packs of a stream without end are planned at most, of about so many pieces."""


class Estimate(NamedTuple):
    """An epoch's packs, and what it truncates or drops, before it is read."""

    packs: float
    error: float  # the standard error of ``packs``; 0 if they were counted
    samples: int  # how many samples were encoded; the fractions below are of these
    longer: float  # fraction of the samples that are longer than max_seq_len
    cut: float  # fraction of the tokens that are truncated or dropped
    cut_trained: float  # fraction of the trained tokens that are truncated or dropped
    untrained: float  # fraction of the samples that train nothing, before or after truncation
    padding: float  # fraction of the packs' capacity

    @property
    def at_most(self) -> int:
        """The packs and two standard errors more, for schedules: one that ends too late is better than too early."""
        return max(1, math.ceil(self.packs + 2 * self.error))


def estimate(config: LaneConfig, *, rows: int, num_lanes: int = 1) -> Estimate:
    """Estimate an epoch from ``rows`` rows of each source; small sources are counted, in the order of epoch 0.

    Rows that the run skips are left out.

    Raises:
        ValueError: if a source cannot tell its size, or an epoch has no end. What the encoder raises for a row is
            raised, unless ``on_bad_record="skip"``.
    """
    seen = _Seen(config)

    def tokens_of(source: Source, encoder: Encode | None) -> tuple[float, float]:
        """Return the tokens of a source read once, and how many of them are trained."""
        return seen.look(source, config.encode if encoder is None else encoder, rows)

    if config.mix is not None:
        tokens = _mixture_tokens(config.mix, tokens_of)
    else:
        tokens, _ = tokens_of(config.source, None)
    if config.mix is None and seen.rows_in_all <= COUNTED_ROWS and seen.tokens_in_all <= COUNTED_TOKENS:
        ledger = _count(config, num_lanes)
        padding = seen.padding() if config.endless else ledger.padding
        return seen.estimate(ledger.packs, error=0.0, padding=padding)
    # The last pack of each lane is half empty on average.
    fill = seen.fill()
    full = tokens / (config.packing.max_seq_len * fill)
    packs = full + num_lanes / 2
    padding = seen.padding() if config.endless else 1 - fill * full / packs
    return seen.estimate(packs, error=packs * seen.relative_error, padding=padding)


def _mixture_tokens(mix: Mix, tokens_of: Callable[[Source, Encode | None], tuple[float, float]]) -> float:
    """Return the number of tokens in one epoch of a mixture.

    Args:
        mix: a mixture.
        tokens_of: returns the tokens of one pass over a source and how many of them are trained, given the source and
            its encoder.

    Raises:
        ValueError: if the mixture never ends, or a source trains nothing.
    """
    if mix.stop == "never":
        raise ValueError("a mixture with stop='never' has no end; set max_steps")
    # For each source: its tokens per trained token, and how many tokens of the whole mixture are trained when this
    # source has been read once.
    found = []
    read = [entry for entry in mix.entries if entry.weight]
    for entry in read:
        tokens, trained = tokens_of(entry.source, entry.encoder)
        if not trained:
            raise ValueError(f"no token of source {entry.name!r} is trained, as far as a sample tells")
        found.append((tokens / trained, trained / entry.weight))
    ends = min if mix.stop == "first_exhausted" else max
    all_trained = ends(size for _, size in found)
    return sum(
        all_trained * entry.weight * per_trained for entry, (per_trained, _) in zip(read, found, strict=True)
    )


def _count(config: LaneConfig, num_lanes: int) -> Ledger:
    """Make all packs of an epoch; return what was counted."""
    config = _one_epoch(config)
    lanes = [Lane(config, lane=lane, num_lanes=num_lanes) for lane in range(num_lanes)]
    for lane in lanes:
        for _ in iter(lane.next_pack, None):
            pass
    return Ledger.total(lane.ledger for lane in lanes)


def _one_epoch(config: LaneConfig) -> LaneConfig:
    """Return the configuration of a pass before the run, which lists no bad records."""
    quiet = (
        None
        if config.quarantine is None
        else Quarantine(limit=sys.maxsize, shard_limit=sys.maxsize, quiet=True)
    )
    return replace(config, endless=False, quarantine=quiet)


def packed_lengths(config: LaneConfig, rows: range) -> list[int]:
    """Encode every n-th row of map-style data; return how many tokens of each are packed, 0 for rows that are dropped.

    Args:
        config: of a stream of map-style data.
        rows: the numbers of the rows, up to the end of the data.

    Raises:
        ValueError: for a row that the run does not take, with its place.
    """
    reader = PieceReader(replace(_one_epoch(config), shuffle_window=0), lane=rows.start, num_lanes=rows.step)
    reader.open(0)
    lengths = dict.fromkeys(rows, 0)
    for piece in iter(reader.next, None):
        lengths[piece.address.row_id[0]] += piece.length
    return list(lengths.values())


def count_packs(config: LaneConfig, lengths: list[int], *, epoch: int, lane: int, num_lanes: int) -> int:
    """Count the packs that one lane makes of an epoch of map-style data, by planning it.

    >>> from streampack.packing.settings import Packing
    >>> config = LaneConfig(MapSource([{"tokens": [1] * n} for n in (5, 4, 3)]), len, Packing(8))
    >>> count_packs(config, [5, 4, 3], epoch=0, lane=0, num_lanes=1)
    2

    Args:
        config: of a stream of map-style data.
        lengths: of all its rows, as `packed_lengths` gives them.
        epoch: from 0; it decides the order when shuffling.
        lane: from 0.
        num_lanes: the number of lanes.
    """
    reading = Reading(
        lane, num_lanes=num_lanes, epoch=epoch, seed=config.seed, shuffle_window=config.shuffle_window
    )
    rows: Any = range(len(lengths))
    numbers = (row.row_id[0] for row in MapSource(rows).read(reading))
    kept = ((number, lengths[number]) for number in numbers if lengths[number])
    return sum(1 for _ in plan_samples(kept, config.packing))


class _Seen:
    """Counts over the rows that were encoded for an estimate."""

    def __init__(self, config: LaneConfig) -> None:
        self.config = config
        self.kept: list[int] = []  # the length of each piece
        self.samples = self.longer = self.untrained = 0
        self.tokens = self.trained = self.lost = self.lost_trained = 0
        self.rows_in_all = self.tokens_in_all = 0.0
        self.relative_error = 0.0  # the largest of all sources

    def look(self, source: Source, encode: Encode, rows: int) -> tuple[float, float]:
        """Encode some rows of a source; return estimates of its tokens that are packed, and of those trained."""
        found, scale = source.probe(rows)
        sampled = [row.data for row in found if row.data is not None]
        sizes: list[int] = []
        lengths: list[int] = []
        trained, before = 0, self.tokens
        for number in permutation(len(sampled), rows).tolist():
            if len(lengths) >= ENOUGH_ROWS and self.tokens - before > COUNTED_TOKENS:
                break
            row = sampled[number]
            try:
                sample = sample_from_encoded(encode(row))
                check_sample(sample, self.config.vocab_size)
            except Exception:
                if self.config.quarantine is None:
                    raise
                length = trains = 0
            else:
                length, trains = self._add(sample)
            sizes.append(len(str(dict(row))))  # about the bytes of the row in a file
            lengths.append(length)
            trained += trains
        scale *= len(sampled) / max(1, len(lengths))
        self.rows_in_all += scale * len(lengths)
        self.tokens_in_all += scale * (self.tokens - before)
        self.relative_error = max(self.relative_error, _relative_error(source, lengths, sizes, scale))
        return sum(lengths) * scale, trained * scale

    def _add(self, sample: Sample) -> tuple[int, int]:
        """Count a sample; return how many of its tokens are packed, and how many of those are trained."""
        packing, length = self.config.packing, sample.tokens.size
        if not length:
            return 0, 0
        self.samples += 1
        self.tokens += length
        wanted = trained_tokens(sample)
        self.trained += wanted
        self.longer += length > packing.max_seq_len
        if length > packing.max_seq_len and packing.overlong == "error":
            return 0, 0
        pieces = [piece for _, piece in self.config.cut(sample)]
        trains = sum(map(trained_tokens, pieces))
        self.untrained += bool(pieces) and not trains
        if not trains and self.config.untrained == "drop":
            pieces = []
        tokens = [piece.tokens.size for piece in pieces]
        self.kept += tokens
        self.lost += length - sum(tokens)
        if packing.overlong in ("truncate", "drop"):
            self.lost_trained += wanted - trains
        return sum(tokens), trains

    def fill(self) -> float:
        """Return how full the strategy makes packs of such samples, 0 to 1, by planning some."""
        packing = self.config.packing
        tokens = sum(self.kept)
        if not tokens:
            return 1.0
        again = math.ceil(SIMULATED_PACKS * packing.max_seq_len / tokens)
        lengths = [self.kept[i] for turn in range(again) for i in permutation(len(self.kept), turn).tolist()]
        packs = sum(1 for _ in plan_samples(enumerate(lengths), packing))
        return min(1.0, tokens * again / ((packs - 0.5) * packing.max_seq_len))

    def padding(self) -> float:
        """Return the padding of a stream of such samples without end, which has no part-empty last packs."""
        packing = self.config.packing
        if not self.kept:
            return 0.0
        again = (permutation(len(self.kept), turn).tolist() for turn in count())
        numbered = enumerate(self.kept[i] for order in again for i in order)
        packs = tokens = 0
        for pack in islice(plan_samples(numbered, packing), ENDLESS_PACKS):
            packs += 1
            tokens += sum(span.stop - span.start for span in pack)
            if pack[-1].index > ENDLESS_PIECES:
                break
        return 1 - tokens / (packs * packing.max_seq_len)

    def estimate(self, packs: float, *, error: float, padding: float) -> Estimate:
        """Return an estimate with these packs and the counts so far."""
        return Estimate(
            packs,
            error,
            self.samples,
            self.longer / max(1, self.samples),
            self.lost / max(1, self.tokens),
            self.lost_trained / max(1, self.trained),
            self.untrained / max(1, self.samples),
            padding,
        )


def _relative_error(source: Source, lengths: list[int], sizes: list[int], scale: float) -> float:
    """Return the standard error of a source's tokens, as a fraction of them."""
    count, total = len(lengths), sum(lengths)
    if count < 2 or not total:
        return 0.0
    expected = [total / count] * count
    if source.probed_by_bytes:  # the corpus's size is known in bytes, so the error is that of tokens per byte
        expected = [total / max(1, sum(sizes)) * size for size in sizes]
    variance = sum((length - mean) ** 2 for length, mean in zip(lengths, expected, strict=True)) / (count - 1)
    left = max(0.0, 1 - 1 / max(1.0, scale))  # 0 for a source that was read as a whole
    return math.sqrt(variance * left / count) / (total / count)
