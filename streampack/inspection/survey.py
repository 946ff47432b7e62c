"""One pass over a corpus, or a sample of it, and the report that comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from streampack.inspection.advice import advise
from streampack.inspection.costs import slowest_over_mean
from streampack.inspection.epoch import Epoch, read_epoch
from streampack.inspection.packs import first_packs
from streampack.inspection.plans import Plan, Totals, plan_outcomes
from streampack.inspection.reading import Progress, Tally, stops
from streampack.inspection.report import (
    Attention,
    Coverage,
    Imbalance,
    Lengths,
    LongRow,
    Loss,
    Report,
    Settings,
    SourceShare,
)
from streampack.inspection.shape import RunShape
from streampack.packing.groups import attention_cost
from streampack.streaming.balance import DEFAULT_WINDOW
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.lane_config import LaneConfig
from streampack.streaming.run_settings import default_lanes
from streampack.streaming.sampling import tolerant

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
    finished: Callable[[], None] = lambda: None,
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
        finished: called when all rows are read.

    Raises:
        ValueError: if no row makes a sample, or the source cannot be read.
    """
    shape = shape or RunShape()
    ranks = shape.ranks[0]
    config = dataset.lane_config
    lanes = _lanes(dataset, shape, ranks)
    window = dataset.settings.window_for(config.packing, ranks)
    reading = replace(tolerant(config), balance_window=window)
    epoch, tally, shares = read_epoch(reading, num_lanes=lanes, rows=rows, progress=progress)
    finished()
    if not tally.kept:
        raise ValueError(_nothing(tally))
    settings = _settings(dataset, shape, lanes, window)
    outcomes, chosen, planned = plan_outcomes(reading, epoch, shape, chosen=settings.filled_by)
    report = Report(
        title=title,
        settings=settings,
        coverage=Coverage(tally.rows, epoch.rows, epoch.exact, epoch.error),
        lengths=_lengths(tally),
        losses=_losses(tally, config, epoch),
        outcomes=outcomes,
        attention=_attention(dataset, chosen, planned, shape),
        packs=first_packs(reading, lanes, packs),
        sources=_shares(shares, planned, shape),
        advice=[],
        assumed=_assumed(dataset, epoch, settings, shape),
    )
    return replace(report, advice=advise(report))


def _lanes(dataset: IterablePackedDataset, shape: RunShape, ranks: int) -> int:
    consumers = ranks * max(1, shape.workers)
    return dataset.num_lanes or default_lanes(dataset.lane_config.source, consumers)


def _nothing(tally: Tally) -> str:
    if not tally.rows:
        return "the source has no rows; check its paths"
    reasons = ", ".join(f"{count[0]:,} {reason}" for reason, count in tally.losses.items())
    examples = "; ".join(each[0] for each in tally.examples.values())
    return f"none of the {tally.rows:,} rows looked at can be packed ({reasons}): {examples}"


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


def _lengths(tally: Tally) -> Lengths:
    whole = np.asarray(tally.whole, np.int64)
    longest = sorted(tally.longest, reverse=True)
    return Lengths(
        samples=len(whole),
        tokens=int(whole.sum()),
        trained=tally.trained,
        mean=float(whole.mean()),
        quantiles={str(q): int(np.quantile(whole, q, method="inverted_cdf")) for q in QUANTILES},
        histogram=_histogram(whole),
        longest=[
            LongRow(tally.source.locate(row_id), tokens, trained) for tokens, trained, row_id in longest
        ],
    )


def _histogram(lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[tuple[int, int, int]]:
    """Count lengths in bins of equal ratio, or of equal width where the lengths differ little."""
    least, most = max(1, int(lengths.min())), int(lengths.max())
    spaced = (
        np.geomspace(least, most + 1, BINS + 1)
        if most > 4 * least
        else np.linspace(least, most + 1, BINS + 1)
    )
    edges = np.unique(spaced.round().astype(np.int64))
    edges[0] = min(int(edges[0]), int(lengths.min()))
    counts, _ = np.histogram(lengths, edges)
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), counts.tolist(), strict=True))


