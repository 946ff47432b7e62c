"""One pass over a corpus, or a sample of it, and the report that comes of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from streampack.accounting import DROP_REASONS
from streampack.inspection.advice import advise
from streampack.inspection.costs import slowest_over_mean
from streampack.inspection.packs import first_packs
from streampack.inspection.plans import Plan, plan_outcomes
from streampack.inspection.reading import Epoch, Ints, Progress, Tally, read_epoch
from streampack.inspection.report import (
    Attention,
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
from streampack.packing.groups import attention_cost
from streampack.streaming.balance import DEFAULT_WINDOW
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.estimate import tolerant
from streampack.streaming.lane_config import LaneConfig, default_lanes

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
        shape: ranks, batches and model of the run.
        rows: how many rows to read from all over the corpus; None reads all of them, in the order of the run.
        packs: how many of the run's first packs to show.
        progress: called with the number of rows read so far.

    Raises:
        ValueError: if no row makes a sample, or the source cannot be read.
    """
    shape = shape or RunShape()
    config, lanes = dataset.lane_config, _lanes(dataset, shape, shape.ranks[0])
    window = dataset.window_for(shape.ranks[0])
    reading = replace(tolerant(config), balance_window=window)
    tally = Tally(config.source, progress)
    epoch = read_epoch(reading, tally, num_lanes=lanes, rows=rows)
    if not epoch.rows.kept.any():
        raise ValueError(_nothing(tally))
    settings = _settings(dataset, shape, lanes, window)
    outcomes, plan = plan_outcomes(reading, epoch, shape, chosen=settings.filled_by)
    [chosen] = [outcome for outcome in outcomes if outcome.chosen]
    in_all = float(epoch.weights.sum()) if epoch.known else None
    report = Report(
        title=title,
        settings=settings,
        coverage=Coverage(len(tally), in_all, epoch.exact, epoch.error),
        lengths=_lengths(tally, limit=settings.max_seq_len),
        losses=_losses(tally, config, epoch),
        outcomes=outcomes,
        attention=_attention(dataset, plan, chosen, shape),
        packs=first_packs(reading, lanes, packs),
        sources=_shares(config, epoch, chosen, shape),
        advice=[],
        assumed=_assumed(dataset, epoch, settings, shape),
    )
    return replace(report, advice=advise(report))


def _lanes(dataset: IterablePackedDataset, shape: RunShape, ranks: int) -> int:
    consumers = ranks * max(1, shape.workers)
    return dataset.num_lanes or default_lanes(dataset.lane_config.source, consumers)


def _nothing(tally: Tally) -> str:
    if not len(tally):
        return "the source has no rows; check its paths"
    counts = {
        reason: int(tally.rows.lost_by(reason).sum()) for reason in tally.examples if reason in DROP_REASONS
    }
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
    examples = "; ".join(each[0] for each in tally.examples.values())
    return f"none of the {len(tally):,} rows looked at can be packed ({reasons}): {examples}"


def _settings(dataset: IterablePackedDataset, shape: RunShape, lanes: int, window: int) -> Settings:
    config, model, batching = dataset.lane_config, shape.model, shape.batching(shape.ranks[0])
    return Settings(
        max_seq_len=config.packing.max_seq_len,
        filled_by=config.packing.filled_by,
        overlong=str(config.packing.overlong),
        buffer_size=config.packing.buffer_size,
        shuffle=config.shuffle_window > 0,
        ranks=shape.ranks[0],
        workers=shape.workers,
        lanes=lanes,
        batch_size=shape.batch_size,
        packs_per_step=batching.packs_per_step,
        balance_window=window,
        padded_batch=shape.padded_batch,
        pad_seqs_to=config.packing.pad_seqs_to,
        model=None if model is None else model.name,
        parameters=None if model is None else model.parameters,
    )


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


def _histogram(lengths: Ints, limit: int) -> list[tuple[int, int, int]]:
    """Count lengths in bins of equal ratio, or of equal width where they differ little; one begins behind ``limit``."""
    least, most = max(1, int(lengths.min())), int(lengths.max())
    space = np.geomspace if most > 4 * least else np.linspace
    edges = np.unique(space(least, most + 1, BINS + 1).round().astype(np.int64))
    edges[0] = lengths.min()
    if edges[0] <= limit < most:
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
        lost = np.where(by := rows.lost_by(reason), rows.length - rows.kept, 0)
        error = 0.0 if epoch.exact else float(np.std(weights * lost)) * math.sqrt(len(lost)) / whole
        examples = tally.examples.get(reason, [])
        if reason == "bad" and len(tally.bad_kinds) > 1:
            counts = tally.bad_kinds.values()
            examples = [f"{text} ({number:,} such)" for text, number in zip(examples, counts, strict=False)]
        # Rows that train nothing are told of where they are packed, too.
        count = by.sum() or (rows.untrained.sum() if reason == "untrained" else 0)
        if count:
            stop = bool(by.any()) and stops.get(reason, False)
            fraction = float(weights @ lost) / whole
            found.append(Loss(reason, int(count), int(lost.sum()), fraction, error, stop, examples))
    return found


