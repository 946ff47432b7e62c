"""Costs of one process of a run, measured at one size: memory, seconds, bytes, files.

Seconds are CPU time, which other programs on the machine do not change much.
"""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch

from benchmarks import report
from benchmarks.lengths import lengths
from streampack import IterablePackedDataset, JSONLSource, PackedDataLoader, TextEncoder

# private: how files are cut into lanes has no public name
from streampack.sources.mechanics.files import divide

Result = TypeVar("Result")
SHARD_BYTES = 250_000_000
WORDS = [f"w{number:04}" for number in range(4000)]


class WordTokenizer:
    """A tokenizer with one token a word, which costs next to nothing, so that reading is measured."""

    ids = {word: number for number, word in enumerate(WORDS, start=3)}  # noqa: RUF012

    def encode(self, text: str, *, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        return [1] * add_bos + [self.ids.get(word, 2) for word in text.split()] + [2] * add_eos


def write_rows(path: Path, size: int) -> None:
    """Write about ``size`` bytes of ``{"text": ...}`` rows with FLAN-like lengths, 2.6 kB on average."""
    rng = np.random.default_rng(0)
    # Two tokens shorter than a pack: the tokenizer adds a beginning and an end.
    counts = lengths("flan", count=min(2000, max(1, size // 3000)), longest=4094).tolist()
    rows = [json.dumps({"text": " ".join(rng.choice(WORDS, count))}) + "\n" for count in counts]
    with path.open("w") as file:
        for row in cycle(rows):
            if file.tell() >= size:
                return
            file.write(row)


def clocked(call: Callable[[], Result]) -> tuple[float, Result]:
    """Return the CPU seconds of a call, the least of three, and the last result."""
    spent = []
    for _ in range(3):
        gc.collect()
        cost, result = report.timed(call)
        spent.append(cost.cpu)
    return min(spent), result


def kept(call: Callable[[], Any]) -> float:
    """Return the bytes of Python objects and arrays that live as long as the result."""
    gc.collect()
    tracemalloc.start()
    try:
        result = call()
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        del result
        gc.collect()
        return held - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def open_files() -> int:
    """Count the regular files that this process holds open."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of this listing is closed by then
            found += entry.resolve().is_file()
    return found


def manifest(shards: int) -> dict[str, float]:
    """Measure a source of ``shards`` files, which are not read."""
    with TemporaryDirectory() as folder:
        for number in range(shards):
            path = Path(folder, f"shard-{number:06}-of-100000.jsonl")
            path.touch()
            os.truncate(path, SHARD_BYTES)  # sparse: takes no disk space
        pattern = f"{folder}/*.jsonl"
        return {
            "memory": kept(lambda: JSONLSource(pattern)),
            "seconds": clocked(lambda: JSONLSource(pattern))[0],
            "pickled": len(pickle.dumps(JSONLSource(pattern))),
        }


def division(shards: int, lanes: int) -> dict[str, float]:
    """Measure the division of files into the parts of all lanes, which every reading process makes."""
    sizes = [SHARD_BYTES] * shards
    return {
        "memory": kept(lambda: divide(sizes, lanes)),
        "seconds": clocked(lambda: divide(sizes, lanes))[0],
    }


def reading(lanes: int, window: int) -> dict[str, float]:
    """Measure the lanes of one process: the first pack of each, and a resume from their states."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        write_rows(path, lanes * window * 3500)  # 2.6 kB a row, so each lane fills its window

        def make() -> IterablePackedDataset:
            return IterablePackedDataset(
                JSONLSource(path),
                encoder=TextEncoder(WordTokenizer()),
                max_seq_len=4096,
                num_lanes=lanes,
                shuffle=window,
            )

        def begin() -> Any:
            events = make().events()
            return events, {event.lane: event.state for event in islice(events, lanes)}

        took, (stream, states) = clocked(begin)
        opened = open_files()
        del stream
        gc.collect()
        opened -= open_files()
        again, _ = clocked(lambda: next(make().events(lane_states=states)))
        return {"memory": kept(begin), "seconds": took, "resume": again, "files": opened}


def pack(max_seq_len: int) -> dict[str, float]:
    """Measure a pack that waits for the trainer; ``max_seq_len`` tokens in one sequence."""
    tokens = np.ones(max_seq_len, dtype=np.int64)
    data = IterablePackedDataset([{"tokens": tokens, "labels": tokens}], max_seq_len=max_seq_len)
    return {"memory": kept(lambda: next(data.stream()))}


def state(lanes: int, packs: int = 12) -> dict[str, float]:
    """Measure the state of a loader after some packs of each lane."""
    ones = np.ones(4096, dtype=np.int64)
    rows = [
        {"tokens": ones[:length], "labels": ones[:length]}
        for length in lengths("flan", count=lanes * packs * 12).tolist()
    ]
    loader = PackedDataLoader(IterablePackedDataset(rows, max_seq_len=4096, num_lanes=lanes))
    batches = iter(loader)
    for _ in range(lanes * packs):
        next(batches)
    held = loader.state_dict()
    saved = io.BytesIO()
    torch.save(held, saved)
    again = PackedDataLoader(IterablePackedDataset(rows, max_seq_len=4096, num_lanes=lanes))
    return {"saved": saved.tell(), "check": clocked(lambda: again.load_state_dict(held))[0]}
