"""The tables of a report, for pages and terminals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streampack.inspection.report import Report


@dataclass(frozen=True)
class Table:
    """A table of text. The first column names the rows."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    text: Sequence[int] = ()  # numbers of the columns that hold text; others hold numbers
    chosen: int | None = None  # the row to highlight


def percent(value: float, error: float = 0.0) -> str:
    """Format a fraction in per cent, with its standard error if it has one.

    >>> percent(0.1234), percent(0.1234, 0.001)
    ('12.34 %', '12.34 % ± 0.10')
    """
    return f"{100 * value:.2f} %" + (f" ± {100 * error:.2f}" if error else "")


def lead(report: Report) -> str:
    """Return a line about what was read."""
    coverage, lengths, settings = report.coverage, report.lengths, report.settings
    error = "" if coverage.exact or coverage.rows_in_all is None else "; ± is a standard error"
    return (
        f"{coverage}{error}: {lengths.samples:,} samples of {lengths.tokens:,} tokens, in packs of "
        f"{settings.packing.max_seq_len:,} by {settings.packing.filled_by}"
    )


def report_tables(report: Report) -> list[Table]:
    """Return the tables of an inspection."""
    tables = [_ways(report), _quantiles(report), _longest(report)]
    if report.losses:
        tables.append(_losses(report))
    if report.sources:
        tables.append(_sources(report))
    return tables


def _ways(report: Report) -> Table:
    columns = ["way", "padding", "packs", "steps", "samples a step", "tokens computed", "speed-up"]
    rows = []
    for each in sorted(report.outcomes, key=lambda outcome: not outcome.chosen):
        row = [f"{each.name} (yours)" if each.chosen else each.name, percent(each.padding, each.error)]
        row += [f"{each.packs:,.0f}", f"{each.steps:,.0f}", f"{each.samples_per_step:,.1f}"]
        row += [f"{each.tokens:,.0f}", f"{each.speedup:.2f} x"]
        rows.append(row)
    chosen, lengths, packing = report.chosen, report.lengths, report.settings.packing
    lost, rows_lost = (sum(getattr(loss, of) for loss in report.losses) for of in ("fraction", "rows"))
    trained = percent(lengths.trained / max(1, lengths.tokens))
    notes = [
        f"{trained} of the tokens are trained; {percent(lost)} are dropped or cut off, in {rows_lost:,} rows"
    ]
    if packing.pad_seqs_to > 1:
        notes.append(f"pad_seqs_to={packing.pad_seqs_to} costs {percent(chosen.sequence_ends)} of padding")
    if chosen.media is not None:
        notes.append(f"max_media used: {percent(chosen.media)} of {packing.max_media:,} a pack")
    return Table("Ways to make batches", columns, rows, notes, chosen=0)


def _quantiles(report: Report) -> Table:
    quantiles = report.lengths.quantiles
    names = ["mean", *(f"{100 * float(q):g} %" for q in quantiles)]
    row = [f"{report.lengths.mean:,.0f}", *(f"{value:,}" for value in quantiles.values())]
    return Table("Lengths, in tokens", names, [row])


def _longest(report: Report) -> Table:
    rows = [(each.place, f"{each.tokens:,}", f"{each.trained:,}") for each in report.lengths.longest]
    return Table("", ("the longest rows", "tokens", "trained"), rows)


def _losses(report: Report) -> Table:
    rows = [
        (
            f"{loss.reason}: the run stops" if loss.stops else loss.reason,
            f"{loss.rows:,}",
            f"{loss.tokens:,}",
            percent(loss.fraction, loss.error),
            "\n".join(loss.examples),
        )
        for loss in report.losses
    ]
    columns = ("reason", "rows", "tokens", "of all tokens", "for example")
    return Table("Dropped, cut off, or not trained", columns, rows, text=(4,))


def _sources(report: Report) -> Table:
    rows = [
        (
            share.name,
            percent(share.weight),
            percent(share.fraction),
            f"{share.rows:,.0f}",
            f"{share.tokens:,.0f}",
            f"{share.passes:,.2f}",
            "" if share.passes_in_run is None else f"{share.passes_in_run:,.2f}",
        )
        for share in report.sources
    ]
    columns = ("source", "weight", "fraction", "rows", "tokens", "passes an epoch", "in the run")
    note = "weight and fraction are those of the trained tokens"
    return Table("Sources of the mixture", columns, rows, notes=[note])
