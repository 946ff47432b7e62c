"""How far a shuffle reaches: the part of a corpus that its windows mix, and the window that ``"auto"`` chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from streampack.lanes.lane_config import LaneConfig
from streampack.sources.mechanics.files import FileSource
from streampack.sources.reading import permutation
from streampack.sources.source import Source

AUTO = "auto"
SHUFFLE_WINDOW = 2048
"""Rows in a window with ``shuffle=True``, and the smallest window that ``shuffle="auto"`` chooses."""
AUTO_SPREAD = 0.9
"""The ``spread`` that ``shuffle="auto"`` aims at."""
AUTO_BYTES = 1 << 28
"""The most bytes that the windows of all lanes may hold with ``shuffle="auto"``."""
SAMPLED_ROWS = 64  # which tell how many rows there are, and how large they are


@dataclass(frozen=True)
class Mixing:
    """How far the shuffled order of one source differs from the order of its files.

    Attributes:
        window: rows in a shuffle window.
        at_once: the fraction of the source's rows that the windows of all lanes hold at a time.
        spread: the fraction of an epoch over which the rows of one file lie, as a mean over all rows. Rows that lie
            evenly within a fraction f of the epoch count as f, so a full shuffle has 1. It is the root of 12 times the
            variance of their positions.
    """

    window: int
    at_once: float
    spread: float

    def text(self, num_lanes: int) -> str:
        """Describe the figures in a line."""
        if self.window == 0:
            how = "rows are not shuffled"
        elif self.at_once > 0.9999:
            return "shuffle: all rows are mixed"
        else:
            lanes = f"{num_lanes} lane{'s' * (num_lanes > 1)}"
            how = f"windows of {self.window:,} rows in {lanes} mix {self.at_once:.1%} of the rows at a time"
        return f"shuffle: {how}; the rows of one file lie within {self.spread:.0%} of an epoch"


def mixing(config: LaneConfig, num_lanes: int) -> dict[str, Mixing]:
    """Return how far the shuffle reaches in each source, by its name in a mixture; else the name is empty.

    A few rows are read for their number. Streams of unknown length are skipped.
    """
    found = {}
    for name, source in config.source.leaves().items():
        if source.map_style and config.shuffle_window:
            found[name] = Mixing(config.shuffle_window, 1.0, 1.0)
        elif isinstance(source, FileSource):
            rows, _ = _rows_and_bytes(source)
            found[name] = _mixing(source, rows, num_lanes, window=config.shuffle_window, seed=config.seed)
    return found


def mixing_lines(config: LaneConfig, num_lanes: int) -> list[str]:
    """Return a line on the shuffle of each source, for the start of a run and for reports."""
    return [
        f"{name}: {found.text(num_lanes)}" if name else found.text(num_lanes)
        for name, found in mixing(config, num_lanes).items()
    ]


def auto_window(source: Source, num_lanes: int, *, seed: int) -> int:
    """Return the smallest shuffle window whose ``spread`` is `AUTO_SPREAD`, of those that fit into `AUTO_BYTES`.

    Windows are powers of two, at least `SHUFFLE_WINDOW`. Of a mixture, the source that needs most decides.
    """
    chosen = SHUFFLE_WINDOW
    for leaf in source.leaves().values():
        if not isinstance(leaf, FileSource):
            continue
        rows, size = _rows_and_bytes(leaf)
        window = SHUFFLE_WINDOW
        while (
            window * num_lanes < rows
            and 2 * window * num_lanes * size / rows <= AUTO_BYTES
            and _mixing(leaf, rows, num_lanes, window=window, seed=seed).spread < AUTO_SPREAD
        ):
            window *= 2
        chosen = max(chosen, window)
    return chosen


def _rows_and_bytes(source: Source) -> tuple[float, float]:
    """Return about how many rows a source has, and how many bytes they are in memory."""
    found, scale = source.sample(SAMPLED_ROWS)
    size = sum(len(str(dict(example.data or {}))) for example in found)
    return max(1.0, len(found) * scale), size * scale


def _mixing(source: FileSource, rows: float, num_lanes: int, *, window: int, seed: int) -> Mixing:
    sums = np.zeros(
        (3, len(source.files))
    )  # by file: rows, and the sums of their positions and of the squares
    at_once = 0.0
    for lane, parts in enumerate(_sizes_of_parts(source, rows, num_lanes)):
        if window:
            parts = [parts[i] for i in permutation(len(parts), seed, 0, lane)]
        in_lane = sum(size for _, size in parts)
        at_once += min(window, in_lane)
        if not in_lane:
            continue
        begin = 0.0
        for file, size in parts:
            # With a window, a row lies anywhere in the window that the part's order puts it into.
            for start, stop, kept in _windows(begin, begin + size, in_lane, window):
                at, width = (start + stop) / 2 / in_lane, (stop - start) / in_lane
                sums[:, file] += kept, kept * at, kept * (at**2 + width**2 / 12)
            begin += size
    count, first, second = sums
    variance = second - first**2 / np.maximum(count, 1e-9)
    return Mixing(window, min(1.0, at_once / rows), min(1.0, float(np.sqrt(12 * variance.sum() / rows))))


def _windows(begin: float, end: float, last: float, window: int) -> Iterator[tuple[float, float, float]]:
    """Yield where rows from ``begin`` to ``end`` may come: the start and stop of each window, and how many of them."""
    if not window:
        yield begin, end, end - begin
        return
    numbers = range(int(begin // window), int(-(-end // window)) + 1)
    for start, stop in pairwise(number * window for number in numbers):
        if (kept := min(end, stop) - max(begin, start)) > 0:
            yield start, min(stop, last), kept


def _sizes_of_parts(source: FileSource, rows: float, num_lanes: int) -> list[list[tuple[int, float]]]:
    """Return the parts of each lane as (file, about how many rows), from the bytes of their files."""
    lanes = source.lanes(num_lanes)
    ends: dict[int, int] = {}
    for part in (part for parts in lanes for part in parts):
        ends[part.file] = max(ends.get(part.file, 1), part.stop or 1)
    per_byte = rows / max(1, sum(source.files[file].size for file in ends))
    return [
        [
            (part.file, source.files[part.file].size * per_byte / part.stride
             * (1 if part.stop is None else (part.stop - part.start) / ends[part.file]))
            for part in parts
        ]
        for parts in lanes
    ]  # fmt: skip
