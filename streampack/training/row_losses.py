"""The log of every sequence's loss in a run, and the packs of a past step, made again from the checkpoint before it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from streampack.loader.data_loader import PackedDataLoader
from streampack.packing.batch import Batch, unstack_packs
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.run_state import state_of
from streampack.training.checkpoint import Checkpoints, read_run
from streampack.training.config import RunConfig
from streampack.training.progress import keep_until, read_lines
from streampack.training.world import World
from streampack.types import Fragment, Pack

ROWS_FOLDER = "rows"
"""The folder in ``output_dir`` where the log is kept."""

Fragments = tuple[tuple[Fragment, ...], ...]  # of each pack of a batch


class RowLosses:
    """Log the loss of every sequence that is trained, with ``log_rows: true``; otherwise do nothing.

    Each rank writes JSON lines to a file of its own, ``rows/rank_00000.jsonl``: one line a step, which lists its
    sequences as ``[row_id, start, stop, loss, weight, checksum]``, with the sum of the losses of a sequence's tokens,
    in nats, the sum of its labels' weights, and the sum of its tokens' `hashes`. About 50 bytes a sequence. Sums stay
    on the device until `write`, so that the loop does not wait for a GPU.

    Making it is a collective. A run that goes on from the step ``resumed`` (None for a new run) removes later lines.
    """

    def __init__(self, config: RunConfig, *, world: World, resumed: int | None = None) -> None:
        self.path: Path | None = None
        # The sequences of each batch, and the sums of their losses, weights and hashes, until they are written; and how
        # many of the batches each step had.
        self._batches: list[tuple[Fragments, tuple[torch.Tensor, ...]]] = []
        self._steps: list[tuple[int, int]] = []
        if config.log_rows:
            folder = Path(config.output_dir, ROWS_FOLDER)
            with world.raise_on_all():
                # Of other ranks, too: there may be fewer now.
                for path in _files(folder) if world.is_main else ():
                    keep_until(path, resumed)
            self.path = folder / f"rank_{world.rank:05d}.jsonl"

    def add(self, batch: Batch, losses: torch.Tensor, weights: torch.Tensor) -> None:
        """Take one batch of this rank: its `token_losses`, ``[batch, max_seq_len]``, and its labels' weights."""
        if self.path is None:
            return
        bounds = _bounds(batch)
        dtype = torch.float32 if losses.device.type == "mps" else torch.float64
        sums = (
            _sums(losses.detach().to(dtype), bounds),
            _sums(weights.double(), bounds),
            _sums(hashes(batch.tokens), bounds),  # on the CPU where only the losses were computed on a device
        )
        self._batches.append((batch.fragments, sums))

    def end_step(self, step: int) -> None:
        """Say that the batches since the last call were this step's."""
        if self.path is not None:
            self._steps.append((step, len(self._batches) - sum(count for _, count in self._steps)))

    def write(self) -> None:
        """Write the steps that have ended. This waits for the device."""
        if not self._steps or self.path is None:
            return
        batches, lines = iter(self._batches), []
        for step, count in self._steps:
            rows = [row for _, batch in zip(range(count), batches, strict=False) for row in _rows(*batch)]
            lines.append(json.dumps({"step": step, "rows": rows}, separators=(",", ":")) + "\n")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(lines)
        self._batches, self._steps = [], []


def hashes(tokens: torch.Tensor) -> torch.Tensor:
    """Return a number below 2**31 for each id. Their sum over a sequence tells later whether its row has changed."""
    return (tokens + 1) * 2_654_435_761 % (2**31 - 1)


def _bounds(batch: Batch) -> torch.Tensor:
    """Return where the tokens of each sequence of each pack begin and end: ``[2, batch, most sequences]``.

    They are counted on the host, where no number has to be read from the device. Missing sequences have no token.
    """
    width = max(map(len, batch.fragments))
    starts, stops = [], []
    for pack in batch.fragments:
        begins = list(accumulate((each.length for each in pack), initial=0))
        ends = [begin + each.stop - each.start for begin, each in zip(begins, pack, strict=False)]
        starts.append(begins[:-1] + [0] * (width - len(pack)))
        stops.append(ends + [0] * (width - len(pack)))
    return torch.tensor([starts, stops], dtype=torch.int64)


