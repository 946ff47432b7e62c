"""One pass over a corpus, or a sample of it, and the report that comes of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from streampack.accounting import DROP_REASONS
from streampack.inspection.advice import advise
from streampack.inspection.packs import first_packs
from streampack.inspection.plans import plan_outcomes, slowest_over_mean
from streampack.inspection.report import (
    Coverage,
    Imbalance,
    Lengths,
    LongRow,
    Loss,
    Outcome,
    Report,
    RunShape,
    Settings,
    SourceShare,
)
from streampack.inspection.rows import Epoch, Progress, Tally, read_epoch
from streampack.streaming.balance import DEFAULT_WINDOW
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.estimate import tolerant
from streampack.streaming.first_look import first_look
from streampack.streaming.lane_config import LaneConfig
from streampack.types import IntArray

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0)
BINS = 24


def inspect_dataset(
    dataset: IterablePackedDataset,
    *,
    title: str = "",
    shape: RunShape | None = None,
    rows: int | None = 20_000,
    packs: int = 6,
    progress: Progress = lambda rows: None,
) -> Report:
    """Read a dataset's rows and report what packing makes of them. The dataset itself is not iterated.

    >>> rows = [{"tokens": [1] * n, "labels": [1] * n} for n in (5, 4, 2, 3, 4)]
    >>> report = inspect_dataset(IterablePackedDataset(rows, max_seq_len=8))
    >>> report.chosen.name, report.chosen.packs, report.chosen.padding
    ('exact_fit', 3.0, 0.25)

    Args:
        dataset: of the run.
        title: of the report, such as the path of the config.
        shape: ranks and batches of the run.
        rows: how many rows to read from all over the corpus; None reads all of them, in the order of the run.
        packs: how many of the run's first packs to show.
        progress: called with the number of rows read so far.

    Raises:
        ValueError: if no row makes a sample, or the source cannot be read.
    """
    shape = shape or RunShape()
    ranks, config = shape.ranks[0], dataset.lane_config
    settings = Settings(
        packing=config.packing,
        shape=shape,
        shuffle=config.shuffle_window > 0,
        lanes=dataset.num_lanes or dataset.lanes_for(ranks),
        packs_per_step=shape.batching(ranks).packs_per_step,
        balance_window=dataset.window_for(ranks),
    )
    reading = replace(tolerant(config), balance_window=settings.balance_window)
    tally = Tally(config, progress)
    epoch = read_epoch(reading, tally, num_lanes=settings.lanes, rows=rows)
    losses = _losses(tally, config, epoch)
    if not epoch.rows.kept.any():
        reasons = ", ".join(f"{loss.rows:,} {loss.reason}" for loss in losses)
        examples = "; ".join(loss.examples[0] for loss in losses)
        raise ValueError(
            f"none of the {len(tally):,} rows looked at can be packed ({reasons}): {examples}"
            if len(tally)
            else "the source has no rows; check its paths"
        )
    outcomes, plan = plan_outcomes(epoch, reading.packing, shape, seed=config.seed)
    [chosen] = [outcome for outcome in outcomes if outcome.chosen]
    report = Report(
        title=title,
        settings=settings,
        coverage=Coverage(
            rows=len(tally),
            rows_in_all=float(epoch.weights.sum()) if epoch.known else None,
            exact=epoch.exact,
            error=epoch.error,
        ),
        lengths=_lengths(tally, limit=config.packing.max_seq_len),
        losses=losses,
        outcomes=outcomes,
        imbalance=[_imbalance(dataset, plan.pairs, chosen, shape, each) for each in shape.ranks if each > 1],
        packs=first_packs(reading, settings.lanes, packs),
        sources=_shares(config, epoch, chosen, settings),
        advice=[],
        assumed=_assumed(dataset, epoch, settings),
        first=first_look(reading),
    )
    return replace(report, advice=advise(report))


def _lengths(tally: Tally, *, limit: int) -> Lengths:
    rows = tally.rows
    whole = rows.length[~rows.lost_by("bad")]
    return Lengths(
        samples=len(whole),
        tokens=int(whole.sum()),
        trained=int(rows.trained.sum()),
        mean=float(whole.mean()),
        quantiles={str(q): int(np.quantile(whole, q, method="inverted_cdf")) for q in QUANTILES},
        histogram=_histogram(whole, limit),
        longest=[
            LongRow(tally.source.locate(row_id), tokens, trained)
            for tokens, trained, row_id in sorted(tally.longest, reverse=True)
        ],
    )


def _histogram(lengths: IntArray, limit: int) -> list[tuple[int, int, int]]:
    """Count lengths in bins of equal ratio, or of equal width where they differ little; one begins behind ``limit``."""
    least, most = max(1, int(lengths.min())), int(lengths.max())
    space = np.geomspace if most > 4 * least else np.linspace
    edges = np.unique(space(least, most + 1, BINS + 1).round().astype(np.int64))
    if least <= limit < most:
        edges = np.unique([*edges, limit + 1])
    counts, _ = np.histogram(lengths, edges)
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True))


def _losses(tally: Tally, config: LaneConfig, epoch: Epoch) -> list[Loss]:
    stops = {
        "overlong": config.packing.overlong == "error",
        "untrained": config.untrained == "error",
        "bad": config.quarantine is None,
    }
    rows, weights, found = epoch.rows, epoch.weights, []
    whole = max(1.0, float(weights @ rows.length))
    for reason in sorted(DROP_REASONS):
        by = rows.lost_by(reason)
        lost = np.where(by, rows.length - rows.kept, 0)
        # Rows that train nothing are told of where they are packed, too.
        count = int(by.sum() or (rows.untrained.sum() if reason == "untrained" else 0))
        if count:
            fraction = float(weights @ lost) / whole
            # Of a ratio: long rows count in both of its sums.
            differs = weights * (lost - fraction * rows.length)
            error = 0.0 if epoch.exact else float(np.std(differs)) * math.sqrt(len(lost)) / whole
            stop = bool(by.any()) and stops.get(reason, False)
            examples = tally.examples(reason)
            found.append(Loss(reason, count, int(lost.sum()), fraction, error, stop, examples))
    return found


def _imbalance(
    dataset: IterablePackedDataset, pairs: IntArray, chosen: Outcome, shape: RunShape, ranks: int
) -> Imbalance:
    batching, most = shape.batching(ranks), dataset.balance_window or DEFAULT_WINDOW
    planned, balanced = (
        slowest_over_mean(
            pairs,
            ranks=ranks,
            lanes=dataset.num_lanes or dataset.lanes_for(ranks),
            packs_per_rank=batching.packs_per_rank,
            epoch_packs=chosen.packs,
            window=window,
            seed=dataset.lane_config.seed,
        )
        for window in (0, most)
    )
    whole = batching.batches_per_step * ranks * batching.packs_per_batch
    return Imbalance(
        ranks=ranks,
        packs_per_step=batching.packs_per_step,
        null_packs=whole - batching.packs_per_step,
        steps=math.ceil(chosen.packs / batching.packs_per_step),
        planned=planned,
        window=most,
        balanced=balanced,
    )


def _shares(config: LaneConfig, epoch: Epoch, chosen: Outcome, settings: Settings) -> list[SourceShare]:
    """Return the sources of a mixture in an epoch, and in the whole run, if it has a number of steps."""
    if config.mix is None:
        return []
    steps, rows = settings.shape.max_steps, epoch.rows
    in_epoch = [np.where(rows.source == i, epoch.weights, 0) for i in range(len(config.mix.entries))]
    trained = max(1e-9, float(epoch.weights @ rows.kept_trained))
    return [
        SourceShare(
            name=entry.name,
            weight=entry.weight,
            rows=float(own.sum()) / max(passes, 1e-9),
            tokens=float(own @ rows.kept) / max(passes, 1e-9),
            fraction=float(own @ rows.kept_trained) / trained,
            passes=passes,
            passes_in_run=None if steps is None else passes * steps * settings.packs_per_step / chosen.packs,
        )
        for entry, own, passes in zip(config.mix.entries, in_epoch, epoch.passes.tolist(), strict=True)
    ]


def _assumed(dataset: IterablePackedDataset, epoch: Epoch, settings: Settings) -> list[str]:
    """Return sentences about what was assumed, because nothing said so."""
    shape, mix = settings.shape, dataset.lane_config.mix
    found = [
        f"the run has {shape.ranks[0]} rank(s), each with {shape.workers} worker processes, {settings.lanes} lane(s), "
        f"and steps of {settings.packs_per_step} packs over all ranks",
        f"padding is that of batches of {shape.padded_batch(settings.packing)} random samples, to the longest of each",
        "attention computes no pair of tokens of different samples (flex, varlen, flash; dense attention computes all)",
    ]
    if mix is not None and mix.stop == "never":
        found.append("the mixture has no end: an epoch is what it takes until each source was read once")
    elif dataset.epochs is None:
        found.append("the data is read again and again: only its last packs would be part-empty")
    if not epoch.known:
        found.append("the source does not tell its size: figures are of an epoch of the rows looked at")
    elif not epoch.exact:
        found.append("the rows looked at stand for all; --all reads every row")
    return found
