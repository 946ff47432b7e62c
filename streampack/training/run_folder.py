"""The folder that a run writes to: its lock, where it resumes, how a signal ends it, and when it is over."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from streampack.fingerprint import digest
from streampack.loader.data_loader import PackedDataLoader
from streampack.storage.folders import lock_folder, write_whole
from streampack.training.checkpoint import Checkpoints, read_run, step_of
from streampack.training.config import RunConfig
from streampack.training.world import World
from streampack.validation import warn_user

SIGNALS = (signal.SIGTERM, signal.SIGINT)
TOGETHER = 1.0
"""Seconds within which several signals count as one: what signals all processes of a job at once (systemd, some Slurm
sites) reaches a rank directly and again through torchrun."""

OF_A_MACHINE = {
    "output_dir", "tokenizer", "checkpointer", "ref_checkpointer", "data", "dataset", "dataset_val", "resume_from",
    "metric_logger", "profiler", "device", "num_workers", "seed",
}  # fmt: skip
"""Keys whose values may differ between ranks: they name files, which machines may keep in other places, or rank 0's is
taken. The loader compares what is read."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the run; `hold_output` adds the message, which says from which step the run can continue."""

    def __init__(self, message: str = "", *, step: int | None = None, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.step = step
        self.number = number

    @property
    def status(self) -> int:
        """The exit status: 143 for SIGTERM, 130 for SIGINT, as of a process that the signal killed."""
        return 128 + self.number


@contextmanager
def stop_on_signals(world: World) -> Iterator[Callable[[], int]]:
    """Note SIGTERM and SIGINT while the block runs, instead of ending the process; a second signal ends it.

    Yields a collective, to be called after each step: it returns the signal that any rank was sent, 0 if none. Its
    messages go over gloo, so it does not wait for a GPU. Only the main thread has handlers.
    """
    process, received, since = os.getpid(), 0, 0.0

    def note(number: int, _frame: FrameType | None) -> None:
        nonlocal received, since
        if os.getpid() != process:
            # Forked, such as a worker of torch's DataLoader: Ctrl-C is its parent's.
            if number == signal.SIGTERM:
                os._exit(128 + number)
        elif received:
            if time.monotonic() - since > TOGETHER:
                os._exit(128 + number)
        else:
            received, since = number, time.monotonic()
            if world.is_main:
                name = signal.Signals(number).name
                text = f"\n{name}: stopping after this step; a second signal ends the run at once\n"
                # Not by print: the step may be printing, and a pipe may have no reader left.
                with suppress(OSError):
                    os.write(2, text.encode())

    in_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.signal(number, note) for number in SIGNALS if in_main}
    try:
        yield lambda: world.max(received)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def require_same_config(config: RunConfig, *, world: World) -> None:
    """Collective: raise on all ranks unless all have the same config, as when machines have copies of their own.

    With another optimizer, a rank would train its part of the model differently in silence. With another number of
    steps, ranks would wait for one another.
    """
    ours = {name: value is None if name in OF_A_MACHINE else value for name, value in vars(config).items()}
    if (held_out := config.validation) is not None:
        ours["validation"] = {"fraction": held_out.fraction, "max_packs": held_out.max_packs}
    if len({*world.gather(digest(ours))}) == 1:
        return
    first, *others = world.gather(ours)
    for rank, theirs in enumerate(others, 1):
        for name, value in theirs.items():
            if value != first[name]:
                raise ValueError(
                    f"rank {rank} has {name}={value!r} and rank 0 has {name}={first[name]!r}; give all ranks the same "
                    "config"
                )


@contextmanager
def hold_output(config: RunConfig, *, world: World) -> Iterator[None]:
    """Collective: lock the ``output_dir`` of a run and of its checkpointer while the block runs.

    A KeyboardInterrupt in the block becomes `Interrupted`, with a message.
    """
    named = {config.output_dir, config.checkpointer.get("output_dir", config.output_dir)}
    folders = sorted(
        {Path(folder).resolve(): Path(folder) for folder in named}.values()
    )  # or two would deadlock
    with ExitStack() as held:
        with world.raise_on_all():
            for folder in folders if world.is_main else ():
                way_out = "wait until it has ended, or choose another output_dir"
                held.enter_context(lock_folder(folder, way_out=way_out))
        try:
            yield
        except KeyboardInterrupt as error:
            number = error.number if isinstance(error, Interrupted) else signal.SIGINT
            raise _interrupted(config, number=number) from error


def _interrupted(config: RunConfig, *, number: int) -> Interrupted:
    newest = max(Checkpoints(checkpoints_folder(config)).steps(), default=None)
    message = (
        f"there is no checkpoint yet (save_every_n_steps={config.save_every_n_steps}), and the same command restarts"
        if newest is None
        else f"resume_from_checkpoint=True resumes from step {newest}, its newest checkpoint"
    )
    return Interrupted(f"{config.output_dir}: interrupted; {message}", step=newest, number=number)


def checkpoints_folder(config: RunConfig) -> Path:
    """Return where a run keeps its checkpoints."""
    return Path(config.output_dir, "checkpoints")


