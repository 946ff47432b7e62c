"""How long ranks wait for the one whose pack costs most, with and without ``balance_window``.

Run ``python -m benchmarks.straggling``; README.md in this folder explains the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import report
from benchmarks.lengths import LogNormal, causal_pairs
from streampack import IterablePackedDataset

WEB = LogNormal(600, 1.5, "web pages: heavy tail, mean 1,850 before they are cut at the context")
WINDOWS = (0, 16, 64, 256)
CASES = ((8_192, 8, 512), (32_768, 8, 512), (32_768, 64, 128), (131_072, 8, 256), (131_072, 64, 128))
"""Tokens of a pack, ranks, steps."""
# An 8B llama: 6 operations a parameter and token, and 12 a pair of tokens, layer and dimension, forward and backward.
PAIRS_A_TOKEN = 6 * 8.03e9 / (12 * 32 * 4096)
HEADER = "context | ranks | packs | as planned | " + " | ".join(f"window {each}" for each in WINDOWS[1:])


def web_rows(tokens: int, longest: int, *, seed: int) -> list[dict[str, npt.NDArray[np.int32]]]:
    """Return rows of about ``tokens`` tokens with web-like lengths; they share their memory."""
    rng = np.random.default_rng(seed)
    ids = np.ones(longest, np.int32)
    rows, total = [], 0
    while total < tokens:
        length = int(np.clip(np.rint(WEB.median * np.exp(WEB.sigma * rng.standard_normal())), 2, longest))
        rows.append({"tokens": ids[:length], "labels": ids[:length]})
        total += length
    return rows


def dataset(rows: Sequence[Any], context: int, window: int, *, lanes: int) -> IterablePackedDataset:
    """Return the packs of some lanes; epochs follow one another without an end."""
    return IterablePackedDataset(
        rows, max_seq_len=context, num_lanes=lanes, balance_window=window, epochs=None
    )


def case(context: int, ranks: int, steps: int) -> list[str]:
    """Return a row of the table: each rank reads a lane, and takes one of its packs in each step."""
    rows = web_rows(ranks * steps * context, context, seed=ranks)  # rows of its own for each lane
    ratios = []
    for window in WINDOWS:
        packs = dataset(rows, context, window, lanes=ranks)
        work = np.array([  # in pairs of tokens
            [sum(pack.seq_lens) * PAIRS_A_TOKEN + causal_pairs(pack.seq_lens) for pack in islice(stream, steps)]
            for stream in (packs.stream(lane, ranks) for lane in range(ranks))
        ])  # fmt: skip
        ratios.append(float((work.max(0) / work.mean(0)).mean()))
    return [f"{context:,}", str(ranks), f"{ranks * steps:,}", *(f"{ratio:.3f}" for ratio in ratios)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    options = report.parser(__doc__, smoke="one case, few steps").parse_args(arguments)
    report.publish(
        options,
        "straggling",
        "Waiting for the rank whose pack costs most",
        f"Lengths: log-normal with median {WEB.median:,.0f} and sigma {WEB.sigma}, {WEB.like}. Work of the most "
        "expensive rank over the ranks' mean, mean over steps, of an 8B llama; each rank takes packs of its own lane. "
        "Explained in ../README.md.",
        report.table(HEADER, [case(*each) for each in (((8_192, 2, 32),) if options.smoke else CASES)]),
        packages=["numpy"],
    )


if __name__ == "__main__":
    main()
