"""What a recipe calls to write the page of its run: it keeps the first packs, and writes at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from streampack.accounting import Ledger
from streampack.inspection.packs import view
from streampack.inspection.run_page import RunReport, write_page
from streampack.packing.batch import Batch, unstack_packs
from streampack.streaming.lane_config import LaneConfig
from streampack.training.config import RunConfig, to_plain
from streampack.training.progress import METRICS_FILE, read_metrics
from streampack.training.world import World
from streampack.types import Pack
from streampack.validation import warn_user

REPORT_FILE = "report.html"
"""The file in ``output_dir`` that rank 0 writes."""
PACKS = 4
"""Packs that are shown: the first that rank 0 trained since its start."""
MOST_ERROR = 500
"""Characters of an error's message that are kept."""


class ReportWriter:
    """Writes the page of a run, ``report.html`` in its ``output_dir``, on rank 0; does nothing on the other ranks.

    Args:
        config: the run's.
        written: the same as it was written, which `shown` has made fit to be seen.
        lanes: of the dataset, whose source and encoder say what a pack holds.
        in_effect: what `streampack.training.progress.opening` returns.
        world: the ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        written: Any,
        lanes: LaneConfig,
        in_effect: Mapping[str, str],
        world: World,
    ) -> None:
        self.config = config
        self.written = written
        self.lanes = lanes
        self.in_effect = in_effect
        self.path = Path(config.output_dir, REPORT_FILE)
        self._missing = PACKS if world.is_main else 0
        self._is_main = world.is_main
        self._packs: list[tuple[int, Pack]] = []

    def add(self, batch: Batch, *, step: int) -> None:
        """Take a batch that is trained in a step; only the first packs are kept."""
        if self._missing:
            found = unstack_packs(batch)[: self._missing]
            self._packs += [(step, pack) for pack in found]
            self._missing -= len(found)

    @contextmanager
    def on_error(self) -> Iterator[None]:
        """Write the page where an error or a signal ends the block, and say so in it."""
        try:
            yield
        except BaseException as error:
            self._write(_how(error), ledger=None)
            raise

    def write(self, *, step: int, ledger: Ledger) -> None:
        """Write the page of a run that is over."""
        self._write(f"finished after {step:,} steps", ledger=ledger)

    def _write(self, ended: str, *, ledger: Ledger | None) -> None:
        if not self._is_main:
            return
        try:
            write_page(self._report(ended, ledger), self.path)
        except Exception as error:  # the weights are worth more than a picture of the run
            warn_user(f"{self.path} could not be written: {type(error).__name__}: {error}")

    def _report(self, ended: str, ledger: Ledger | None) -> RunReport:
        from omegaconf import OmegaConf

        metrics = read_metrics(self.path.with_name(METRICS_FILE))
        mix = self.lanes.mix
        return RunReport(
            title=str(self.path.parent),
            ended=ended,
            in_effect=self.in_effect,
            config=OmegaConf.to_yaml(asdict(self.config) | to_plain(self.written)),
            metrics=metrics,
            ledger=_last_ledger(metrics) if ledger is None else ledger.as_dict(),
            sources=[] if mix is None else list(mix.names),
            packs=[(step, view(pack, self.lanes)) for step, pack in self._packs],
        )


def _how(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted by a signal"
    return f"failed: {type(error).__name__}: {error}"[:MOST_ERROR]


def _last_ledger(metrics: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the ledger that was logged last, by the names of `Ledger.as_dict`; empty if there is none."""
    prefix = "ledger_"
    logged = (
        {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        for values in reversed(list(metrics.values()))
    )
    return next(filter(None, logged), {})
