"""The report as a page."""

from __future__ import annotations

from collections.abc import Iterator

from streampack.inspection.page import (
    Bar,
    Fact,
    Markup,
    bars,
    bullets,
    facts,
    markup,
    page,
    paragraph,
    section,
    table,
)
from streampack.inspection.page_packs import boundaries, mask_figure, packs_figure
from streampack.inspection.report import Report
from streampack.inspection.terminal import percent, sequence_ends


def report_page(report: Report) -> str:
    """Return a report as a self-contained HTML document."""
    title = f"streampack inspect: {report.title}" if report.title else "streampack inspect"
    return page(title, _parts(report, title))


def _parts(report: Report, title: str) -> Iterator[Markup]:
    yield Markup(f"<h1>{markup(title)}</h1>")
    yield paragraph(_read(report), kind="lead")
    yield _facts(report)
    yield section("Recommended", _advice(report))
    if report.packs:
        yield section("The first packs", packs_figure(report.packs))
        beside = f'<div class="beside">{mask_figure(report.packs[0])}<div>{boundaries(report.packs[0])}</div></div>'
        note = "A token (row) attends to the tokens (columns) of its own sequence up to itself; positions restart at 0."
        yield section("Mask and boundaries of the first pack", paragraph(note, kind="note"), Markup(beside))
    yield section("Ways to make batches", _tokens(report), _outcomes(report))
    yield section("Lengths", _quantiles(report), _histogram(report), _longest(report))
    if report.losses:
        yield section("Dropped, cut off, or not trained", _losses(report))
    if report.sources:
        yield section("Sources of the mixture", _sources(report))
    yield section("Attention", paragraph(_attention(report)), _imbalance(report))
    yield section("Assumed", bullets(report.assumed))


def _read(report: Report) -> str:
    coverage, lengths, settings = report.coverage, report.lengths, report.settings
    error = "" if coverage.exact or coverage.rows_in_all is None else "; ± is a standard error"
    model = f"; the model is {settings.model} ({settings.parameters:,} parameters)" if settings.model else ""
    return (
        f"Read: {coverage}{error}. {lengths.samples:,} samples of {lengths.tokens:,} tokens, in packs of "
        f"{settings.max_seq_len:,} by {settings.filled_by}{model}."
    )


def _facts(report: Report) -> Markup:
    chosen, lengths = report.chosen, report.lengths
    padding = next(outcome for outcome in report.outcomes if outcome.name == "padding")
    found = [
        Fact(
            "padding",
            percent(chosen.padding, chosen.error),
            f"{percent(padding.padding)} in padded batches{sequence_ends(report)}",
        ),
        Fact(
            "optimizer steps an epoch", f"{chosen.steps:,.0f}", f"{chosen.samples_per_step:,.1f} samples each"
        ),
        Fact("speed-up over padding", f"{chosen.speedup:.2f} x", "by tokens computed"),
    ]
    if chosen.flops_speedup is not None:
        found.append(
            Fact("speed-up over padding", f"{chosen.flops_speedup:.2f} x", "by the model's operations")
        )
    found.append(
        Fact("trained tokens", percent(lengths.trained / max(1, lengths.tokens)), f"{lengths.trained:,}")
    )
    lost = sum(loss.fraction for loss in report.losses)
    found.append(
        Fact("tokens dropped or cut off", percent(lost), f"{sum(loss.rows for loss in report.losses):,} rows")
    )
    return facts(found)


def _advice(report: Report) -> Markup:
    if not report.advice:
        return paragraph("Nothing: these settings fit the data.")
    each = (
        f"<li><strong>{markup(advice.title)}</strong>{paragraph(advice.why)}<pre>{markup(advice.yaml)}</pre></li>"
        for advice in report.advice
    )
    return Markup('<ol class="advice">' + "".join(each) + "</ol>")


def _tokens(report: Report) -> Markup:
    found = [
        Bar(outcome.name, outcome.tokens, percent(outcome.padding), hatched=outcome.padding)
        for outcome in sorted(report.outcomes, key=lambda outcome: not outcome.chosen)
    ]
    caption = "Tokens computed in an epoch; the hatched part is padding"
    return bars(found, caption=caption, columns=("way", "tokens", "padding"))


