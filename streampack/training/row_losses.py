"""The log of every sequence's loss in a run, and the packs of a past step, made again from the checkpoint before it."""

from __future__ import annotations

import math
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from streampack.loader.data_loader import PackedDataLoader
from streampack.packing.batch import Batch, unstack_packs
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.run_state import state_of
from streampack.training.checkpoint import Checkpoints, read_run
from streampack.training.config import RunConfig
from streampack.training.meters import sums_by_sequence
from streampack.training.progress import append_lines, keep_until, read_lines
from streampack.training.world import World
from streampack.types import Fragment, Pack

ROWS_FOLDER = "rows"
"""The folder in ``output_dir`` where the log is kept."""

Fragments = tuple[tuple[Fragment, ...], ...]  # of each pack of a batch


class RowLosses:
    """Log the loss of every sequence that is trained, with ``log_rows: true``; otherwise do nothing.

    Each data rank writes JSON lines to a file of its own, ``rows/rank_00000.jsonl``: one line a batch, with its step,
    which lists its sequences as ``[row_id, start, stop, loss, weight, token_sum]``, with the sum of the losses of a
    sequence's tokens, in nats, the sum of its labels' weights, and that of its tokens' ids. About 50 bytes a sequence.
    Sums stay on the device until `write`, so that the loop does not wait for a GPU.

    Making it is a collective. A run that resumes from the step ``resumed`` (None: a new run) removes later lines.
    """

    def __init__(self, config: RunConfig, *, world: World, resumed: int | None = None) -> None:
        folder = Path(config.output_dir, ROWS_FOLDER)
        logs = config.log_rows and world.rank % world.tensor_parallel == 0
        self.path = folder / f"rank_{world.data_rank:05d}.jsonl" if logs else None
        self._batches: list[tuple[int, Fragments, torch.Tensor]] = []
        if config.log_rows:
            with world.raise_on_all():
                # Of other ranks, too: there may be fewer now.
                for path in _files(folder) if world.is_main else ():
                    keep_until(path, resumed)

    def add(self, batch: Batch, losses: torch.Tensor, weights: torch.Tensor, *, step: int) -> None:
        """Take one batch of this rank: its `token_losses`, ``[batch, max_seq_len]``, and its labels' weights."""
        if self.path is not None:
            tokens = batch.tokens.to(losses.device, non_blocking=True)
            sums = torch.stack(sums_by_sequence(batch, losses, weights, tokens))
            self._batches.append((step, batch.fragments, sums))

    def write(self) -> None:
        """Write the batches since the last call, those of whole steps. This waits for the device."""
        if self.path is not None:
            append_lines(self.path, (_line(*each) for each in self._batches))
            self._batches = []


def _line(step: int, packs: Fragments, sums: torch.Tensor) -> dict[str, Any]:
    found = zip(packs, *sums.tolist(), strict=True)
    rows = [row for pack, *values in found for row in zip(pack, *values, strict=False)]
    return {
        "step": step,
        "rows": [
            [each.row_id, each.start, each.stop, float(f"{loss:.6g}"), float(f"{weight:.6g}"), int(token_sum)]
            for each, loss, weight, token_sum in rows
        ],
    }


class RowLoss(NamedTuple):
    """The loss of one sequence in a step."""

    fragment: Fragment
    loss: float  # the sum over its tokens, in nats
    weight: float  # of its labels: how many are trained, or 1 with ``loss_norm: sample``
    token_sum: int  # the sum of its tokens' ids, by which a row that has changed is found
    excess: float
    """By how much its part of the step's loss is above its part of the step's trained tokens.

    By its part of the loss alone, a long row of ordinary text comes before a short row of garbage.
    """

    @property
    def mean(self) -> float:
        """Its loss a trained token; with ``loss_norm: sample``, of its sample."""
        return self.loss / self.weight if self.weight else 0.0


def read_step(folder: Path, step: int) -> list[RowLoss]:
    """Return the sequences of a step by their `RowLoss.excess`, the largest first; before all those without a loss."""
    lines = [line for path in _files(folder) for line in read_lines(path)]
    if not (rows := [row for line in lines if line["step"] == step for row in line["rows"]]):
        steps = [line["step"] for line in lines]
        there = (
            f"it has steps {min(steps)} to {max(steps)}" if steps else "a run keeps them with log_rows: true"
        )
        raise ValueError(f"{folder} has no rows of step {step}; {there}")
    losses, weights = sum(row[3] for row in rows), sum(row[4] for row in rows)
    found = []
    for row_id, start, stop, loss, weight, token_sum in rows:
        excess = (loss / losses if losses else 0.0) - (weight / weights if weights else 0.0)
        found.append(RowLoss(Fragment(tuple(row_id), start, stop, None), loss, weight, token_sum, excess))

    def key(row: RowLoss) -> tuple[bool, float]:
        if not math.isfinite(row.loss):
            return False, 0.0
        # Where another row's loss is not finite, no excess says anything.
        return True, -row.excess if math.isfinite(losses) else -row.mean

    return sorted(found, key=key)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank_*.jsonl"))


def packs_of_step(dataset: IterablePackedDataset, checkpoints: Path, step: int) -> list[Pack]:
    """Make the packs of a step again, counted from 1, those of all ranks, without null packs.

    They are read from the newest checkpoint before the step on, or from the beginning of the data, by the run's
    ``dataset``, from which nothing was read yet.
    """
    kept = Checkpoints(checkpoints)
    if not (steps := kept.steps()):
        raise ValueError(
            f"{checkpoints} holds no checkpoint of a run, by which its steps could be made again; set "
            "save_every_n_steps, or look at the first packs of the config (without a step)"
        )
    if step < 1:
        raise ValueError(f"step {step} cannot be: steps are counted from 1")
    # A checkpoint says how many packs the steps before it had; a resume may have changed that.
    after = read_run(kept.path(min((each for each in steps if each >= step), default=steps[-1])))
    begun = max((each for each in steps if each < step), default=0)
    if begun:
        state = read_run(kept.path(begun))["stream"]
    elif after["begun"]:
        raise ValueError(
            f"the run began at step {after['begun']}, after another run, and {checkpoints} has no checkpoint before "
            f"step {step}; its first one is of step {steps[0]}"
        )
    else:
        head = {name: value for name, value in after["stream"].items() if name not in ("lanes", "checksum")}
        state = state_of({**head, "slot": 0, "epoch": 0}, {})
    dataset.load_state_dict(state)
    packs = after["packs_per_step"]
    loader = PackedDataLoader(dataset, batch_size=packs, packs_per_step=packs)
    if (batch := next(islice(loader, step - begun - 1, None), None)) is None:
        raise ValueError(f"the data end before step {step}, which was never trained")
    return unstack_packs(batch)
