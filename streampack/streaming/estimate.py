"""Samples of some rows from all over a corpus; counts and estimates of an epoch's packs, before the epoch is read."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any, NamedTuple

from streampack.accounting import Ledger, trained_tokens
from streampack.packing.groups import Group, lacks_training
from streampack.packing.media import MediaSample
from streampack.packing.planner import plan_samples
from streampack.packing.settings import Packing
from streampack.packing.strategies import PADDED
from streampack.sources import MapSource
from streampack.sources.bad_records import Quarantine
from streampack.sources.reading import Reading, permutation
from streampack.sources.source import Source
from streampack.streaming.lane import Lane
from streampack.streaming.lane_config import CHARACTERS_OF_A_TOKEN, GIANT, LaneConfig
from streampack.streaming.piece_reader import PieceReader
from streampack.types import Row, RowId, Sample

ENOUGH_ROWS = 64
COUNTED_ROWS = 4096
COUNTED_TOKENS = 1 << 22
"""A source with no more rows and no more tokens is counted, a larger one is estimated from as many tokens at most."""
SIMULATED_PACKS, SIMULATED_PIECES = 200, 50_000
"""About so many packs are planned from the sampled lengths, to find how full the strategy makes them, and of about so
many pieces at most."""


class Seen(NamedTuple):
    """The result of reading one row: its lengths and trained tokens, or why it was dropped."""

    row_id: RowId
    length: int  # tokens of the whole sample
    trained: int
    kept: int  # tokens of its pieces
    kept_trained: int
    reason: str | None  # one of DROP_REASONS
    detail: str
    media: int = 0  # of its pieces


class SampledSource(NamedTuple):
    """A sample of a source's rows."""

    kept: array[int]  # tokens that each row keeps, 0 if it is dropped
    trained: array[int]  # of those
    media: array[int]  # that each row keeps
    read: int  # tokens of all samples
    scale: float  # how many times as large the source is
    error: float  # relative standard error of its tokens, or of its pieces where each is a pack


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


def look(config: LaneConfig, row: Row) -> tuple[Seen, list[Sample]]:
    """Encode and cut a row as a lane of a `tolerant` configuration does; return its counts and its pieces."""
    sample = config.sample(row)
    if isinstance(sample, str):
        return Seen(row.row_id, 0, 0, 0, 0, "bad", sample), []
    if sample is GIANT:
        detail = f"more than {CHARACTERS_OF_A_TOKEN} * max_document_tokens characters, which were not encoded"
        return Seen(row.row_id, 0, 0, 0, 0, "overlong", detail), []
    length = sample.tokens.size
    trained = trained_tokens(sample)
    parts = config.cut(sample)
    pieces = [piece for _, piece in parts]
    kept = sum(piece.tokens.size for piece in pieces)
    kept_trained = sum(map(trained_tokens, pieces)) if kept < length or len(pieces) > 1 else trained
    reason, detail = None, ""
    lacks = bool(parts) and (lacks_training(parts[0][1]) if len(parts) == 1 else not kept_trained)
    nothing = "no token is trained" + (" of an answer" if isinstance(sample, Group) else "")
    if lacks and config.drops_untrained(sample, parts):
        pieces, kept, kept_trained, reason, detail = [], 0, 0, "untrained", nothing
    elif not pieces:
        over = f", {sample.cost:,} of max_media" if isinstance(sample, MediaSample) else ""
        reason, detail = "overlong", f"{length:,} tokens{over}"
    elif kept < length:
        reason, detail = "truncated", f"{length:,} tokens, {trained - kept_trained:,} trained ones cut off"
    elif lacks and isinstance(sample, Group):  # `Rows.untrained` finds the plain ones
        reason, detail = "untrained", nothing
    media = sum(piece.cost for piece in pieces if isinstance(piece, MediaSample))
    return Seen(row.row_id, length, trained, kept, kept_trained, reason, detail, media), pieces


