"""What a run counts and says: the meters of its steps, logger, page, profiler and bar."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torchtune import training

from streampack.instantiate import build
from streampack.packing.batch import Batch
from streampack.packing.strategies import PADDED
from streampack.training.meters import CountMeter, SourceMeter, memory_metrics, run_ledger, stream_metrics
from streampack.training.optimizer import clip_gradients, scale_gradients
from streampack.training.progress import MetricLogger, aligned, bar, postfix, summary
from streampack.training.row_losses import RowLosses
from streampack.training.secrets import shown

if TYPE_CHECKING:
    from streampack.training.run import Run


class RunLog:
    """Counts the batches of a run, and writes what it logs. Making it is a collective, and so are its methods.

    Args:
        run: the run, whose data are set up.
        report: makes what writes the page of the run.
        metrics: returns more numbers to log.
        in_effect: what was printed at the start, by name.
    """

    def __init__(
        self,
        run: Run,
        report: Callable[..., Any],
        *,
        metrics: Callable[[], dict[str, float]],
        in_effect: Mapping[str, str],
    ) -> None:
        cfg, world, written = run.cfg, run.world, shown(run.raw)
        self._run, self._more_metrics = run, metrics
        self.logger = MetricLogger(cfg, written=written, world=world, resumed=run.saved_step)
        self.report = report(
            cfg, written=written, lanes=run.dataset.lane_config, in_effect=in_effect, world=world
        )
        self.profiler = build(cfg.profiler)[0] if cfg.profiler else training.DummyProfiler()
        self.meter = CountMeter(world, run.device)
        self.by_source = SourceMeter(run.loader, world, run.device)
        self.by_row = RowLosses(cfg, world=world, resumed=run.saved_step)
        self.started = time.perf_counter()

    def begin(self, stack: ExitStack, *, steps: int) -> None:
        """Start profiler and bar, until the stack closes; an error in between is written to the page."""
        self.profiler.start()
        stack.enter_context(self.report.on_error())
        self._bar = stack.enter_context(bar(steps, done=self._run.step, enabled=self._run.world.is_main))

    def end_step(self, metrics: dict[str, Any]) -> None:
        """Log a step that was made, with its ``metrics``, every ``log_every_n_steps``."""
        run = self._run
        self.meter.stop()
        self.profiler.step()
        self._bar.update()
        if run.step % (run.cfg.log_every_n_steps or 1):
            return
        run.loader.require_trained()
        metrics = self.meter.metrics() | metrics | self._more_metrics() | self.by_source.metrics()
        metrics |= stream_metrics(run.loader, run.world)
        if run.cfg.log_peak_memory_stats:
            metrics |= memory_metrics(run.world, run.device)
        self.by_row.write()
        self.logger.log(metrics, step=run.step)
        self._bar.set_postfix_str(postfix(metrics))

    def totals(self) -> dict[str, Any]:
        """Return the counts of the entire run, by the names of its `Result`."""
        before = self._run.before
        return {
            "step": self._run.step,
            "tokens": before["tokens"] + self.meter.tokens,
            "computed": before["computed"] + self.meter.computed,
            "seconds": before["seconds"] + time.perf_counter() - self.started,
            "held_out": self._run.held_out,
        }

    def end(self, *, result: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Close the logger, write the page and print the closing lines, on rank 0; ``saved``: folders by content."""
        self.logger.close()
        self.report.write(step=self._run.step, ledger=result["ledger"])
        lanes = self._run.dataset.lane_config
        lines = summary(result, quarantine=lanes.quarantine, padded=lanes.packing.strategy == PADDED)
        written = {**{name: str(path) for name, path in saved.items()}, "report": str(self.report.path)}
        print(f"{lines}\n{aligned(written)}")  # noqa: T201

    def result(self) -> dict[str, Any]:
        """Return the `Result` of the run."""
        self.profiler.stop()
        return self.totals() | {"ledger": run_ledger(self._run.loader, self._run.world)}


class Step:
    """The batches of one optimizer step on this rank, and more ``metrics`` of it to log."""

    def __init__(self, run: Run, batches: Iterable[Batch]) -> None:
        self._run, self._log, self._batches = run, run.log, batches
        self.metrics: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._batches:
            self._log.report.add(batch, step=self._run.step + 1)
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
            batch: on any device.
            loss: the sum over the batch.
            losses: the same by token, ``[batch, max_seq_len]``.
            weights: of ``losses``, by whose sum over the step the gradients are divided, on the CPU.
            z_loss: the sum over the batch.
            trained: trained tokens; None: the number of weights that are not 0.
        """
        self._log.meter.add(batch, loss, weights, z_loss=z_loss, trained=trained)
        self._log.by_source.add(batch, losses, weights)
        self._log.by_row.add(batch, losses, weights, step=self._run.step + 1)

    def reduce(self) -> torch.Tensor:
        """Collective, once a step, after all `add`: return the factor that `scale_gradients` scales by."""
        return self._log.meter.reduce()

    def scale_gradients(self) -> None:
        """Collective: divide the gradients once, by the weights of all ranks, and clip them.

        They are of summed losses, and FSDP has averaged them over the data ranks: the factor is their number / weights.
        """
        model, max_norm = self._run.model, self._run.cfg.clip_grad_norm
        scale_gradients(model, self.reduce(), compiled=self._run.cfg.compile)
        if max_norm is not None:
            self.metrics["grad_norm"] = clip_gradients(model, max_norm)
