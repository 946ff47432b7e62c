"""Output of a run: the metric logger, the progress bar, the closing summary."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from streampack.accounting import Ledger
from streampack.instantiate import build
from streampack.sources.bad_records import Quarantine
from streampack.training.config import RunConfig
from streampack.training.record import METRICS_FILE, MetricRecord
from streampack.training.world import World


class MetricLogger:
    """The config's metric logger on rank 0, and the run's own record beside it; does nothing on the other ranks.

    Args:
        config: its ``metric_logger`` is built, and its ``output_dir`` gets the `MetricRecord`.
        world: the ranks.
        resumed: the step from which the run goes on, None for a new run.
    """

    def __init__(self, config: RunConfig, *, world: World, resumed: int | None = None) -> None:
        self.logger = self.record = None
        if world.is_main:
            self.logger = build(config.metric_logger)
            self.record = MetricRecord(Path(config.output_dir, METRICS_FILE), resumed=resumed)

    def log_config(self, config: Any) -> None:
        """Log the run's config."""
        if self.logger is not None:
            self.logger.log_config(config)

    def log(self, values: Mapping[str, Any], *, step: int) -> None:
        """Log numbers by name. A logger that prints gets lines of its own, apart from the progress bar."""
        from torchtune.training.metric_logging import StdoutLogger
        from tqdm import tqdm

        if self.logger is None or self.record is None:
            return
        self.record.write(values, step=step)
        prints = isinstance(self.logger, StdoutLogger) or sys.stderr.isatty()
        with tqdm.external_write_mode() if prints else nullcontext():
            self.logger.log_dict(values, step=step)

    def close(self) -> None:
        """Flush and close the logger."""
        if self.logger is not None:
            self.logger.close()


def aligned(lines: Mapping[str, str]) -> str:
    """Format lines that each begin with a name.

    >>> print(aligned({"data": "2 lanes", "attention": "varlen"}))
    data         2 lanes
    attention    varlen
    """
    return "\n".join(f"{name:12} {text}" for name, text in lines.items())


def dropped_tokens(ledger: Ledger) -> str:
    """Format how many tokens a ledger has as dropped, and for which reasons.

    >>> ledger = Ledger()
    >>> ledger.drop("truncated", 1200)
    >>> dropped_tokens(ledger)
    '1,200 dropped (1,200 truncated)'
    """
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in ledger.dropped.items() if count)
    return f"{sum(ledger.dropped.values()):,} dropped{reasons and f' ({reasons})'}"


def summary(result: Mapping[str, Any], *, quarantine: Quarantine | None = None) -> str:
    """Format the closing lines of a run: packs, where every token went, speed, validation losses.

    Args:
        result: what a recipe returns.
        quarantine: the list of skipped records, if there is one.
    """
    ledger: Ledger = result["ledger"]
    seconds, held_out = result["seconds"], result["held_out"]
    lines = [
        f"packs        {ledger.packs:,}, from {ledger.samples:,} samples that were read, {ledger.padding:.2%} padding",
        f"tokens       {ledger.tokens_in:,} in = {ledger.packed:,} packed + {dropped_tokens(ledger)} + "
        f"{ledger.buffered:,} buffered",
        f"speed        {result['tokens'] / max(seconds, 1e-9):,.0f} tokens/s over {seconds:,.0f} s",
    ]
    if bad := ledger.dropped_samples["bad"]:
        listed = quarantine.report() if quarantine is not None else ""
        lines.append(f"bad records  {bad:,} skipped{listed and f'; {listed}'}")
    if ledger.untrained:
        lines.append(f"untrained    {ledger.untrained:,} samples train nothing")
    if held_out:
        (first_step, first), (last_step, last) = held_out[0], held_out[-1]
        lines.append(f"held-out     loss {first:.3f} (step {first_step}) -> {last:.3f} (step {last_step})")
    return "\n".join(lines)


@contextmanager
def bar(total: int, *, done: int, enabled: bool = True) -> Iterator[Any]:
    """Show a tqdm bar over optimizer steps within the block; print a line first if ``done`` steps were made before.

    While the bar is shown, log messages of this process are printed above it, on lines of their own.
    """
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    if enabled and done:
        over = f"at step {done:,}: max_steps or epochs end the run at step {total:,}"
        print(f"going on from step {done:,} of {total:,}" if done < total else over, flush=True)  # noqa: T201
    with (
        logging_redirect_tqdm() if enabled else nullcontext(),
        tqdm(total=total, initial=done, disable=not enabled, dynamic_ncols=True, unit="step") as shown,
    ):
        yield shown


def postfix(metrics: Mapping[str, float]) -> str:
    """Format what the bar shows of a step's metrics."""
    parts = [
        f"loss {metrics['loss']:.3f}",
        f"{metrics['tokens_per_second']:,.0f} tokens/s",
        f"padding {metrics['padding']:.1%}",
    ]
    if "cost_imbalance" in metrics:
        parts.append(f"imbalance {metrics['cost_imbalance']:.2f}")
    if "data_wait" in metrics:
        parts.append(f"data wait {metrics['data_wait']:.2g} s")
    return ", ".join(parts)