def sample_source(
    config: LaneConfig,
    source: Source,
    prefix: RowId,
    rows: int,
    *,
    most_tokens: int | None = None,
    see: Callable[[Seen], None] = lambda seen: None,
) -> SampledSource:
    """Read about ``rows`` rows from all over a source, whose row ids begin with ``prefix`` in a mixture.

    With ``most_tokens`` it ends there, if it has seen `ENOUGH_ROWS` rows by then, in an order of chance.
    """
    found, scale = source.sample(rows)
    order = range(len(found)) if most_tokens is None else permutation(len(found), rows).tolist()
    kept, trained, media, sizes, read = array("i"), array("i"), array("i"), array("i"), 0
    for example in (found[i] for i in order):
        if most_tokens is not None and len(kept) >= ENOUGH_ROWS and read > most_tokens:
            break
        row_id = (*prefix, *example.row_id)
        if example.data is None:
            seen = Seen(row_id, 0, 0, 0, 0, "bad", "it cannot be read")
        else:
            seen, _ = look(config, Row(example.data, row_id))
        see(seen)
        read += seen.length
        kept.append(seen.kept)
        trained.append(seen.kept_trained)
        media.append(seen.media)
        # The size of a corpus of files is known in bytes, so the error is that of tokens per byte.
        sizes.append(len(str(dict(example.data or {}))) if source.probed_by_bytes else 1)
    scale *= len(found) / max(1, len(kept))
    packed = kept if config.packing.strategy != PADDED else _pieces(kept, config.packing)
    return SampledSource(kept, trained, media, read, scale, _relative_error(packed, sizes, scale))


def sample_epoch(
    config: LaneConfig,
    rows: int,
    *,
    most_tokens: int | None = None,
    see: Callable[[Seen], None] = lambda seen: None,
) -> dict[int, tuple[SampledSource, float]]:
    """Sample the source, or by their numbers those of a mixture that have a weight; say how often an epoch reads each.

    Raises:
        ValueError: for a mixture that never ends, a source without a trained token, or one that cannot tell its size.
    """
    mix = config.mix
    if mix is None:
        return {0: (sample_source(config, config.source, (), rows, most_tokens=most_tokens, see=see), 1.0)}
    if mix.stop == "never":
        raise ValueError("a mixture with stop='never' has no end; set max_steps")
    found = {}
    for number, entry in enumerate(mix.entries):
        if entry.weight:
            each = sample_source(config, entry.source, (number,), rows, most_tokens=most_tokens, see=see)
            if not sum(each.trained):
                raise ValueError(
                    f"no token of source {entry.name!r} is trained, in {len(each.kept):,} rows from all over it, so "
                    "its weight cannot be reached; look at its labels, or leave it out"
                )
            found[number] = each, sum(each.trained) * each.scale / entry.weight
    # How many tokens of the whole mixture are trained when a source has been read once.
    ends = min if mix.stop == "first_exhausted" else max
    trained = ends(whole for _, whole in found.values())
    return {number: (each, trained / whole) for number, (each, whole) in found.items()}


def _relative_error(tokens: Sequence[int], sizes: Sequence[int], scale: float) -> float:
    """Return the standard error of a source's tokens, as a fraction of them; 0 if it was read as a whole."""
    count, total = len(tokens), sum(tokens)
    if count < 2 or not total:
        return 0.0
    ratio = total / max(1, sum(sizes))
    variance = sum((t - ratio * s) ** 2 for t, s in zip(tokens, sizes, strict=True)) / (count - 1)
    return math.sqrt(variance * max(0.0, 1 - 1 / max(1.0, scale)) / count) / (total / count)


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


