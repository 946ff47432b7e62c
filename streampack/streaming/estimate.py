"""Counts and estimates of an epoch's packs, before the epoch is read."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any, NamedTuple

from streampack.accounting import Ledger, trained_tokens
from streampack.packing.planner import plan_samples
from streampack.packing.samples import check_ids, sample_from_row
from streampack.packing.settings import Packing
from streampack.sources import MapSource
from streampack.sources.bad_records import Quarantine
from streampack.sources.mixture import Mix
from streampack.sources.reading import Reading, permutation
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
SIMULATED_PACKS, SIMULATED_PIECES = 200, 50_000
"""About so many packs are planned from the sampled lengths, to find how full the strategy makes them, and of about so
many pieces at most."""


class Estimate(NamedTuple):
    """The packs of an epoch, before it is read."""

    packs: float
    error: float  # the standard error of ``packs``; 0 if they were counted
    samples: int  # how many rows were encoded for it
    lost: float  # fraction of their tokens that are truncated or dropped
    padding: float  # fraction of the packs' capacity

    @property
    def at_most(self) -> int:
        """The packs and two standard errors more, for schedules: one that ends too late is better than too early."""
        return max(1, math.ceil(self.packs + 2 * self.error))


class _Sampled(NamedTuple):
    """Some rows of a source, encoded and cut."""

    rows: int
    lengths: list[int]  # of their pieces
    read: int  # tokens of these rows
    trained: int  # of the pieces
    scale: float  # how many times as large the source is
    error: float  # relative standard error of the source's tokens

    @property
    def tokens(self) -> int:
        """Tokens of the pieces."""
        return sum(self.lengths)

    @property
    def is_small(self) -> bool:
        """Whether the source is counted."""
        return self.rows * self.scale <= COUNTED_ROWS and self.read * self.scale <= COUNTED_TOKENS


def estimate(config: LaneConfig, *, rows: int, num_lanes: int = 1) -> Estimate:
    """Estimate an epoch from ``rows`` rows of each source; small sources are counted, in the order of epoch 0.

    Rows that the run skips are left out.
    """
    packing, mix = config.packing, config.mix
    if mix is None:
        first = _sample(config, config.source, config.encode, rows)
        sampled, tokens = [first], first.tokens * first.scale
    else:
        sampled, tokens = _sample_mixture(config, mix, rows)
    looked_at = sum(each.rows for each in sampled)
    lost = 1 - sum(each.tokens for each in sampled) / max(1, sum(each.read for each in sampled))
    if mix is None and not config.endless and first.is_small:
        counted = _count(config, num_lanes)
        return Estimate(counted.packs, 0.0, looked_at, lost, counted.padding)
    fill = _fill([length for each in sampled for length in each.lengths], packing)
    full = tokens / (packing.max_seq_len * fill)
    # The last pack of each lane is half empty on average.
    packs = full + (0 if config.endless else num_lanes / 2)
    error = packs * max(each.error for each in sampled)
    return Estimate(packs, error, looked_at, lost, 1 - fill * full / packs if packs else 0.0)


def _sample(config: LaneConfig, source: Source, encode: Encode, rows: int) -> _Sampled:
    """Encode some rows from all over a source."""
    packing = config.packing
    found, scale = source.sample(rows)
    data = [row.data for row in found if row.data is not None]
    lengths: list[int] = []
    kept: list[int] = []  # tokens of each row
    sizes: list[int] = []
    read = trained = 0
    for number in permutation(len(data), rows).tolist():
        if len(kept) >= ENOUGH_ROWS and read > COUNTED_TOKENS:
            break
        pieces: list[Sample] = []
        try:
            sample = sample_from_row(encode(data[number]))
            check_ids([sample], config.vocab_size)
        except Exception:
            if config.quarantine is None:
                raise
        else:
            length = sample.tokens.size
            read += length
            if length and (length <= packing.max_seq_len or packing.overlong != "error"):
                pieces = [piece for _, piece in config.cut(sample)]
        of_row = sum(map(trained_tokens, pieces))
        if config.untrained == "drop" and not of_row:
            pieces = []
        trained += of_row
        lengths += [piece.tokens.size for piece in pieces]
        kept.append(sum(piece.tokens.size for piece in pieces))
        # The size of a corpus of files is known in bytes, so the error is that of tokens per byte.
        sizes.append(len(str(dict(data[number]))) if source.probed_by_bytes else 1)
    scale *= len(data) / max(1, len(kept))
    return _Sampled(len(kept), lengths, read, trained, scale, relative_error(kept, sizes, scale))


def _sample_mixture(config: LaneConfig, mix: Mix, rows: int) -> tuple[list[_Sampled], float]:
    """Encode some rows of each source; return the number of tokens in one epoch of the mixture, too."""
    if mix.stop == "never":
        raise ValueError("a mixture with stop='never' has no end; set max_steps")
    found = []
    for entry in [entry for entry in mix.entries if entry.weight]:
        each = _sample(config, entry.source, entry.encoder or config.encode, rows)
        if not each.trained:
            raise ValueError(f"no token of source {entry.name!r} is trained, as far as a sample tells")
        found.append((entry.weight, each))
    # How many tokens of the whole mixture are trained when a source has been read once.
    ends = min if mix.stop == "first_exhausted" else max
    trained = ends(each.trained * each.scale / weight for weight, each in found)
    tokens = sum(trained * weight * each.tokens / each.trained for weight, each in found)
    return [each for _, each in found], tokens


def _fill(lengths: Sequence[int], packing: Packing) -> float:
    """Return how full the strategy makes packs of such pieces, 0 to 1: the first packs of an endless stream of them."""
    if not lengths:
        return 1.0
    orders = (permutation(len(lengths), turn).tolist() for turn in count())
    pieces = enumerate(lengths[i] for order in orders for i in order)
    packs = tokens = 0
    for pack in islice(plan_samples(pieces, packing), SIMULATED_PACKS):
        packs += 1
        tokens += sum(span.length for span in pack)
        if pack[-1].index > SIMULATED_PIECES:
            break
    return tokens / (packs * packing.max_seq_len)


def relative_error(tokens: Sequence[int], sizes: Sequence[int], scale: float) -> float:
    """Return the standard error of a source's tokens, as a fraction of them.

    Args:
        tokens: of some rows.
        sizes: of the rows, or 1 each: tokens are taken to grow with them.
        scale: how many times as large the source is; with 1, it was read as a whole, and there is no error.
    """
    count, total = len(tokens), sum(tokens)
    if count < 2 or not total:
        return 0.0
    ratio = total / max(1, sum(sizes))
    variance = sum((t - ratio * s) ** 2 for t, s in zip(tokens, sizes, strict=True)) / (count - 1)
    return math.sqrt(variance * max(0.0, 1 - 1 / max(1.0, scale)) / count) / (total / count)


def _count(config: LaneConfig, num_lanes: int) -> Ledger:
    """Make all packs of an epoch; return what was counted."""
    config = _one_epoch(config)
    lanes = [Lane(config, lane=lane, num_lanes=num_lanes) for lane in range(num_lanes)]
    for lane in lanes:
        while not lane.done:
            lane.next_event()
    return Ledger.total(lane.ledger for lane in lanes)


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
