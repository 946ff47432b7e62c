"""What a run tells while it goes: metrics of a step, a progress bar, a closing summary."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from streampack.accounting import Ledger
from streampack.distributed.world import World
from streampack.instantiate import build
from streampack.packing.batch import Batch
from streampack.sources.bad_records import Quarantine
from streampack.training.methods import Loader

COUNTS = ("loss", "z_loss", "weight", "trained", "tokens", "slots", "samples")


class StepMeter:
    """Counts over the batches of a step and over all ranks, and how fast they went by.

    The sums stay on the device until `metrics` reads them, so that nothing waits for a GPU in between.

    A step that trains nothing is an error, raised by `metrics` and `check` on all ranks, unless ``untrained`` is
    ``"keep"``: the loss would be 0. A step that is mostly padding may train nothing, if one before it did train:
    at an epoch's end, little may be left.
    """

    def __init__(self, world: World, device: torch.device, *, untrained: str | None = None) -> None:
        self.world = world
        self.device = device
        self.untrained = untrained
        self.empty_steps = torch.zeros(
            (), dtype=torch.int64, device=device
        )  # that trained nothing, and should have
        self.window = self._zeros()  # all ranks', since the last report
        self.total = self._zeros()  # all ranks', since the beginning
        self.steps, self.seconds = 0, 0.0  # in the window
        self.made = 0  # steps in all
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self.started = time.perf_counter()
        self.batches = 0
        self.loss: torch.Tensor | float = 0.0
        self.z_loss: torch.Tensor | float = 0.0
        self.counts = [0.0] * len(COUNTS)

    def add(
        self, batch: Batch, loss: torch.Tensor, weights: torch.Tensor, *, z_loss: torch.Tensor | None = None
    ) -> None:
        """Count one batch of this rank's, its summed loss (and z-loss), and its labels' weights (on the CPU)."""
        self.batches += 1
        self.loss = self.loss + loss.detach()
        if z_loss is not None:
            self.z_loss = self.z_loss + z_loss.detach()
        weight, trained = float(weights.sum()), float(weights.count_nonzero())
        counts = (0.0, 0.0, weight, trained, batch.num_tokens, batch.tokens.numel(), batch.num_seqs)
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]

    def reduce(self) -> torch.Tensor:
        """Add up over the ranks, once a step; the factor for gradients that every rank summed and FSDP averaged.

        That is ranks / weight, or 0 for a step in which nothing is trained.
        """
        sums = torch.tensor(self.counts, dtype=torch.float64).to(self.device, non_blocking=True)
        sums[0] += self.loss
        sums[1] += self.z_loss
        self.world.add_up(sums)
        weight, tokens, slots = (sums[COUNTS.index(name)] for name in ("weight", "tokens", "slots"))
        trained_before = self.total[COUNTS.index("weight")] > 0
        self.empty_steps += (weight == 0) & (tokens > 0) & ((2 * tokens >= slots) | ~trained_before)
        self.step = sums
        self.window += sums
        self.total += sums
        return torch.where(weight > 0, self.world.size / weight, 0.0)

    def stop(self) -> None:
        """End the step."""
        self.steps += 1
        self.made += 1
        self.seconds += time.perf_counter() - self.started

    def check(self) -> None:
        """Waits for the device.

        Raises:
            ValueError: if a step trained nothing.
        """
        if self.untrained != "keep" and (count := int(self.empty_steps)):
            raise ValueError(
                f"{count} of {self.made} step(s) trained nothing: no label of their tokens is trained. Look at the "
                "labels, and whether data.overlong=truncate cuts answers off; ledger_untrained counts such samples in "
                "the metrics. data.untrained=drop leaves them out, data.untrained=keep lets such steps be"
            )

    @property
    def tokens(self) -> int:
        """Real tokens of all ranks so far."""
        return int(self.total[COUNTS.index("tokens")])

    def metrics(self) -> dict[str, float]:
        """For the metric logger: the loss of the last step, the rest over the steps since the last report.

        ``loss`` is per trained token (or per sample, by the weights) and without ``z_loss``, which is there where it
        counts; ``padding`` is a share of 1.

        Raises:
            ValueError: see `check`.
        """
        before = time.perf_counter()
        loss, z_loss, weight = self.step[:3].tolist()  # waits for the GPU
        sums = dict(zip(COUNTS, self.window.tolist(), strict=True))
        seconds = self.seconds + time.perf_counter() - before
        self.check()
        metrics = {
            "loss": loss / weight if weight else 0.0,
            "tokens_per_second": sums["tokens"] / max(seconds, 1e-9),
            "padding": 1 - sums["tokens"] / max(1, sums["slots"]),
            "samples_per_step": sums["samples"] / max(1, self.steps),
            "trained_tokens": sums["trained"] / max(1, self.steps),
        }
        if z_loss:
            metrics["z_loss"] = z_loss / weight
        self.window, self.steps, self.seconds = self._zeros(), 0, 0.0
        return metrics

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(len(COUNTS), dtype=torch.float64, device=self.device)


def stream_totals(loader: Loader, world: World) -> tuple[Ledger, int]:
    """Where every token of all ranks went, and the epoch that the slowest is in. A collective."""
    ledgers, epochs = zip(*world.gather((loader.ledger(), loader.epoch)), strict=True)
    return Ledger.total(ledgers), min(epochs)


def memory_metrics(world: World, device: torch.device) -> dict[str, float]:
    """For the metric logger: the most GPU memory that each rank has had in use, in GiB. A collective."""
    if device.type != "cuda":
        return {}
    peaks = world.gather(torch.cuda.max_memory_allocated(device) / 2**30)
    return {f"peak_memory_gib_rank_{rank}": peak for rank, peak in enumerate(peaks)}


class MetricLogger:
    """The config's metric logger on rank 0; on the others, nothing."""

    def __init__(self, node: Mapping[str, Any], *, world: World) -> None:
        self.logger = build(node) if world.is_main else None

    def log_config(self, config: Any) -> None:
        """The run's config, once."""
        if self.logger is not None:
            self.logger.log_config(config)

    def log(self, values: Mapping[str, Any], *, step: int) -> None:
        """Numbers by name; what a logger prints stands on lines of its own, not behind the progress bar."""
        from torchtune.training.metric_logging import StdoutLogger
        from tqdm import tqdm

        if self.logger is None:
            return
        prints = isinstance(self.logger, StdoutLogger) or sys.stderr.isatty()
        with tqdm.external_write_mode() if prints else nullcontext():
            self.logger.log_dict(values, step=step)

    def close(self) -> None:
        """Flush what is not written yet."""
        if self.logger is not None:
            self.logger.close()


