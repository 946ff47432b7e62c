"""What a run on a thousand ranks costs, measured and worked out; and that run, simulated from lengths alone.

One command: ``python -m benchmarks.scale``. docs/scale.md explains the tables and says what follows.
"""

from __future__ import annotations

import argparse
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

ROW_BYTES, TOKEN_BYTES = 20, 4  # of a row of JSON, beside its text; and of a token's text
FILES = 100_000
PACKING = Packing(4096)  # of the epoch
TICKS = 20  # of the progress bar for each plan
DENSE, ATTENTION = (
    6 * 7.5e9,
    6 * 32 * 4096,
)  # FLOPs a token, and a pair of tokens, of Llama 3.1 8B with its backward

EPOCH = (
    "lanes",
    "packs a step",
    "packs",
    "padding",
    "packs of a lane",
    "steps",
    "first lane dry",
    "null packs",
)
RESUME = (
    "lanes",
    "packs a step",
    "resumed at step",
    "first lane dry",
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
    """How large the run is that gets simulated."""

    packs: int = 1_000_000
    ranks: int = 1024
    lost: int = 64
    files: int = FILES
    steps: int = 32  # of each context length, for the spread of the cost
    contexts: tuple[int, ...] = (4096, 32_768, 131_072)

    @property
    def left(self) -> int:
        """Ranks after the loss."""
        return self.ranks - self.lost

    @property
    def common(self) -> int:
        """The fewest lanes that the ranks divide, before and after."""
        return int(np.lcm(self.ranks, self.left))


def drawn(name: str, count: int, longest: int) -> sim.Ints:
    """Random lengths, not quantiles: lanes differ as they do.  # [count]"""
    shape = DISTRIBUTIONS[name]
    normal = np.random.default_rng(0).standard_normal(count)
    return np.clip(np.rint(shape.median * np.exp(shape.sigma * normal)), 1, longest).astype(np.int64)


def corpus(name: str, packs: int, longest: int, *, files: int, lanes: int) -> sim.Corpus:
    """Enough samples for about so many packs of ``longest`` tokens, in JSONL files."""
    mean = drawn(name, 100_000, longest).mean()
    lengths = drawn(name, round(packs * longest / mean), longest)
    return sim.by_bytes(lengths, TOKEN_BYTES * lengths + ROW_BYTES, -(-len(lengths) // files), lanes)


def ticker(begin: Callable[[str], None], step: str, lanes: int) -> Callable[[], None]:
    """To be called once a lane: the bar moves `TICKS` times."""
    done = 0

    def tick() -> None:
        nonlocal done
        if done * TICKS // lanes != (done - 1) * TICKS // lanes:
            begin(step)
        done += 1

    return tick


class Run(NamedTuple):
    """An epoch that nothing interrupts."""

    corpus: sim.Corpus
    packs: sim.Packs
    topology: sim.Topology
    dealt: sim.Dealt

    @property
    def lanes(self) -> int:
        """Of the corpus."""
        return len(self.corpus.ends)

    @property
    def dry(self) -> int:
        """The step in which the first lane lacks a pack."""
        return sim.first_dry(self.packs, self.lanes, self.topology.packs_per_step)


def null_share(packs: int, dealt: sim.Dealt, topology: sim.Topology) -> float:
    """Of all places of all ranks in all steps, those that hold a null pack."""
    return 1 - packs / (dealt.steps * topology.places)


def simulate(settings: Settings, begin: Callable[[str], None]) -> tuple[str, str]:
    """One epoch on all ranks; and its rest on those that are left, from the middle on."""
    ranks, left, many = settings.ranks, settings.left, settings.common
    epochs, resumes = [], []
    for lanes, sizes in ((ranks, (ranks,)), (many, (ranks, 4 * ranks, many))):
        data = corpus("flan", settings.packs, 4096, files=settings.files, lanes=lanes)
        packs = sim.plan(data, PACKING, tick=ticker(begin, f"plan {lanes:,} lanes", lanes))
        assert (packs.pack >= 0).all(), "every sample is in a pack"
        for size in sizes:
            topology = sim.Topology(ranks, size)
            run = Run(data, packs, topology, sim.deal(packs, topology))
            epochs.append(epoch_row(run))
            half = run.dealt.steps // 2
            handed = sim.handed_after(packs, run.dealt, half, lanes)
            tick = ticker(begin, f"resume {lanes:,} lanes, {size:,} packs a step", lanes)
            rest = sim.plan(data, PACKING, before=packs, handed=handed, tick=tick)
            check_rest(packs, run.dealt, half, rest)
            resumes.append(resume_row(run, half, rest, sim.Topology(left, size)))
            if (lanes, size) == (many, ranks):
                resumes.append(resume_row(run, half, rest, sim.Topology(left, left)))
    return report.table(EPOCH, epochs), report.table(RESUME, resumes)


def epoch_row(run: Run) -> list[str]:
    """How even and how full it is."""
    counts = np.bincount(run.packs.lane, minlength=run.lanes)
    padding = 1 - run.packs.tokens.sum() / (counts.sum() * PACKING.max_seq_len)
    return [
        f"{run.lanes:,}",
        f"{run.topology.packs_per_step:,}",
        f"{counts.sum():,}",
        f"{padding:.2%}",
        f"{counts.min()} to {counts.max()}",
        f"{run.dealt.steps:,}",
        f"{run.dry:,}",
        f"{null_share(int(counts.sum()), run.dealt, run.topology):.1%}",
    ]


def resume_row(run: Run, half: int, rest: sim.Packs, after: sim.Topology) -> list[str]:
    """The rest of it, from step ``half`` on, beside the rest of the run that nothing interrupts."""
    before = run.topology.packs_per_step
    again = sim.deal(rest, after, slot=half * before)
    unbroken = sim.Dealt(
        *(column[run.dealt.step >= half] for column in run.dealt[:3]), run.dealt.steps - half
    )
    until = "other size"
    if after.packs_per_step == before:
        same = half + same_steps(run.packs, run.dealt, half, rest, again)
        assert run.lanes % after.ranks or same >= run.dry, "the same packs until the first lane is dry"
        until = f"{same:,}"
    return [
        f"{run.lanes:,}",
        f"{before:,}" + ("" if after.packs_per_step == before else f", then {after.packs_per_step:,}"),
        f"{half:,}",
        f"{run.dry:,}",
        until,
        f"{unbroken.steps:,}",
        f"{again.steps:,}",
        f"{1 - after.packs_per_step / after.places:.1%}",
        f"{null_share(len(rest.lane), again, after):.1%}",
        f"{null_share(len(rest.lane), unbroken, run.topology):.1%}",
    ]


def check_rest(packs: sim.Packs, dealt: sim.Dealt, half: int, rest: sim.Packs) -> None:
    """Every sample exactly once: before the loss or after it, and there in the pack that it would have been in."""
    done, after = dealt.step[packs.pack] < half, rest.pack >= 0
    assert (done ^ after).all(), "every sample exactly once"
    was, now = packs.pack[after], rest.pack[after]
    assert (packs.number[was] == rest.number[now]).all()
    assert (packs.cost[was] == rest.cost[now]).all()


def same_steps(packs: sim.Packs, dealt: sim.Dealt, half: int, rest: sim.Packs, again: sim.Dealt) -> int:
    """How many steps from the resume on train on the same packs as the run without."""

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
    """How evenly a step's cost lies on the ranks, one pack of each, as packs come and sorted in windows."""
    rows = []
    for longest in settings.contexts:
        lanes = settings.ranks
        # Some lanes end early; steps are counted until the first does.
        data = corpus("stack", lanes * (settings.steps + 8), longest, files=10 * lanes, lanes=lanes)
        packs = sim.plan(data, Packing(longest), tick=ticker(begin, f"plan packs of {longest:,}", lanes))
        for window in (1, 4, 16):
            moved = sim.sorted_in_windows(packs, packs.cost, window)
            dealt = sim.deal(moved, sim.Topology(lanes, lanes))
            steps = min(settings.steps, sim.first_dry(moved, lanes, lanes))
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
    """Measure, simulate, print and keep the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--packs", type=int, default=Settings().packs, help="packs of the simulated epoch (%(default)s)")
    add("--smoke", action="store_true", help="seconds, to see that it runs: 32 ranks, 8,000 packs, no file")
    add("--out", type=Path, help="folder of the result file (benchmarks/results)")
    options = parser.parse_args(arguments)
    if not Path("/proc/self/fd").exists():
        parser.error(
            "memory, files and sockets are read from /proc, which this system has not; run it on Linux"
        )
    settings = Settings(packs=options.packs)
    if options.smoke:
        settings = Settings(8_000, ranks=32, lost=2, files=100, steps=8, contexts=(4096,))
    began = time.perf_counter()
    step = report.progress(len(costs.GROUPS) + TICKS * (6 + len(settings.contexts)))
    grown = []
    for group in costs.GROUPS:
        step(group.step)
        grown += group.rows(shrink=10 if options.smoke else 1)
    epoch, resume = simulate(settings, step)
    even = spread(settings, step)
    text = "\n\n".join(
        [
            f"# Scale: {costs.SHARDS:,} shards on {costs.RANKS:,} ranks",
            report.row_id("streampack", "torch", "numpy"),
            f"How to read it: ../../docs/scale.md. {time.perf_counter() - began:,.0f} s in all.",
            "## What grows",
            report.table(costs.HEADER, grown),
            f"## One epoch of {settings.packs:,} packs on {settings.ranks:,} ranks, simulated",
            epoch,
            f"## {settings.lost} ranks lost in the middle of it, simulated",
            resume,
            f"## The cost of a step, one pack on each of {settings.ranks:,} ranks, simulated",
            even,
        ]
    )
    print(text)
    if options.out or not options.smoke:
        print(f"\nwritten to {report.save('scale', text, options.out or report.RESULTS)}")


if __name__ == "__main__":
    main()
