"""The page of a run: what was in effect, what it logged, where its tokens went, and its first packs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from streampack.accounting import DROP_REASONS, Ledger
from streampack.inspection.packs import PackView, view
from streampack.inspection.page import Chart, render
from streampack.inspection.tables import Table, percent
from streampack.lanes.lane_config import LaneConfig
from streampack.packing.batch import Batch, unstack_packs
from streampack.storage.folders import write_text
from streampack.training.checks import to_plain
from streampack.training.config import RunConfig
from streampack.training.progress import METRICS_FILE, read_metrics
from streampack.training.world import World
from streampack.types import FloatArray, Pack
from streampack.validation import warn_user

REPORT_FILE = "report.html"
"""The file in ``output_dir`` that rank 0 writes."""
PACKS = 4
"""Packs that are shown: the first that rank 0 trained since its start."""
MOST_ERROR = 500
"""Characters of an error's message that are kept."""
MOST_SETTINGS = 40_000
"""Characters of the settings that are shown."""
PARTS = 250
"""A line with more than twice this many points shows the lowest and highest point of each of this many parts."""
OTHERS = ("epoch", "ledger_", "source_", "peak_memory_")
"""Metrics with these prefixes are not drawn."""
LEFT, RIGHT, TOP, BOTTOM = 66, 402, 12, 176
"""Axes of a chart of 420 by 210."""

Logged = Mapping[int, Mapping[str, float]]
"""Metrics, by step and name."""


@dataclass
class ReportWriter:
    """Writes the page of a run, ``report.html`` in its ``output_dir``, on rank 0; does nothing on the other ranks.

    Args:
        config: the run's.
        written: the same as it was written, without secrets.
        lanes: of the dataset, whose source and encoder say what a pack holds.
        in_effect: what `streampack.training.progress.opening` returns.
        world: the ranks.
    """

    config: RunConfig
    _: KW_ONLY
    written: Any
    lanes: LaneConfig
    in_effect: Mapping[str, str]
    world: World
    packs: list[tuple[int, Pack]] = field(default_factory=list, init=False)

    @property
    def path(self) -> Path:
        """The page."""
        return Path(self.config.output_dir, REPORT_FILE)

    def add(self, batch: Batch, *, step: int) -> None:
        """Take a batch that is trained in a step; only the first packs are kept."""
        if self.world.is_main and len(self.packs) < PACKS:
            self.packs += [(step, pack) for pack in unstack_packs(batch)][: PACKS - len(self.packs)]

    @contextmanager
    def on_error(self) -> Iterator[None]:
        """Write the page if an error or a signal ends the block."""
        try:
            yield
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            how = "interrupted by a signal" if interrupted else f"failed: {type(error).__name__}: {error}"
            self._write(how[:MOST_ERROR], ledger=None)
            raise

    def write(self, *, step: int, ledger: Ledger) -> None:
        """Write the page of a run that is over."""
        self._write(f"finished after {step:,} steps", ledger=ledger)

    def _write(self, ended: str, *, ledger: Ledger | None) -> None:
        if not self.world.is_main:
            return
        from omegaconf import OmegaConf

        mix = self.lanes.mix
        try:
            write_run_page(
                self.path,
                ended=ended,
                in_effect=self.in_effect,
                settings=OmegaConf.to_yaml(asdict(self.config) | to_plain(self.written)),
                metrics=read_metrics(self.path.with_name(METRICS_FILE)),
                ledger=None if ledger is None else ledger.as_dict(),
                packs=[(step, view(pack, self.lanes)) for step, pack in self.packs],
                sources=() if mix is None else mix.names,
            )
        except Exception as error:  # a page must not cost the weights of the run
            warn_user(f"{self.path} could not be written: {type(error).__name__}: {error}")


