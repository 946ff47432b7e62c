"""The page of a run: one HTML file that makes no requests, for screens of 400 to 1,600 pixels and for paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from streampack.accounting import DROP_REASONS
from streampack.inspection.charts import BUCKETS, Line, Point, line_chart, short, thin
from streampack.inspection.pack_pictures import pack_picture
from streampack.inspection.run_page_style import STYLE
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
    Chart("padding", "Padding", "% of a pack", {"padding": "padding"}, factor=100),
    Chart("speed", "Speed", "tokens/s", {"tokens/s": "tokens_per_second"}, show=short),
    Chart("wait", "Waiting for data", "ms a step", {"data wait": "data_wait"}, factor=1000),
    Chart(
        "imbalance",
        "Attention cost of the dearest rank",
        "times the mean",
        {"imbalance": "cost_imbalance"},
        least=1.0,
    ),
    Chart("norm", "Gradient norm, before it is clipped", "norm", {"gradient norm": "grad_norm"}),
    Chart("rate", "Learning rate", "rate", {"learning rate": "lr"}, show="{:.3g}".format),
)


def render(report: RunReport) -> str:
    """Return the page of a run as text."""
    title = escape(f"Run {report.title}")
    sections = [
        ("Over time", _pictures(report)),
        ("Where every token went", _ledger(report) + _sources(report)),
        ("The first packs", _packs(report)),
        ("In effect", _in_effect(report)),
    ]
    body = "".join(f"<section><h2>{heading}</h2>{html}</section>" for heading, html in sections if html)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main><header><h1>{title}</h1>"
        f"<p>{escape(report.ended)}</p>{_tiles(report)}</header>{body}</main></body></html>\n"
    )


def _tiles(report: RunReport) -> str:
    """Show the figures that one looks for first."""
    found = []
    for name, metric in (("loss", "loss"), ("validation loss", "validation_loss")):
        if points := _finite(report.series(metric)):
            found.append((name, f"{points[0][1]:.3f} → {points[-1][1]:.3f}"))
    if report.metrics:
        found.insert(0, ("last step logged", f"{max(report.metrics):,}"))
    if speed := _finite(report.series("tokens_per_second")):
        found.append(("tokens/s, median", short(sorted(value for _, value in speed)[len(speed) // 2])))
    if report.ledger:
        found.append(("tokens packed", short(report.ledger["packed"])))
        found.append(("padding", f"{report.ledger['padding']:.2%}"))
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in found)
    return f'<dl class="tiles">{items}</dl>' if items else ""


def _pictures(report: RunReport) -> str:
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
        keys = "".join(
            f'<span class="key key-{number}">{escape(line.name)}</span>' for number, line in enumerate(lines)
        )
        if drawn:
            legend = keys if len(lines) > 1 else ""
            charts.append(f"<figure><figcaption>{escape(chart.title)} {legend}</figcaption>{drawn}</figure>")
        rows += [_summary(chart, line) for line in lines]
    if not rows:
        return "<p>Nothing was logged.</p>"
    heads = ("", "unit", "first", "last", "lowest", "at step", "highest", "at step", "mean")
    gaps = any(
        not math.isfinite(v) for chart in CHARTS for m in chart.metrics.values() for _, v in report.series(m)
    )
    notes = [
        "Of many steps, a line is their mean, and the pale one behind it their lowest and highest values."
        if len(report.metrics) > 2 * BUCKETS
        else "",
        "A cross marks a step whose value is not a finite number." if gaps else "",
    ]
    note = "".join(f"<p>{text}</p>" for text in notes if text)
    return (
        f'<div class="charts">{"".join(charts)}</div>{note}{_table("The metrics in numbers", heads, rows)}'
        f"{_steps(report)}"
    )


def _summary(chart: Chart, line: Line) -> list[str]:
    """Return a row of the table: what a line shows, in numbers."""
    name = line.name if len(chart.metrics) == 1 else f"{line.name} {chart.title.lower()}"
    points = _finite(line.points)
    if not points:
        return [name, chart.unit, *["not finite"] * 2, *["-"] * 5]
    low, high = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    mean = sum(value for _, value in points) / len(points)
    first, last = (_cell(value, chart) for _, value in (line.points[0], line.points[-1]))
    return [
        name, chart.unit, first, last, _cell(low[1], chart), f"{low[0]:,.0f}", _cell(high[1], chart),
        f"{high[0]:,.0f}", _cell(mean, chart),
    ]  # fmt: skip


def _cell(value: float, chart: Chart) -> str:
    return chart.show(value) if math.isfinite(value) else "not finite"


def _steps(report: RunReport) -> str:
    """Return a table of some steps, those with the highest and the lowest loss among them."""
    loss = _finite(report.series("loss"))
    columns = [
        (f"{label} {chart.title.lower()}" if len(chart.metrics) > 1 else label, metric, chart)
        for chart in CHARTS
        for label, metric in chart.metrics.items()
        if report.series(metric)
    ]
    rows = [
        [f"{step:,.0f}"]
        + [
            _cell(report.metrics[int(step)][metric] * chart.factor, chart)
            if metric in report.metrics[int(step)]
            else ""
            for _, metric, chart in columns
        ]
        for step, _ in thin(loss, buckets=MOST_ROWS // 2 - 1)
    ]
    heads = ["step", *(name if chart.unit in name else f"{name}, {chart.unit}" for name, _, chart in columns)]
    table = _table("Some steps", heads, rows)
    return f"<details><summary>Some steps in numbers</summary>{table}</details>" if rows else ""


def _ledger(report: RunReport) -> str:
    ledger = report.ledger
    if not ledger:
        return ""
    whole = max(1, ledger["tokens_in"])
    parts = [("packed", ledger["packed"])]
    parts += [
        (f"dropped: {name}", ledger.get(f"dropped_{name}", 0)) for name in DROP_REASONS if name != "bad"
    ]
    parts += [("buffered: read, waiting for a pack", ledger["buffered"])]
    rows = [
        [name, f"{tokens:,.0f}", f"{tokens / whole:.2%}"]
        for name, tokens in [("made by the encoder", ledger["tokens_in"]), *parts]
        if tokens
    ]
    counts = [
        f"{ledger['samples']:,.0f} samples read, {ledger['packs']:,.0f} packs, {ledger['padding']:.2%} padding"
    ]
    for name, words in (
        ("bad_records", "bad records skipped"),
        ("bad_shards", "files left out"),
        ("untrained", "samples that train nothing"),
    ):
        if ledger[name]:
            counts.append(f"{ledger[name]:,.0f} {words}")
    return _table("Tokens", ("", "tokens", "of all"), rows) + f"<p>{'; '.join(counts)}.</p>"


def _sources(report: RunReport) -> str:
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
    heads = ("source", "of the trained tokens", "trained tokens", "epochs")
    return _table("Sources of the mixture", heads, rows) if rows else ""


def _packs(report: RunReport) -> str:
    if not report.packs:
        return ""
    legend = (
        '<p class="legend"><span class="swatch trained"></span>trained <span class="swatch masked"></span>masked '
        '<span class="swatch padding"></span>padding. Each sequence has a colour; none attends to another.</p>'
    )
    return legend + "".join(pack_picture(pack, step=step) for step, pack in report.packs)


def _in_effect(report: RunReport) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in report.in_effect.items()
    )
    config = report.config
    if len(config) > MOST_CONFIG:
        config = f"{config[:MOST_CONFIG]}\n[{len(config) - MOST_CONFIG:,} characters more]"
    return (
        f'<dl class="effect">{items}</dl><details><summary>All settings</summary>'
        f'<pre tabindex="0">{escape(config)}</pre></details>'
    )


def _table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column names the rows; narrow screens scroll it."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' if text else "<td></td>" for text in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(text)}</td>" for text in rest)}</tr>'
        for first, *rest in rows
    )
    return (
        f'<div class="wide" role="region" aria-label="{escape(caption)}" tabindex="0"><table><caption>'
        f"{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]
