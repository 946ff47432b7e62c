"""Samples and their lengths, of some rows from all over a corpus."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from streampack.accounting import trained_tokens
from streampack.sources.bad_records import Quarantine
from streampack.sources.reading import permutation
from streampack.sources.source import Source
from streampack.streaming.lane_config import LaneConfig
from streampack.types import Row, RowId, Sample

ENOUGH_ROWS = 64


class Seen(NamedTuple):
    """The result of reading one row: its lengths and trained tokens, or why it was dropped."""

    row_id: RowId
    length: int  # tokens of the whole sample
    trained: int
    kept: int  # tokens of its pieces
    kept_trained: int
    reason: str | None  # one of DROP_REASONS
    detail: str


class SampledSource(NamedTuple):
    """A sample of a source's rows."""

    kept: array[int]  # tokens that each row keeps, 0 if it is dropped
    trained: array[int]  # of those
    read: int  # tokens of all samples
    scale: float  # how many times as large the source is
    error: float  # relative standard error of its tokens


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
    kept, trained, sizes, read = array("i"), array("i"), array("i"), 0
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
        # The size of a corpus of files is known in bytes, so the error is that of tokens per byte.
        sizes.append(len(str(dict(example.data or {}))) if source.probed_by_bytes else 1)
    scale *= len(found) / max(1, len(kept))
    return SampledSource(kept, trained, read, scale, _relative_error(kept, sizes, scale))


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