def write_run_page(
    path: Path,
    *,
    ended: str,
    in_effect: Mapping[str, str],
    settings: str,
    metrics: Logged,
    ledger: Mapping[str, float] | None,
    packs: Sequence[tuple[int, PackView]],
    sources: Sequence[str] = (),
) -> None:
    """Write the page of a run.

    Args:
        path: of the page, in the run's folder, which names the run.
        ended: how it ended.
        in_effect: what was printed at its start, by name.
        settings: all settings, as text.
        metrics: what was logged.
        ledger: counts of `Ledger.as_dict`; None: those that were logged last, if any.
        packs: the first ones, with the step that trained each.
        sources: names of a mixture's sources.
    """
    last: dict[str, float] = {}
    lines: dict[str, FloatArray] = {}  # of each metric the steps and values, [points, 2]
    for logged in metrics.values():
        last |= logged
    for name in last:
        if not name.startswith(OTHERS):
            lines[name] = np.array([(step, found[name]) for step, found in metrics.items() if name in found])
    tables = [_metrics(lines)]
    if ledger is None:
        ledger = {name.removeprefix("ledger_"): last[name] for name in last if name.startswith("ledger_")}
    if ledger:
        tables.append(_ledger(ledger))
    if shares := [*_sources(last, sources)]:
        columns = ("source", "of the trained tokens", "trained tokens", "epochs")
        tables.append(Table("Sources of the mixture", columns, shares))
    tables.append(Table("In effect", ("what", "at the start"), list(in_effect.items()), text=(1,)))
    context = {
        "title": f"Run {path.parent}",
        "lead": ended,
        "tables": tables,
        "charts": [*_charts(lines)],
        "packs": [(f"step {step:,}", pack) for step, pack in packs],
        "settings": settings[:MOST_SETTINGS] + "\n[...]" * (len(settings) > MOST_SETTINGS),
    }
    write_text(path, render(context))


def _charts(lines: Mapping[str, FloatArray]) -> Iterator[Chart]:
    """Yield a chart of each metric that has two finite values or more; a validation's is beside the training's."""
    titles: dict[str, dict[str, FloatArray]] = {}
    for name, points in lines.items():
        if len(found := _finite(points)) > 1:
            titles.setdefault(name.removeprefix("validation_").removeprefix("eval_"), {})[name] = found
    for title, drawn in titles.items():
        (first, low), (last, high) = (pick(np.concatenate([*drawn.values()]), 0) for pick in (np.min, np.max))
        shown = {}
        for name, points in drawn.items():
            if len(points) > 2 * PARTS:
                parts = np.array_split(points, PARTS)
                ends = [part[sorted((part[:, 1].argmin(), part[:, 1].argmax()))] for part in parts]
                points = np.concatenate(ends)
            x = LEFT + (RIGHT - LEFT) * (points[:, 0] - first) / (last - first or 1)
            y = BOTTOM - (BOTTOM - TOP) * (points[:, 1] - low) / (high - low or 1)
            shown[name] = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(x, y, strict=True))
        yield Chart(title, shown, _number(low), _number(high), f"{first:,.0f}", f"{last:,.0f}")


def _finite(points: FloatArray) -> FloatArray:
    return points[np.isfinite(points[:, 1])]


def _number(value: float) -> str:
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:,.4g}"


def _metrics(lines: Mapping[str, FloatArray]) -> Table:
    rows, notes = [], []
    for name, points in lines.items():
        found, ends = _finite(points), [_number(points[0, 1]), _number(points[-1, 1])]
        if len(found):
            for at, value in (found[found[:, 1].argmin()], found[found[:, 1].argmax()]):
                ends += [_number(value), f"{at:,.0f}"]
        rows.append([name, *ends, *["-"] * (6 - len(ends))])
        if odd := points[~np.isfinite(points[:, 1]), 0].tolist():
            notes.append(
                f"Not a finite number: {len(odd):,} value(s) of {name}, the first at step {odd[0]:,.0f}."
            )
    columns = ("metric", "first", "last", "lowest", "at step", "highest", "at step")
    return Table("The metrics in numbers", columns, rows, notes if rows else ["Nothing was logged."])


def _ledger(ledger: Mapping[str, float]) -> Table:
    parts = {"made by the encoder": ledger["tokens_in"], "packed": ledger["packed"]}
    parts |= {f"dropped: {name}": ledger.get(f"dropped_{name}", 0) for name in DROP_REASONS if name != "bad"}
    parts["buffered: read, waiting for a pack"] = ledger["buffered"]
    in_all = max(1, ledger["tokens_in"])
    rows = [(name, f"{tokens:,.0f}", percent(tokens / in_all)) for name, tokens in parts.items() if tokens]
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
