"""Cost of a token and memory as packs, the corpus and the number of worker processes grow.

Run ``python -m benchmarks.growth``; README.md in this folder explains the tables.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context, set_start_method
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import lengths as corpora
from benchmarks import report
from benchmarks.start import WordTokenizer, write_rows
from streampack import IterablePackedDataset, JSONLSource, PackedDataLoader, TextEncoder

LONGEST = 1024  # tokens of a sample, so that all sizes of packs hold the same samples
PACK_SIZES = tuple(4**power for power in range(5, 11))  # 1k to 1M
CORPUS_SIZES = tuple(10**power for power in range(4, 8))
WORKERS = (0, 1, 2, 4)
TEXT_BYTES = 20_000_000  # of the file that workers read, again and again
TOKENS = 12_000_000  # read in a round
ROUNDS = 3
HEADER = ("Mtok/s", "of the first row", "garbage collection", "memory, MB")


class Rows:
    """A map-style corpus of any number of rows with FLAN-like lengths, which holds a thousand."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.lengths = corpora.lengths("flan", count=1000, longest=LONGEST).tolist()
        self.ids = np.random.default_rng(0).integers(1, 32_000, LONGEST, dtype=np.int32)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        ids = self.ids[: self.lengths[index % 1000]]
        return {"tokens": ids, "labels": ids}


class Cost(NamedTuple):
    """What a round took."""

    seconds: float  # of the process's CPU; with workers, elapsed
    tokens: int
    memory: int  # bytes, the most, beyond those before
    collecting: float | None = None  # of the seconds, in Python's garbage collector; not known of workers


def measure(max_seq_len: int, rows: int, tokens: int, shuffle: bool) -> Cost:
    """Pack about so many tokens in a new process."""
    next(IterablePackedDataset(Rows(1000), max_seq_len=LONGEST).stream())  # imports
    gc.collect()
    before = report.resident_memory("VmRSS") or 0
    settings: dict[str, Any] = {
        "max_seq_len": max_seq_len,
        "num_lanes": 1,
        "shuffle": shuffle,
        "epochs": None,
    }
    stream = IterablePackedDataset(Rows(rows), **settings).stream()
    next(stream)  # with the order of the rows, which is no cost of a token
    collector = Collector()
    begun, done = time.process_time(), 0
    while done < tokens:
        done += sum(next(stream).seq_lens)
    seconds = time.process_time() - begun
    return Cost(seconds, done, (report.resident_memory("VmHWM") or 0) - before, collector.seconds)


class Collector:
    """Adds up the CPU time of Python's garbage collector from now on.

    It looks through all objects of the process, those of torch among them, whenever a quarter as many as before are
    alive: the pieces of a pack of a million tokens are thousands of objects.
    """

    def __init__(self) -> None:
        self.seconds = self._begun = 0.0
        gc.callbacks.append(self._add)

    def _add(self, phase: str, _: Any) -> None:
        if phase == "start":
            self._begun = time.process_time()
        else:
            self.seconds += time.process_time() - self._begun


def measure_workers(path: Path, workers: int, tokens: int) -> Cost:
    """Read, tokenize and pack about so many tokens of a file of text in worker processes of a new process."""
    data = IterablePackedDataset(
        JSONLSource(path), encoder=TextEncoder(WordTokenizer()), max_seq_len=4096, num_lanes=8, epochs=None
    )
    set_start_method(
        "fork", force=True
    )  # this process was spawned, and so would its workers be, unlike a trainer's
    before = report.proportional_memory([os.getpid()]) or 0
    batches = iter(PackedDataLoader(data, batch_size=4, num_workers=workers))
    next(batches)  # when the workers have begun
    begun, done, memory = time.perf_counter(), 0, 0
    while done < tokens:
        done += next(batches).num_tokens
    seconds = time.perf_counter() - begun
    for _ in range(8):  # a batch of each lane
        processes = [os.getpid(), *(child.pid for child in active_children() if child.pid)]
        memory = max(memory, report.proportional_memory(processes) or 0)
        next(batches)
    return Cost(seconds, done, memory - before)


def best(measured: Callable[..., Cost], *case: Any, rounds: int) -> Cost:
    """Return the fastest of some rounds, each in a process of its own."""
    costs = []
    for _ in range(rounds):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            costs.append(pool.submit(measured, *case).result())
    return min(costs, key=lambda cost: cost.seconds / cost.tokens)


def table(name: str, sizes: list[tuple[int, Cost]]) -> str:
    """Return a table of one size that grows."""
    first = sizes[0][1]
    rows = []
    for size, cost in sizes:
        speed = cost.tokens / cost.seconds
        ratio = speed * first.seconds / first.tokens
        collecting = "-" if cost.collecting is None else f"{cost.collecting / cost.seconds:.0%}"
        rows.append(
            [f"{size:,}", f"{speed / 1e6:.1f}", f"{ratio:.2f}", collecting, f"{cost.memory / 1e6:.0f}"]
        )
    return report.table((name, *HEADER), rows)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    options: argparse.Namespace = report.parser(__doc__, smoke="two sizes, few tokens").parse_args(arguments)
    tokens, rounds = (200_000, 1) if options.smoke else (TOKENS, ROUNDS)
    packs, corpus = (PACK_SIZES[:2], CORPUS_SIZES[:2]) if options.smoke else (PACK_SIZES, CORPUS_SIZES)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.jsonl"
        write_rows(text, TEXT_BYTES // 20 if options.smoke else TEXT_BYTES)
        with_workers = [
            (workers, best(measure_workers, text, workers, tokens, rounds=rounds)) for workers in WORKERS
        ]
    report.publish(
        "growth",
        options,
        "# Cost as packs, the corpus and the number of workers grow",
        report.machine_line("streampack", "torch", "numpy"),
        f"One lane, `exact_fit`, int32 samples of at most {LONGEST:,} tokens to packs; {tokens / 1e6:g} million "
        f"tokens, CPU time of the fastest of {rounds} processes. How to read it: ../README.md.",
        "Rows in their order, of a corpus of 100,000:",
        table(
            "max_seq_len",
            [(size, best(measure, size, 100_000, tokens, False, rounds=rounds)) for size in packs],
        ),
        "Shuffled rows, packs of 4,096:",
        table("samples", [(size, best(measure, 4096, size, tokens, True, rounds=rounds)) for size in corpus]),
        "JSON lines of text to batches, packs of 4,096, 8 lanes; elapsed time, and the memory of all processes:",
        table("num_workers", with_workers),
    )


if __name__ == "__main__":
    main()
