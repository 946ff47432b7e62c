"""Seconds of real steps of two ranks, with and without ``balance_window``, beside what attention costs predict.

Run ``python -m benchmarks.even_steps``; README.md in this folder explains the table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import islice
from typing import NamedTuple

import torch

from benchmarks import report
from benchmarks.gpu.model import Shape
from benchmarks.straggling import dataset, web_rows
from streampack import PackedDataLoader, prepare_model_for_packing
from streampack.losses import summed_cross_entropy
from streampack.packing.attention_cost import AttentionCost
from tests.harness.processes import Ranks

CONTEXT, MEASURED_WINDOW, ROUND = 8_192, 64, 16
HEADER = (
    "steps",
    "as planned, s a step",
    "window 64, s a step",
    "gain",
    "gain by the model",
    "dearest / mean before",
    "after",
)


class Timed(NamedTuple):
    """Steps of one rank, as planned and with a window."""

    seconds: list[list[float]]  # of the steps
    computed: list[list[float]]  # of the rank's own part of them
    costs: list[list[int]]  # attention costs of its packs


def train(rounds: int, context: int) -> Timed:
    """In a rank: train on both streams in turn, `ROUND` steps of each; gradients are averaged in every step."""
    torch.set_num_threads(1)
    shape = Shape(vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=4, embed_dim=64, intermediate_dim=64)
    model = shape.build(device="cpu", dtype="fp32", seed=0)
    inputs = prepare_model_for_packing(model, attention="varlen")
    rows = web_rows(4 * rounds * ROUND * context, context, seed=0)
    streams = [iter(PackedDataLoader(dataset(rows, context, w, lanes=2))) for w in (0, MEASURED_WINDOW)]
    found = Timed([[], []], [[], []], [[], []])
    world = torch.distributed.get_world_size()
    for number in range(rounds + 1):
        for i, batches in enumerate(streams):
            for batch in islice(batches, ROUND):
                torch.distributed.barrier()
                begun = time.perf_counter()
                loss = summed_cross_entropy(model(**inputs(batch)), batch.labels)
                loss.backward()
                own = time.perf_counter() - begun
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    torch.distributed.all_reduce(parameter.grad.div_(world))
                    parameter.grad = None
                if number:  # the first round warms up
                    found.seconds[i].append(time.perf_counter() - begun)
                    found.computed[i].append(own)
                    found.costs[i].append(
                        sum(AttentionCost().of(f.stop - f.start for f in p) for p in batch.fragments)
                    )
    return found


def steps(rounds: int, context: int) -> list[str]:
    """Return the row of the second table."""
    with Ranks(2) as ranks:
        found: list[Timed] = ranks.run(train, rounds, context, timeout=3000)
    seconds = [statistics.fmean(found[0].seconds[i]) for i in range(2)]
    # The model of a step: the longest of the ranks' times, each a straight line over attention cost.
    costs, computed = (
        [x for rank in found for x in getattr(rank, name)[0]] for name in ("costs", "computed")
    )
    slope, constant = statistics.linear_regression(costs, computed)
    of_steps = [
        [max(pair) for pair in zip(*(rank.costs[i] for rank in found), strict=True)] for i in range(2)
    ]
    modelled = [statistics.fmean(constant + slope * cost for cost in dearest) for dearest in of_steps]
    ratios = [
        statistics.fmean(
            max(pair) / statistics.fmean(pair) for pair in zip(*(r.costs[i] for r in found), strict=True)
        )
        for i in range(2)
    ]
    return [
        str(len(found[0].seconds[0])),
        *(f"{value:.3f}" for value in seconds),
        *(f"{1 - after / before:.1%}" for before, after in (seconds, modelled)),
        *(f"{ratio:.3f}" for ratio in ratios),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    options: argparse.Namespace = report.parser(__doc__, smoke="one round of short packs").parse_args(
        arguments
    )
    measured = steps(1, 1024) if options.smoke else steps(8, CONTEXT)
    report.publish(
        "even-steps",
        options,
        "# Real steps of two ranks, with and without balance_window",
        report.machine_line("streampack", "torch", "torchtune"),
        f"2 processes of one thread each that average their gradients, packs of {CONTEXT:,}, a model of two layers "
        f"that mostly attends; both streams take turns, {ROUND} steps of each at a time. How to read it: ../README.md.",
        report.table(HEADER, [measured]),
    )


if __name__ == "__main__":
    main()
