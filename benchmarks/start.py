"""Time to the first batch, and memory of reading, for a large and a small JSONL file.

Run ``python -m benchmarks.start``; README.md in this folder explains the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import lengths as corpora
from benchmarks import report

MAX_SEQ_LEN = 4096
BATCH_SIZE = 4
SMALL = 10_000_000
WORDS = [f"w{number:04d}" for number in range(4000)]
HEADER = (
    "file",
    "first batch, s",
    "rows read",
    "MB read",
    "growth at first batch, MB",
    "growth at the end, MB",
    "peak growth, MB",
    "packs",
    "Mtok/s",
)


class WordTokenizer:
    """A tokenizer with one token a word, which costs next to nothing, so that reading is measured."""

    def __init__(self) -> None:
        self.ids = {word: number for number, word in enumerate(WORDS, start=4)}  # 0 is the padding

    def encode(self, text: str, *, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        ids = self.ids
        return [1] * add_bos + [ids.get(word, 3) for word in text.split()] + [2] * add_eos


class CountingEncoder:
    """An encoder that counts the rows it is given."""

    def __init__(self, encoder: Any) -> None:
        self.encoder = encoder
        self.rows = 0

    def __call__(self, row: Mapping[str, Any], /) -> Any:
        self.rows += 1
        return self.encoder(row)

    def fingerprint(self) -> str:
        return str(self.encoder.fingerprint())


def write_rows(path: Path, size: int) -> int:
    """Write about ``size`` bytes of ``{"text": ...}`` rows with FLAN-like lengths; return how many rows."""
    rng = np.random.default_rng(0)
    # Two tokens shorter than a pack: the tokenizer adds a beginning and an end.
    counts = corpora.lengths("flan", count=min(2000, max(1, size // 3000)), longest=MAX_SEQ_LEN - 2)
    words = np.array(WORDS)
    block = [
        json.dumps({"text": " ".join(rng.choice(words, count))}).encode() + b"\n" for count in counts.tolist()
    ]
    rows = written = 0
    with path.open("wb") as file:
        while written < size:
            line = block[rows % len(block)]
            file.write(line)
            written += len(line)
            rows += 1
        file.flush()
        os.fsync(file.fileno())
    return rows


def drop_from_cache(path: Path) -> None:
    """Ask the system to drop a file from its cache, so that the first batch is read from the disk."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def megabytes(field: str) -> float:
    """Return `report.resident_memory` in megabytes."""
    return (report.resident_memory(field) or 0) / 1e6


def measure_file(path: Path, *, whole: bool) -> dict[str, Any]:
    """Measure one file in this process, from after the imports, before the source is opened."""
    import torch

    from streampack import IterablePackedDataset, JSONLSource, TextEncoder

    before = megabytes("VmRSS")
    start = time.perf_counter()
    source = JSONLSource(path)
    encoder = CountingEncoder(TextEncoder(WordTokenizer()))
    stream = iter(IterablePackedDataset(source, encoder=encoder, max_seq_len=MAX_SEQ_LEN))
    packs = [next(stream) for _ in range(BATCH_SIZE)]
    batch = {key: torch.stack([pack[key] for pack in packs]) for key in ("tokens", "labels", "input_pos")}
    measured: dict[str, Any] = {
        "first_batch": time.perf_counter() - start,
        "rows": encoder.rows,
        "bytes": source.bytes_read,
        "growth_first": megabytes("VmRSS") - before,
    }
    assert batch["tokens"].shape == (BATCH_SIZE, MAX_SEQ_LEN)
    if whole:
        count, tokens = BATCH_SIZE, 0
        start = time.perf_counter()
        for pack in stream:
            count += 1
            tokens += int((pack["tokens"] != 0).sum())
        measured |= {
            "packs": count,
            "rate": tokens / (time.perf_counter() - start) / 1e6,
            "growth_end": megabytes("VmRSS") - before,
            "growth_peak": megabytes("VmHWM") - before,
        }
    return measured


def in_fresh_process(path: Path, *, whole: bool) -> dict[str, Any]:
    """Run `measure_file` in a new interpreter."""
    drop_from_cache(path)
    command = [sys.executable, "-m", "benchmarks.start", "--child", str(path), *["--whole"] * whole]
    folder = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"measuring {path.name} failed with exit status {done.returncode}:\n{done.stderr}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def measure(sizes: Sequence[int], repeats: int) -> str:
    """Read every file ``repeats`` times to its first batch, then once to its end; return the table."""
    step = report.progress(len(sizes) * (repeats + 2))
    firsts: dict[int, list[float]] = {size: [] for size in sizes}
    wholes: dict[int, dict[str, Any]] = {}
    written: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {size: Path(folder, f"{size}.jsonl") for size in sizes}
        for size, path in paths.items():
            step(f"write {size / 1e6:,g} MB")
            written[size] = write_rows(path, size)
        for number in range(1, repeats + 1):
            for size, path in paths.items():
                step(f"{size / 1e6:,g} MB: first batch, {number}")
                firsts[size].append(in_fresh_process(path, whole=False)["first_batch"])
        for size, path in paths.items():
            step(f"{size / 1e6:,g} MB: to the end")
            wholes[size] = in_fresh_process(path, whole=True)

    rows = []
    for size, whole in wholes.items():
        rows.append(
            [
                f"{size / 1e6:,g} MB, {written[size]:,} rows",
                f"{statistics.median(firsts[size]):.3f}",
                f"{whole['rows']:,}",
                f"{whole['bytes'] / 1e6:.3f}",
                *(f"{whole[key]:.1f}" for key in ("growth_first", "growth_end", "growth_peak")),
                f"{whole['packs']:,}",
                f"{whole['rate']:.1f}",
            ]
        )
    large, small = wholes[max(sizes)], wholes[min(sizes)]
    differences = ", ".join(
        f"{large[key] - small[key]:+.1f} MB {words}"
        for key, words in (
            ("growth_first", "at the first batch"),
            ("growth_end", "at the end"),
            ("growth_peak", "at the peak"),
        )
    )
    return f"{report.table(HEADER, rows)}\n\nThe larger file's memory against the smaller's: {differences}."


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the table."""
    parser = report.parser(__doc__, smoke="2 MB against 0.5 MB, once")
    add = parser.add_argument
    add("--bytes", type=int, default=1_000_000_000, help="size of the large file (%(default)s)")
    add(
        "--repeats",
        type=int,
        default=3,
        help="fresh processes for each file; the table shows their medians (%(default)s)",
    )
    add("--child", type=Path, help=argparse.SUPPRESS)
    add("--whole", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(measure_file(options.child, whole=options.whole)))
        return
    if not Path("/proc/self/status").exists():
        parser.error("resident memory is read from /proc, which this system does not have; run it on Linux")
    sizes = (2_000_000, 500_000) if options.smoke else (options.bytes, SMALL)
    repeats = 1 if options.smoke else options.repeats
    if sizes[0] <= sizes[1] or repeats < 1:
        parser.error(f"--bytes {sizes[0]} must be above {sizes[1]}, and --repeats {repeats} at least 1")
    report.publish(
        "start",
        options,
        f"# The first batch ({BATCH_SIZE} packs of {MAX_SEQ_LEN:,} tokens), and memory",
        report.machine_line("streampack", "torch", "numpy"),
        f"First batch: median of {repeats} fresh process(es). Explained in ../README.md.",
        measure(sizes, repeats),
    )


if __name__ == "__main__":
    main()
