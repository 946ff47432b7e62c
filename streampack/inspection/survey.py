"""One pass over a corpus, or over a sample of it, and the report about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from streampack.accounting import DROP_REASONS
from streampack.inspection.advice import advise
from streampack.inspection.packs import first_packs
from streampack.inspection.plans import plan_outcomes
from streampack.inspection.report import (
    Coverage,
    Lengths,
    LongRow,
    Loss,
    Outcome,
    Report,
    RunShape,
    Settings,
    SourceShare,
)
from streampack.lanes.lane_config import LaneConfig
from streampack.sources.bad_records import kind_of
from streampack.sources.mixture import Mix
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.epoch_rows import Epoch, Seen, ratio, read_lanes, read_sample, tolerant
from streampack.streaming.first_look import first_look
from streampack.streaming.mixing import mixing_lines
from streampack.types import RowId

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0)
EXAMPLES = 3
LONGEST = 5
FIRST_ROWS = 256
"""Rows from which the size of an epoch is estimated, to see whether all of it can be read."""
COMPLETE = 2.5
"""All of an epoch is read if it has at most this many times the rows asked for. From half of 800 rows, what is dropped
was off by 0.3 points."""

Progress = Callable[[int], None]
"""Called with the number of rows read so far."""


class NamedRows:
    """Keeps the longest rows, and for each reason the first lost rows of the corpus; of bad rows one of each kind."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.count = progress, 0
        self.lost: dict[str, dict[object, tuple[RowId, str]]] = {}  # by reason, then by kind
        self.longest: list[tuple[int, int, RowId]] = []  # (length, trained, row_id)

    def see(self, seen: Seen) -> None:
        """Look at one more row."""
        self.count += 1
        self.progress(self.count)
        long = (seen.length, seen.trained, seen.row_id)
        if (len(self.longest) < LONGEST or long > self.longest[-1]) and long not in self.longest:
            self.longest = sorted([*self.longest, long], reverse=True)[:LONGEST]
        if seen.reason:
            self._add(seen.reason, seen.row_id, seen.detail)
        if seen.length and not (seen.kept_trained if seen.kept else seen.trained):
            self._add("untrained", seen.row_id, "no token is trained")

    def _add(self, reason: str, row_id: RowId, detail: str) -> None:
        found = self.lost.setdefault(reason, {})
        kind = kind_of(detail) if reason == "bad" else row_id
        found[kind] = min(found.get(kind, (row_id, detail)), (row_id, detail))
        if len(found) > EXAMPLES:
            del found[max(found, key=lambda each: found[each])]


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
    config = dataset.lane_config
    settings = Settings(
        packing=config.packing,
        shape=shape,
        lanes=dataset.num_lanes or dataset.lanes_for(shape.ranks),
        balance_window=dataset.window_for(shape.ranks),
    )
    reading = replace(tolerant(config), balance_window=settings.balance_window)
    named = NamedRows(progress)
    epoch = _read_epoch(reading, named, num_lanes=settings.lanes, rows=rows)
    losses = _losses(named, config, epoch)
    if not epoch.rows.kept.any():
        reasons = ", ".join(f"{loss.rows:,} {loss.reason}" for loss in losses)
        examples = "; ".join(loss.examples[0] for loss in losses)
        raise ValueError(
            f"none of the {len(epoch.rows):,} rows looked at can be packed ({reasons}): {examples}"
            if len(epoch.rows)
            else "the source has no rows; check its paths"
        )
    outcomes = plan_outcomes(epoch, reading.packing, shape, seed=config.seed)
    [chosen] = [outcome for outcome in outcomes if outcome.chosen]
    report = Report(
        title=title,
        settings=settings,
        coverage=Coverage(
            rows=len(epoch.rows),
            rows_in_all=float(epoch.weights.sum()) if epoch.known else None,
            exact=epoch.exact,
            error=epoch.relative_error(epoch.rows.kept),
        ),
        lengths=_lengths(epoch, named, config),
        losses=losses,
        outcomes=outcomes,
        packs=first_packs(reading, settings.lanes, packs),
        sources=_shares(config, epoch, chosen, shape),
        advice=[],
        assumed=_assumed(dataset, epoch, settings),
        first=[*first_look(reading), *mixing_lines(reading, settings.lanes)],
    )
    return replace(report, advice=advise(report))


