"""Output of a run: the metric logger, the progress bar, the closing summary."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from streampack.accounting import Ledger
from streampack.distributed.world import World
from streampack.instantiate import build
from streampack.sources.bad_records import Quarantine


class MetricLogger:
    """The config's metric logger on rank 0; does nothing on the other ranks."""

    def __init__(self, node: Mapping[str, Any], *, world: World) -> None:
        self.logger = build(node) if world.is_main else None

    def log_config(self, config: Any) -> None:
        """Log the run's config."""
        if self.logger is not None:
            self.logger.log_config(config)

    def log(self, values: Mapping[str, Any], *, step: int) -> None:
        """Log numbers by name. A logger that prints gets lines of its own, apart from the progress bar."""
        from torchtune.training.metric_logging import StdoutLogger
        from tqdm import tqdm

        if self.logger is None:
            return
        prints = isinstance(self.logger, StdoutLogger) or sys.stderr.isatty()
        with tqdm.external_write_mode() if prints else nullcontext():
            self.logger.log_dict(values, step=step)

    def close(self) -> None:
        """Flush and close the logger."""
        if self.logger is not None:
            self.logger.close()


def summary(result: Mapping[str, Any], *, quarantine: Quarantine | None = None) -> str:
    """Format the closing lines of a run: packs, where every token went, speed, validation losses.

    Args:
        result: what a recipe returns.
        quarantine: the list of skipped records, if there is one.
    """
    ledger: Ledger = result["ledger"]
    seconds, held_out = result["seconds"], result["held_out"]
    dropped = sum(ledger.dropped.values())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in ledger.dropped.items() if count)
    lines = [
        f"packs        {ledger.packs:,}, from {ledger.samples:,} samples that were read, {ledger.padding:.2%} padding",
        f"tokens       {ledger.tokens_in:,} in = {ledger.packed:,} packed + {dropped:,} dropped"
        f"{f' ({reasons})' if reasons else ''} + {ledger.buffered:,} buffered",
        f"speed        {result['tokens'] / max(seconds, 1e-9):,.0f} tokens/s over {seconds:,.0f} s",
    ]
    if (bad := ledger.dropped_samples["bad"]) or ledger.bad_shards:
        listed = quarantine.report() if quarantine is not None else ""
        shards = f" and {ledger.bad_shards:,} shards left out" if ledger.bad_shards else ""
        lines.append(f"bad records  {bad:,} skipped{shards}{listed and f'; {listed}'}")
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
        print(f"going on from step {done:,} of {total:,}", flush=True)  # noqa: T201
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
