"""Costs of a run on a thousand ranks, measured and extrapolated, and a simulation of that run from lengths alone.

Run ``python -m benchmarks.scale``; docs/scale.md explains the tables and draws conclusions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import report
from benchmarks.lengths import DISTRIBUTIONS
from benchmarks.scale import costs
from benchmarks.scale import simulation as sim
from streampack.packing.settings import Packing

ROW_BYTES, TOKEN_BYTES = 20, 4  # of a row of JSON without its text; of a token's text
FILES = 100_000
PACKING = Packing(4096)  # of the epoch
# FLOPs a token, and a pair of tokens, of a forward and backward pass of Llama 3.1 8B.
DENSE, ATTENTION = 6 * 7.5e9, 6 * 32 * 4096

EPOCH = (
    "lanes",
    "packs a step",
    "packs",
    "padding",
    "packs of a lane",
    "steps",
    "first lane ends",
    "null packs",
)
RESUME = (
    "lanes",
    "packs a step",
    "resumed at step",
    "first lane ends",
    "same packs until",
    "steps, unbroken",
    "steps",
    "null packs, even step",
    "null packs to the end",
    "to the end, unbroken",
)
SPREAD = (
    "max_seq_len",
    "window",
    "attention, mean over max",
    "8B model, mean over max",
    "8B model, waits",
)


class Settings(NamedTuple):
    """Size of the simulated run."""

    packs: int = 1_000_000
    ranks: int = 1024
    lost: int = 64
    files: int = FILES
    steps: int = 32  # for each context length, to measure the spread of the cost
    contexts: tuple[int, ...] = (4096, 32_768, 131_072)

    @property
    def left(self) -> int:
        """Number of ranks after the loss."""
        return self.ranks - self.lost

    @property
    def common(self) -> int:
        """Smallest number of lanes that the ranks divide, before and after the loss."""
        return int(np.lcm(self.ranks, self.left))


def drawn(name: str, count: int, longest: int) -> sim.Ints:
    """Draw random lengths, not quantiles, so that lanes differ.  # [count]"""
    shape = DISTRIBUTIONS[name]
    normal = np.random.default_rng(0).standard_normal(count)
    return np.clip(np.rint(shape.median * np.exp(shape.sigma * normal)), 1, longest).astype(np.int64)


