"""The page of a run: what was in effect, what it logged, where its tokens went, and its first packs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from streampack.accounting import DROP_REASONS
from streampack.inspection.packs import PackView
from streampack.inspection.page import Chart, Line, page
from streampack.inspection.tables import Table

MOST_CONFIG = 40_000
"""Characters of the settings that are shown."""
LEFT, RIGHT, TOP, BOTTOM = 66, 402, 12, 176
"""Where the axes of a picture lie, of 420 by 210."""
BUCKETS = 250
"""A line of more than twice as many points is drawn as the means of so many parts of it."""
MOST_MARKS = 40
"""Values that are no numbers are marked, at most so many."""

Point = tuple[float, float]  # (step, value)


@dataclass(frozen=True)
class RunReport:
    """Everything that the page of a run shows: settings, metrics, ledger and first packs."""

    title: str
    ended: str  # how it ended
    in_effect: Mapping[str, str]  # what was printed at its start, by name
    config: str  # all settings, as text
    metrics: Mapping[int, Mapping[str, float]]  # by step and name
    ledger: Mapping[str, float]  # counts of `Ledger.as_dict`; empty if there are none
    sources: list[str]  # names of a mixture's sources
    packs: list[tuple[int, PackView]]  # with the step that trained each

    def series(self, name: str, factor: float = 1.0) -> list[Point]:
        """Return the steps that logged a metric, each with its value."""
        return [(step, values[name] * factor) for step, values in self.metrics.items() if name in values]


def short(value: float) -> str:
    """Format a number so that it fits beside an axis.

    >>> short(950), short(12_500), short(3_200_000)
    ('950', '12.5k', '3.2M')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


@dataclass(frozen=True)
class Metric:
    """A picture: which metrics it shows, and how."""

    title: str
    unit: str
    names: dict[str, str]  # in the picture -> of the metric
    least: float | None = 0.0
    factor: float = 1.0  # the value in the unit / the value that is logged
    show: Callable[[float], str] = "{:,.4g}".format


METRICS = (
    Metric("Loss", "nats", {"training": "loss", "validation": "validation_loss"}, least=None),
    Metric(
        "Rewards of answers", "reward", {"chosen": "rewards/chosen", "rejected": "rewards/rejected"}, None
    ),
    Metric(
        "Pairs whose chosen answer has the higher reward",
        "% of the pairs",
        {"training": "rewards/accuracies", "validation": "validation_rewards/accuracies"},
        factor=100,
    ),
    Metric("Padding", "% of a pack", {"padding": "padding"}, factor=100),
    Metric("Speed", "tokens/s", {"tokens/s": "tokens_per_second"}, show=short),
    Metric("Waiting for data", "ms a step", {"data wait": "data_wait"}, factor=1000),
    Metric(
        "Attention cost of the slowest rank", "times the mean", {"imbalance": "cost_imbalance"}, least=1.0
    ),
    Metric("Gradient norm, before it is clipped", "norm", {"gradient norm": "grad_norm"}),
    Metric("Learning rate", "rate", {"learning rate": "lr"}, show="{:.3g}".format),
)


