"""Which rows the loss of a step came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from streampack.inspection.run_data import training_data
from streampack.training.config import read_config
from streampack.training.row_losses import ROWS_FOLDER, hashes, ranked, read_step, step_losses

SNIPPET = 160
"""Characters of a row's text that are shown."""


def worst_steps(config: Any, *, top: int) -> list[str]:
    """Return lines of the steps with the highest loss."""
    losses = step_losses(Path(read_config(config).output_dir, ROWS_FOLDER))
    worst = sorted(losses, key=lambda step: (abs(losses[step]) < float("inf"), -losses[step]))[:top]
    lines = [f"{'step':>8} {'loss':>8}   of {len(losses):,} steps; --step N shows the rows of one"]
    return lines + [f"{step:>8} {losses[step]:>8.3f}" for step in worst]


def rows_of_step(config: Any, step: int, *, top: int) -> list[str]:
    """Return lines of the rows of a step, those first that add most to its loss for their length."""
    cfg = read_config(config)
    rows = read_step(Path(cfg.output_dir, ROWS_FOLDER), step)
    dataset = training_data(cfg)
    loss = rows[0].step_loss / rows[0].step_weight if rows[0].step_weight else 0.0
    lines = [
        f"step {step}: loss {loss:.3f}, {len(rows):,} sequences",
        f"{'excess':>8} {'loss':>7} {'tokens':>7}  row",
    ]
    for row in ranked(rows)[:top]:
        tokens = row.fragment.stop - row.fragment.start
        figures = f"{row.excess:>+8.2%} {row.mean:>7.3f} {tokens:>7,}"
        lines.append(f"{figures}  {_described(dataset, row)}")
    return lines


def _described(dataset: Any, row: Any) -> str:
    """Return a row's place and the beginning of its text."""
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
