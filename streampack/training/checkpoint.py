"""Running checkpoints: model and optimizer through torch.distributed.checkpoint, the rest in a small file beside.

A checkpoint directory is trusted input: DCP's own metadata is a pickle. The small file is not: it loads
with ``weights_only=True``.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
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

from streampack.distributed.world import World

RUN_FILE = "run.pt"
PATTERN = re.compile(r"step_(\d+)")
LEFTOVERS = re.compile(r"step_\d+\.(part|old)")
TRAINED = StateDictOptions(ignore_frozen_params=True)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which and why."""


class Checkpoints:
    """The checkpoints of one run under ``folder``, of which the newest ``keep`` are kept.

    Each is a directory ``step_00000100`` that all ranks write to, so with several machines ``folder`` must be
    one that all of them see. It is written under another name and synced to the disk before it is renamed,
    and renamed before it is removed: whatever bears the name is whole, whenever the run was killed.
    Saved by any number of ranks, it loads on any number. What is frozen is not saved: it comes from where
    the run began.

    Args:
        folder: made when the first checkpoint is written.
        keep: how many to keep.
        world: the ranks that save and load together; every method but `steps` is a collective.
        in_background: `save` returns once everything is copied to memory and writes while training goes on;
            a second one waits for the first, and an error is raised by the next `save` or `wait`.
    """

    def __init__(
        self, folder: str | Path, *, keep: int = 2, world: World | None = None, in_background: bool = False
    ) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.world = world or World()
        self.in_background = in_background
        self._writing: _Writing | None = None

    def steps(self) -> list[int]:
        """Of the complete checkpoints, ascending."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(match[1]) for match in map(PATTERN.fullmatch, names) if match)

    def newest(self) -> int | None:
        """The last of `steps` as rank 0 sees them, the same on all ranks."""
        return self.world.from_main(max(self.steps(), default=None))

    def save(
        self, step: int, *, model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any]
    ) -> Path:
        """Write a checkpoint; ``run`` is what else the loop needs, plain values only, rank 0's."""
        self.wait()
        final = self._path(step)
        part = final.with_suffix(".part")
        _hush()
        # As a collective, it also keeps every rank from writing before the folder is clean.
        with self.world.together(), _plain_errors(f"checkpoint {final} could not be written"):
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
            assert isinstance(future, Future)  # it is not with stagers that copy in the background, too
            self._writing = _Writing(lambda: self._publish(part, final, written=future.result))
        else:
            with self.world.together():
                self._publish(part, final, written=lambda: self._write(state, part))
        return final

    def wait(self) -> None:
        """Until the checkpoint that is being written is complete."""
        writing, self._writing = self._writing, None
        with self.world.together():
            if writing is not None:
                writing.result()

    def load(self, step: int, *, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Restore model and optimizer in place, and return what ``run`` was."""
        _hush()
        path = self._path(step)
        state = _state(model, optimizer)
        with _plain_errors(f"checkpoint {path} could not be read"):
            loader.load(state, checkpoint_id=path, no_dist=self.world.size == 1)
        set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optimizer"], options=TRAINED)
        run: dict[str, Any] = torch.load(path / RUN_FILE, weights_only=True)
        return run

    def _write(self, state: dict[str, Any], part: Path) -> None:
        saver.save(state, storage_writer=FileSystemWriter(part), no_dist=self.world.size == 1)

    def _publish(self, part: Path, final: Path, *, written: Callable[[], Any]) -> None:
        """Give a checkpoint its name once all ranks have written their share, and remove those too many."""
        with _plain_errors(f"checkpoint {final} could not be written"):
            written()
        if not self.world.is_main:
            return
        _sync_folder(part)
        if final.exists():  # a run that stands at a step whose checkpoint it has has not gone on since
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
        """Remove what a killed run left."""
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if LEFTOVERS.fullmatch(path.name):
                shutil.rmtree(path)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"


class _Writing:
    """A checkpoint that is written in a thread. A daemon: a run that failed must not wait for its checkpoint."""

    def __init__(self, write: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(write,), daemon=True)
        self.thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self.error = error

    def result(self) -> None:
        self.thread.join()
        if self.error is not None:
            raise self.error


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What DCP writes, and loads in place: names as if the model were neither wrapped nor sharded.

    Not ``model.state_dict()``: with quantized weights, which are frozen, it would dequantize all of them.
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
    """What was created, renamed or removed in a folder is only sure to last after this."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    """Errors that say what failed; DCP's `CheckpointException` is not even an Exception."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error}") from error
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{what}: rank {rank}: {cause}") from error


def _hush() -> None:
    """A single process is no mistake. For good, because a context would not reach into DCP's threads."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
