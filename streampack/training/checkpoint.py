"""Running checkpoints: model and optimizer through torch.distributed.checkpoint, the rest in a small file beside.

A checkpoint directory is trusted input: DCP's own metadata is a pickle. The small file is not: it loads
with ``weights_only=True``.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

RUN_FILE = "run.pt"
PATTERN = re.compile(r"step_(\d+)")


class Checkpoints:
    """The checkpoints of one run under ``folder``, of which the newest ``keep`` are kept.

    Each is a directory ``step_00000100``. It is written under another name and renamed when complete, so
    whatever bears the name is whole.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = keep

    def steps(self) -> list[int]:
        """Of the complete checkpoints, ascending."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(match[1]) for match in map(PATTERN.fullmatch, names) if match)

    def save(
        self, step: int, *, model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any]
    ) -> Path:
        """Write a checkpoint; ``run`` is what else the loop needs, plain values only."""
        final = self._path(step)
        part = final.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        weights, moments = get_state_dict(model, optimizer)
        with _plain_errors(f"checkpoint {final} could not be written"):
            saver.save(
                {"model": weights, "optimizer": moments},
                checkpoint_id=part,
                no_dist=not dist.is_initialized(),
            )
        torch.save(run, part / RUN_FILE)
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self._path(old))
        return final

    def load(self, step: int, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Restore model and optimizer in place, and return what ``run`` was."""
        path = self._path(step)
        weights, moments = get_state_dict(model, optimizer)
        with _plain_errors(f"checkpoint {path} could not be read"):
            loader.load(
                {"model": weights, "optimizer": moments},
                checkpoint_id=path,
                no_dist=not dist.is_initialized(),
            )
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        run: dict[str, Any] = torch.load(path / RUN_FILE, weights_only=True)
        return run

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """DCP as one would expect it: its `CheckpointException` is no Exception, and a single process no warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise RuntimeError(f"{what}: rank {rank}: {cause}") from error