def draw(metric: Metric, metrics: Mapping[str, Sequence[Point]]) -> Chart | None:
    """Draw metrics by their names in the picture; None if they have no finite value."""
    values = [value for points in metrics.values() for _, value in _finite(points)]
    if not values:
        return None
    steps = [step for points in metrics.values() for step, _ in points]
    first, last = min(steps), max(steps)
    low, high = min(values if metric.least is None else [metric.least, *values]), max(values)

    def x(step: float) -> str:
        return f"{LEFT + (RIGHT - LEFT) * (step - first) / ((last - first) or 1):.1f}"

    def path(points: Iterable[Sequence[float]]) -> str:
        return " ".join(
            f"{x(step)},{BOTTOM - (BOTTOM - TOP) * (value - low) / ((high - low) or 1):.1f}"
            for step, value in points
        )

    lines = []
    for name, points in metrics.items():
        drawn, band = path(_finite(points)), ""
        if len(_finite(points)) > 2 * BUCKETS:
            parts = np.array_split(np.array(_finite(points)), BUCKETS)
            drawn = path(part.mean(0).tolist() for part in parts)
            ends = [(part, sorted((part[:, 1].argmin(), part[:, 1].argmax()))) for part in parts]
            band = path(part[at].tolist() for part, both in ends for at in both)
        gaps = [x(step) for step, value in points if not math.isfinite(value)][:MOST_MARKS]
        lines.append(Line(name, drawn, band, gaps))
    ticks = [(BOTTOM, low), ((TOP + BOTTOM) // 2, (low + high) / 2), (TOP, high)]
    marks = [(place, metric.show(value)) for place, value in (ticks if high > low else ticks[:1])]
    return Chart(metric.title, metric.unit, lines, marks, f"{first:,.0f}", f"{last:,.0f}")


def run_page(report: RunReport) -> str:
    """Return the report of a run as a self-contained HTML document."""
    charts = [draw(each, _logged(report, each)) for each in METRICS]
    return page(
        f"Run {report.title}",
        report.ended,
        [*_tables(report)],
        charts=[chart for chart in charts if chart is not None],
        packs=[(f"step {step:,}", pack) for step, pack in report.packs],
        settings=report.config[:MOST_CONFIG] + "\n[...]" * (len(report.config) > MOST_CONFIG),
    )


def write_page(report: RunReport, path: Path) -> None:
    """Write a report as an HTML page, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(run_page(report), encoding="utf-8")
    part.replace(path)


def _logged(report: RunReport, metric: Metric) -> dict[str, list[Point]]:
    found = {name: report.series(key, metric.factor) for name, key in metric.names.items()}
    return {name: points for name, points in found.items() if points}


def _tables(report: RunReport) -> Iterator[Table]:
    yield Table("In short", ("figure", "value", "note"), [*_short(report)], text=(2,))
    yield _metrics(report)
    if report.ledger:
        yield _ledger(report.ledger)
    if sources := [*_sources(report)]:
        columns = ("source", "of the trained tokens", "trained tokens", "epochs")
        yield Table("Sources of the mixture", columns, sources)
    yield Table("In effect", ("what", "at the start"), list(report.in_effect.items()), text=(1,))


def _short(report: RunReport) -> Iterator[tuple[str, str, str]]:
    if report.metrics:
        yield "last step logged", f"{max(report.metrics):,}", ""
    for name, metric in (("loss", "loss"), ("validation loss", "validation_loss")):
        if points := _finite(report.series(metric)):
            (first, before), (last, value) = points[0], points[-1]
            yield name, f"{value:.3f}", f"at step {last:,.0f}; {before:.3f} at step {first:,.0f}"
    if speed := _finite(report.series("tokens_per_second")):
        yield "tokens/s", short(sorted(value for _, value in speed)[len(speed) // 2]), "median"
    if report.ledger:
        yield "tokens packed", short(report.ledger["packed"]), ""
        yield "padding of all packs", f"{report.ledger['padding']:.2%}", ""


def _metrics(report: RunReport) -> Table:
    rows, notes = [], []
    for metric in METRICS:
        for name, points in _logged(report, metric).items():
            shown = name if len(metric.names) == 1 else f"{name} {metric.title.lower()}"
            shown = shown if metric.unit in shown else f"{shown}, {metric.unit}"
            rows.append([shown, *_summary(points, metric.show)])
            if odd := [step for step, value in points if not math.isfinite(value)]:
                mark = "; a cross marks each" if _finite(points) else ""
                mark = f"; crosses mark the first {MOST_MARKS}" if mark and len(odd) > MOST_MARKS else mark
                what = f"{len(odd):,} value(s), the first at step {odd[0]:,.0f}"
                notes.append(f"Not a finite number: {shown}: {what}{mark}.")
    if not rows:
        return Table("The metrics in numbers", notes=["Nothing was logged."])
    if len(report.metrics) > 2 * BUCKETS:
        notes.append(
            "A line is the mean of several steps; the pale one behind it has their lowest and highest values."
        )
    columns = ("metric", "first", "last", "lowest", "at step", "highest", "at step", "mean")
    return Table("The metrics in numbers", columns, rows, notes)


def _summary(points: Sequence[Point], show: Callable[[float], str]) -> list[str]:
    found = _finite(points)
    if not found:
        return [*["not finite"] * 2, *["-"] * 5]
    low, high = min(found, key=lambda p: p[1]), max(found, key=lambda p: p[1])
    first, last = (
        show(value) if math.isfinite(value) else "not finite" for _, value in (points[0], points[-1])
    )
    mean = sum(value for _, value in found) / len(found)
    return [first, last, show(low[1]), f"{low[0]:,.0f}", show(high[1]), f"{high[0]:,.0f}", show(mean)]


def _ledger(ledger: Mapping[str, float]) -> Table:
    parts = {"made by the encoder": ledger["tokens_in"], "packed": ledger["packed"]}
    parts |= {f"dropped: {name}": ledger.get(f"dropped_{name}", 0) for name in DROP_REASONS if name != "bad"}
    parts["buffered: read, waiting for a pack"] = ledger["buffered"]
    whole = max(1, ledger["tokens_in"])
    rows = [(name, f"{tokens:,.0f}", f"{tokens / whole:.2%}") for name, tokens in parts.items() if tokens]
    note = f"{ledger['samples']:,.0f} samples read, {ledger['packs']:,.0f} packs, {ledger['padding']:.2%} padding"
    for name, words in (("bad_records", "bad records skipped"), ("untrained", "samples that train nothing")):
        note += f"; {ledger[name]:,.0f} {words}" if ledger[name] else ""
    return Table("Where every token went", ("where", "tokens", "of all"), rows, notes=[f"{note}."])


def _sources(report: RunReport) -> Iterator[tuple[str, ...]]:
    last: dict[str, float] = {}
    for values in report.metrics.values():
        last |= {name: value for name, value in values.items() if name.startswith("source_")}
    for name in report.sources if last else ():
        fraction, trained, epochs = (
            last.get(f"source_{name}_{what}", 0) for what in ("fraction", "trained", "epochs")
        )
        yield name, f"{fraction:.2%}", f"{trained:,.0f}", f"{epochs:.4g}"


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]
