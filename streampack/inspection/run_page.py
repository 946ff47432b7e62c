"""The page of a run: what was in effect, what it logged, where its tokens went, and its first packs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streampack.accounting import DROP_REASONS
from streampack.inspection.packs import PackView
from streampack.inspection.page import Chart, Line, page
from streampack.inspection.tables import Table, percent
from streampack.storage.folders import write_text
from streampack.types import FloatArray

MOST_CONFIG = 40_000
"""Characters of the settings that are shown."""
LEFT, RIGHT, TOP, BOTTOM = 66, 402, 12, 176
"""Where the axes of a picture lie, of 420 by 210."""
BUCKETS = 250
"""A line of more than twice as many points is drawn as the means of so many parts of it."""
MOST_MARKS = 40
"""Values that are no numbers are marked, at most so many."""

Logged = Mapping[int, Mapping[str, float]]
"""Metrics, by step and name."""


class Metric(NamedTuple):
    """A picture: which metrics it shows, and how."""

    title: str
    unit: str
    names: dict[str, str]  # in the picture -> of the metric
    least: float = 0.0  # the axis begins here, or at the lowest value
    factor: float = 1.0  # the value in the unit / the value that is logged
    show: Callable[[float], str] = "{:,.4g}".format

    def points(self, metrics: Logged) -> dict[str, FloatArray]:
        """Return the steps and values that were logged, ``[points, 2]``, by the names in the picture."""
        found = {}
        for name, key in self.names.items():
            values = [(step, logged[key] * self.factor) for step, logged in metrics.items() if key in logged]
            if values:
                found[name] = np.array(values)
        return found


METRICS = (
    Metric("Loss", "nats", {"training": "loss", "validation": "validation_loss"}, least=np.inf),
    Metric(
        "Rewards of answers", "reward", {"chosen": "rewards/chosen", "rejected": "rewards/rejected"}, np.inf
    ),
    Metric(
        "Pairs whose chosen answer has the higher reward",
        "% of the pairs",
        {"training": "rewards/accuracies", "validation": "validation_rewards/accuracies"},
        factor=100,
    ),
    Metric("Padding", "% of a pack", {"": "padding"}, factor=100),
    Metric("Speed", "tokens/s", {"": "tokens_per_second"}, show="{:,.0f}".format),
    Metric("Waiting for data", "ms a step", {"": "data_wait"}, factor=1000),
    Metric("Attention cost of the slowest rank", "times the mean", {"": "cost_imbalance"}, least=1.0),
    Metric("Gradient norm, before it is clipped", "norm", {"": "grad_norm"}),
    Metric("Learning rate", "rate", {"": "lr"}, show="{:.3g}".format),
)


def write_run_page(
    path: Path,
    *,
    ended: str,
    in_effect: Mapping[str, str],
    config: str,
    metrics: Logged,
    ledger: Mapping[str, float] | None,
    packs: Sequence[tuple[int, PackView]],
    sources: Sequence[str] = (),
) -> None:
    """Write the page of a run, whole or not at all.

    Args:
        path: of the page, in the run's folder, which names the run.
        ended: how it ended.
        in_effect: what was printed at its start, by name.
        config: all settings, as text.
        metrics: what was logged.
        ledger: counts of `Ledger.as_dict`; None: those that were logged last, if any.
        packs: the first ones, with the step that trained each.
        sources: names of a mixture's sources.
    """
    charts = [draw(metric, points) for metric in METRICS if (points := metric.points(metrics))]
    tables = [_metrics(metrics)]
    last: dict[str, float] = {}
    for logged in metrics.values():
        last |= logged
    if ledger is None:
        names = {name: name.removeprefix("ledger_") for name in last if name.startswith("ledger_")}
        ledger = {short: last[name] for name, short in names.items()}
    if ledger:
        tables.append(_ledger(ledger))
    if shares := [*_sources(last, sources)]:
        columns = ("source", "of the trained tokens", "trained tokens", "epochs")
        tables.append(Table("Sources of the mixture", columns, shares))
    tables.append(Table("In effect", ("what", "at the start"), list(in_effect.items()), text=(1,)))
    text = page(
        f"Run {path.parent}",
        ended,
        tables,
        charts=[chart for chart in charts if chart is not None],
        packs=[(f"step {step:,}", pack) for step, pack in packs],
        settings=config[:MOST_CONFIG] + "\n[...]" * (len(config) > MOST_CONFIG),
    )
    write_text(path, text)


def draw(metric: Metric, points: Mapping[str, FloatArray]) -> Chart | None:
    """Draw a metric's points by their names in the picture; None if none is finite."""
    finite = {name: _finite(each) for name, each in points.items()}
    values = np.concatenate([each[:, 1] for each in finite.values()])
    if not values.size:
        return None
    steps = np.concatenate([each[:, 0] for each in points.values()])
    first, low = steps.min(), min(metric.least, values.min())
    span, height = steps.max() - first, values.max() - low

    def path(each: FloatArray) -> str:
        x = LEFT + (RIGHT - LEFT) * (each[:, 0] - first) / (span or 1)
        y = BOTTOM - (BOTTOM - TOP) * (each[:, 1] - low) / (height or 1)
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(x, y, strict=True))

    lines = []
    for name, each in finite.items():
        means, band = each, ""
        if len(each) > 2 * BUCKETS:
            parts = np.array_split(each, BUCKETS)
            means = np.array([part.mean(0) for part in parts])
            ends = [part[sorted((part[:, 1].argmin(), part[:, 1].argmax()))] for part in parts]
            band = path(np.concatenate(ends))
        odd = points[name][~np.isfinite(points[name][:, 1])][:MOST_MARKS]
        gaps = [place.partition(",")[0] for place in path(odd).split()]
        lines.append(Line(name, path(means), band, gaps))
    ticks = [(BOTTOM, low), ((TOP + BOTTOM) // 2, low + height / 2), (TOP, low + height)]
    marks = [(place, metric.show(value)) for place, value in (ticks if height else ticks[:1])]
    return Chart(metric.title, metric.unit, lines, marks, f"{first:,.0f}", f"{first + span:,.0f}")


def _finite(points: FloatArray) -> FloatArray:
    return points[np.isfinite(points[:, 1])]


def _metrics(metrics: Logged) -> Table:
    rows, notes = [], []
    for metric in METRICS:
        for name, points in metric.points(metrics).items():
            title = f"{metric.title}: {name}" if name else metric.title
            found = _finite(points)
            cells = [metric.show(points[0, 1]), metric.show(points[-1, 1]), *["-"] * 5]
            if len(found):
                low, high = found[found[:, 1].argmin()], found[found[:, 1].argmax()]
                cells[2:4] = metric.show(low[1]), f"{low[0]:,.0f}"
                cells[4:] = metric.show(high[1]), f"{high[0]:,.0f}", metric.show(found[:, 1].mean())
            rows.append([title, metric.unit, *cells])
            if odd := points[~np.isfinite(points[:, 1]), 0].tolist():
                notes.append(
                    f"Not a finite number: {title}: {len(odd):,} value(s), the first at step {odd[0]:,.0f}. Crosses "
                    f"mark the first {MOST_MARKS} at most."
                )
    if not rows:
        return Table("The metrics in numbers", notes=["Nothing was logged."])
    if len(metrics) > 2 * BUCKETS:
        notes.append(
            "A line is the mean of several steps; the pale one behind it has their lowest and highest values."
        )
    columns = ("metric", "unit", "first", "last", "lowest", "at step", "highest", "at step", "mean")
    return Table("The metrics in numbers", columns, rows, notes, text=(1,))


def _ledger(ledger: Mapping[str, float]) -> Table:
    parts = {"made by the encoder": ledger["tokens_in"], "packed": ledger["packed"]}
    parts |= {f"dropped: {name}": ledger.get(f"dropped_{name}", 0) for name in DROP_REASONS if name != "bad"}
    parts["buffered: read, waiting for a pack"] = ledger["buffered"]
    whole = max(1, ledger["tokens_in"])
    rows = [(name, f"{tokens:,.0f}", percent(tokens / whole)) for name, tokens in parts.items() if tokens]
    note = (
        f"{ledger['samples']:,.0f} samples read, {ledger['packs']:,.0f} packs, {percent(ledger['padding'])} padding; "
        f"{ledger['bad_records']:,.0f} bad records skipped; {ledger['untrained']:,.0f} samples that train nothing."
    )
    return Table("Where every token went", ("where", "tokens", "of all"), rows, notes=[note])


def _sources(last: Mapping[str, float], sources: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each source that was logged, with its ``last`` values."""
    for name in sources:
        if f"source_{name}_fraction" in last:
            fraction, trained, epochs = (
                last[f"source_{name}_{what}"] for what in ("fraction", "trained", "epochs")
            )
            yield name, percent(fraction), f"{trained:,.0f}", f"{epochs:.4g}"
