"""What a recipe calls to write the page of its run: it keeps the first packs, and writes at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any

from streampack.accounting import Ledger
from streampack.inspection.packs import view
from streampack.inspection.run_page import write_run_page
from streampack.packing.batch import Batch, unstack_packs
from streampack.streaming.lane_config import LaneConfig
from streampack.training.checks import to_plain
from streampack.training.config import RunConfig
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


@dataclass
class ReportWriter:
    """Writes the page of a run, ``report.html`` in its ``output_dir``, on rank 0; does nothing on the other ranks.

    Args:
        config: the run's.
        written: the same as it was written, which `shown` has made fit to be seen.
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
        """Write the page where an error or a signal ends the block, and say so in it."""
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

        path, mix = self.path, self.lanes.mix
        try:
            write_run_page(
                path,
                ended=ended,
                in_effect=self.in_effect,
                config=OmegaConf.to_yaml(asdict(self.config) | to_plain(self.written)),
                metrics=read_metrics(path.with_name(METRICS_FILE)),
                ledger=None if ledger is None else ledger.as_dict(),
                packs=[(step, view(pack, self.lanes)) for step, pack in self.packs],
                sources=() if mix is None else mix.names,
            )
        except Exception as error:  # the weights are worth more than a picture of the run
            warn_user(f"{path} could not be written: {type(error).__name__}: {error}")
