"""Speed from token shards to batches, beside the floor: copying the same tokens to fresh memory.

Run ``python -m benchmarks.tokens``; README.md in this folder explains the table.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import report
from streampack import IterablePackedDataset, PackedDataLoader, TokenShardSource
from streampack.sources import Reading
from streampack.tokenize.tokenize import tokenize

MEANS = (1000, 30_000)  # tokens in a document
PACKS = (4096, 32_768, 131_072)
BATCH_TOKENS = 1 << 15
LANES = 8
VOCABULARY = 60_000
HEADER = (
    "document",
    "pack",
    "floor, Mtok/s",
    "in used memory, Mtok/s",
    "source, Mtok/s",
    "batches, Mtok/s",
    "of floor",
    "spread",
    "above floor, us a pack",
)


class Documents:
    """A map-style dataset of random documents of about ``mean`` tokens."""

    def __init__(self, tokens: int, *, mean: int) -> None:
        rng = np.random.default_rng(0)
        self.lengths = rng.geometric(1 / mean, tokens // mean)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = np.random.default_rng((1, index)).integers(0, VOCABULARY, self.lengths[index])
        return {"tokens": tokens, "labels": tokens}


def floor(folder: Path, max_seq_len: int, *, keep: bool = True) -> int:
    """Copy tokens, labels and positions from the mapped shards to fresh memory, which is kept; return the tokens.

    Without ``keep``, copy to the same memory again and again.
    """

    def fresh() -> list[np.ndarray]:
        return [np.empty(max_seq_len, np.int64) for _ in range(3)]

    positions, packs, count = np.arange(max_seq_len), [fresh()], 0
    for shard in TokenShardSource(folder).shards:
        tokens = np.memmap(folder / shard.name, "<u2", "r", offset=4096, shape=shard.tokens)
        for start in range(0, tokens.size - max_seq_len + 1, max_seq_len):
            part = tokens[start : start + max_seq_len]
            if keep:
                packs.append(fresh())
            pack = packs[-1]
            pack[0][:] = pack[1][:] = part
            pack[2][:] = positions
            count += max_seq_len
    return count


def documents(folder: Path, max_seq_len: int) -> int:
    """Read every document by the source alone, as int32; return the tokens."""
    source = TokenShardSource(folder)
    lanes = [source.read(Reading(lane, num_lanes=LANES)) for lane in range(LANES)]
    return sum(row.data["tokens"].size for lane in lanes for row in lane)


def batches(folder: Path, max_seq_len: int) -> int:
    """Iterate over the loader with ``split_across_pack``; return the tokens."""
    data = IterablePackedDataset(
        TokenShardSource(folder), max_seq_len=max_seq_len, split_across_pack=True, num_lanes=LANES
    )
    loader = PackedDataLoader(data, batch_size=max(1, BATCH_TOKENS // max_seq_len))
    return sum(batch.tokens.numel() for batch in loader)


def seconds(run: Callable[[Path, int], int], folder: Path, max_seq_len: int) -> float:
    """Return the seconds of a run for each million tokens."""
    report.give_memory_back()
    start = time.perf_counter()
    return (1e6 / run(folder, max_seq_len)) * (time.perf_counter() - start)


def rows(tokens: int, *, repeats: int) -> Iterator[list[str]]:
    """Yield a row of the table for every mean length and pack length."""
    begin = report.progress(len(MEANS) * len(PACKS))
    for mean in MEANS:
        with tempfile.TemporaryDirectory() as name:
            folder = tokenize(Documents(tokens, mean=mean), out=name, lanes=2, dtype="uint16", progress=False)
            for max_seq_len in PACKS:
                begin(f"documents of {mean:,}, packs of {max_seq_len:,}")
                runs = (floor, partial(floor, keep=False), documents, batches)
                for run in runs:  # brings the files into the page cache
                    run(folder, max_seq_len)
                rounds = [[seconds(run, folder, max_seq_len) for run in runs] for _ in range(repeats)]
                ratios = [least / ours for least, *_, ours in rounds]
                overhead = [(ours - least) * max_seq_len for least, *_, ours in rounds]
                yield [
                    f"{mean:,}",
                    f"{max_seq_len:,}",
                    *(f"{1 / statistics.median(column):.0f}" for column in zip(*rounds, strict=True)),
                    *report.median_and_range(ratios),
                    f"{statistics.median(overhead):.0f}",
                ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the table."""
    parser = report.parser(__doc__, smoke="a million tokens, once")
    add = parser.add_argument
    add("--tokens", type=int, default=20_000_000, help="tokens in the shards (%(default)s)")
    add("--repeats", type=int, default=7, help="rounds; the table shows their medians (%(default)s)")
    options = parser.parse_args(arguments)
    tokens, repeats = (1_000_000, 1) if options.smoke else (options.tokens, options.repeats)
    if tokens < 2 * max(PACKS) or repeats < 1:
        parser.error(
            f"--tokens {tokens} must be at least {2 * max(PACKS)}, and --repeats {repeats} at least 1"
        )
    report.publish(
        "tokens",
        options,
        "# Token shards to batches, splitting",
        report.machine_line("streampack", "torch", "numpy"),
        f"{tokens:,} tokens in the page cache, one process, {LANES} lanes; medians of {repeats} rounds, each of "
        "which makes the four runs. Explained in ../README.md.",
        report.table(HEADER, rows(tokens, repeats=repeats)),
    )


if __name__ == "__main__":
    main()