def _sums(values: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return the sum of the values of each sequence, ``[batch, most sequences]``, on the device of the values."""
    bounds = bounds.to(values.device, non_blocking=True)
    before = F.pad(values.cumsum(1), (1, 0))
    return before.gather(1, bounds[1]) - before.gather(1, bounds[0])


def _rows(packs: Fragments, sums: tuple[torch.Tensor, ...]) -> Iterator[list[Any]]:
    for fragments, *of_pack in zip(packs, *(each.tolist() for each in sums), strict=True):
        # The widest has more sums.
        for fragment, loss, weight, checksum in zip(fragments, *of_pack, strict=False):
            found = float(f"{loss:.6g}"), float(f"{weight:.6g}"), checksum
            yield [fragment.row_id, fragment.start, fragment.stop, *found]


@dataclass(frozen=True, slots=True)
class RowLoss:
    """The loss of one sequence in a step.

    >>> fragment = Fragment((0, 7), 0, 10, None)
    >>> row = RowLoss(fragment, step_loss=80.0, step_weight=40.0, loss=40.0, weight=10.0, checksum=0)
    >>> row.mean, row.excess
    (4.0, 0.25)
    """

    fragment: Fragment
    step_loss: float  # the sum over the step
    step_weight: float
    loss: float  # the sum over its tokens, in nats
    weight: float  # of its labels: how many are trained, or 1 with ``loss_norm: sample``
    checksum: int  # the sum of its tokens' `hashes`

    @property
    def mean(self) -> float:
        """Its loss a trained token; with ``loss_norm: sample``, of its sample."""
        return self.loss / self.weight if self.weight else 0.0

    @property
    def excess(self) -> float:
        """By how much its part of the step's loss is above its part of the step's trained tokens.

        By its part of the loss alone, a long row of ordinary text comes before a short row of garbage.
        """
        part = self.loss / self.step_loss if self.step_loss else 0.0
        return part - (self.weight / self.step_weight if self.step_weight else 0.0)


def read_step(folder: Path, step: int) -> list[RowLoss]:
    """Return the sequences of a step from the log in a folder."""
    rows = [
        row
        for path in _files(folder)
        for line in read_lines(path)
        if line["step"] == step
        for row in line["rows"]
    ]
    if not rows:
        raise ValueError(f"{folder} has no rows of step {step}{_what_there_is(folder)}")
    loss, weight = sum(row[3] for row in rows), sum(row[4] for row in rows)
    return [
        RowLoss(Fragment(tuple(row_id), start, stop, None), loss, weight, *own)
        for row_id, start, stop, *own in rows
    ]


def ranked(rows: Iterable[RowLoss]) -> list[RowLoss]:
    """Return sequences by their `RowLoss.excess`, the largest first; before all others those of no finite loss."""

    def key(row: RowLoss) -> tuple[bool, float]:
        if not math.isfinite(row.loss):
            return False, 0.0
        # Where another row's loss is not finite, neither is any excess.
        return True, -row.excess if math.isfinite(row.step_loss) else -row.mean

    return sorted(rows, key=key)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank_*.jsonl"))


def _what_there_is(folder: Path) -> str:
    steps = [line["step"] for path in _files(folder) for line in read_lines(path)]
    if steps:
        return f"; it has steps {min(steps)} to {max(steps)}"
    return "; a run keeps them with log_rows: true in its config"


def packs_of_step(dataset: IterablePackedDataset, checkpoints: Path, step: int) -> list[Pack]:
    """Make the packs of a step again, counted from 1, those of all ranks, without null packs.

    They are read from the newest checkpoint before the step on, or from the beginning of the data, by the run's
    ``dataset``, from which nothing was read yet.
    """
    kept = Checkpoints(checkpoints)
    if not (steps := kept.steps()):
        raise ValueError(
            f"{checkpoints} holds no checkpoint of a run, by which its steps could be made again; set "
            "checkpoint_every, or look at the first packs of the config (without a step)"
        )
    if step < 1:
        raise ValueError(f"step {step} cannot be: steps are counted from 1")
    # A checkpoint says how many packs the steps before it had; a resume may have changed that.
    after = read_run(kept.path(min((each for each in steps if each >= step), default=steps[-1])))
    packs_per_step, state = after["packs_per_step"], after["stream"]
    begun = max((each for each in steps if each < step), default=0)
    if begun:
        state = read_run(kept.path(begun))["stream"]
    elif after["begun"]:
        raise ValueError(
            f"the run began at step {after['begun']} behind another run, and {checkpoints} has no checkpoint before "
            f"step {step}; its first one is of step {steps[0]}"
        )
    if not begun:
        head = {name: value for name, value in state.items() if name not in ("lanes", "checksum")}
        state = state_of({**head, "slot": 0, "epoch": 0}, {})
    dataset.load_state_dict(state)
    loader = PackedDataLoader(dataset, batch_size=packs_per_step, packs_per_step=packs_per_step)
    if (batch := next(islice(loader, step - begun - 1, None), None)) is None:
        raise ValueError(f"the data end before step {step}, which was never trained")
    return unstack_packs(batch)