def corpus(name: str, packs: int, longest: int, *, files: int, lanes: int) -> sim.Corpus:
    """Draw samples for about ``packs`` packs of ``longest`` tokens, in JSONL files."""
    mean = drawn(name, 100_000, longest).mean()
    lengths = drawn(name, round(packs * longest / mean), longest)
    return sim.by_bytes(lengths, TOKEN_BYTES * lengths + ROW_BYTES, -(-len(lengths) // files), lanes)


class Run(NamedTuple):
    """An uninterrupted epoch."""

    corpus: sim.Corpus
    packs: sim.Packs
    topology: sim.Topology
    dealt: sim.Dealt

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return len(self.corpus.ends)

    @property
    def lane_end(self) -> int:
        """First step in which a lane lacks a pack."""
        return sim.first_lane_end(self.packs, self.lanes, self.topology.packs_per_step)


def null_share(packs: int, dealt: sim.Dealt, topology: sim.Topology) -> float:
    """Return the fraction of null packs over all ranks and steps."""
    return 1 - packs / (dealt.steps * topology.places)


def simulate(settings: Settings, begin: Callable[[str], None]) -> tuple[str, str]:
    """Simulate one epoch on all ranks, and a resume in its middle on those that are left; return both tables."""
    ranks, left, many = settings.ranks, settings.left, settings.common
    epochs, resumes = [], []
    for lanes, sizes in ((ranks, (ranks,)), (many, (ranks, 4 * ranks, many))):
        begin(f"plan {lanes:,} lanes")
        data = corpus("flan", settings.packs, 4096, files=settings.files, lanes=lanes)
        packs = sim.plan(data, PACKING)
        assert (packs.pack >= 0).all(), "every sample is in a pack"
        for size in sizes:
            topology = sim.Topology(ranks, size, num_lanes=lanes)
            run = Run(data, packs, topology, sim.deal(packs, topology))
            epochs.append(epoch_row(run))
            half = run.dealt.steps // 2
            handed = sim.handed_after(packs, run.dealt, half, lanes)
            begin(f"resume {lanes:,} lanes, {size:,} packs a step")
            rest = sim.plan(data, PACKING, before=packs, handed=handed)
            check_rest(packs, run.dealt, half, rest)
            resumes.append(resume_row(run, half, rest, sim.Topology(left, size, num_lanes=lanes)))
            if (lanes, size) == (many, ranks):
                resumes.append(resume_row(run, half, rest, sim.Topology(left, left, num_lanes=lanes)))
    return report.table(EPOCH, epochs), report.table(RESUME, resumes)


def epoch_row(run: Run) -> list[str]:
    """Format an epoch's row."""
    counts = np.bincount(run.packs.lane, minlength=run.lanes)
    padding = 1 - run.packs.tokens.sum() / (counts.sum() * PACKING.max_seq_len)
    return [
        f"{run.lanes:,}",
        f"{run.topology.packs_per_step:,}",
        f"{counts.sum():,}",
        f"{padding:.2%}",
        f"{counts.min()} to {counts.max()}",
        f"{run.dealt.steps:,}",
        f"{run.lane_end:,}",
        f"{null_share(int(counts.sum()), run.dealt, run.topology):.1%}",
    ]


def resume_row(run: Run, half: int, rest: sim.Packs, after: sim.Topology) -> list[str]:
    """Format a resume's row: the steps from ``half`` on, beside those of the uninterrupted run."""
    before = run.topology.packs_per_step
    again = sim.deal(rest, after, slot=half * before)
    unbroken = sim.Dealt(
        *(column[run.dealt.step >= half] for column in run.dealt[:3]), run.dealt.steps - half
    )
    until = "other size"
    if after.packs_per_step == before:
        same = half + same_steps(run.packs, run.dealt, half, rest, again)
        assert same >= run.lane_end, "the same packs until the first lane ends"
        until = f"{same:,}"
    return [
        f"{run.lanes:,}",
        f"{before:,}" + ("" if after.packs_per_step == before else f", then {after.packs_per_step:,}"),
        f"{half:,}",
        f"{run.lane_end:,}",
        until,
        f"{unbroken.steps:,}",
        f"{again.steps:,}",
        f"{1 - after.packs_per_step / after.places:.1%}",
        f"{null_share(len(rest.lane), again, after):.1%}",
        f"{null_share(len(rest.lane), unbroken, run.topology):.1%}",
    ]


def check_rest(packs: sim.Packs, dealt: sim.Dealt, half: int, rest: sim.Packs) -> None:
    """Check that every sample is trained once, before or after the loss, and in the same pack as without it."""
    done, after = dealt.step[packs.pack] < half, rest.pack >= 0
    assert (done ^ after).all(), "every sample exactly once"
    was, now = packs.pack[after], rest.pack[after]
    assert (packs.number[was] == rest.number[now]).all()
    assert (packs.cost[was] == rest.cost[now]).all()


def same_steps(packs: sim.Packs, dealt: sim.Dealt, half: int, rest: sim.Packs, again: sim.Dealt) -> int:
    """Count the steps from the resume on whose packs are those of the uninterrupted run."""

    def keyed(packs: sim.Packs, step: sim.Ints) -> list[npt.NDArray[Any]]:
        keys = packs.number * (int(packs.lane.max()) + 1) + packs.lane
        order = np.lexsort((keys, step))
        return np.split(keys[order], np.cumsum(np.bincount(step))[:-1])

    later = dealt.step >= half
    whole = keyed(sim.Packs(*(column[later] for column in packs[:5]), packs.pack), dealt.step[later] - half)
    pairs = enumerate(zip(whole, keyed(rest, again.step), strict=False))
    return next(
        (i for i, (one, other) in pairs if not np.array_equal(one, other)), min(len(whole), again.steps)
    )


def spread(settings: Settings, begin: Callable[[str], None]) -> str:
    """Measure how evenly a step's cost is spread over ranks, one pack each, as streamed and sorted in windows."""
    rows = []
    for longest in settings.contexts:
        lanes = settings.ranks
        # Lanes differ in length; only steps before the end of the first are counted.
        data = corpus("stack", lanes * (settings.steps + 8), longest, files=10 * lanes, lanes=lanes)
        begin(f"plan packs of {longest:,}")
        packs = sim.plan(data, Packing(longest))
        for window in (1, 4, 16):
            moved = sim.sorted_in_windows(packs, packs.cost, window)
            dealt = sim.deal(moved, sim.Topology(lanes, lanes))
            steps = min(settings.steps, sim.first_lane_end(moved, lanes, lanes))
            attention = sim.cost_of_ranks(moved, dealt, lanes, moved.cost)[:steps]
            model = DENSE * longest + ATTENTION * attention
            evenness = [float(c.mean() / c.max(axis=1).mean()) for c in (attention, model)]
            rows.append(
                [
                    f"{longest:,}",
                    "none" if window == 1 else f"{window} packs",
                    *(f"{value:.1%}" for value in evenness),
                    f"{1 / evenness[1] - 1:.1%}",
                ]
            )
    return report.table(SPREAD, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, simulate, print and write the tables."""
    parser = report.parser(__doc__, smoke="32 ranks, 8,000 packs")
    add = parser.add_argument
    add("--packs", type=int, default=Settings().packs, help="packs of the simulated epoch (%(default)s)")
    options = parser.parse_args(arguments)
    if not Path("/proc/self/fd").exists():
        parser.error(
            "memory, files and sockets are read from /proc, which this system does not have; run it on Linux"
        )
    settings = Settings(packs=options.packs)
    if options.smoke:
        settings = Settings(8_000, ranks=32, lost=2, files=100, steps=8, contexts=(4096,))
    began = time.perf_counter()
    step = report.progress(len(costs.GROUPS) + 6 + len(settings.contexts))
    grown = []
    for group in costs.GROUPS:
        step(group.step)
        grown += group.rows(shrink=10 if options.smoke else 1)
    epoch, resume = simulate(settings, step)
    even = spread(settings, step)
    report.publish(
        "scale",
        options,
        f"# Scale: {costs.SHARDS:,} shards on {costs.RANKS:,} ranks",
        report.machine_line("streampack", "torch", "numpy"),
        f"Explained in ../../docs/scale.md. {time.perf_counter() - began:,.0f} s in all.",
        "## What grows",
        report.table(costs.HEADER, grown),
        f"## One epoch of {settings.packs:,} packs on {settings.ranks:,} ranks, simulated",
        epoch,
        f"## {settings.lost} ranks lost in the middle of it, simulated",
        resume,
        f"## The cost of a step, one pack on each of {settings.ranks:,} ranks, simulated",
        even,
    )


if __name__ == "__main__":
    main()