def _outcomes(report: Report) -> Markup:
    with_model = report.chosen.flops_speedup is not None
    columns = ["way", "padding", "packs", "steps", "samples a step", "tokens computed", "speed-up"]
    rows: list[list[object]] = []
    for outcome in sorted(report.outcomes, key=lambda outcome: not outcome.chosen):
        tag = (
            Markup(f'{markup(outcome.name)} <span class="tag">yours</span>')
            if outcome.chosen
            else outcome.name
        )
        row: list[object] = [tag, percent(outcome.padding, outcome.error), f"{outcome.packs:,.0f}"]
        row += [f"{outcome.steps:,.0f}", f"{outcome.samples_per_step:,.1f}", f"{outcome.tokens:,.0f}"]
        row += [f"{outcome.speedup:.2f} x"]
        row += [f"{outcome.flops_speedup:.2f} x"] if outcome.flops_speedup is not None else []
        rows.append(row)
    columns += ["by operations"] if with_model else []
    return table(columns, rows, chosen=0)


def _quantiles(report: Report) -> Markup:
    quantiles = report.lengths.quantiles
    found = [Fact("mean", f"{report.lengths.mean:,.0f}")]
    names = {"0.5": "median", "1.0": "longest"}
    found += [
        Fact(names.get(q, f"{100 * float(q):g} % below"), f"{n:,}")
        for q, n in quantiles.items()
        if float(q) > 0.2
    ]
    return facts(found)


def _histogram(report: Report) -> Markup:
    limit = report.settings.max_seq_len
    found = [
        Bar(f"{start:,} - {stop - 1:,}", count, f"{count:,}", over=start > limit)
        for start, stop, count in report.lengths.histogram
    ]
    caption = f"Samples by length in tokens; those above max_seq_len={limit:,} in another colour"
    return bars(found, caption=caption, columns=("tokens", "samples", "number"))


def _longest(report: Report) -> Markup:
    rows = [[row.place, f"{row.tokens:,}", f"{row.trained:,}"] for row in report.lengths.longest]
    return table(["the longest rows", "tokens", "trained"], rows)


def _losses(report: Report) -> Markup:
    rows: list[list[object]] = []
    for loss in report.losses:
        name = f"{loss.reason}: the run stops" if loss.stops else loss.reason
        examples = Markup("<br>".join(markup(example) for example in loss.examples))
        rows.append(
            [name, f"{loss.rows:,}", f"{loss.tokens:,}", percent(loss.fraction, loss.error), examples]
        )
    return table(["reason", "rows", "tokens", "of all tokens", "for example"], rows, text=[4])


def _sources(report: Report) -> Markup:
    rows = [
        [
            share.name,
            percent(share.weight),
            percent(share.fraction),
            f"{share.rows:,.0f}",
            f"{share.tokens:,.0f}",
            f"{share.passes:,.2f}",
            "" if share.passes_in_run is None else f"{share.passes_in_run:,.2f}",
        ]
        for share in report.sources
    ]
    columns = [
        "source",
        "weight",
        "fraction of trained tokens",
        "rows",
        "tokens",
        "passes an epoch",
        "in the run",
    ]
    return table(columns, rows)


def _attention(report: Report) -> str:
    attention, quantiles = report.attention, report.attention.quantiles
    work = attention.share_of_work
    share = "" if work is None else f" Attention is {work:.1%} of the model's operations."
    return (
        f"Pairs of tokens in a pack: mean {attention.mean:,.0f}, median {quantiles['0.5']:,}, 99 % below "
        f"{quantiles['0.99']:,}, largest {attention.largest:,}. That is {attention.fraction:.1%} of what one sample of "
        f"the same length would compute.{share}"
    )


def _imbalance(report: Report) -> Markup:
    found = report.attention.imbalance
    if not found:
        return Markup("")
    with_model = found[0].planned_work is not None
    columns = ["ranks", "packs a step", "null packs", "steps", "slowest / mean", "balanced"]
    columns += ["of all work", "balanced, of all work"] if with_model else []
    rows: list[list[object]] = []
    for each in found:
        row: list[object] = [
            each.ranks,
            f"{each.packs_per_step:,}",
            f"{each.null_packs:,}",
            f"{each.steps:,.0f}",
        ]
        row += [f"{each.planned:.3f}", f"{each.balanced:.3f}"]
        if each.planned_work is not None and each.balanced_work is not None:
            row += [f"{each.planned_work:.3f}", f"{each.balanced_work:.3f}"]
        rows.append(row)
    caption = (
        "Attention of the slowest rank of a step over the mean of the ranks; "
        f"balanced: balance_window={found[0].window}"
    )
    return table(columns, rows, caption=caption)
