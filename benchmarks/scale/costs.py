"""Costs that grow with shards, lanes and ranks, measured at two sizes: the smaller one predicts the larger."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks import report
from benchmarks.scale import probes, ranks

SHARDS, LANES, RANKS = 100_000, 15_360, 1024  # of the extrapolation; one worker process a rank
WINDOW = 2048  # rows, the default of a shuffled dataset
HEADER = (
    "what | grows as | sizes | smaller | larger, predicted | larger, measured | off | "
    f"{SHARDS:,} shards, {RANKS:,} ranks"
)


def volume(value: float) -> str:
    """Format bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:,.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.3g} {unit}"


def seconds(value: float) -> str:
    """Format seconds."""
    if value < 1e-3:
        return f"{value * 1e6:.3g} us"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


class Growth(NamedTuple):
    """A driver of costs: a name, and its amount as a function of the sizes."""

    formula: str
    units: Callable[..., float]


SIZE = Growth("size", lambda size: size)
LANE_ROWS = Growth("lanes of the process x window", lambda lanes, window: lanes * window)
# The most parts: a cut every 16th of a lane, and one at each file's end.
PARTS = Growth("shards + 16 x lanes", lambda shards, lanes: shards + 16 * lanes)
SORTED_PARTS = Growth(
    "(shards + 16 x lanes) x log lanes", lambda shards, lanes: (shards + 16 * lanes) * math.log(lanes)
)
OWN = Growth("shards / ranks", lambda shards, ranks: shards / ranks)
OTHERS_SHARDS = Growth("shards of the others", lambda shards, ranks: shards - shards / ranks)
OTHERS = Growth("ranks - 1", lambda shards, ranks: ranks - 1)


class Group(NamedTuple):
    """The costs that one probe measures, by the key of its result."""

    probe: Callable[..., dict[str, float]]
    names: tuple[str, ...]  # of the sizes
    small: tuple[int, ...]
    large: tuple[int, ...]
    full: tuple[int, ...]  # of the extrapolation
    costs: dict[str, tuple[str, Growth, Callable[[float], str]]]

    def rows(self, *, shrink: int) -> Iterator[list[str]]:
        """Measure at both sizes; ``shrink`` divides sizes above 100."""
        small, large = (
            tuple(size if size <= 100 else size // shrink for size in sizes)
            for sizes in (self.small, self.large)
        )
        low, high = self.probe(*small), self.probe(*large)
        sizes = ", ".join(
            f"{a:,} and {b:,} {name}" if a != b else f"{a:,} {name}"
            for name, a, b in zip(self.names, small, large, strict=True)
        )
        for key, (what, growth, show) in self.costs.items():
            unit = low[key] / growth.units(*small)
            predicted = unit * growth.units(*large)
            off = f"{high[key] / predicted - 1:+.0%}" if predicted else "none"
            values = (low[key], predicted, high[key])
            full = show(unit * growth.units(*self.full))
            yield [what, growth.formula, sizes, *map(show, values), off, full]


GROUPS = (
    Group(
        *(probes.manifest, ("shards",), (1_000,), (8_000,), (SHARDS,)),
        {
            "memory": ("manifest, memory of each process", SIZE, volume),
            "seconds": ("manifest, start of each rank", SIZE, seconds),
            "pickled": ("source, pickled for a spawned worker", SIZE, volume),
        },
    ),
    Group(
        *(probes.division, ("shards", "lanes")),
        *((SHARDS // 2, LANES // 2), (SHARDS, LANES), (SHARDS, LANES)),
        {
            "memory": ("parts, memory of each process", PARTS, volume),
            "seconds": ("parts, start of each process", SORTED_PARTS, seconds),
        },
    ),
    Group(
        *(probes.reading, ("lanes", "rows a window"), (4, 512), (16, 512), (LANES // RANKS, WINDOW)),
        {
            "memory": ("windows and buffers, memory of each process", LANE_ROWS, volume),
            "seconds": ("first pack of every lane, each process", LANE_ROWS, seconds),
            "resume": ("resume, each process", LANE_ROWS, seconds),
            "files": ("files open between reads, each process", LANE_ROWS, "{:,.0f}".format),
        },
    ),
    Group(
        *(probes.pack, ("tokens",), (4_096,), (32_768,), (4_096,)),
        {"memory": ("a waiting pack, memory", SIZE, volume)},
    ),
    Group(
        *(probes.state, ("lanes",), (128,), (1_024,), (LANES,)),
        {
            "saved": ("state, file", SIZE, volume),
            "check": ("state, check when loaded, each rank", SIZE, seconds),
        },
    ),
    Group(
        *(ranks.loaders, ("shards", "ranks"), (400, 4), (2_400, 12), (SHARDS, RANKS)),
        {
            "read": ("fingerprint, bytes read by each rank", OWN, volume),
            "fingerprint": ("fingerprint, received by each rank", OTHERS_SHARDS, volume),
            "sockets": ("sockets of each rank, each group", OTHERS, "{:,.0f}".format),
            "agreement": ("agreement on 8 batches, received by each rank", OTHERS, volume),
            "seconds": ("agreement on 8 batches, each rank", OTHERS, seconds),
            "merged": ("state, 15 lanes a rank, received by each rank", OTHERS, volume),
        },
    ),
)


def measure(*, shrink: int) -> list[list[str]]:
    """Return the rows of all costs."""
    step = report.progress(len(GROUPS))
    rows = []
    for group in GROUPS:
        step(group.probe.__name__)
        rows += group.rows(shrink=shrink)
    return rows