def summary(
    ledger: Ledger,
    *,
    seconds: float,
    tokens: int,
    validation: list[tuple[int, float]],
    quarantine: Quarantine | None = None,
) -> str:
    """The closing lines of a run: what was packed, where every token went, how fast it was."""
    dropped = sum(ledger.dropped.values())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in ledger.dropped.items() if count)
    lines = [
        f"packs        {ledger.packs:,}, from {ledger.samples:,} samples that were read, {ledger.padding:.2%} padding",
        f"tokens       {ledger.tokens_in:,} in = {ledger.packed:,} packed + {dropped:,} dropped"
        f"{f' ({reasons})' if reasons else ''} + {ledger.buffered:,} buffered",
        f"speed        {tokens / max(seconds, 1e-9):,.0f} tokens/s over {seconds:,.0f} s",
    ]
    if bad := ledger.dropped_samples["bad"]:
        listed = quarantine.report() if quarantine is not None else ""
        lines.append(f"bad records  {bad:,} skipped{listed and f'; {listed}'}")
    if ledger.untrained:
        lines.append(f"untrained    {ledger.untrained:,} samples train nothing")
    if validation:
        (first_step, first), (last_step, last) = validation[0], validation[-1]
        lines.append(f"held-out     loss {first:.3f} (step {first_step}) -> {last:.3f} (step {last_step})")
    return "\n".join(lines)


@contextmanager
def bar(total: int, *, done: int, enabled: bool = True) -> Iterator[Any]:
    """Show a tqdm bar over optimizer steps; one that does not begin at 0 says so before.

    While it is shown, warnings and log messages of this process are printed on lines of their own, above it.
    """
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    if enabled and done:
        print(f"going on from step {done:,} of {total:,}", flush=True)  # noqa: T201
    with (
        logging_redirect_tqdm() if enabled else nullcontext(),
        _warnings_above() if enabled else nullcontext(),
        tqdm(total=total, initial=done, disable=not enabled, dynamic_ncols=True, unit="step") as shown,
    ):
        yield shown


@contextmanager
def _warnings_above() -> Iterator[None]:
    """Clear the bars of this process while a warning is printed."""
    from tqdm import tqdm

    show = warnings.showwarning

    def show_above(*args: Any, **named: Any) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            show(*args, **named)

    warnings.showwarning = show_above
    try:
        yield
    finally:
        warnings.showwarning = show
