"""The rows of an epoch as columns of numbers: all of them by lanes, or a sample from all over the corpus."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streampack.accounting import DROP_REASONS
from streampack.packing.strategies import PADDED
from streampack.sources.mixture import Mix
from streampack.sources.reading import BadRecord, permutation
from streampack.sources.source import Source
from streampack.streaming.first_look import Seen, look
from streampack.streaming.lane_config import LaneConfig
from streampack.types import IntArray, Row, RowId

ENOUGH_ROWS = 64
FIRST_LOOK = 256
"""Rows from which the size of a source is estimated."""

Floats = npt.NDArray[np.float64]
Numbers = IntArray | Floats


class Rows(NamedTuple):
    """Token counts of the rows that were read, one column for each count: ``[rows]`` each, in the order of reading."""

    source: IntArray  # its number in a mixture
    length: IntArray  # tokens of the whole sample
    trained: IntArray
    kept: IntArray  # tokens of its pieces, 0 if it is dropped
    kept_trained: IntArray
    reason: IntArray  # 0, or 1 + the number of one of DROP_REASONS
    media: IntArray | None = None  # of its pieces; None without ``max_media``

    def lost_by(self, reason: str) -> npt.NDArray[np.bool_]:
        """Return which rows lost tokens, or all, for this reason."""
        return np.equal(self.reason, 1 + DROP_REASONS.index(reason))

    @property
    def untrained(self) -> npt.NDArray[np.bool_]:
        """Which rows have tokens, and none that is trained."""
        trained = np.where(self.kept > 0, self.kept_trained, self.trained)
        return np.greater(self.length, 0) & np.equal(trained, 0)


class Tally:
    """Keeps six numbers of each row, in 24 bytes, with ``max_media`` seven, and nothing else that grows.

    ``see`` is called with each row.
    """

    def __init__(self, config: LaneConfig, see: Callable[[Seen], None] = lambda seen: None) -> None:
        self.source, self.see = config.source, see
        self.columns = len(Rows._fields) - (config.packing.max_media is None)
        self.numbers = array("i")

    def __len__(self) -> int:
        return len(self.numbers) // self.columns

    def add(self, seen: Seen) -> None:
        """Count a row."""
        number = self.source.source_index(seen.row_id)
        reason = 0 if seen.reason is None else 1 + DROP_REASONS.index(seen.reason)
        found = (number, seen.length, seen.trained, seen.kept, seen.kept_trained, reason, seen.media)
        self.numbers.extend(found[: self.columns])
        self.see(seen)

    @property
    def rows(self) -> Rows:
        """The token counts of all rows added so far; a view, and no row can be added while it is in use."""
        return Rows(*np.frombuffer(self.numbers, np.int32).reshape(-1, self.columns).T)


Sizes = Sequence["array[int]"]
"""The tokens that some samples keep, one number for each; with ``max_media``, their media as a second array."""


@dataclass(frozen=True)
class Epoch:
    """The rows that were looked at, and the epoch that they stand for.

    ``lanes`` holds the sizes of each lane's samples in the order of reading. A sample of the corpus has one lane, in an
    order that stands for that of a run.
    """

    rows: Rows
    lanes: Sequence[Sizes]
    num_lanes: int  # each of them has a part-empty last pack
    weights: Floats  # [rows], how many rows of the epoch each stands for
    passes: Floats  # [sources], how often the epoch reads each source
    unread: Floats  # [rows], fraction of each one's source that was not read; 0 where all was
    exact: bool = True
    known: bool = True  # whether the source tells its size
    error: float = 0.0  # relative standard error of ``tokens``; with "padded", of the pieces

    @property
    def samples(self) -> float:
        """Samples that are packed in the epoch."""
        return float(self.weights[self.rows.kept > 0].sum())

    @property
    def tokens(self) -> float:
        """Tokens that are packed in the epoch, padding left out."""
        return float(self.weights @ self.rows.kept)


def ratio(
    part: Numbers, whole: Numbers, *, weights: Floats | float = 1.0, unread: Floats | float = 1.0
) -> tuple[float, float]:
    """Return ``sum(part) / sum(whole)`` of units drawn at random, and its standard error.

    Large units count in both sums, so what varies is the distance of each from the ratio (Cochran, Sampling Techniques,
    1977, section 2.11). Each unit stands for ``weights``, and ``unread`` is the fraction of those that were not drawn.

    >>> [round(each, 3) for each in ratio(np.array([1, 3, 2, 2]), np.array([4, 4, 4, 4]))]
    [0.5, 0.102]
    """
    count, in_all = len(part), float((weights * whole).sum())
    if not in_all:
        return 0.0, 0.0
    found = float((weights * part).sum()) / in_all
    varies = float((unread * (weights * (part - found * whole)) ** 2).sum())
    return found, math.sqrt(varies * count / max(1, count - 1)) / in_all


def read_lanes(config: LaneConfig, tally: Tally, *, num_lanes: int, rows: int | None = None) -> Epoch:
    """Read the first epoch, lane by lane, or only ``rows`` rows, for a source of unknown length.

    ``config`` is a `tolerant` one.
    """
    whole, passes = rows is None, np.ones(1)
    own = num_lanes if whole else 1
    lanes = [_read_lane(config, tally, lane, own, rows) for lane in range(own)]
    if config.mix is not None:
        read = np.bincount(tally.rows.source, minlength=len(config.mix.entries))
        sizes = [_size(entry.source) or own for entry, own in zip(config.mix.entries, read, strict=True)]
        passes = read / np.maximum(1, sizes)
    ones = np.ones(len(tally))
    unread = np.zeros(len(tally)) if whole else ones
    return Epoch(tally.rows, lanes, num_lanes, ones, passes, unread, exact=whole, known=whole)


def read_sample(
    config: LaneConfig, tally: Tally, *, num_lanes: int, rows: int, most_tokens: int | None = None
) -> Epoch:
    """Read about ``rows`` rows from all over the source, or over each one of a mixture that has a weight.

    With ``most_tokens``, reading a source ends there, in an order of chance, if `ENOUGH_ROWS` rows were read by then.

    Raises:
        ValueError: for a mixture that never ends, a source without a trained token, or one that cannot tell its size.
    """
    mix = config.mix
    if mix is not None and mix.stop == "never":
        raise ValueError("a mixture with stop='never' has no end; set max_steps")
    entries = [] if mix is None else mix.entries
    sources = {number: entry.source for number, entry in enumerate(entries) if entry.weight}
    scale, error = np.zeros(max(1, len(entries))), 0.0
    for number, source in sources.items() if mix else [(0, config.source)]:
        prefix = (number,) if mix else ()
        scale[number], own = _sample_source(config, source, tally, prefix, rows=rows, most_tokens=most_tokens)
        error = max(error, own)
    found, passes = tally.rows, np.ones(1)
    if mix is not None:
        trained = np.bincount(found.source, found.kept_trained, minlength=len(scale))
        passes = _passes(mix, found, trained * scale)
    weights = (scale * passes)[found.source]
    unread = 1 - 1 / np.maximum(1.0, scale[found.source])
    lane = _in_order(found, weights, config)
    return Epoch(found, [lane], num_lanes, weights, passes, unread, exact=False, error=error)


def _sample_source(
    config: LaneConfig, source: Source, tally: Tally, prefix: RowId, *, rows: int, most_tokens: int | None
) -> tuple[float, float]:
    """Read a sample of a source, whose row ids begin with ``prefix`` in a mixture.

    Returns how many times as large the source is, and the relative standard error of its tokens, or of its pieces where
    each is a pack.
    """
    found, scale = source.sample(rows)
    order = range(len(found)) if most_tokens is None else permutation(len(found), rows).tolist()
    sizes, packed, read = array("q"), array("q"), 0
    for example in (found[i] for i in order):
        if most_tokens is not None and len(sizes) >= ENOUGH_ROWS and read > most_tokens:
            break
        row_id = (*prefix, *example.row_id)
        if example.data is None:
            seen = Seen(row_id, 0, 0, 0, 0, "bad", "it cannot be read")
        else:
            seen, _ = look(config, Row(example.data, row_id))
        tally.add(seen)
        read += seen.length
        pieces = -(-seen.kept // config.packing.max_seq_len)
        packed.append(pieces if config.packing.strategy == PADDED else seen.kept)
        # The size of a corpus of files is known in bytes, so the error is that of tokens per byte.
        sizes.append(len(str(dict(example.data or {}))) if source.probed_by_bytes else 1)
    scale *= len(found) / max(1, len(sizes))
    per_size, error = ratio(np.array(packed), np.array(sizes), unread=1 - 1 / max(1.0, scale))
    return scale, error / per_size if per_size else 0.0


def _passes(mix: Mix, rows: Rows, trained: Floats) -> Floats:
    """Return how often an epoch reads each source, from the trained tokens of one pass over each."""
    weights = np.array([entry.weight for entry in mix.entries], np.float64)
    own = weights > 0
    for number in np.flatnonzero(own & (trained == 0)):
        raise ValueError(
            f"no token of source {mix.entries[number].name!r} is trained, in {(rows.source == number).sum():,} rows "
            "from all over it, so its weight cannot be reached; look at its labels, or leave it out"
        )
    # How many tokens of the whole mixture are trained when a source has been read once.
    whole = trained[own] / weights[own]
    passes = np.zeros(len(weights))
    passes[own] = (whole.min() if mix.stop == "first_exhausted" else whole.max()) / whole
    return passes


def _size(source: Source) -> float | None:
    """Return about how many rows one pass over a source has; None if it cannot tell."""
    try:
        found, scale = source.sample(FIRST_LOOK)
    except ValueError:
        return None
    return len(found) * scale


def _read_lane(config: LaneConfig, tally: Tally, lane: int, num_lanes: int, rows: int | None) -> Sizes:
    """Read a lane of the first epoch, or its first rows; return the sizes of its samples."""
    reader, first = config.open(lane, num_lanes=num_lanes, epoch=0), len(tally)
    while rows is None or len(tally) - first < rows:
        try:
            row = next(reader, None)
        except BadRecord as error:
            if config.quarantine is None:
                raise error.unskipped() from None
            tally.add(Seen(error.row_id, 0, 0, 0, 0, "bad", error.reason))
            continue
        if row is None:
            break
        seen, pieces = look(config, row)
        tally.add(seen)
        reader.charge(pieces)
    return _sizes(tally.rows, slice(first, None))


def _sizes(rows: Rows, own: slice | npt.NDArray[np.intp]) -> Sizes:
    """Return the sizes of the samples that some rows make."""
    columns = [rows.kept] if rows.media is None else [rows.kept, rows.media]
    return [array("i", column[own][rows.kept[own] > 0].tobytes()) for column in columns]


def _in_order(rows: Rows, weights: Floats, config: LaneConfig) -> Sizes:
    """Return the sizes of as many samples as rows were read, by their weights, in an order like that of a run."""
    packed = np.flatnonzero(rows.kept)
    if not len(packed):
        return _sizes(rows, packed)
    ends = np.cumsum(weights[packed]) * (len(packed) / weights[packed].sum())
    drawn = np.repeat(packed, np.diff(np.floor(ends + 0.5).astype(np.int64), prepend=0))
    if config.shuffle_window:
        drawn = drawn[permutation(len(drawn), config.seed, 0)]
    else:  # the sources lie one behind another, and a run reads them side by side
        _, counts = np.unique(rows.source[drawn], return_counts=True)
        drawn = drawn[np.argsort(np.concatenate([np.arange(n) / n for n in counts]), kind="stable")]
    return _sizes(rows, drawn)
