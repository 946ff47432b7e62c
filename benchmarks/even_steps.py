"""Seconds of real steps of two ranks, with and without ``balance_window``, beside what attention costs predict.

Run ``python -m benchmarks.even_steps``; README.md in this folder explains the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch

from benchmarks import report
from benchmarks.lengths import causal_pairs
from benchmarks.model import Shape
from benchmarks.straggling import dataset, web_rows
from streampack import PackedDataLoader, prepare_model_for_packing, summed_cross_entropy
from tests.harness.processes import run_ranks

CONTEXT, WINDOW, ROUND = 8_192, 64, 16
HEADER = (
    "steps | as planned, s a step | window 64, s a step | gain | gain by the model | "
    "highest / mean before | after"
)


class Step(NamedTuple):
    """One step of one rank."""

    seconds: float
    computed: float  # seconds of the rank's own part
    cost: int  # of its packs' attention


def train(rounds: int, context: int) -> list[list[Step]]:
    """In a rank: train on both streams in turn, `ROUND` steps of each; gradients are averaged in every step."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    shape = Shape(vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=4, embed_dim=64, intermediate_dim=64)
    model = shape.build(device="cpu", dtype="fp32", seed=0)
    inputs = prepare_model_for_packing(model, attention="varlen")
    rows = web_rows(4 * rounds * ROUND * context, context, seed=0)
    streams = [iter(PackedDataLoader(dataset(rows, context, window, lanes=2))) for window in (0, WINDOW)]
    found: list[list[Step]] = [[], []]

    def forward_and_backward(batch: Any) -> None:
        summed_cross_entropy(model(**inputs(batch)), batch.labels).backward()

    def step(batch: Any) -> report.Cost:
        own, _ = report.timed(lambda: forward_and_backward(batch))
        for parameter in model.parameters():
            assert parameter.grad is not None
            torch.distributed.all_reduce(parameter.grad.div_(torch.distributed.get_world_size()))
            parameter.grad = None
        return own

    for number in range(rounds + 1):
        for batches, steps in zip(streams, found, strict=True):
            for batch in islice(batches, ROUND):
                torch.distributed.barrier()
                whole, own = report.timed(lambda batch=batch: step(batch))
                cost = sum(causal_pairs(f.stop - f.start for f in pack) for pack in batch.fragments)
                if number:  # the first round warms up
                    steps.append(Step(whole.seconds, own.seconds, cost))
    torch.distributed.destroy_process_group()
    return found


def row(rounds: int, context: int) -> list[str]:
    """Return the row of the table."""
    ranks: list[list[list[Step]]] = run_ranks(train, 2, rounds, context, timeout=3000)
    seconds = [statistics.fmean(step.seconds for step in ranks[0][stream]) for stream in range(2)]
    # The model of a step: the longest of the ranks' times, each a straight line over attention cost.
    planned = [step for rank in ranks for step in rank[0]]
    slope, constant = statistics.linear_regression(
        [step.cost for step in planned], [step.computed for step in planned]
    )
    modelled, ratios = [], []
    for stream in range(2):
        costs = [
            [step.cost for step in steps] for steps in zip(*(rank[stream] for rank in ranks), strict=True)
        ]
        modelled.append(statistics.fmean(constant + slope * max(each) for each in costs))
        ratios.append(statistics.fmean(max(each) / statistics.fmean(each) for each in costs))
    return [
        str(len(ranks[0][0])),
        *(f"{value:.3f}" for value in seconds),
        *(f"{1 - after / before:.1%}" for before, after in (seconds, modelled)),
        *(f"{ratio:.3f}" for ratio in ratios),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = report.parser(__doc__, smoke="one round of short packs").parse_args(arguments)
    report.publish(
        options,
        "even-steps",
        "Real steps of two ranks, with and without balance_window",
        f"2 processes of one thread each that average their gradients, packs of {CONTEXT:,}, a model of two layers "
        f"that mostly attends; both streams take turns, {ROUND} steps of each at a time. Explained in ../README.md.",
        report.table(HEADER, [row(1, 1024) if options.smoke else row(8, CONTEXT)]),
        packages=["torchtune"],
    )


if __name__ == "__main__":
    main()
