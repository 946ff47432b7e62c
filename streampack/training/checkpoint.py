"""Running checkpoints: model and optimizer by torch.distributed.checkpoint (DCP), the rest in a small file.

A checkpoint directory is trusted input: DCP's metadata is a pickle. The small file loads with ``weights_only=True``.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult

from streampack.training.world import World

RUN_FILE = "run.pt"
STEP_NAME = re.compile(r"step_(\d+)")
LEFTOVER_NAME = re.compile(r"step_\d+\.(part|old)")
WITHOUT_FROZEN = StateDictOptions(ignore_frozen_params=True)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which and why."""


@contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Turn errors into `CheckpointError`. DCP's `CheckpointException` is a BaseException."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {_reason(error)}") from error
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{what}: rank {rank}: {_reason(cause)}") from error


def _reason(error: BaseException) -> str:
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"


@dataclass
class Checkpoints:
    """Save and load the checkpoints of a run, and keep the newest ``keep``.

    A checkpoint is a directory ``step_00000100`` under ``folder`` that all ranks write to, so several machines need a
    shared file system. It is synced to disk before it gets its name, and renamed before it is removed: whenever a run
    is killed, a directory of that name is complete. Any number of ranks can load it. Frozen weights are not saved: a
    resumed run loads them from its base.

    Every method but `steps` is a collective. With ``in_background``, `save` copies everything to memory and writes it
    while training continues; the next `save` or `wait` waits for it and raises its error.
    """

    folder: Path
    _: KW_ONLY
    keep: int = 2
    world: World = field(default_factory=World)
    in_background: bool = False
    _writing: Future[None] | None = field(default=None, init=False)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(match[1]) for match in map(STEP_NAME.fullmatch, names) if match)

    def save(
        self, step: int, *, model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any]
    ) -> Path:
        """Write a checkpoint and return its path; ``run`` holds plain values; rank 0's are saved."""
        self.wait()
        final = self.path(step)
        part = final.with_suffix(".part")
        # A collective: no rank writes before the folder is clean.
        with self.world.raise_on_all(), self._removed_on_error(final):
            if self.world.is_main:
                for path in self.folder.iterdir() if self.folder.is_dir() else ():
                    if LEFTOVER_NAME.fullmatch(path.name):  # of a run that was killed
                        shutil.rmtree(path)
                part.mkdir(parents=True)
                # To a file, torch.save would hide a full disk by another error.
                content = io.BytesIO()
                torch.save(run, content)
                with (part / RUN_FILE).open("wb") as file:
                    file.write(content.getvalue())
                    os.fsync(file.fileno())
        state = _state(model, optimizer)
        if self.in_background:
            with plain_errors(f"checkpoint {final} could not be copied to memory"):
                future = saver.async_save(
                    state,
                    storage_writer=_Writer(part),
                    process_group=self.world.background,
                    no_dist=self.world.size == 1,
                )
            # It would be something else if a stager that copies in the background were used.
            assert isinstance(future, Future)
            self._writing = _in_thread(lambda: self._publish(part, final, written=future.result))
        else:
            with self.world.raise_on_all():
                write = partial(saver.save, state, storage_writer=_Writer(part), no_dist=self.world.size == 1)
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
        path = self.path(step)
        # Before the collectives of DCP, in which the other ranks would wait for one that has no such file.
        with self.world.raise_on_all():
            run = read_run(path)
        with self.world.raise_on_all(), plain_errors(f"checkpoint {path} could not be read"):
            state = _state(model, optimizer)
            loader.load(state, checkpoint_id=path, no_dist=self.world.size == 1)
            set_optimizer_state_dict(
                model, optimizer, optim_state_dict=state["optimizer"], options=WITHOUT_FROZEN
            )
        return run

    def _publish(self, part: Path, final: Path, *, written: Callable[[], Any]) -> None:
        """Rename a checkpoint that all ranks have written, and remove surplus ones."""
        with self._removed_on_error(final):
            written()
            if not self.world.is_main:
                return
            _sync_folder(part)
            part.rename(final)
            _sync_folder(self.folder)
        with plain_errors(f"checkpoint {final} is complete, but an older one could not be removed"):
            for old in self.steps()[: -self.keep]:
                path = self.path(old)
                gone = path.with_suffix(".old")
                path.rename(gone)
                shutil.rmtree(gone)

    @contextmanager
    def _removed_on_error(self, final: Path) -> Iterator[None]:
        """Turn errors of a save into `CheckpointError`, remove what was written, and say what is still complete."""
        try:
            with plain_errors(f"checkpoint {final} could not be written"):
                yield
        except CheckpointError as error:
            complete: list[int] = []
            with suppress(OSError):
                if self.world.is_main:
                    shutil.rmtree(final.with_suffix(".part"), ignore_errors=True)  # frees a full disk
                complete = self.steps()
            if complete:
                raise CheckpointError(
                    f"{error}; the newest complete checkpoint is that of step {complete[-1]}"
                ) from error
            raise

    def path(self, step: int) -> Path:
        """Return the directory of a step's checkpoint, whether there is one or not."""
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


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's directory."""
    name = STEP_NAME.fullmatch(path.name)
    if name is None or not path.is_dir():
        raise ValueError(
            f"{path} is no checkpoint; name a directory such as OUTPUT_DIR/checkpoints/step_00000100"
        )
    return int(name[1])


def load_weights(path: Path, model: nn.Module) -> None:
    """Restore a model alone from a checkpoint's directory, in place, in a single process."""
    with plain_errors(f"checkpoint {path} could not be read"):
        loader.load({"model": _weights(model)}, checkpoint_id=path, no_dist=True)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what DCP writes and loads in place."""
    return {
        "model": _weights(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=WITHOUT_FROZEN),
    }


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained weights and the buffers, under the names of an unwrapped, unsharded model.

    Not ``model.state_dict()``, which would dequantize all quantized weights; those are frozen.
    """
    # DCP warns of a single process. Silenced for good, because a context does not reach DCP's threads.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    weights = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                weights[f"{prefix}.{name}" if prefix else name] = buffer
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in weights.items()}


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that files created, renamed or removed in it stay so after a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Writer(FileSystemWriter):
    """DCP's writer, which raises the operating system's error, and not the one that torch.save then has."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = error.__context__
            if isinstance(cause, OSError):
                raise cause from None
            raise


def read_run(path: Path) -> dict[str, Any]:
    """Read what a checkpoint's directory holds beside model and optimizer."""
    file = path / RUN_FILE
    with plain_errors(f"checkpoint {path} could not be read"):
        try:
            run: dict[str, Any] = torch.load(file, weights_only=True)
        except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{file} is damaged, or no file of a checkpoint: {error}") from error
    return run
