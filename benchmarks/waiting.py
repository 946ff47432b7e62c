"""Seconds of the quickstart's steps on text that is read, tokenized and packed meanwhile, and on batches in memory.

Run ``python -m benchmarks.waiting``; README.md in this folder explains the table.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import report

WORKERS = (0, 1)
WARMUP, ROUNDS, ROUND = 10, 8, 25  # steps, rounds, steps of a round
HEADER = (
    "workers",
    "steps",
    "streamed, ms a step",
    "in memory, ms a step",
    "streamed / in memory",
    "rounds",
    "waited, ms a step",
)


def quickstart() -> Any:
    """Return the quickstart's config, for the CPU."""
    import streampack_configs
    from omegaconf import OmegaConf
    from streampack_recipes import stdlib_corpus

    from streampack.training.config import read_config

    stdlib_corpus.prepare()
    written = OmegaConf.load(Path(streampack_configs.__path__[0]) / "quickstart.yaml")
    written.device = "cpu"
    return read_config(written)


def loader_of(cfg: Any, workers: int) -> Any:
    """Return a loader of the quickstart's batches, from its text."""
    from streampack import PackedDataLoader
    from streampack.distributed.world import World
    from streampack.instantiate import build
    from streampack.training.data import build_datasets

    datasets = build_datasets(cfg, tokenizer=build(cfg.tokenizer), vocab_size=None, world=World())
    return PackedDataLoader(
        datasets.train,
        batch_size=cfg.batch_size,
        packs_per_step=cfg.packs_per_step,
        num_workers=workers,
    )


def trainer(cfg: Any) -> Callable[[Any], None]:
    """Return a function that trains a new model on a batch, as the recipe does."""
    import torch

    from streampack import prepare_model_for_packing
    from streampack.instantiate import build
    from streampack.losses import summed_cross_entropy
    from streampack.training.model import clip_gradients

    torch.manual_seed(0)
    model = build(cfg.model)
    inputs = prepare_model_for_packing(model, attention=cfg.attention)
    optimizer = build(cfg.optimizer, list(model.parameters()))

    def step(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss = summed_cross_entropy(model(**inputs(batch)), batch.labels) / batch.num_trained
        loss.backward()
        clip_gradients(model, cfg.clip_grad_norm)
        optimizer.step()

    return step


def steps(workers: int, *, warmup: int, rounds: int, size: int) -> list[str]:
    """Return a row of the table: two models of the same weights train on the same batches, step by step in turn."""
    import torch

    cfg = quickstart()
    total = warmup + rounds * size
    held = list(islice(loader_of(cfg, workers), total))
    loader = loader_of(cfg, workers)
    batches, train = iter(loader), (trainer(cfg), trainer(cfg))
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(total):
        # The one that goes first finds other memory in the processor's caches than the other.
        for kind in (0, 1) if number % 2 else (1, 0):
            begun = time.perf_counter()
            batch = held[number] if kind else next(batches)
            train[kind](batch)
            seconds[kind].append(time.perf_counter() - begun)
            assert torch.equal(batch.tokens, held[number].tokens)
        if number + 1 == warmup:
            loader.metrics()  # what was waited from here on is asked for below
    streamed, memory = (of_kind[warmup:] for of_kind in seconds)
    ratios = [
        sum(streamed[first : first + size]) / sum(memory[first : first + size])
        for first in range(0, len(streamed), size)
    ]
    median, spread = (f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f} to {max(ratios):.3f}")
    milliseconds = [1e3 * statistics.fmean(of_kind) for of_kind in (streamed, memory)]
    waited = 1e3 * loader.metrics()["data_wait"]
    return [
        str(workers),
        str(len(streamed)),
        *(f"{each:.1f}" for each in milliseconds),
        median,
        spread,
        f"{waited:.2f}",
    ]


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    options: argparse.Namespace = report.parser(__doc__, smoke="two steps").parse_args(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the quickstart does, before torch is imported
    sizes = {"warmup": 1, "rounds": 2, "size": 1} if options.smoke else {}
    rows = [
        steps(workers, **({"warmup": WARMUP, "rounds": ROUNDS, "size": ROUND} | sizes)) for workers in WORKERS
    ]
    report.publish(
        "waiting",
        options,
        "# The quickstart's steps, streamed and from memory",
        report.machine_line("streampack", "torch", "torchtune"),
        "The quickstart's model, text and settings; one process and its workers. How to read it: ../README.md.",
        report.table(HEADER, rows),
    )


if __name__ == "__main__":
    main()
