"""Token counts of the rows of an epoch: of all rows, lane by lane, or of rows sampled from all over the corpus."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streampack.accounting import DROP_REASONS, trained_tokens
from streampack.lanes.lane_config import CHARACTERS_OF_A_TOKEN, GIANT, LaneConfig
from streampack.packing.groups import Group, lacks_training
from streampack.packing.media import MediaSample
from streampack.packing.settings import Packing
from streampack.sources.bad_records import Quarantine
from streampack.sources.examples import Example
from streampack.sources.mixture import Mix
from streampack.sources.reading import BadRecord, permutation
from streampack.sources.source import Source, UnknownSize
from streampack.types import IntArray, Row, RowId, Sample

ENOUGH_ROWS = 64
ENOUGH_PACKS, ENOUGH_PACKS_OF_MEDIA, ENOUGH_PIECES = 1_000, 200, 50_000
"""Sampled rows that fill fewer packs are repeated in one lane, up to `ENOUGH_PIECES` pieces. With 200 packs, the order
of the pieces alone moves the padding by 1.5 points, but packs with two budgets take longer to plan."""

Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[Any]
Rows = Any
"""A numpy record array with one record for each row that was read. Its columns are those of `COLUMNS`."""
COLUMNS = np.dtype(
    [
        ("lane", "i4"),
        ("source", "i2"),  # number of the source in a mixture
        ("length", "i4"),  # tokens of the complete sample
        ("trained", "i4"),
        ("kept", "i4"),  # tokens of its pieces, 0 if it is dropped
        ("kept_trained", "i4"),
        ("media", "i4"),  # cost of its pieces
        ("reason", "i1"),  # 0, or 1 + an index into DROP_REASONS
        ("extent", "i4"),  # size of the row, in the unit of the source's size: bytes or rows
    ]
)


class Seen(NamedTuple):
    """The result of reading one row: its lengths and trained tokens, or why it was dropped."""

    row_id: RowId
    length: int  # tokens of the complete sample
    trained: int
    kept: int  # tokens of its pieces
    kept_trained: int
    reason: str | None  # one of DROP_REASONS
    detail: str
    media: int = 0  # cost of its pieces


See = Callable[[Seen], None] | None


def tolerant(config: LaneConfig) -> LaneConfig:
    """Return a configuration that drops and counts the rows that would stop the run."""
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
    try:
        sample = config.sample(row)
    except BadRecord as error:
        return Seen(row.row_id, 0, 0, 0, 0, "bad", error.reason), []
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
    elif lacks and isinstance(sample, Group):  # inspect counts plain samples without trained tokens by itself
        reason, detail = "untrained", nothing
    media = sum(piece.cost for piece in pieces if isinstance(piece, MediaSample))
    return Seen(row.row_id, length, trained, kept, kept_trained, reason, detail, media), pieces


def ratio(
    part: Numbers, total: Numbers, *, weights: Numbers | float = 1.0, unread: Numbers | float = 1.0
) -> tuple[float, float]:
    """Return ``sum(part) / sum(total)`` of units drawn at random, and its standard error.

    Large units count in both sums, so the error follows from each unit's distance to the ratio (Cochran, Sampling
    Techniques, 1977, section 2.11). Each unit stands for ``weights`` units; ``unread`` is the fraction that was not
    drawn.

    >>> [round(each, 3) for each in ratio(np.array([1, 3, 2, 2]), np.array([4, 4, 4, 4]))]
    [0.5, 0.102]
    >>> ratio(np.array([1, 3]), np.array([4, 4]), unread=0.0)
    (0.5, 0.0)
    """
    count, in_all = len(part), float((weights * total).sum())
    if not in_all:
        return 0.0, 0.0
    found = float((weights * part).sum()) / in_all
    squares = float((unread * (weights * (part - found * total)) ** 2).sum())
    return found, math.sqrt(squares * count / max(1, count - 1)) / in_all


@dataclass(frozen=True)
class Epoch:
    """The rows that were read, and how many rows of the epoch each stands for."""

    rows: Rows
    num_lanes: int  # each has a part-empty last pack
    scale: Floats  # [sources] rows of the epoch for each row that was read
    passes: Floats  # [sources] how often the epoch reads each source
    unread: Floats  # [sources] fraction of each that was not read
    exact: bool = False  # all rows were read, in the order of the first epoch
    known: bool = True  # whether the source can tell its size

    @property
    def weights(self) -> Floats:
        """Rows of the epoch that each row stands for: ``[rows]``."""
        found: Floats = self.scale[self.rows.source]
        return found

    @property
    def samples(self) -> float:
        """Samples that are packed in the epoch."""
        return float(self.weights[self.rows.kept > 0].sum())

    @property
    def tokens(self) -> float:
        """Tokens that are packed in the epoch, without padding."""
        return float(self.weights @ self.rows.kept)

    def relative_error(self, amounts: Numbers) -> float:
        """Return the relative standard error of the sum over the epoch of ``amounts``, ``[rows]``."""
        if self.exact:
            return 0.0
        errors = [0.0]
        for number in np.unique(self.rows.source):
            own = self.rows.source == number
            mean, error = ratio(amounts[own], self.rows.extent[own], unread=self.unread[number])
            errors.append(error / mean if mean else 0.0)
        return max(errors)

    def lanes(self, packing: Packing, *, seed: int) -> tuple[list[list[IntArray]], float]:
        """Return the sizes of the samples in each lane, and how often each row is repeated; 0 if all rows were read.

        Sizes are tokens, ``[samples]``, and with ``max_media`` also media. Rows that were sampled are in one lane, in
        random order, and are repeated until they fill `ENOUGH_PACKS`.
        """
        rows = self.rows
        columns = [rows.kept] if packing.max_media is None else [rows.kept, rows.media]
        packed = np.flatnonzero(rows.kept)
        if self.exact or not len(packed):
            lanes = (packed[rows.lane[packed] == lane] for lane in range(self.num_lanes))
            return [[column[own] for column in columns] for own in lanes], 0.0
        weights = self.weights[packed]
        in_all, most, enough = float(weights.sum()), float(ENOUGH_PIECES), ENOUGH_PACKS
        filled = float(weights @ rows.kept[packed]) / packing.max_seq_len
        if packing.max_media is not None:
            filled = max(filled, float(weights @ rows.media[packed]) / packing.max_media)
            enough = ENOUGH_PACKS_OF_MEDIA
            # Pieces that fill only one of the two budgets stay buffered until the lane ends, so the planned lane must
            # not be longer than a real one.
            most = min(most, in_all / max(1, self.num_lanes))
        count = max(len(packed), round(min(most, enough * in_all / filled)))
        drawn = np.searchsorted(np.cumsum(weights), (np.arange(count) + 0.5) * in_all / count)
        own = packed[drawn[permutation(count, seed, 0)]]
        return [[column[own] for column in columns]], count / len(packed)


def read_lanes(config: LaneConfig, *, num_lanes: int, limit: int | None = None, see: See = None) -> Epoch:
    """Read all lanes of the first epoch, or the first ``limit`` rows of a source of unknown size."""
    own, mix = num_lanes if limit is None else 1, config.mix
    seen = ((lane, 1, each) for lane in range(own) for each in islice(_lane_rows(config, lane, own), limit))
    rows = _table(seen, config, see)
    read = np.bincount(rows.source, minlength=1 if mix is None else len(mix.entries))
    ones = np.ones(len(read))
    sizes = (
        read
        if mix is None
        else [_size(entry.source) or n for entry, n in zip(mix.entries, read, strict=True)]
    )
    passes, exact = read / np.maximum(1, sizes), limit is None
    return Epoch(rows, num_lanes, ones, passes, ones * (not exact), exact=exact, known=exact)


def read_sample(
    config: LaneConfig, *, num_lanes: int, rows: int, most_tokens: int | None = None, see: See = None
) -> Epoch:
    """Read about ``rows`` rows from all over the source, or from all over each source of a mixture.

    With ``most_tokens``, reading a source stops after that number of tokens, but not before `ENOUGH_ROWS` rows.

    Raises:
        UnknownSize: for a mixture that never ends, or a source of unknown size.
        ValueError: for a source without trained tokens.
    """
    mix = config.mix
    if mix is not None and mix.stop == "never":
        raise UnknownSize("a mixture with stop='never' has no end; set max_steps")
    sources = {0: config.source}
    if mix is not None:
        sources = {number: entry.source for number, entry in enumerate(mix.entries) if entry.weight}
    tables, times = [], np.zeros(1 if mix is None else len(mix.entries))
    for number, source in sources.items():
        found, scale = source.sample(rows)
        prefix = () if mix is None else (number,)
        tables.append(_table(_sampled(config, source, found, prefix, most_tokens), config, see))
        times[number] = scale * len(found) / max(1, len(tables[-1]))
    table = np.concatenate(tables).view(np.recarray)
    passes = np.ones(1) if mix is None else _passes(mix, table, times)
    return Epoch(table, num_lanes, times * passes, passes, 1 - 1 / np.maximum(1, times))


def _table(seen: Iterable[tuple[int, int, Seen]], config: LaneConfig, see: See) -> Rows:
    """Return a table of the rows, which come as ``(lane, extent, row)``, and call ``see`` with each row."""

    def records() -> Iterator[tuple[int, ...]]:
        for lane, extent, each in seen:
            if see is not None:
                see(each)
            reason = 0 if each.reason is None else 1 + DROP_REASONS.index(each.reason)
            number = config.source.source_index(each.row_id)
            counts = each.length, each.trained, each.kept, each.kept_trained, each.media
            yield (lane, number, *counts, reason, extent)

    return np.fromiter(records(), COLUMNS).view(np.recarray)


def _lane_rows(config: LaneConfig, lane: int, num_lanes: int) -> Iterator[Seen]:
    reader = config.open(lane, num_lanes=num_lanes, epoch=0)
    while True:
        try:
            row = next(reader, None)
        except BadRecord as error:
            if config.quarantine is None:
                raise error.unskipped() from None
            yield Seen(error.row_id, 0, 0, 0, 0, "bad", error.reason)
            continue
        if row is None:
            return
        seen, pieces = look(config, row)
        yield seen
        reader.charge(pieces)


def _sampled(
    config: LaneConfig, source: Source, found: list[Example], prefix: RowId, most_tokens: int | None
) -> Iterator[tuple[int, int, Seen]]:
    """Yield sampled rows in random order. In a mixture, ``prefix`` begins their row ids."""
    read = 0
    for number, at in enumerate(permutation(len(found), len(found)).tolist()):
        if most_tokens is not None and number >= ENOUGH_ROWS and read > most_tokens:
            return
        example, row_id = found[at], (*prefix, *found[at].row_id)
        if example.data is None:
            seen = Seen(row_id, 0, 0, 0, 0, "bad", "it cannot be read")
        else:
            seen, _ = look(config, Row(example.data, row_id))
        read += seen.length
        yield 0, len(str(dict(example.data or {}))) if source.probed_by_bytes else 1, seen


def _passes(mix: Mix, rows: Rows, times: Floats) -> Floats:
    """Return how often an epoch reads each source. A source is ``times`` as large as its rows in the table."""
    trained = np.bincount(rows.source, rows.kept_trained, minlength=len(times)) * times
    weights = np.array([entry.weight for entry in mix.entries], np.float64)
    own = weights > 0
    for number in np.flatnonzero(own & (trained == 0)):
        raise ValueError(
            f"no token of source {mix.entries[number].name!r} is trained, in {(rows.source == number).sum():,} rows "
            "from all over it, so its weight cannot be reached; check its labels, or remove the source"
        )
    # Trained tokens of the complete mixture when a source has been read once.
    once = np.divide(trained, weights, where=own, out=np.full_like(trained, np.nan))
    passes: Floats = (np.nanmin(once) if mix.stop == "first_exhausted" else np.nanmax(once)) / once
    return np.nan_to_num(passes)


def _size(source: Source) -> float | None:
    """Return the estimated number of rows in one pass over a source; None if its size is unknown."""
    try:
        found, scale = source.sample(ENOUGH_ROWS)
    except ValueError:
        return None
    return len(found) * scale