def _read_epoch(config: LaneConfig, named: NamedRows, *, num_lanes: int, rows: int | None) -> Epoch:
    """Read an epoch, or about ``rows`` rows of it; ``config`` is a `tolerant` one.

    A stream of unknown length gives its first rows. A mixture that never ends gives each of its sources once.
    """
    mix = config.mix
    if mix is not None and mix.stop == "never":
        config = replace(config, source=Mix(mix.entries, stop="all_exhausted"))
    if rows is not None:
        try:
            size = read_sample(config, num_lanes=num_lanes, rows=FIRST_ROWS).weights.sum()
        except ValueError:  # a source cannot tell its size, or these rows of a mixture's source train nothing
            size = math.inf
            if mix is None:
                return read_lanes(config, num_lanes=num_lanes, limit=rows, see=named.see)
        if size > COMPLETE * rows:
            each = rows if mix is None else max(1, rows // sum(entry.weight > 0 for entry in mix.entries))
            return read_sample(config, num_lanes=num_lanes, rows=each, see=named.see)
    return read_lanes(config, num_lanes=num_lanes, see=named.see)


def _lengths(epoch: Epoch, named: NamedRows, config: LaneConfig) -> Lengths:
    lengths = epoch.rows.length[epoch.rows.reason != 1 + DROP_REASONS.index("bad")]
    return Lengths(
        samples=len(lengths),
        tokens=int(lengths.sum()),
        trained=int(epoch.rows.trained.sum()),
        mean=float(lengths.mean()),
        quantiles={str(q): int(np.quantile(lengths, q, method="inverted_cdf")) for q in QUANTILES},
        longest=[
            LongRow(config.source.locate(row_id), tokens, trained)
            for tokens, trained, row_id in named.longest
        ],
    )


def _losses(named: NamedRows, config: LaneConfig, epoch: Epoch) -> list[Loss]:
    stops = {
        "overlong": config.packing.overlong == "error",
        "untrained": config.untrained == "error",
        "bad": config.quarantine is None,
    }
    rows, found = epoch.rows, list[Loss]()
    for reason in sorted(named.lost):
        by = rows.reason == 1 + DROP_REASONS.index(reason)
        count = int(by.sum())
        if not count:  # rows that train nothing and are packed
            trained = np.where(rows.kept > 0, rows.kept_trained, rows.trained)
            count = int(((rows.length > 0) & (trained == 0)).sum())
        lost = np.where(by, rows.length - rows.kept, 0)
        unread = epoch.unread[rows.source]
        fraction, error = ratio(lost, rows.length, weights=epoch.weights, unread=unread)
        stop = bool(by.any()) and stops.get(reason, False)
        examples = [f"{config.source.locate(at)}: {why}" for at, why in sorted(named.lost[reason].values())]
        found.append(Loss(reason, count, int(lost.sum()), fraction, error, stop, examples))
    return found


def _shares(config: LaneConfig, epoch: Epoch, chosen: Outcome, shape: RunShape) -> list[SourceShare]:
    """Return the sources of a mixture in an epoch, and in the complete run if it has a number of steps."""
    if config.mix is None:
        return []
    steps, rows, batching = shape.max_steps, epoch.rows, shape.batching
    trained = max(1e-9, float(epoch.weights @ rows.kept_trained))
    shares = []
    for number, entry in enumerate(config.mix.entries):
        own, passes = np.where(rows.source == number, epoch.weights, 0), float(epoch.passes[number])
        share = SourceShare(
            name=entry.name,
            weight=entry.weight,
            rows=float(own.sum()) / max(passes, 1e-9),
            tokens=float(own @ rows.kept) / max(passes, 1e-9),
            fraction=float(own @ rows.kept_trained) / trained,
            passes=passes,
            passes_in_run=None if steps is None else passes * steps * batching.packs_per_step / chosen.packs,
        )
        shares.append(share)
    return shares


def _assumed(dataset: IterablePackedDataset, epoch: Epoch, settings: Settings) -> list[str]:
    """Return sentences about what was assumed, because nothing said so."""
    shape, mix = settings.shape, dataset.lane_config.mix
    found = [
        f"the run has {shape.ranks} rank(s), each with {shape.workers} worker processes, {settings.lanes} lane(s), "
        f"and steps of {shape.batching.packs_per_step} packs over all ranks",
        f"padding is that of batches of {shape.padded_batch(settings.packing)} random samples, to the longest of each",
        "attention computes no pair of tokens of different samples (flex, varlen, flash; dense attention computes all)",
    ]
    if mix is not None and mix.stop == "never":
        found.append("the mixture has no end: in an epoch each source is read at least once")
    elif dataset.epochs is None:
        found.append("the data is read again and again: only its last packs would be part-empty")
    if not epoch.known:
        found.append("the source does not tell its size: figures are of an epoch of the rows looked at")
    elif not epoch.exact:
        found.append("the rows looked at stand for all, in random order; --all reads every row")
    return found
