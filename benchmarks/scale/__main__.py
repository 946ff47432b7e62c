"""Costs of a run on a thousand ranks, measured and extrapolated, and a simulation of that run from lengths alone.

Run ``python -m benchmarks.scale``; docs/guides/pretraining.md explains the tables and draws conclusions.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks import report
from benchmarks.lengths import DISTRIBUTIONS
from benchmarks.scale import costs
from benchmarks.scale import simulation as sim
from streampack import plan_packs

ROW_BYTES, TOKEN_BYTES = 20, 4  # of a row of JSON without its text; of a token's text
MAX_SEQ_LEN = 4096
EPOCH = "lanes | packs a step | packs | padding | packs of a lane | steps | first lane ends | null packs"
RESUME = (
    "lanes | packs a step | resumed at step | first lane ends | same packs until | steps, unbroken | "
    "steps | null packs, even step | null packs to the end | to the end, unbroken"
)


class Settings(NamedTuple):
    """Size of the simulated run."""

    packs: int = 1_000_000
    ranks: int = 1024
    lost: int = 64
    files: int = costs.SHARDS


def simulate(settings: Settings) -> tuple[str, str]:
    """Simulate one epoch on all ranks, and a resume in its middle on those that are left; return both tables."""
    ranks, left = settings.ranks, settings.ranks - settings.lost
    many = int(np.lcm(ranks, left))  # the least that the ranks divide, before and after the loss
    # Random lengths, not quantiles, so that lanes differ.
    shape = DISTRIBUTIONS["flan"]
    normal = np.random.default_rng(0).standard_normal(max(100_000, 10 * settings.packs))
    lengths = np.clip(np.rint(shape.median * np.exp(shape.sigma * normal)), 1, MAX_SEQ_LEN).astype(np.int64)
    lengths = lengths[: round(settings.packs * MAX_SEQ_LEN / lengths[:100_000].mean())]
    epochs, resumes = [], []
    for lanes, sizes in ((ranks, (ranks,)), (many, (ranks, 4 * ranks, many))):
        rows_per_file = -(-len(lengths) // settings.files)
        rows = sim.by_bytes(TOKEN_BYTES * lengths + ROW_BYTES, rows_per_file, lanes)
        counts = np.array([sum(1 for _ in plan_packs(lengths[own], MAX_SEQ_LEN)) for own in rows])
        packs = sim.Packs.of(counts)
        for size in sizes:
            topology = sim.Topology(ranks, size, lanes)
            assigned = sim.assign(packs, topology)
            epochs.append(
                [
                    f"{lanes:,}",
                    f"{size:,}",
                    f"{counts.sum():,}",
                    f"{1 - lengths.sum() / (counts.sum() * MAX_SEQ_LEN):.2%}",
                    f"{counts.min()} to {counts.max()}",
                    f"{assigned.steps:,}",
                    f"{sim.first_lane_end(packs, topology):,}",
                    f"{1 - counts.sum() / (assigned.steps * topology.places):.1%}",
                ]
            )
            after = (size, left) if (lanes, size) == (many, ranks) else (size,)
            resumes += [resume_row(packs, topology, sim.Topology(left, each, lanes)) for each in after]
    return report.table(EPOCH, epochs), report.table(RESUME, resumes)


def resume_row(packs: sim.Packs, before: sim.Topology, after: sim.Topology) -> list[str]:
    """Format a resume's row: the steps from the middle on, beside those of the uninterrupted run."""
    assigned = sim.assign(packs, before)
    half = assigned.steps // 2
    later = assigned.step >= half
    rest = packs.where(later)
    again = sim.assign(rest, after, slot=half * before.packs_per_step)
    lane_end = sim.first_lane_end(packs, before)
    same = after.packs_per_step == before.packs_per_step
    until = half + sim.same_steps((rest, assigned.step[later] - half), (rest, again.step))
    assert not same or until >= lane_end, "the same packs until the first lane ends"
    unbroken = assigned.steps - half
    return [
        f"{before.lanes:,}",
        f"{before.packs_per_step:,}" + ("" if same else f", then {after.packs_per_step:,}"),
        f"{half:,}",
        f"{lane_end:,}",
        f"{until:,}" if same else "other size",
        f"{unbroken:,}",
        f"{again.steps:,}",
        f"{1 - after.packs_per_step / after.places:.1%}",
        f"{1 - len(rest.lane) / (again.steps * after.places):.1%}",
        f"{1 - len(rest.lane) / (unbroken * before.places):.1%}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, simulate, print and write the tables."""
    options = report.parser(__doc__, smoke="32 ranks, 8,000 packs").parse_args(arguments)
    settings = Settings(8_000, ranks=32, lost=2, files=100) if options.smoke else Settings()
    began = time.perf_counter()
    grown = costs.measure(shrink=10 if options.smoke else 1)
    epoch, resume = simulate(settings)
    report.publish(
        options,
        "scale",
        f"Scale: {costs.SHARDS:,} shards on {costs.RANKS:,} ranks",
        f"Explained in ../../docs/guides/pretraining.md. {time.perf_counter() - began:,.0f} s in all.",
        "## What grows",
        report.table(costs.HEADER, grown),
        f"## One epoch of {settings.packs:,} packs on {settings.ranks:,} ranks, simulated",
        epoch,
        f"## {settings.lost} ranks lost in the middle of it, simulated",
        resume,
        packages=["numpy"],
    )


if __name__ == "__main__":
    main()