def open_checkpoints(config: RunConfig, *, world: World) -> tuple[Checkpoints, int | None]:
    """Collective: return the run's checkpoints and the step to resume from, None for a new run.

    Without a checkpoint, ``resume_from_checkpoint`` begins at step 0 and prints so: launchers restart a run by the
    command that started it. Checkpoints are refused without that key, and so are weights that would be overwritten.
    """
    checkpoints = Checkpoints(
        checkpoints_folder(config),
        keep=config.keep_last_n_checkpoints,
        world=world,
        in_background=config.enable_async_checkpointing,
    )
    newest = world.broadcast(max(checkpoints.steps(), default=None))
    if newest is not None and not config.resume_from_checkpoint:
        raise ValueError(
            f"{checkpoints.folder} holds checkpoints up to step {newest} of an earlier run; "
            "set resume_from_checkpoint=True to continue from there, or choose another output_dir"
        )
    if newest is not None:
        return checkpoints, newest
    if weights := world.broadcast(weights_folders(config) if world.is_main else None):
        raise ValueError(
            f"{' and '.join(weights)} holds weights of an earlier run, and {checkpoints.folder} no checkpoint: this "
            "run would begin at step 0 and overwrite them; choose another output_dir, or remove the weights"
        )
    if config.resume_from_checkpoint and world.is_main:
        begin = "at step 0" if config.resume_from is None else f"from {config.resume_from}"
        print(f"no checkpoint in {checkpoints.folder}: the run begins {begin}", flush=True)  # noqa: T201
    return checkpoints, None


def saved_settings(config: RunConfig) -> dict[str, Any]:
    """Return seed and dtype of a run's newest checkpoint; nothing if it has none."""
    checkpoints = Checkpoints(checkpoints_folder(config))
    if not (steps := checkpoints.steps()):
        return {}
    run = read_run(checkpoints.path(steps[-1]))
    return {name: run[name] for name in ("seed", "dtype") if name in run}


def begin_phase(
    config: RunConfig,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: PackedDataLoader,
    world: World,
) -> int:
    """Collective: begin a second phase from another run's checkpoint, ``resume_from``, and return its step.

    The model and the optimizer's state are that run's, and the optimizer's settings (``lr``, ``weight_decay``) the
    config's. The data restart, or with ``continue_data`` continue after what that run has packed.
    """
    assert config.resume_from is not None
    path = Path(config.resume_from)
    with world.raise_on_all():
        step = step_of(path)
    if config.most_steps <= step:
        raise ValueError(
            f"max_steps={config.most_steps} is over: the steps of resume_from={config.resume_from} count, which are "
            f"{step}; give more"
        )
    settings = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    run = Checkpoints(path.parent, world=world).load(step, model=model, optimizer=optimizer)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    if config.continue_data:
        loader.continue_from(run["stream"])
    return step


def warn_of_unused(config: RunConfig, saved: Mapping[str, Any], *, world: World) -> None:
    """Warn of settings of the optimizer other than those in ``saved``, with which the checkpoint was made."""
    now = config.optimizer
    changed = [
        f"optimizer.{key}={now.get(key)} (it was {saved.get(key)})"
        for key in sorted({*saved, *now})
        if saved.get(key) != now.get(key)
    ]
    if changed and world.is_main:
        warn_user(
            f"{', '.join(changed)}: not used as far as the checkpoint has such a number, such as lr or weight_decay, "
            "with which the optimizer continues; start a new run, or a second phase (resume_from), for another"
        )


# The end of a run: finished.json is written last, when the weights are complete, and removed when a run continues.


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
    step = world.broadcast(_finished(config) if config.resume_from_checkpoint and world.is_main else None)
    if step is not None and world.is_main:
        longer = (
            "give it more max_steps or epochs to train on"
            if Checkpoints(checkpoints_folder(config)).steps()
            else "it kept no checkpoint (save_every_n_steps), so to train on, begin another run from these weights"
        )
        print(  # noqa: T201
            f"{config.output_dir} holds a run that is over: step {step}, weights in "
            f"{' and '.join(weights_folders(config))}. Nothing was changed; {longer}"
        )
    return step


def _finished(config: RunConfig) -> int | None:
    if not end_file(config).is_file() or not weights_folders(config):
        return None
    end = json.loads(end_file(config).read_text())
    step: int = end["step"]
    by_steps = step >= config.most_steps
    by_epochs = end["epochs"] is not None and config.epochs is not None and config.epochs <= end["epochs"]
    return step if by_steps or by_epochs else None


def record_end(config: RunConfig, *, step: int) -> None:
    """Mark a run as over; rank 0 calls this when the weights are written."""
    by_steps = step >= config.most_steps
    end = {"step": step, "epochs": None if by_steps else config.epochs}
    write_whole(end_file(config), json.dumps(end).encode())


def end_file(config: RunConfig) -> Path:
    """Return the file that marks a run as over."""
    return Path(config.output_dir, "finished.json")
