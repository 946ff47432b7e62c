"""The page of a run: one HTML file that makes no requests, for screens of 400 to 1,600 pixels and for paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from streampack.accounting import DROP_REASONS
from streampack.inspection.charts import BUCKETS, Line, Point, line_chart, short, thin
from streampack.inspection.page import Fact, Markup, facts, markup, page, paragraph, section, table
from streampack.inspection.page_packs import packs_figure
from streampack.inspection.run_report import RunReport

MOST_ROWS = 25
"""Rows of the table of steps."""
MOST_CONFIG = 40_000
"""Characters of the settings that are shown."""


def _plain(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


@dataclass(frozen=True)
class Chart:
    """Which metrics a picture shows, and how."""

    name: str
    title: str
    unit: str
    metrics: dict[str, str]  # name in the legend -> name of the metric
    least: float | None = 0.0
    factor: float = 1.0  # the value in the unit / the value that is logged
    show: Callable[[float], str] = _plain


CHARTS = (
    Chart("loss", "Loss", "nats", {"training": "loss", "validation": "validation_loss"}, least=None),
    Chart(
        "rewards",
        "Rewards of chosen and rejected answers",
        "reward",
        {"chosen": "rewards/chosen", "rejected": "rewards/rejected"},
        least=None,
    ),
    Chart(
        "accuracy",
        "Pairs whose chosen answer has the higher reward",
        "% of the pairs",
        {"training": "rewards/accuracies", "validation": "validation_rewards/accuracies"},
        factor=100,
    ),
    Chart("padding", "Padding", "% of a pack", {"padding": "padding"}, factor=100),
    Chart("speed", "Speed", "tokens/s", {"tokens/s": "tokens_per_second"}, show=short),
    Chart("wait", "Waiting for data", "ms a step", {"data wait": "data_wait"}, factor=1000),
    Chart(
        "imbalance",
        "Attention cost of the slowest rank",
        "times the mean",
        {"imbalance": "cost_imbalance"},
        least=1.0,
    ),
    Chart("norm", "Gradient norm, before it is clipped", "norm", {"gradient norm": "grad_norm"}),
    Chart("rate", "Learning rate", "rate", {"learning rate": "lr"}, show="{:.3g}".format),
)


def run_page(report: RunReport) -> str:
    """Return the report of a run as a self-contained HTML document."""
    title = f"Run {report.title}"
    return page(title, _parts(report, title))


def _parts(report: RunReport, title: str) -> Iterator[Markup]:
    yield Markup(f"<h1>{markup(title)}</h1>")
    yield paragraph(report.ended, kind="lead")
    yield _facts(report)
    yield section("Over time", *_pictures(report))
    if report.ledger:
        yield section("Where every token went", *_ledger(report), *_sources(report))
    if report.packs:
        views = [pack for _, pack in report.packs]
        names = [f"step {step:,}" for step, _ in report.packs]
        note = "Before each pack stands the step that trained it."
        yield section("The first packs", paragraph(note, kind="note"), packs_figure(views, names=names))
    yield section("In effect", *_in_effect(report))


def _facts(report: RunReport) -> Markup:
    """Show the figures that one looks for first."""
    found = []
    if report.metrics:
        found.append(Fact("last step logged", f"{max(report.metrics):,}"))
    for name, metric in (("loss", "loss"), ("validation loss", "validation_loss")):
        if points := _finite(report.series(metric)):
            (first, before), (last, value) = points[0], points[-1]
            found.append(
                Fact(name, f"{value:.3f}", f"at step {last:,.0f}; {before:.3f} at step {first:,.0f}")
            )
    if speed := _finite(report.series("tokens_per_second")):
        found.append(Fact("tokens/s", short(sorted(value for _, value in speed)[len(speed) // 2]), "median"))
    if report.ledger:
        found.append(Fact("tokens packed", short(report.ledger["packed"])))
        found.append(Fact("padding", f"{report.ledger['padding']:.2%}"))
    return facts(found) if found else Markup("")


def _pictures(report: RunReport) -> Iterator[Markup]:
    charts, rows = [], []
    for chart in CHARTS:
        lines = [
            Line(name, [(step, value * chart.factor) for step, value in report.series(metric)])
            for name, metric in chart.metrics.items()
        ]
        lines = [line for line in lines if line.points]
        drawn = line_chart(
            chart.name, lines, title=chart.title, unit=chart.unit, least=chart.least, show=chart.show
        )
        if drawn:
            charts.append(_figure(chart, lines, drawn))
        rows += [_summary(chart, line) for line in lines]
    if not rows:
        yield paragraph("Nothing was logged.")
        return
    yield Markup(f'<div class="charts">{"".join(charts)}</div>')
    if len(report.metrics) > 2 * BUCKETS:
        note = (
            "A line is the mean of several steps; the pale one behind it is their lowest and highest values."
        )
        yield paragraph(note, kind="note")
    values = (
        value for chart in CHARTS for metric in chart.metrics.values() for _, value in report.series(metric)
    )
    if not all(map(math.isfinite, values)):
        yield paragraph("A cross marks a step whose value is not a finite number.", kind="note")
    columns = ("metric", "first", "last", "lowest", "at step", "highest", "at step", "mean")
    yield table(columns, rows, caption="The metrics in numbers")
    yield _steps(report)


def _figure(chart: Chart, lines: Sequence[Line], drawn: str) -> str:
    keys = "".join(
        f'<span class="line-key line-key-{at}">{markup(line.name)}</span>' for at, line in enumerate(lines)
    )
    return f"<figure><figcaption>{markup(chart.title)} {keys if len(lines) > 1 else ''}</figcaption>{drawn}</figure>"


def _summary(chart: Chart, line: Line) -> list[str]:
    """Return a row of the table: what a line shows, in numbers."""
    name = _with_unit(line.name if len(chart.metrics) == 1 else f"{line.name} {chart.title.lower()}", chart)
    points = _finite(line.points)
    if not points:
        return [name, *["not finite"] * 2, *["-"] * 5]
    low, high = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    mean = sum(value for _, value in points) / len(points)
    first, last = (_cell(value, chart) for _, value in (line.points[0], line.points[-1]))
    return [
        name, first, last, _cell(low[1], chart), f"{low[0]:,.0f}", _cell(high[1], chart),
        f"{high[0]:,.0f}", _cell(mean, chart),
    ]  # fmt: skip


def _with_unit(name: str, chart: Chart) -> str:
    return name if chart.unit in name else f"{name}, {chart.unit}"


def _cell(value: float, chart: Chart) -> str:
    return chart.show(value) if math.isfinite(value) else "not finite"


def _steps(report: RunReport) -> Markup:
    """Return a table of some steps, those with the highest and the lowest loss among them."""
    columns = [
        (f"{label} {chart.title.lower()}" if len(chart.metrics) > 1 else label, metric, chart)
        for chart in CHARTS
        for label, metric in chart.metrics.items()
        if report.series(metric)
    ]
    rows = []
    for step, _ in thin(_finite(report.series("loss")), buckets=MOST_ROWS // 2 - 1):
        logged = report.metrics[int(step)]
        values = (
            _cell(logged[metric] * chart.factor, chart) if metric in logged else ""
            for _, metric, chart in columns
        )
        rows.append([f"{step:,.0f}", *values])
    if not rows:
        return Markup("")
    heads = ["step", *(_with_unit(name, chart) for name, _, chart in columns)]
    return _folded(
        "Some steps in numbers",
        Markup(
            f'<div class="wide" tabindex="0" role="region" aria-label="Some steps">{table(heads, rows)}</div>'
        ),
    )


def _ledger(report: RunReport) -> Iterator[Markup]:
    ledger = report.ledger
    whole = max(1, ledger["tokens_in"])
    parts = [("made by the encoder", ledger["tokens_in"]), ("packed", ledger["packed"])]
    parts += [
        (f"dropped: {name}", ledger.get(f"dropped_{name}", 0)) for name in DROP_REASONS if name != "bad"
    ]
    parts += [("buffered: read, waiting for a pack", ledger["buffered"])]
    rows = [[name, f"{tokens:,.0f}", f"{tokens / whole:.2%}"] for name, tokens in parts if tokens]
    yield table(("where", "tokens", "of all"), rows)
    counts = [
        f"{ledger['samples']:,.0f} samples read, {ledger['packs']:,.0f} packs, {ledger['padding']:.2%} padding"
    ]
    for name, words in (
        ("bad_records", "bad records skipped"),
        ("untrained", "samples that train nothing"),
    ):
        if ledger[name]:
            counts.append(f"{ledger[name]:,.0f} {words}")
    yield paragraph(f"{'; '.join(counts)}.")


def _sources(report: RunReport) -> Iterator[Markup]:
    last: dict[str, float] = {}
    for values in report.metrics.values():
        last |= {name: value for name, value in values.items() if name.startswith("source_")}
    rows = [
        [
            name,
            f"{last.get(f'source_{name}_fraction', 0):.2%}",
            f"{last.get(f'source_{name}_trained', 0):,.0f}",
            f"{last.get(f'source_{name}_epochs', 0):.4g}",
        ]
        for name in report.sources
        if last
    ]
    if rows:
        columns = ("source", "of the trained tokens", "trained tokens", "epochs")
        yield table(columns, rows, caption="Sources of the mixture")


def _in_effect(report: RunReport) -> Iterator[Markup]:
    yield table(("what", "at the start"), list(report.in_effect.items()), text=[1])
    config = report.config
    if len(config) > MOST_CONFIG:
        config = f"{config[:MOST_CONFIG]}\n[{len(config) - MOST_CONFIG:,} characters more]"
    yield _folded("All settings", Markup(f"<pre>{markup(config)}</pre>"))


def _folded(title: str, content: Markup) -> Markup:
    return Markup(f"<details><summary>{markup(title)}</summary>{content}</details>")


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]
