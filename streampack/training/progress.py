"""Output of a run: what is in effect, metrics to loggers and to ``metrics.jsonl``, the bar, the closing summary."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from streampack.accounting import Ledger
from streampack.attention.prepare import Inputs
from streampack.instantiate import build, errors_of
from streampack.lanes.number_of_lanes import lanes_text
from streampack.loader.data_loader import PackedDataLoader
from streampack.packing.strategies import PADDED
from streampack.sources.bad_records import Quarantine
from streampack.streaming.estimate import TooLong
from streampack.training.config import RunConfig
from streampack.training.schedule import PROBED_ROWS
from streampack.training.world import World

METRICS_FILE = "metrics.jsonl"
"""The file in ``output_dir`` that rank 0 writes, whatever metric logger the config names."""
FEW_ROWS = 256
"""Rows that are encoded where only the expected padding is asked for: behind URLs each is a request."""
SHOWN = {
    "loss": "loss {:.3f}", "tokens_per_second": "{:,.0f} tokens/s", "padding": "padding {:.1%}",
    "cost_imbalance": "imbalance {:.2f}", "data_wait": "data wait {:.2g} s",
}  # fmt: skip
"""Metrics that the bar shows."""


def opening(
    config: RunConfig, loader: PackedDataLoader, *, inputs: Inputs, world: World, done: int = 0
) -> dict[str, str]:
    """Say what is in effect in a run, by name, for its first lines; nothing on other ranks than 0.

    The state of ``loader`` is loaded if the run resumes, after ``done`` steps.
    """
    if not world.is_main:
        return {}
    dataset, packs = loader.dataset, loader.packs_per_step
    packing, lanes = dataset.lane_config.packing, dataset.lanes_for(world.data_size)
    name = f"strategy={packing.strategy}" if packing.strategy else packing.filled_by
    padded, unit = packing.strategy == PADDED, "sample" if packing.strategy == PADDED else "pack"
    lines = {
        "data": f"{lanes} lane{'s' * (lanes > 1)} for {world.size} rank{'s' * (world.size > 1)}",
        "packing": f"{name}, max_seq_len={packing.max_seq_len}, balance_window={dataset.window_for(world.data_size)}",
        "attention": inputs.summary.removeprefix("attention="),
        "step": f"{packs:,} {unit}{'s' * (packs > 1)}",
    }
    if not done:
        lines["lanes"] = lanes_text(lanes, fixed=config.dataset is not None)
    else:
        ledger = loader.ledger()  # of all lanes, as it was loaded
        lines["so far"] = f"{ledger.tokens_in:,} tokens read, {dropped_tokens(ledger)}"
    # Streams of unknown length and endless mixtures have no estimate. The error of a bad row is not raised here, but
    # where training reads the row.
    loses = packing.overlong not in ("error", "split")
    with suppress(Exception):
        rows = PROBED_ROWS if loses or config.epochs is not None else FEW_ROWS
        try:
            estimate = dataset.estimate(rows=rows, num_lanes=lanes)
        except TooLong as stops:
            return lines | {"overlong": str(stops)}
        error = f" (standard error {estimate.error / estimate.packs:.1%})" if estimate.error else ""
        lines["data"] += f", an epoch is {'about ' * bool(error)}{estimate.packs:,.0f} {unit}s{error}"
        if not padded:  # the padding of samples is that of their batches
            lines["packing"] += f", about {estimate.padding:.1%} padding expected"
        lines["step"] = estimate.step(packing, packs)
        if told := estimate.losses(packing):
            lines["overlong"] = f"{told}; streampack inspect says which"
    return lines


class MetricLogger:
    """Rank 0's metric logger, the config's, and the run's own record beside it; nothing on the other ranks.

    Making it is a collective. ``resumed`` is the step from which a run resumes, None for a new run; ``written`` the
    config to log.
    """

    def __init__(self, config: RunConfig, *, written: Any, world: World, resumed: int | None) -> None:
        self.path = Path(config.output_dir, METRICS_FILE)
        way_out = "install what it needs, or name torchtune.training.metric_logging.DiskLogger"
        with world.raise_on_all():
            with errors_of("metric_logger", way_out):
                self.logger = build(config.metric_logger) if world.is_main else None
            if self.logger is not None:
                keep_until(self.path, resumed)
                self.logger.log_config(written)

    def log(self, values: Mapping[str, Any], *, step: int) -> None:
        """Log numbers by name. A logger that prints gets lines of its own, apart from the progress bar."""
        from torchtune.training.metric_logging import StdoutLogger
        from tqdm import tqdm

        if self.logger is None:
            return
        write_metrics(self.path, values, step=step)
        prints = isinstance(self.logger, StdoutLogger) or sys.stderr.isatty()
        with tqdm.external_write_mode() if prints else nullcontext():
            self.logger.log_dict(values, step=step)

    def close(self) -> None:
        """Flush and close the logger."""
        if self.logger is not None:
            self.logger.close()


def write_metrics(path: Path, values: Mapping[str, Any], *, step: int) -> None:
    """Append the numbers of a step to a file of JSON lines, by name. NaN and infinities become null.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), METRICS_FILE)
    >>> write_metrics(path, {"loss": 2.5, "padding": 0.01}, step=1)
    >>> write_metrics(path, {"loss": 2.25}, step=2)
    >>> read_metrics(path)
    {1: {'loss': 2.5, 'padding': 0.01}, 2: {'loss': 2.25}}
    """
    numbers = {name: value if isinstance(value, int) else float(value) for name, value in values.items()}
    append_lines(
        path,
        [{"step": step} | {name: each if math.isfinite(each) else None for name, each in numbers.items()}],
    )


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON lines to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def keep_until(path: Path, step: int | None) -> None:
    """Remove the lines of later steps from a file of JSON lines, if there is one; all of it if ``step`` is None."""
    if step is None:
        path.unlink(missing_ok=True)
    elif path.exists():
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        append_lines(part, (line for line in read_lines(path) if line["step"] <= step))
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


def summary(result: Mapping[str, Any], *, quarantine: Quarantine | None, padded: bool = False) -> str:
    """Format the closing lines of a run: packs, where every token went, speed, validation losses.

    ``padded``: each pack holds one sample.
    """
    ledger: Ledger = result["ledger"]
    seconds, held_out, computed = result["seconds"], result["held_out"], result["computed"]
    trained, packed = ("samples", "trained") if padded else ("packs", "packed")
    lines = [
        f"{trained:12} {ledger.packs:,}, from {ledger.samples:,} samples that were read",
        f"tokens       {ledger.tokens_in:,} in = {ledger.packed:,} {packed} + {dropped_tokens(ledger)} + "
        f"{ledger.buffered:,} buffered",
        f"model        {computed:,} tokens computed, {1 - result['tokens'] / max(1, computed):.2%} of them padding",
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
        print(f"continuing from step {done:,} of {total:,}" if done < total else over, flush=True)  # noqa: T201
    with (
        logging_redirect_tqdm() if enabled else nullcontext(),
        tqdm(total=total, initial=done, disable=not enabled, dynamic_ncols=True, unit="step") as shown,
    ):
        yield shown


def postfix(metrics: Mapping[str, float]) -> str:
    """Format what the bar shows of a step's metrics."""
    return ", ".join(text.format(metrics[name]) for name, text in SHOWN.items() if name in metrics)
