"""Costs that grow with shards, lanes and ranks, measured at two sizes: the smaller one predicts the larger."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.scale import probes, ranks

SHARDS, LANES, RANKS = 100_000, 15_360, 1024  # of the extrapolation; one worker process a rank
OWN = LANES // RANKS
WINDOW = 2048  # rows, the default of a shuffled dataset

HEADER = (
    "what",
    "grows as",
    "file",
    "sizes",
    "smaller",
    "larger, predicted",
    "larger, measured",
    "off",
    f"{SHARDS:,} shards, {RANKS:,} ranks",
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


def count(value: float) -> str:
    """Format a number."""
    return f"{value:,.0f}"


class Cost(NamedTuple):
    """One quantity, proportional to ``units`` of the sizes; the code that causes it is in ``where``."""

    key: str  # of the probe's result
    what: str
    where: str
    formula: str
    units: Callable[..., float]
    show: Callable[[float], str]


class Group(NamedTuple):
    """The costs that one probe measures."""

    step: str
    probe: Callable[..., dict[str, float]]
    names: tuple[str, ...]  # of the sizes
    small: tuple[int, ...]
    large: tuple[int, ...]
    full: tuple[int, ...]  # of the extrapolation
    costs: tuple[Cost, ...]

    def rows(self, *, shrink: int = 1) -> list[list[str]]:
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
        rows = []
        for key, what, where, formula, units, show in self.costs:
            unit = low[key] / units(*small)
            predicted = unit * units(*large)
            off = f"{high[key] / predicted - 1:+.0%}" if predicted else "none"
            values = (low[key], predicted, high[key])
            rows.append(
                [what, formula, where, sizes, *map(show, values), off, show(unit * units(*self.full))]
            )
        return rows


def number(things: int) -> float:
    return things


def parts(shards: int, lanes: int) -> float:
    """Return the most parts: a cut every 16th of a lane, and one at each file's end."""
    return shards + 16 * lanes


def rows_held(lanes: int, window: int) -> float:
    return lanes * window


def others(ranks: int) -> float:
    return ranks - 1


def own_shards(shards: int, ranks: int) -> float:
    """Return the shards that each rank reads."""
    return shards / ranks


FILES, JSONL, CORPUS = "storage/listing.py", "sources/jsonl.py", "distributed/corpus.py"
RANK_SYNC, OWN_SHARDS = "distributed/rank_sync.py", "shards / ranks"
EACH_PART, EACH_ROW, EACH_OTHER = "shards + 16 x lanes", "lanes of the process x window", "ranks - 1"

GROUPS = (
    Group(
        *("manifest", probes.manifest, ("shards",), (1_000,), (8_000,), (SHARDS,)),
        costs=(
            Cost("memory", "manifest, memory of each process", FILES, "shards", number, volume),
            Cost("seconds", "manifest, start of each rank", FILES, "shards", number, seconds),
            Cost("pickled", "source, pickled for a spawned worker", FILES, "shards", number, volume),
            Cost("identified", "fingerprint, of what all ranks read", FILES, "shards", number, seconds),
        ),
    ),
    Group(
        *("fingerprint", ranks.fingerprint, ("shards", "ranks"), (400, 4), (2_400, 12), (SHARDS, RANKS)),
        costs=(
            Cost("read", "fingerprint, bytes read by each rank", CORPUS, OWN_SHARDS, own_shards, volume),
            Cost("seconds", "fingerprint, reading, each rank", CORPUS, OWN_SHARDS, own_shards, seconds),
            Cost(
                "received",
                "fingerprint, received by each rank",
                CORPUS,
                "shards of the others",
                lambda shards, ranks: shards - own_shards(shards, ranks),
                volume,
            ),
        ),
    ),
    Group(
        *("footers", ranks.footers, ("Parquet shards", "ranks"), (240, 4), (1_200, 12), (SHARDS, RANKS)),
        costs=(
            Cost("read", "Parquet footers, read by each rank", CORPUS, OWN_SHARDS, own_shards, count),
            Cost(
                "received",
                "Parquet row groups, received by each rank",
                CORPUS,
                "shards of the others",
                lambda shards, ranks: shards - own_shards(shards, ranks),
                volume,
            ),
        ),
    ),
    Group(
        *("estimate", probes.estimate, ("shards",), (200,), (800,), (SHARDS,)),
        costs=(Cost("probed", "estimate, rows read", JSONL, "rows asked for", lambda shards: 1, count),),
    ),
    Group(
        "division into lanes",
        probes.division,
        ("shards", "lanes"),
        *((SHARDS // 2, LANES // 2), (SHARDS, LANES), (SHARDS, LANES)),
        costs=(
            Cost("memory", "parts, memory of each process", JSONL, EACH_PART, parts, volume),
            Cost(
                *("seconds", "parts, start of each process", JSONL, f"({EACH_PART}) x log lanes"),
                units=lambda shards, lanes: parts(shards, lanes) * math.log(lanes),
                show=seconds,
            ),
        ),
    ),
    Group(
        "lanes of one process",
        probes.reading,
        ("lanes", "rows a window"),
        *((4, 512), (16, 512), (OWN, WINDOW)),
        costs=(
            Cost(
                "memory",
                "windows and buffers, memory of each process",
                "streaming/lane.py",
                EACH_ROW,
                rows_held,
                volume,
            ),
            Cost(
                "seconds",
                "first pack of every lane, each process",
                "streaming/lane.py",
                EACH_ROW,
                rows_held,
                seconds,
            ),
            Cost("resume", "resume, each process", "streaming/lane.py", EACH_ROW, rows_held, seconds),
            Cost(
                "files",
                "files open between reads, each process",
                "storage/base.py",
                "none",
                rows_held,
                count,
            ),
        ),
    ),
    Group(
        *("one pack", probes.pack, ("tokens",), (4_096,), (32_768,), (4_096,)),
        costs=(
            Cost(
                "memory",
                "a waiting pack, memory",
                "packing/assemble.py",
                "16 x max_seq_len",
                number,
                volume,
            ),
        ),
    ),
    Group(
        *("state", probes.state, ("lanes",), (128,), (1_024,), (LANES,)),
        costs=(
            Cost("lanes", "state, lanes", "streaming/lane_state.py", "lanes", number, volume),
            Cost("saved", "state, file", "streaming/dataset.py", "lanes", number, volume),
            Cost(
                "check",
                "state, check when loaded, each rank",
                "streaming/dataset.py",
                "lanes",
                number,
                seconds,
            ),
        ),
    ),
    Group(
        *("agreement of ranks", ranks.agreement, ("ranks",), (4,), (12,), (RANKS,)),
        costs=(
            Cost("sockets", "sockets of each rank, each group", RANK_SYNC, EACH_OTHER, others, count),
            Cost(
                "received",
                "agreement on 8 batches, received by each rank",
                RANK_SYNC,
                EACH_OTHER,
                others,
                volume,
            ),
            Cost("seconds", "agreement on 8 batches, each rank", RANK_SYNC, EACH_OTHER, others, seconds),
            Cost(
                "merged",
                "state, 15 lanes a rank, received by each rank",
                RANK_SYNC,
                "lanes of the others",
                others,
                volume,
            ),
            Cost(
                "ahead",
                "batches made ahead, each rank",
                "loader/data_loader.py",
                "2 rounds of 8",
                lambda ranks: 1,
                count,
            ),
        ),
    ),
)
