"""Held-out loss of runs with and without ``balance_window``, over several seeds.

Run ``python -m benchmarks.balance_loss``; README.md in this folder explains the table.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
import torch

from benchmarks import report
from benchmarks.paper.data import Corpus, corpus_of, stdlib
from benchmarks.paper.settings import DATA, Settings
from benchmarks.paper.train import build, train, validate
from streampack import IterablePackedDataset, PackedDataLoader, prepare_model_for_packing

LANES = 4  # each gives one pack to every step
WINDOWS = (0, 16, 64, 256)
EPOCHS = 1
DOCSTRINGS = replace(DATA["docstrings"], samples=6200, max_seq_len=256, batch_size=LANES)
CORPORA = {"docstrings": DOCSTRINGS, "sources": replace(DOCSTRINGS, data="sources", samples=200)}
HEADER = (
    "corpus | balance_window | held-out loss, mean | standard deviation over seeds | "
    "against 0, the same seed: mean | standard error | steps | cost in a step, highest / mean"
)


class Result(NamedTuple):
    """One run."""

    loss: float  # nats a held-out token
    steps: int
    excess: float  # mean over steps of the highest attention cost of a pack over the packs' mean


def sources(settings: Settings) -> Corpus:
    """Return the standard library's sources, with all tokens trained; every 10th is held out."""
    rows, tokenizer = stdlib("sources")
    samples = []
    for row in rows[: settings.samples]:
        tokens = np.array(tokenizer.encode(row["text"])[:4096])
        samples.append({"tokens": tokens, "labels": tokens})
    held_out = [
        {name: values[: settings.max_seq_len] for name, values in sample.items()} for sample in samples[::10]
    ]
    kept = [sample for number, sample in enumerate(samples) if number % 10]
    return Corpus(kept, held_out, tokenizer.vocab_size, floor=None)


def measure(name: str, window: int, seed: int, smoke: bool) -> Result:
    """Train a model from random weights for `EPOCHS` epochs, and return its loss on held-out samples."""
    torch.set_num_threads(1)
    settings = replace(CORPORA[name], seed=seed)
    if smoke:
        settings = replace(settings, samples=60, validation=8)
    corpus = sources(settings) if settings.data == "sources" else corpus_of(settings)
    model, optimizer = build(corpus, settings, lr=settings.lr)
    feed = prepare_model_for_packing(model)
    dataset = IterablePackedDataset(
        corpus.train,
        max_seq_len=settings.max_seq_len,
        overlong="split",
        shuffle=True,
        seed=seed,
        epochs=EPOCHS,
        num_lanes=LANES,
        balance_window=window,
        untrained="keep",
    )
    ratios = []
    for batch in PackedDataLoader(dataset, batch_size=LANES):
        train(model, optimizer, feed, batch)
        costs = [sum((f.stop - f.start) ** 2 for f in fragments) for fragments in batch.fragments]
        ratios.append(max(costs) / statistics.fmean(costs))
    loss = validate(model, corpus, settings)
    return Result(loss, len(ratios), statistics.fmean(ratios))


def row(name: str, window: int, results: Sequence[Result], without: Sequence[Result]) -> list[str]:
    """Return a row of the table, of runs with one seed after another."""
    losses = [result.loss for result in results]
    changes = [result.loss - other.loss for result, other in zip(results, without, strict=True)]
    error = statistics.stdev(changes) / len(changes) ** 0.5
    return [
        name,
        str(window),
        f"{statistics.fmean(losses):.4f}",
        f"{statistics.stdev(losses):.4f}",
        f"{statistics.fmean(changes):+.4f}" if window else report.NONE,
        f"{error:.4f}" if window else report.NONE,
        str(results[0].steps),
        f"{statistics.fmean(result.excess for result in results):.3f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = report.parser(__doc__, smoke="two seeds, few samples")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=report.cpu_count())
    options = parser.parse_args(arguments)
    seeds = range(2 if options.smoke else options.seeds)
    cases = [(name, window, seed) for name in CORPORA for seed in seeds for window in WINDOWS]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        futures = {case: pool.submit(measure, *case, options.smoke) for case in cases}
        found = {case: future.result() for case, future in futures.items()}
    rows = []
    for name in CORPORA:
        results = {window: [found[name, window, seed] for seed in seeds] for window in WINDOWS}
        rows += [row(name, window, results[window], results[0]) for window in WINDOWS]
    report.publish(
        options,
        "balance-loss",
        "Held-out loss with and without balance_window",
        f"{len(seeds)} seeds of weights and order, {EPOCHS} epoch, {LANES} lanes, a pack of each in every step. "
        "Explained in ../README.md.",
        report.table(HEADER, rows),
        packages=["torchtune", "numpy"],
    )


if __name__ == "__main__":
    main()
