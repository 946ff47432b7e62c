"""How long ranks wait for the one whose pack costs most, with and without ``balance_window``.

Run ``python -m benchmarks.straggling``; README.md in this folder explains the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import report
from benchmarks.lengths import LogNormal
from streampack import IterablePackedDataset
from streampack.packing.attention_cost import AttentionCost

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


def cases(smoke: bool) -> Iterator[tuple[int, int, int]]:
    """Yield the cases of the first table."""
    yield from [(8_192, 2, 32)] if smoke else CASES


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    options: argparse.Namespace = report.parser(__doc__, smoke="one case, few steps").parse_args(arguments)
    rows = [case(*each) for each in cases(options.smoke)]
    report.publish(
        "straggling",
        options,
        "# Waiting for the rank whose pack costs most",
        report.machine_line("streampack", "torch", "numpy"),
        f"Lengths: log-normal with median {WEB.median:,.0f} and sigma {WEB.sigma}, {WEB.like}. Work of the dearest "
        "rank over the ranks' mean, mean over steps, of an 8B llama; each rank takes packs of its own lane. How to "
        "read it: ../README.md.",
        report.table(HEADER, rows),
    )


if __name__ == "__main__":
    main()
