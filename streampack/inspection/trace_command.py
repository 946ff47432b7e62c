"""The command ``streampack trace``: the rows that a step's loss came from."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from streampack.catalog import UsageError

DESCRIPTION = """\
Show which rows the loss of a step came from. The run must have kept them: log_rows: true in its config.

  streampack trace --config my.yaml                 steps with the highest loss
  streampack trace --config my.yaml --step 1200     the rows of a step

Rows are in the order of their excess: their share of the step's loss less their share of its trained tokens.
"""
SNIPPET = 160
"""Characters of a row's text that are shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words of the command to its parser."""
    parser.description = DESCRIPTION
    parser.add_argument("--step", type=int, metavar="N", help="a step of the run in the config's output_dir")
    parser.add_argument(
        "--top", type=int, default=10, metavar="N", help="how many steps or rows to show (10)"
    )
    parser.add_argument("--by", default="excess", metavar="ORDER", help="excess, share or mean (excess)")


def run(options: argparse.Namespace, config: Any) -> int:
    """Print the steps or rows, and return the exit status."""
    if options.top < 1:
        raise UsageError(f"--top {options.top} is below 1; give at least 1")
    try:
        from streampack.training.row_losses import ORDERS
    except ImportError as error:
        raise UsageError(str(error)) from None
    if options.by not in ORDERS:
        raise UsageError(f"--by {options.by} is none of {', '.join(ORDERS)}")
    for line in _steps(options, config) if options.step is None else _rows(options, config):
        sys.stdout.write(f"{line}\n")
    return 0


def _steps(options: argparse.Namespace, config: Any) -> list[str]:
    from streampack.training.config import read_config
    from streampack.training.row_losses import ROWS_FOLDER, step_losses

    losses = step_losses(Path(read_config(config).output_dir, ROWS_FOLDER))
    worst = sorted(losses, key=lambda step: (abs(losses[step]) < float("inf"), -losses[step]))[: options.top]
    lines = [f"{'step':>8} {'loss':>8}   of {len(losses):,} steps; --step N shows the rows of one"]
    return lines + [f"{step:>8} {losses[step]:>8.3f}" for step in worst]


def _rows(options: argparse.Namespace, config: Any) -> list[str]:
    from streampack.inspection.run_data import training_data
    from streampack.training.config import read_config
    from streampack.training.row_losses import ROWS_FOLDER, ranked, read_step

    cfg = read_config(config)
    rows = read_step(Path(cfg.output_dir, ROWS_FOLDER), options.step)
    dataset = training_data(cfg)
    first = rows[0]
    loss = first.step_loss / first.step_weight if first.step_weight else 0.0
    lines = [
        f"step {options.step}: loss {loss:.3f}, {len(rows):,} sequences",
        f"{'excess':>8} {'share':>7} {'loss':>7} {'tokens':>7}  row",
    ]
    for row in ranked(rows, by=options.by)[: options.top]:
        tokens = row.fragment.stop - row.fragment.start
        lines.append(
            f"{row.excess:>+8.2%} {row.share:>7.2%} {row.mean:>7.3f} {tokens:>7,}  {_described(dataset, row)}"
        )
    return lines


def _described(dataset: Any, row: Any) -> str:
    """Return a row's place and the beginning of its text."""
    import torch

    from streampack.training.row_losses import hashes

    row_id = row.fragment.row_id
    try:
        place = dataset.lane_config.source.locate(row_id)
    except LookupError:
        return f"row {row_id[-1]} of file {row_id[-2]}, which there is no more: files were removed since"
    try:
        found = dataset.trace(row.fragment)
    except (ValueError, OSError, LookupError) as error:
        return f"{place}: cannot be read any more: {error}"
    text = " ".join(str(found.get("text", found["tokens"])).split())
    if len(text) > SNIPPET:
        text = f"{text[: SNIPPET - 3]}..."
    changed = int(hashes(torch.tensor(found["tokens"], dtype=torch.int64)).sum()) != row.checksum
    # A row is known by the number of its file, which is another one where files came or went.
    note = " (not what was trained on: it changed since, or files came or went)" if changed else ""
    return f"{place}{note}: {text}"
