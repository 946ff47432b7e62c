"""Running checkpoints: model and optimizer by torch.distributed.checkpoint (DCP), the rest in a small file.

A checkpoint directory is trusted input: DCP's metadata is a pickle. The small file loads with ``weights_only=True``.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LRScheduler

from streampack.distributed.world import World

RUN_FILE = "run.pt"
PATTERN = re.compile(r"step_(\d+)")
LEFTOVERS = re.compile(r"step_\d+\.(part|old)")
TRAINED = StateDictOptions(ignore_frozen_params=True)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which and why."""


class Checkpoints:
    """Save and load the checkpoints of a run, of which the newest ``keep`` are kept.

    A checkpoint is a directory ``step_00000100`` under ``folder`` that all ranks write to, so several machines need a
    shared file system. It is synced to disk under another name before it gets its own, and renamed before it is
    removed: whenever a run is killed, a directory of that name is complete. Saved by any number of ranks, it loads on
    any number. Frozen weights are not saved: a resumed run loads them from its base.

    Args:
        folder: made when the first checkpoint is written.
        keep: number of checkpoints.
        world: the ranks; every method but `steps` is a collective.
        in_background: `save` copies everything to memory and writes it while training continues. The next `save` or
            `wait` waits for it and raises its error.
    """

    def __init__(
        self, folder: str | Path, *, keep: int = 2, world: World | None = None, in_background: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.world = world or World()
        self.in_background = in_background
        self._writing: Future[None] | None = None

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(match[1]) for match in map(PATTERN.fullmatch, names) if match)

    def newest(self) -> int | None:
        """Return the last of rank 0's `steps`, or None, on all ranks."""
        return self.world.broadcast(max(self.steps(), default=None))

    def save(
        self, step: int, *, model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any]
    ) -> Path:
        """Write a checkpoint and return its path; ``run`` holds plain values, of which rank 0's are saved."""
        self.wait()
        final = self._path(step)
        part = final.with_suffix(".part")
        _hush()
        # A collective: no rank writes before the folder is clean.
        with self.world.raise_on_all(), _plain_errors(f"checkpoint {final} could not be written"):
            if self.world.is_main:
                self._clean()
                part.mkdir(parents=True)
                with (part / RUN_FILE).open("wb") as file:
                    torch.save(run, file)
                    os.fsync(file.fileno())
        state = _state(model, optimizer)
        if self.in_background:
            with _plain_errors(f"checkpoint {final} could not be copied to memory"):
                future = saver.async_save(
                    state,
                    storage_writer=FileSystemWriter(part),
                    process_group=self.world.background,
                    no_dist=self.world.size == 1,
                )
            assert isinstance(future, Future)  # with stagers that copy in the background it is not
            self._writing = _in_thread(lambda: self._publish(part, final, written=future.result))
        else:
            with self.world.raise_on_all():
                write = partial(
                    saver.save, state, storage_writer=FileSystemWriter(part), no_dist=self.world.size == 1
                )
                self._publish(part, final, written=write)
        return final

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        writing, self._writing = self._writing, None
        with self.world.raise_on_all():
            if writing is not None:
                writing.result()

    def load(self, step: int, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Restore model and optimizer in place, and return the saved ``run``."""
        _hush()
        path = self._path(step)
        state = _state(model, optimizer)
        with _plain_errors(f"checkpoint {path} could not be read"):
            loader.load(state, checkpoint_id=path, no_dist=self.world.size == 1)
        set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optimizer"], options=TRAINED)
        run: dict[str, Any] = torch.load(path / RUN_FILE, weights_only=True)
        return run

    def _publish(self, part: Path, final: Path, *, written: Callable[[], Any]) -> None:
        """Rename a checkpoint that all ranks have written, and remove surplus ones."""
        with _plain_errors(f"checkpoint {final} could not be written"):
            written()
        if not self.world.is_main:
            return
        _sync_folder(part)
        if final.exists():  # the run has made no step since
            shutil.rmtree(part)
            return
        part.rename(final)
        _sync_folder(self.folder)
        for old in self.steps()[: -self.keep]:
            path = self._path(old)
            gone = path.with_suffix(".old")
            path.rename(gone)
            shutil.rmtree(gone)

    def _clean(self) -> None:
        """Remove the unfinished directories of a killed run."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if LEFTOVERS.fullmatch(path.name):
                shutil.rmtree(path)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"


def _in_thread(write: Callable[[], None]) -> Future[None]:
    """Run a function in a daemon thread: a run that failed does not wait for its checkpoint."""
    future: Future[None] = Future()

    def work() -> None:
        try:
            future.set_result(write())  # type: ignore[func-returns-value]
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what DCP writes and loads in place, under the names of an unwrapped, unsharded model.

    Not ``model.state_dict()``, which would dequantize all quantized weights; those are frozen.
    """
    weights = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                weights[f"{prefix}.{name}" if prefix else name] = buffer
    return {
        "model": {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in weights.items()},
        "optimizer": get_optimizer_state_dict(model, optimizer, options=TRAINED),
    }


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that files created, renamed or removed in it stay so after a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """Turn errors into `CheckpointError`. DCP's `CheckpointException` is a BaseException."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error}") from error
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{what}: rank {rank}: {cause}") from error


def _hush() -> None:
    """Silence DCP's warning about a single process, for good: a context does not reach its threads."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def restore_schedule(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Load the state of a learning-rate schedule, and set the optimizer's rate.

    Building a scheduler sets the rate of step 0, and torch's ``load_state_dict`` does not undo that: the first step
    after a resume would use it.
    """
    scheduler.load_state_dict(dict(state))
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
