"""How long ranks wait for the one whose pack costs most, with and without ``balance_window``.

Run ``python -m benchmarks.straggling``; README.md in this folder explains the tables.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import report
from benchmarks.gpu.model import Shape
from benchmarks.lengths import LogNormal
from streampack import IterablePackedDataset, PackedDataLoader, prepare_model_for_packing
from streampack.losses import summed_cross_entropy
from streampack.packing.attention_cost import AttentionCost
from stress.ranks import Ranks

WEB = LogNormal(600, 1.5, "web pages: heavy tail, mean 1,850 before they are cut at the context")
WINDOWS = (0, 16, 64, 256)
CASES = ((8_192, 8, 512), (32_768, 8, 512), (32_768, 64, 128), (131_072, 8, 256), (131_072, 64, 128))
"""Tokens of a pack, ranks, steps."""
# An 8B llama: 6 operations a parameter and token, and 12 a pair of tokens, layer and dimension, forward and backward.
PAIRS_A_TOKEN = 6 * 8.03e9 / (12 * 32 * 4096)
HEADER = (
    "context",
    "ranks",
    "packs",
    *(f"window {window}" if window else "as planned" for window in WINDOWS),
)

# The real steps: a model for which attention is most of the work, on two processes.
CONTEXT, MEASURED_WINDOW, ROUND = 8_192, 64, 16
STEP_HEADER = (
    "steps",
    "as planned, s a step",
    "window 64, s a step",
    "gain",
    "gain by the model",
    "dearest / mean before",
    "after",
)


def web_rows(tokens: int, longest: int, *, seed: int) -> list[dict[str, npt.NDArray[np.int32]]]:
    """Return rows of about so many tokens with web-like lengths; they share their memory."""
    rng = np.random.default_rng(seed)
    ids = np.ones(longest, np.int32)
    rows, total = [], 0
    while total < tokens:
        length = int(np.clip(np.rint(WEB.median * np.exp(WEB.sigma * rng.standard_normal())), 2, longest))
        rows.append({"tokens": ids[:length], "labels": ids[:length]})
        total += length
    return rows


def dataset(
    rows: Sequence[Any], context: int, window: int, *, lanes: int, **settings: Any
) -> IterablePackedDataset:
    """Return the packs of some lanes."""
    return IterablePackedDataset(
        rows, max_seq_len=context, num_lanes=lanes, balance_window=window, epochs=None, **settings
    )


def work(packed: IterablePackedDataset, lane: int, lanes: int, steps: int) -> npt.NDArray[np.float64]:
    """Return the work of a lane's first packs, in pairs of tokens."""
    cost = AttentionCost()
    packs = islice(packed.stream(lane, lanes), steps)
    return np.array([sum(pack.seq_lens) * PAIRS_A_TOKEN + cost.of(pack.seq_lens) for pack in packs])


def case(context: int, ranks: int, steps: int) -> list[str]:
    """Return a row of the first table: each rank reads a lane, and takes one of its packs in each step."""
    # Each lane needs rows of its own, or lanes would end together; epochs follow one another without an end.
    rows = web_rows(ranks * steps * context, context, seed=ranks)
    ratios = []
    for window in WINDOWS:
        packed = dataset(rows, context, window, lanes=ranks)
        of_ranks = np.stack([work(packed, lane, ranks, steps) for lane in range(ranks)])
        ratios.append(float((of_ranks.max(0) / of_ranks.mean(0)).mean()))
    return [f"{context:,}", str(ranks), f"{ranks * steps:,}", *(f"{ratio:.3f}" for ratio in ratios)]


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


def cases(smoke: bool) -> Iterator[tuple[int, int, int]]:
    """Yield the cases of the first table."""
    yield from [(8_192, 2, 32)] if smoke else CASES


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    options: argparse.Namespace = report.parser(__doc__, smoke="one case, few steps").parse_args(arguments)
    rows = [case(*each) for each in cases(options.smoke)]
    measured = steps(1, 1024) if options.smoke else steps(12, CONTEXT)
    report.publish(
        "straggling",
        options,
        "# Waiting for the rank whose pack costs most",
        report.machine_line("streampack", "torch", "numpy"),
        f"Lengths: log-normal with median {WEB.median:,.0f} and sigma {WEB.sigma}, {WEB.like}. Work of the dearest "
        "rank over the ranks' mean, mean over steps, of an 8B llama; each rank takes packs of its own lane. How to "
        "read it: ../README.md.",
        report.table(HEADER, rows),
        f"Real steps of 2 processes of one thread each, packs of {CONTEXT:,}, a model of two layers whose work is "
        f"mostly attention; both streams take turns, {ROUND} steps of each at a time.",
        report.table(STEP_HEADER, [measured]),
    )


if __name__ == "__main__":
    main()
