"""Padding of an epoch by the number of lanes. Each lane ends with a part-empty pack.

Run ``python -m benchmarks.lanes``; README.md in this folder explains the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from benchmarks import lengths as corpora
from benchmarks import report
from streampack import IterablePackedDataset, plan_packs

ROWS = (100, 300, 1_000, 3_000, 10_000)
LANES = (1, 2, 4, 8, 24, 48)


def padding(name: str, *, rows: int, lanes: int, max_seq_len: int, seed: int) -> float:
    """Return the fraction of an epoch's tokens that is padding."""
    lengths = corpora.lengths(name, count=rows, seed=seed, longest=min(corpora.LONGEST, max_seq_len)).tolist()
    # Lane i of data in memory has rows i, i + lanes, and so on.
    made = sum(1 for lane in range(lanes) for _ in plan_packs(lengths[lane::lanes], max_seq_len))
    return 1 - sum(lengths) / (made * max_seq_len)


def section(
    name: str, *, max_seq_len: int, seeds: int, sizes: Sequence[int], step: Callable[[str], None]
) -> str:
    """Format the table of one set of lengths: a line for each number of rows, a column for each of lanes."""
    lines = []
    for rows in sizes:
        step(f"{name}: {rows:,} rows")
        data = IterablePackedDataset([{"tokens": [1, 1]}] * rows, max_seq_len=max_seq_len)
        cells = [f"{rows:,}", f"{data.lanes_for(1)}"]
        for lanes in LANES:
            found = [
                padding(name, rows=rows, lanes=lanes, max_seq_len=max_seq_len, seed=seed)
                for seed in range(seeds)
            ]
            cells.append(f"{statistics.fmean(found):.1%}")
        lines.append(cells)
    header = " | ".join(["rows", "default", *(f"{lanes} lane{'s' * (lanes > 1)}" for lanes in LANES)])
    return f"## {name}\n\n{report.table(header, lines)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the tables."""
    parser = report.parser(__doc__, smoke="100 rows, one order")
    parser.add_argument("--max-seq-len", type=int, default=4096, help="tokens in a pack (%(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="orders of the rows (%(default)s)")
    options = parser.parse_args(arguments)
    sizes, seeds = (ROWS[:1], 1) if options.smoke else (ROWS, options.seeds)
    step = report.progress(len(sizes) * len(corpora.DISTRIBUTIONS))
    report.publish(
        options,
        "lanes",
        f"Padding by the number of lanes: {options.max_seq_len:,} tokens a pack, exact_fit",
        f"Padding of an epoch, means over {seeds} orders of the rows. Explained in ../README.md.",
        *(
            section(name, max_seq_len=options.max_seq_len, seeds=seeds, sizes=sizes, step=step)
            for name in corpora.DISTRIBUTIONS
        ),
    )


if __name__ == "__main__":
    main()