def _losses(tally: Tally, config: LaneConfig, epoch: Epoch) -> list[Loss]:
    stopping, all_tokens = stops(config), max(1, sum(tally.whole))
    found = []
    for reason, (rows, tokens, squares) in sorted(tally.losses.items()):
        fraction, error = tokens / all_tokens, 0.0
        if not epoch.exact:
            mean = tokens / tally.rows
            error = math.sqrt(max(0.0, squares / tally.rows - mean**2) * tally.rows) / all_tokens
        stop = reason in stopping
        examples = tally.examples.get(reason, [])
        if reason == "bad" and len(tally.bad_kinds) > 1:
            counts = tally.bad_kinds.values()
            examples = [f"{text} ({number:,} such)" for text, number in zip(examples, counts, strict=False)]
        found.append(Loss(reason, rows, tokens, fraction, error, stop, examples))
    if tally.untrained and "untrained" not in tally.losses:
        found.append(Loss("untrained", tally.untrained, 0, 0.0, 0.0, False, tally.examples["untrained"]))
    return found


def _attention(dataset: IterablePackedDataset, chosen: Plan, planned: Totals, shape: RunShape) -> Attention:
    config, model = dataset.lane_config, shape.model
    pairs, length = chosen.pairs, config.packing.max_seq_len
    work = None
    if model is not None:
        work = model.per_pair * planned.pairs / model.of(planned.tokens, planned.pairs)
    several = [ranks for ranks in shape.ranks if ranks > 1]
    return Attention(
        mean=float(pairs.mean()),
        quantiles={str(q): int(np.quantile(pairs, q)) for q in (0.1, 0.5, 0.9, 0.99)},
        largest=int(pairs.max()),
        fraction=float(pairs.mean() / attention_cost([length])),
        share_of_work=work,
        imbalance=[_imbalance(dataset, chosen, planned, shape, ranks) for ranks in several],
    )


def _imbalance(
    dataset: IterablePackedDataset, chosen: Plan, planned: Totals, shape: RunShape, ranks: int
) -> Imbalance:
    model, batching = shape.model, shape.batching(ranks)
    lanes = _lanes(dataset, shape, ranks)
    window = dataset.balance_window or DEFAULT_WINDOW
    order_by: list[int] = chosen.pairs.tolist()

    def ratio(costs: np.ndarray[tuple[int], np.dtype[np.float64]], window: int) -> float:
        return slowest_over_mean(
            costs,
            order_by,
            ranks=ranks,
            lanes=lanes,
            packs_per_rank=batching.packs_per_rank,
            epoch_packs=planned.rows,
            window=window,
            seed=dataset.lane_config.seed,
        )

    pairs = chosen.pairs.astype(np.float64)
    work = None if model is None else model.per_token * chosen.widths + model.per_pair * pairs
    whole = batching.batches_per_step * ranks * batching.packs_per_batch
    return Imbalance(
        ranks=ranks,
        packs_per_step=batching.packs_per_step,
        null_packs=whole - batching.packs_per_step,
        steps=math.ceil(planned.rows / batching.packs_per_step),
        planned=ratio(pairs, 0),
        window=window,
        balanced=ratio(pairs, window),
        planned_work=None if work is None else ratio(work, 0),
        balanced_work=None if work is None else ratio(work, window),
    )


def _shares(shares: list[SourceShare], planned: Totals, shape: RunShape) -> list[SourceShare]:
    """Add the passes over the sources in the whole run, if it has a number of steps."""
    if shape.max_steps is None or not planned.rows:
        return shares
    packs = shape.max_steps * shape.batching(shape.ranks[0]).packs_per_step
    times = packs / planned.rows
    return [replace(share, passes_in_run=share.passes * times) for share in shares]


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
    if not epoch.exact and epoch.rows is None:
        found.append("the source does not tell its size: figures are of an epoch of the rows looked at")
    elif not epoch.exact:
        order = (
            "in a random order, for the run shuffles" if settings.shuffle else "in the order of the corpus"
        )
        found.append(f"the rows looked at stand for all, {order}; --all reads every row")
    if shape.model is None:
        found.append("no model is configured, so operations are not compared")
    return found