def _attention(dataset: IterablePackedDataset, plan: Plan, chosen: Outcome, shape: RunShape) -> Attention:
    model, pairs = shape.model, plan.pairs
    work = None if model is None else model.per_pair * chosen.pairs / model.of(chosen.tokens, chosen.pairs)
    several = [ranks for ranks in shape.ranks if ranks > 1]
    return Attention(
        mean=float(pairs.mean()),
        quantiles={str(q): int(np.quantile(pairs, q)) for q in (0.1, 0.5, 0.9, 0.99)},
        largest=int(pairs.max()),
        fraction=float(pairs.mean() / attention_cost([dataset.lane_config.packing.max_seq_len])),
        share_of_work=work,
        imbalance=[_imbalance(dataset, plan, chosen, shape, ranks) for ranks in several],
    )


def _imbalance(
    dataset: IterablePackedDataset, plan: Plan, chosen: Outcome, shape: RunShape, ranks: int
) -> Imbalance:
    model, batching = shape.model, shape.batching(ranks)
    costs = plan.pairs.astype(np.float64)
    if model is not None:
        costs = model.per_token * plan.widths + model.per_pair * costs
    planned, balanced = (
        slowest_over_mean(
            costs,
            plan.pairs.tolist(),
            ranks=ranks,
            lanes=_lanes(dataset, shape, ranks),
            packs_per_rank=batching.packs_per_rank,
            epoch_packs=chosen.packs,
            window=window,
            seed=dataset.lane_config.seed,
        )
        for window in (0, dataset.balance_window or DEFAULT_WINDOW)
    )
    whole = batching.batches_per_step * ranks * batching.packs_per_batch
    return Imbalance(
        ranks=ranks,
        packs_per_step=batching.packs_per_step,
        null_packs=whole - batching.packs_per_step,
        steps=math.ceil(chosen.packs / batching.packs_per_step),
        planned=planned,
        window=dataset.balance_window or DEFAULT_WINDOW,
        balanced=balanced,
    )


def _shares(config: LaneConfig, epoch: Epoch, chosen: Outcome, shape: RunShape) -> list[SourceShare]:
    """Return the sources of a mixture in an epoch, and in the whole run, if it has a number of steps."""
    if config.mix is None:
        return []
    packs = shape.batching(shape.ranks[0]).packs_per_step * (shape.max_steps or 0)
    rows, trained = epoch.rows, max(1e-9, float(epoch.weights @ epoch.rows.kept_trained))
    shares = []
    for number, entry in enumerate(config.mix.entries):
        own = rows.source == number
        scale, times = float(epoch.scale[number]), float(epoch.times[number])
        shares.append(
            SourceShare(
                name=entry.name,
                weight=entry.weight,
                rows=own.sum() * scale,
                tokens=rows.kept[own].sum() * scale,
                trained=rows.kept_trained[own].sum() * scale,
                fraction=rows.kept_trained[own].sum() * scale * times / trained,
                passes=times,
                passes_in_run=None if shape.max_steps is None else times * packs / chosen.packs,
            )
        )
    return shares


def _assumed(dataset: IterablePackedDataset, epoch: Epoch, settings: Settings, shape: RunShape) -> list[str]:
    """Return sentences about what was assumed, because nothing said so."""
    ranks = "1 rank" if settings.ranks == 1 else f"{settings.ranks} ranks"
    found = [
        f"the run has {ranks}, each with {settings.workers} worker processes, {settings.lanes} lane(s), and steps of "
        f"{settings.packs_per_step} packs over all ranks",
        f"padding is that of batches of {settings.padded_batch} random samples, to the longest of each",
        "attention computes no pair of tokens of different samples (flex, varlen, flash; dense attention computes all)",
    ]
    mix = dataset.lane_config.mix
    if mix is not None and mix.stop == "never":
        found.append("the mixture has no end: an epoch is what it takes until each source was read once")
    elif dataset.epochs is None:
        found.append("the data is read again and again: only its last packs would be part-empty")
    if not epoch.known:
        found.append("the source does not tell its size: figures are of an epoch of the rows looked at")
    elif not epoch.exact:
        order = (
            "in a random order, for the run shuffles" if settings.shuffle else "in the order of the corpus"
        )
        found.append(f"the rows looked at stand for all, {order}; --all reads every row")
    if shape.model is None:
        found.append("no model is configured, so operations are not compared")
    return found