def estimate(config: LaneConfig, *, rows: int, num_lanes: int = 1) -> Estimate:
    """Estimate an epoch from ``rows`` rows of each source; small sources are counted, in the order of epoch 0.

    Rows that the run skips are left out; where it skips none, what the encoder raises for a row is raised.

    Raises:
        TooLong: if samples are too long for a pack, and ``overlong`` is ``"error"``.
    """
    packing, mix = config.packing, config.mix
    seen = replace(tolerant(config), quarantine=_one_epoch(config).quarantine)
    long: list[Seen] = []
    # What ``max_document_tokens`` leaves out is no matter of ``overlong``; giant texts have a length of 0.
    most = config.max_document_tokens or math.inf

    def see(row: Seen) -> None:
        if row.reason in ("overlong", "truncated") and 0 < row.length <= most:
            long.append(row)

    found = sample_epoch(seen, rows, most_tokens=COUNTED_TOKENS, see=see).values()
    sampled = [each for each, _ in found]
    tokens = sum(sum(each.kept) * each.scale * times for each, times in found)
    looked_at, read = sum(len(each.kept) for each in sampled), sum(each.read for each in sampled)
    rows_kept = sum(sum(map(bool, each.kept)) * each.scale * times for each, times in found)
    lost = 1 - sum(sum(each.kept) for each in sampled) / max(1, read)
    cut = len(long), sum(row.length - row.kept for row in long) / max(1, read)
    if long and packing.overlong == "error":
        first = min(long)  # by `row_id`; they were looked at in an order of chance
        raise TooLong(
            f"{len(long):,} of {looked_at:,} samples looked at are too long for max_seq_len={packing.max_seq_len}, "
            f"{cut[1]:.1%} of the tokens, and the run would stop at the first of them: "
            f"{config.source.locate(first.row_id)} has {first.detail}; set overlong to 'truncate', 'drop' or "
            "'split', or raise max_seq_len"
        )
    if mix is None and not config.endless:
        [scale] = [each.scale for each in sampled]
        rows_in_all, tokens_in_all = looked_at * scale, read * scale
        if rows_in_all <= COUNTED_ROWS and tokens_in_all <= COUNTED_TOKENS:
            counted = _count(config, num_lanes)
            per_pack = rows_kept / max(1, counted.packs)
            return Estimate(counted.packs, 0.0, looked_at, lost, counted.padding, *cut, per_pack)
    if packing.strategy == PADDED:
        packs = sum(sum(_pieces(each.kept, packing)) * each.scale * times for each, times in found)
        error = packs * max(each.error for each in sampled)
        return Estimate(packs, error, looked_at, lost, 0.0, *cut, 1.0)
    sizes = [size for each in sampled for size in zip(each.kept, each.media, strict=True) if size[0]]
    fill = _fill(sizes, packing, tokens / num_lanes)
    full = tokens / (packing.max_seq_len * fill)
    # The last pack of each lane is half empty on average. With ``max_media``, `_fill` counts it.
    packs = full + (0 if config.endless or packing.max_media is not None else num_lanes / 2)
    error = packs * max(each.error for each in sampled)
    padding = 1 - fill * full / packs if packs else 0.0
    return Estimate(packs, error, looked_at, lost, padding, *cut, rows_kept / packs if packs else 0.0)


def _pieces(kept: Sequence[int], packing: Packing) -> list[int]:
    """Return in how many pieces each row is packed that keeps so many tokens."""
    return [-(-tokens // packing.max_seq_len) for tokens in kept]


def _fill(sizes: Sequence[tuple[int, int]], packing: Packing, lane: float = math.inf) -> float:
    """Return how full the strategy makes packs of such samples, 0 to 1: the first of an endless stream of them.

    ``sizes`` are tokens and media. With ``max_media`` the stream ends, as a lane of so many tokens does: pieces that
    fill only one of the budgets pile up in the buffer, and are packed at the end.
    """
    if not sizes:
        return 1.0
    orders = (permutation(len(sizes), turn).tolist() for turn in count())
    pieces = ((number, *sizes[i]) for number, i in enumerate(i for order in orders for i in order))
    turns = min(lane, SIMULATED_PACKS * packing.max_seq_len) / sum(length for length, _ in sizes)
    ends = None if packing.max_media is None else max(1, round(turns * len(sizes)))
    packs = tokens = 0
    most = SIMULATED_PACKS if ends is None else 2 * SIMULATED_PACKS
    for pack in islice(plan_samples(islice(pieces, ends), packing), most):
        packs += 1
        tokens += sum(span.length for span in pack)
        if pack[-1].index > SIMULATED_PIECES:
            break
    return tokens / (packs * packing.max_seq_len)


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
