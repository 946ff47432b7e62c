"""The folder that a run writes to: its lock, its checkpoints, and whether the run is over."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from streampack.fingerprint import digest, plain
from streampack.instantiate import COMPONENT
from streampack.storage.folders import lock_folder
from streampack.training.checkpoint import Checkpoints
from streampack.training.config import RunConfig, without_secrets
from streampack.training.world import World
from streampack.validation import warn_user

OVER = "finished.json"
"""File written last, when the weights are complete; see `record_end`."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the run; `hold_output` adds the message, which says from which step the run can continue.

    Args:
        message: what to print.
        step: of the newest checkpoint, None if there is none.
        number: of the signal; `status` is 128 more.
    """

    def __init__(self, message: str = "", *, step: int | None = None, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.step = step
        self.number = number

    @property
    def status(self) -> int:
        """The exit status: 143 for SIGTERM, 130 for SIGINT, as a shell reports a process that the signal killed.

        Not 0, which would tell schedulers and torchrun that the run is over.
        """
        return 128 + self.number


@contextmanager
def hold_output(config: RunConfig, *, world: World) -> Iterator[None]:
    """Lock the folders that a run writes to while the block runs: its and its checkpointer's ``output_dir``.

    A collective.

    Raises:
        ValueError: on rank 0, if another process holds one of them; names its host and process id.
        Interrupted: for a KeyboardInterrupt in the block, with a message.
    """
    with ExitStack() as held:
        with world.raise_on_all():
            for folder in _folders(config) if world.is_main else ():
                way_out = "wait until it has ended, or choose another output_dir"
                held.enter_context(lock_folder(folder, way_out=way_out))
        try:
            yield
        except KeyboardInterrupt as error:
            number = error.number if isinstance(error, Interrupted) else signal.SIGINT
            raise _interrupted(config, number=number) from error


def open_checkpoints(config: RunConfig, *, world: World) -> tuple[Checkpoints, int | None]:
    """Return the run's checkpoints and the step to resume from, None for a new run; a collective.

    Without a checkpoint, ``resume`` begins at step 0 and prints so: launchers that restart a run use the same command
    the first time.

    Raises:
        ValueError: if there are checkpoints and ``resume`` is not set, or weights that a run from step 0 would
            overwrite.
    """
    checkpoints = Checkpoints(
        checkpoints_folder(config),
        keep=config.keep_checkpoints,
        world=world,
        in_background=config.async_checkpoint,
    )
    newest = checkpoints.newest()
    if newest is not None and not config.resume:
        raise ValueError(
            f"{checkpoints.folder} holds checkpoints up to step {newest} of an earlier run; "
            "set resume=True to go on from there, or choose another output_dir"
        )
    if newest is not None:
        return checkpoints, newest
    if weights := world.broadcast(weights_folders(config) if world.is_main else None):
        raise ValueError(
            f"{' and '.join(weights)} holds weights of an earlier run, and {checkpoints.folder} no checkpoint: this "
            "run would begin at step 0 and overwrite them; choose another output_dir, or remove the weights"
        )
    if config.resume and world.is_main:
        rest = "" if config.checkpoint_every else ", and leaves none, because checkpoint_every is not set"
        begin = "at step 0" if config.resume_from is None else f"from {config.resume_from}"
        print(f"no checkpoint in {checkpoints.folder}: the run begins {begin}{rest}", flush=True)  # noqa: T201
    return checkpoints, None


def fixed_settings(config: RunConfig) -> dict[str, Any]:
    """Return the settings that a run keeps at a resume, for its checkpoint and `warn_of_unheeded`."""
    return {"optimizer": config.optimizer, "epochs": config.epochs}


def warn_of_unheeded(
    config: RunConfig, saved: Mapping[str, Any], *, optimizer: torch.optim.Optimizer, world: World
) -> None:
    """Warn, on rank 0, of settings that a checkpoint decides and that the config has otherwise.

    Args:
        config: of the run that goes on.
        saved: `fixed_settings` of the run that wrote the checkpoint.
        optimizer: as the checkpoint has it, whose groups say which settings it decides.
        world: the ranks.
    """
    if not world.is_main:
        return
    before, now = saved["optimizer"], config.optimizer
    for key in sorted({*before, *now}):
        if before.get(key) == now.get(key):
            continue
        if key == COMPONENT:
            warn_user(
                f"optimizer: a {now[key]} goes on with the numbers of a {before[key]}, as the checkpoint has them; "
                "start a new run if they mean other things to it"
            )
        elif key in optimizer.param_groups[0]:
            warn_user(
                f"optimizer.{key}={now.get(key)} is not heeded: the optimizer goes on as its checkpoint has it, which "
                f"was made with {key}={before.get(key)}; start a new run for another"
            )


def weights_folders(config: RunConfig) -> list[str]:
    """Return the folders of final weights that hold any."""
    base = Path(config.checkpointer.get("output_dir", config.output_dir))
    return [
        str(folder)
        for folder in (base / "epoch_0", base / "adapter")
        if any(file.suffix in (".safetensors", ".bin", ".pt") for file in folder.glob("*"))
    ]


def finished(config: RunConfig, *, world: World) -> int | None:
    """Collective: return the last step of a run that is over, if the config resumes it, and print so; else None.

    A run is over when its weights are written and it has made the steps, or read the epochs, that the config asks for.
    """
    step = world.broadcast(_finished(config) if config.resume and world.is_main else None)
    if step is not None and world.is_main:
        print(  # noqa: T201
            f"{config.output_dir} holds a run that is over: step {step}, weights in "
            f"{' and '.join(weights_folders(config))}. Nothing was changed; give it more max_steps or epochs to train "
            "on"
        )
    return step


def record_end(config: RunConfig, *, step: int) -> None:
    """Write the file that marks a run as over; rank 0 calls this when the weights are written."""
    by_steps = config.max_steps is not None and step >= config.max_steps
    epochs = None if by_steps else config.epochs  # read to their end
    path = Path(config.output_dir, OVER)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"step": step, "epochs": epochs, "data": _data_digest(config)}))
    part.replace(path)


def _finished(config: RunConfig) -> int | None:
    path = Path(config.output_dir, OVER)
    if not path.is_file() or not weights_folders(config):
        return None
    end = json.loads(path.read_text())
    step: int = end["step"]
    newest = max(Checkpoints(checkpoints_folder(config)).steps(), default=step)
    if newest != step or end["data"] != _data_digest(config):
        return None  # of an earlier run in this folder, or of other data, which the checkpoint refuses
    by_steps = config.max_steps is not None and step >= config.max_steps
    by_epochs = end["epochs"] is not None and config.epochs is not None and config.epochs <= end["epochs"]
    return step if by_steps or by_epochs else None


def _data_digest(config: RunConfig) -> str:
    """Return a digest of what is read and how, whoever's keys open it."""
    return digest(plain(without_secrets(config.data)))


def _interrupted(config: RunConfig, *, number: int) -> Interrupted:
    newest = max(Checkpoints(checkpoints_folder(config)).steps(), default=None)
    if newest is not None:
        message = f"interrupted; resume=True goes on from step {newest}, its newest checkpoint"
    elif config.checkpoint_every is not None:
        message = (
            f"interrupted before its first checkpoint (checkpoint_every={config.checkpoint_every}); the same command "
            "begins anew"
        )
    else:
        message = (
            "interrupted, and nothing was saved: checkpoint_every is not set; the same command begins anew"
        )
    return Interrupted(f"{config.output_dir}: {message}", step=newest, number=number)


def checkpoints_folder(config: RunConfig) -> Path:
    """Return where a run keeps its checkpoints."""
    return Path(config.output_dir, "checkpoints")


def _folders(config: RunConfig) -> list[Path]:
    """Return the folders to lock, sorted, so that two runs cannot deadlock."""
    named = {config.output_dir, config.checkpointer.get("output_dir", config.output_dir)}
    return sorted({Path(folder).resolve(): Path(folder) for folder in named}.values())
