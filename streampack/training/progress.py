"""Output of a run: what is in effect, metrics to loggers and to ``metrics.jsonl``, the bar, the closing summary."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from streampack.accounting import Ledger
from streampack.attention.prepare import Inputs
from streampack.instantiate import build
from streampack.loader.data_loader import PackedDataLoader
from streampack.sources.bad_records import Quarantine
from streampack.streaming.estimate import Estimate
from streampack.training.config import RunConfig
from streampack.training.meters import run_ledger
from streampack.training.schedule import PROBED_ROWS, lanes_of
from streampack.training.world import World

METRICS_FILE = "metrics.jsonl"
"""The file in ``output_dir`` that rank 0 writes, whatever metric logger the config names."""
FEW_ROWS = 256
"""Rows that are encoded where only the expected padding is asked for."""


def opening(
    config: RunConfig, loader: PackedDataLoader, *, inputs: Inputs, world: World, done: int = 0
) -> dict[str, str]:
    """Collective: say what is in effect in a run, by name, for its first lines: lanes, packing, attention.

    The state of ``loader`` is loaded if the run goes on, after ``done`` steps. Returns an empty dict on all ranks but
    0.
    """
    ledger = run_ledger(loader, world) if done else None
    with world.raise_on_all():
        return _opening(config, loader, inputs, world, ledger) if world.is_main else {}


def _opening(
    config: RunConfig, loader: PackedDataLoader, inputs: Inputs, world: World, ledger: Ledger | None
) -> dict[str, str]:
    num_lanes = lanes_of(config, loader, world)
    estimate = None
    # Streams of unknown length and endless mixtures have no estimate. The error of a bad row is not raised here, but
    # where training reads the row.
    packing = loader.dataset.lane_config.packing
    loses = packing.overlong not in ("error", "split")
    with suppress(Exception):
        rows = PROBED_ROWS if loses or config.epochs is not None else FEW_ROWS
        estimate = loader.dataset.estimate(rows=rows, num_lanes=num_lanes)
    lines = {
        "data": _data(config, world, estimate, num_lanes),
        "packing": _packing(loader, world, estimate),
        "attention": _attention(config, inputs),
    }
    if ledger is not None:
        lines["so far"] = f"{ledger.tokens_in:,} tokens read, {dropped_tokens(ledger)}"
    if estimate is not None and estimate.lost and loses:
        lines["overlong"] = (
            f"overlong={packing.overlong} with max_seq_len={packing.max_seq_len} loses {estimate.lost:.1%} of the "
            f"tokens of {estimate.samples:,} samples looked at; streampack inspect says which"
        )
    return lines


def _data(config: RunConfig, world: World, estimate: Estimate | None, num_lanes: int) -> str:
    consumers = world.size * max(1, config.num_workers)
    text = f"{num_lanes} lane{'s' * (num_lanes > 1)} for {consumers} consumer{'s' * (consumers > 1)}"
    if estimate is None:
        return text
    if estimate.error:
        return (
            f"{text}, an epoch is about {estimate.packs:,.0f} packs "
            f"(standard error {estimate.error / estimate.packs:.1%})"
        )
    return f"{text}, an epoch is {estimate.packs:,.0f} packs"


def _packing(loader: PackedDataLoader, world: World, estimate: Estimate | None) -> str:
    dataset = loader.dataset
    packing = dataset.lane_config.packing
    parts = [
        "split_across_pack" if packing.split_across_pack else f"strategy={packing.strategy}",
        f"max_seq_len={packing.max_seq_len}",
        f"balance_window={dataset.window_for(world.size)}",
    ]
    if estimate is not None:
        parts.append(f"about {estimate.padding:.1%} padding expected")
    return ", ".join(parts)


def _attention(config: RunConfig, inputs: Inputs) -> str:
    if config.attention != "auto":
        return f"{inputs.attention}, as the config says"
    if not inputs.refused:
        return f"{inputs.attention}, the first choice of attention=auto on this device"
    return f"{inputs.attention}; " + "; ".join(
        f"{backend} will not do: {why}" for backend, why in inputs.refused.items()
    )


class MetricLogger:
    """The config's metric logger on rank 0, and the run's own record beside it; does nothing on the other ranks.

    A run that goes on does so from the step ``resumed``, None for a new run.
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


class MetricRecord:
    """Appends one JSON line a log to a file: ``step`` and the numbers by name. NaN and infinities become null.

    A run that goes on from the step ``resumed`` removes the lines of later steps, which are trained again; a new one
    (None) removes all lines of an earlier run.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), METRICS_FILE)
    >>> MetricRecord(path).write({"loss": 2.5, "padding": 0.01}, step=1)
    >>> MetricRecord(path, resumed=1).write({"loss": 2.25}, step=2)
    >>> read_metrics(path)
    {1: {'loss': 2.5, 'padding': 0.01}, 2: {'loss': 2.25}}
    """

    def __init__(self, path: Path, *, resumed: int | None = None) -> None:
        self.path = path
        keep_until(path, resumed)

    def write(self, values: Mapping[str, Any], *, step: int) -> None:
        """Append the numbers of a step."""
        numbers = {name: _number(value) for name, value in values.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_dumps({"step": step, **numbers}))


def keep_until(path: Path, step: int | None) -> None:
    """Remove the lines of later steps from a file of JSON lines, if there is one; all of it if ``step`` is None."""
    if step is None:
        path.unlink(missing_ok=True)
    elif path.exists():
        part = path.with_suffix(".part")
        with part.open("w", encoding="utf-8") as file:
            file.writelines(_dumps(line) for line in read_lines(path) if line["step"] <= step)
        part.replace(path)


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Return the numbers of each step by name, in order; of a name that a step has twice, the last one. Null is NaN.

    Returns an empty dict if there is no file.
    """
    steps: dict[int, dict[str, float]] = {}
    for line in read_lines(path) if path.exists() else ():
        step = line.pop("step")
        numbers = {name: math.nan if value is None else value for name, value in line.items()}
        steps.setdefault(step, {}).update(numbers)
    return dict(sorted(steps.items()))


def _number(value: Any) -> int | float | None:
    """Return a number, which may be a tensor, as JSON has it; None if it is not finite."""
    number = value if isinstance(value, int) else float(value)
    return number if math.isfinite(number) else None


def _dumps(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file; not its last one if that is cut off, because the run was killed."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


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


def summary(result: Mapping[str, Any], *, quarantine: Quarantine | None) -> str:
    """Format the closing lines of a run: packs, where every token went, speed, validation losses."""
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
