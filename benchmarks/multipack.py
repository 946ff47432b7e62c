"""Fill and balance of the steps of several ranks, by streampack and by the published multipack.

Run ``python -m benchmarks.multipack``; README.md in this folder explains the table.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks import report
from benchmarks.lengths import LogNormal, draw, lower_bound

# OpenChat's conversations, on which multipack reports, cut to 2,048 tokens: half of them are that long, the mean is
# 1,550 and the 5th, 10th and 25th percentiles are 400, 561 and 974. This has a mean of 1,559 and 373, 547 and 1,034.
CHAT = LogNormal(2100, 1.05, "conversations, cut (OpenChat): mean 1,550")
LONGEST = 2048

Step = list[list[int]]
Planner = Callable[[list[int], int, int], list[Step]]  # lengths, tokens of a pack, ranks

HEADER = (
    "planner",
    "steps",
    "above bound",
    "padding",
    "efficiency",
    "utilization",
    "lag mean",
    "lag max",
    "left out",
    "seconds",
)


def scheduled(lengths: Sequence[int], numbers: range, max_tokens: int, ranks: int) -> Step | None:
    """Give each sample, longest first, to the rank with the fewest tokens; None if that overflows one."""
    packs: Step = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(numbers, key=lambda number: -lengths[number]):
        rank = loads.index(min(loads))
        packs[rank].append(number)
        loads[rank] += lengths[number]
        if loads[rank] > max_tokens:
            return None
    return packs


def first_fit_decreasing(lengths: Sequence[int], numbers: range, max_tokens: int, ranks: int) -> Step | None:
    """Give each sample, longest first, to the first rank with room for it; None if none has."""
    packs: Step = [[] for _ in range(ranks)]
    rooms = [max_tokens] * ranks
    for number in sorted(numbers, key=lambda number: -lengths[number]):
        rank = next((rank for rank in range(ranks) if rooms[rank] >= lengths[number]), None)
        if rank is None:
            return None
        packs[rank].append(number)
        rooms[rank] -= lengths[number]
    return packs


def published(
    allot: Callable[[Sequence[int], range, int, int], Step | None],
) -> Planner:
    """Return multipack version 2 as github.com/imoneoi/multipack_sampler describes it, without its compiled code.

    A step takes as many of the next samples as ``allot`` can place, found by bisection: ``scheduled`` is its variant
    for quadratic attention, ``first_fit_decreasing`` the linear one. A step that leaves a rank without a sample ends
    the epoch, and its samples are left out.
    """

    def plan(lengths: list[int], max_tokens: int, ranks: int) -> list[Step]:
        steps: list[Step] = []
        ends = np.cumsum(lengths)
        start = 0
        while True:
            used = int(ends[start - 1]) if start else 0
            fits, fails = 0, int(np.searchsorted(ends, used + max_tokens * ranks, "right")) - start + 1
            while fails - fits > 1:
                count = (fits + fails) // 2
                if allot(lengths, range(start, start + count), max_tokens, ranks):
                    fits = count
                else:
                    fails = count
            step = allot(lengths, range(start, start + fits), max_tokens, ranks)
            if step is None or not all(step):
                return steps
            steps.append(step)
            start += fits

    return plan


def ours(objective: str) -> Planner:
    """Return the planner of `MultipackBatchSampler`."""
    from streampack.map_style.multipack import plan_steps

    return lambda lengths, max_tokens, ranks: plan_steps(
        lengths, max_tokens=max_tokens, packs_per_step=ranks, objective=objective
    )


def streamed(strategy: str) -> Planner:
    """Return a planner that gives each rank the next pack of a stream."""
    from streampack import plan_packs

    def plan(lengths: list[int], max_tokens: int, ranks: int) -> list[Step]:
        packs = [[span.index for span in pack] for pack in plan_packs(lengths, max_tokens, strategy=strategy)]
        packs += [[] for _ in range(-len(packs) % ranks)]  # null packs
        return [packs[i : i + ranks] for i in range(0, len(packs), ranks)]

    return plan


def planners() -> dict[str, Planner]:
    """Return the planner of each row."""
    return {
        "multipack, quadratic": ours("quadratic"),
        "multipack, linear": ours("linear"),
        "exact_fit, streamed": streamed("exact_fit"),
        "next_fit, streamed": streamed("next_fit"),
        "published multipack, quadratic": published(scheduled),
        "published multipack, linear": published(first_fit_decreasing),
    }


class Measured(NamedTuple):
    """Measures of a plan."""

    steps: int
    efficiency: float  # tokens / room for tokens
    utilization: float  # tokens / what they would be if every rank had as many as the fullest of its step
    lags: list[float]  # per step: root of the spread over ranks of the sum of squared lengths
    left_out: int  # samples


def measure(steps: list[Step], lengths: Sequence[int], max_tokens: int) -> Measured:
    """Compute the measures that multipack's README defines, over all steps."""
    loads = [[sum(lengths[number] for number in pack) for pack in step] for step in steps]
    costs = [[sum(lengths[number] ** 2 for number in pack) for pack in step] for step in steps]
    tokens = sum(map(sum, loads))
    return Measured(
        steps=len(steps),
        efficiency=tokens / sum(len(step) * max_tokens for step in steps),
        utilization=tokens / sum(max(load) * len(load) for load in loads),
        lags=[(max(cost) - min(cost)) ** 0.5 for cost in costs],
        left_out=len(lengths) - sum(len(pack) for step in steps for pack in step),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the table."""
    parser = report.parser(__doc__, smoke="2,000 samples")
    add = parser.add_argument
    add("--samples", type=int, default=100_000, help="lengths to plan (%(default)s)")
    add("--ranks", type=int, default=8, help="packs of a step (%(default)s)")
    add("--max-tokens", type=int, default=16 * 2048, help="tokens of a pack (%(default)s)")
    add("--repeats", type=int, default=3, help="plans; the table shows the fastest (%(default)s)")
    add("--seed", type=int, default=0, help="of the order of the samples (%(default)s)")
    options = parser.parse_args(arguments)
    count, repeats = (2_000, 1) if options.smoke else (options.samples, options.repeats)
    lengths = draw(CHAT, count=count, seed=options.seed, longest=LONGEST).tolist()
    bound = lower_bound(lengths, options.max_tokens * options.ranks)
    rows = []
    named = planners()
    step = report.progress(len(named))
    for name, plan in named.items():
        step(name)
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            steps = plan(lengths, options.max_tokens, options.ranks)
            seconds.append(time.perf_counter() - begin)
        made = measure(steps, lengths, options.max_tokens)
        rows.append(
            [
                name,
                f"{made.steps:,}",
                f"{made.steps - bound:,}",
                f"{1 - made.efficiency:.3%}",
                f"{made.efficiency:.3%}",
                f"{made.utilization:.3%}",
                f"{statistics.fmean(made.lags):,.0f}",
                f"{max(made.lags):,.0f}",
                f"{made.left_out:,}",
                f"{min(seconds):.2f}",
            ]
        )
    report.publish(
        "multipack",
        options,
        f"# Multipack: {options.ranks} ranks, packs of {options.max_tokens:,} tokens",
        report.machine_line("streampack", "numpy"),
        f"{count:,} chat-like lengths, {sum(lengths):,} tokens: median {statistics.median(lengths):,.0f}, "
        f"mean {statistics.fmean(lengths):,.0f}, longest {max(lengths):,}; seed {options.seed}, "
        f"best of {repeats} plan(s). No plan has fewer than {bound:,} steps. Explained in ../README.md.",
        report.table(HEADER, rows),
    )


if __name__ == "__main__":
    main()
