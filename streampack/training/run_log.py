"""Outputs of a run: meters of its steps, logger, page, profiler and progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torchtune import training

from streampack.instantiate import build
from streampack.loader.data_loader import PackedDataLoader
from streampack.packing.batch import Batch
from streampack.packing.strategies import PADDED
from streampack.training.checks import shown
from streampack.training.config import RunConfig
from streampack.training.meters import CountMeter, SourceMeter, memory_metrics, stream_metrics
from streampack.training.optimizer import clip_gradients, scale_gradients
from streampack.training.progress import MetricLogger, aligned, bar, postfix, summary
from streampack.training.row_losses import RowLosses
from streampack.training.world import World


class RunLog:
    """Counts the batches of a run, and writes what it logs. Making it is a collective, and so are its methods.

    Args:
        cfg: the config.
        raw: the same as it was written.
        loader: of the run.
        world: the ranks.
        device: this rank's.
        resumed: step of the checkpoint that was loaded; None: a new run.
        before: what the run counted before.
        report: makes what writes the page of the run.
        metrics: returns more numbers to log.
        in_effect: what was printed at the start, by name.
    """

    def __init__(
        self,
        cfg: RunConfig,
        *,
        raw: Any,
        loader: PackedDataLoader,
        world: World,
        device: torch.device,
        resumed: int | None,
        before: Mapping[str, Any],
        report: Callable[..., Any],
        metrics: Callable[[], dict[str, float]],
        in_effect: Mapping[str, str],
    ) -> None:
        self.cfg, self.loader, self.world, self.device, self.before = cfg, loader, world, device, before
        self._more_metrics, self._lanes, written = metrics, loader.dataset.lane_config, shown(raw)
        self.logger = MetricLogger(cfg, written=written, world=world, resumed=resumed)
        self.report = report(cfg, written=written, lanes=self._lanes, in_effect=in_effect, world=world)
        self.profiler = build(cfg.profiler)[0] if cfg.profiler else training.DummyProfiler()
        self.meter = CountMeter(world, device)
        self.by_source = SourceMeter(loader, world, device)
        self.by_row = RowLosses(cfg, world=world, resumed=resumed)
        self.started = time.perf_counter()

    def begin(self, stack: ExitStack, *, step: int, steps: int) -> None:
        """Start profiler and bar, until the stack closes; an error in between is written to the page."""
        self.profiler.start()
        stack.enter_context(self.report.on_error())
        self._bar = stack.enter_context(bar(steps, done=step, enabled=self.world.is_main))

    def end_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Log a step that was made, with its ``metrics``, every ``log_every_n_steps``."""
        self.meter.stop()
        self.profiler.step()
        self._bar.update()
        if step % (self.cfg.log_every_n_steps or 1):
            return
        self.loader.require_trained()
        metrics = self.meter.metrics() | {name: float(value) for name, value in metrics.items()}
        metrics |= self._more_metrics() | self.by_source.metrics()
        metrics |= stream_metrics(self.loader, self.world)
        if self.cfg.log_peak_memory_stats:
            metrics |= memory_metrics(self.world, self.device)
        self.by_row.write()
        self.logger.log(metrics, step=step)
        self._bar.set_postfix_str(postfix(metrics))

    def totals(self, step: int) -> dict[str, Any]:
        """Return the counts of the entire run up to a step."""
        return {
            "step": step,
            "tokens": self.before["tokens"] + self.meter.count("tokens"),
            "computed": self.before["computed"] + self.meter.count("capacity"),
            "seconds": self.before["seconds"] + time.perf_counter() - self.started,
            "held_out": self.before["held_out"],
        }

    def end(self, result: Mapping[str, Any], *, saved: Mapping[str, Any]) -> None:
        """Close the logger, write the page and print the closing lines, on rank 0; ``saved``: folders by content."""
        self.logger.close()
        self.report.write(step=result["step"], ledger=result["ledger"])
        padded = self._lanes.packing.strategy == PADDED
        written = {**{name: str(path) for name, path in saved.items()}, "report": str(self.report.path)}
        print(summary(result, quarantine=self._lanes.quarantine, padded=padded), aligned(written), sep="\n")  # noqa: T201


class Step:
    """The batches of one optimizer step on this rank, and more ``metrics`` of it to log; ``number``: from 1."""

    def __init__(self, log: RunLog, batches: Iterable[Batch], *, number: int, model: nn.Module) -> None:
        self._log, self._batches, self._number, self._model = log, batches, number, model
        self.metrics: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self._log.report.add(batch, step=self._number)
            yield batch

    def add(
        self,
        batch: Batch,
        loss: torch.Tensor,
        losses: torch.Tensor,
        weights: torch.Tensor,
        *,
        z_loss: torch.Tensor | None = None,
        trained: int | None = None,
    ) -> None:
        """Count a batch of this rank.

        Args:
            batch: on the device.
            loss: the sum over the batch.
            losses: the same by token, ``[batch, max_seq_len]``.
            weights: of ``losses``, by whose sum over the step the gradients are divided.
            z_loss: the sum over the batch.
            trained: trained tokens; None: the number of weights that are not 0.
        """
        self._log.meter.add(batch, loss, weights, z_loss=z_loss, trained=trained)
        self._log.by_source.add(batch, losses, weights)
        self._log.by_row.add(batch, losses, weights, step=self._number)

    def reduce(self) -> torch.Tensor:
        """Collective, once a step, after all `add`: return the factor that `scale_gradients` scales by."""
        return self._log.meter.reduce()

    def scale_gradients(self) -> None:
        """Collective: divide the gradients once, by the weights of all ranks, and clip them."""
        model, max_norm = self._model, self._log.cfg.clip_grad_norm
        scale_gradients(model, self.reduce(), compiled=self._log.cfg.compile)
        if max_norm is not None:
            self.metrics["grad_norm"] = clip_gradients(model, max_norm)
