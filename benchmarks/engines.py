"""Tokenizing the same corpus by local processes and by a Ray cluster on this machine, with as many CPUs.

Run ``python -m benchmarks.engines``; README.md in this folder explains the table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.text import Corpus, FastTokenizer, texts
from streampack import JSONLSource, TextEncoder
from streampack.tokenize import tokenize

HEADER = ("engine", "MB/s of text", "s", "processes / this", "rounds")
LANES = 16


class Trained:
    """A tokenizer that a task can unpickle, where ``benchmarks`` may not be installed."""

    def __init__(self, inner: Any) -> None:
        self.tokenizer = inner
        self.vocab_size = 8192

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Encode a text."""
        return [1] * add_bos + list(self.tokenizer.encode(text, add_special_tokens=False).ids) + [2] * add_eos


def start(cpus: int) -> float:
    """Start a cluster with a worker process for each CPU, and return how many seconds that took.

    Each call of ``streampack tokenize --engine ray`` has worker processes of its own, which import streampack first.
    """
    import ray

    begun = time.perf_counter()
    environment = {"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])}}
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    with tempfile.TemporaryDirectory() as folder:
        task = ray.remote(num_cpus=1)(_import)
        ray.get([task.remote(folder, cpus) for _ in range(cpus)])
    return time.perf_counter() - begun


def _import(folder: str, workers: int) -> None:
    """Import what a task needs, and wait for the other workers, so that none of them runs two of these tasks."""
    import streampack.tokenize.on_ray  # noqa: F401

    Path(folder, str(os.getpid())).touch()
    while len(list(Path(folder).iterdir())) < workers:
        time.sleep(0.05)


def measure(folder: Path, *, size: int, rounds: int) -> list[list[str]]:
    """Return a row for each engine, from runs that take turns; Ray has a new cluster in each round."""
    import ray

    some = texts()
    corpus = Corpus.write(folder, some, size=size)
    encoder = TextEncoder(Trained(FastTokenizer(some[:500], vocab_size=8192).tokenizer))
    cpus = os.cpu_count() or 1
    settings: dict[str, dict[str, Any]] = {"processes": {"workers": cpus}, "ray": {"engine": "ray"}}
    seconds: dict[str, list[float]] = {engine: [] for engine in settings}
    started = []
    for number in range(rounds):
        for engine, options in settings.items():
            if engine == "ray":
                started.append(start(cpus))
            begun = time.perf_counter()
            tokenize(
                JSONLSource(str(corpus.path)),
                out=folder / f"{engine}-{number}",
                encoder=encoder,
                lanes=LANES,
                progress=False,
                **options,
            )
            seconds[engine].append(time.perf_counter() - begun)
            if engine == "ray":
                ray.shutdown()
    rows = []
    for engine, took in seconds.items():
        ratios = [local / this for local, this in zip(seconds["processes"], took, strict=True)]
        median = statistics.median(took)
        rows.append(
            [
                engine if engine != "ray" else f"ray (started in {statistics.median(started):.1f} s)",
                f"{corpus.path.stat().st_size / 1e6 / median:.2f}",
                f"{median:.2f}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            ]
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    options: argparse.Namespace = report.parser(__doc__, smoke="a small file, one round").parse_args(
        arguments
    )
    size, rounds = (300_000, 1) if options.smoke else (40_000_000, 9)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), size=size, rounds=rounds)
    report.publish(
        "engines",
        options,
        "# Token shards: local processes and Ray",
        report.machine_line("streampack", "ray", "tokenizers"),
        f"{size / 1e6:.1f} MB of JSON lines in {LANES} lanes, a byte-level BPE of Hugging Face's tokenizers, "
        f"{os.cpu_count()} CPUs; the engines take turns. How to read it: ../README.md.",
        report.table(HEADER, rows),
    )


if __name__ == "__main__":
    main()
