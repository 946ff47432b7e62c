"""A second phase: a run that goes on from another run's checkpoint with data and settings of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from streampack.loader.data_loader import PackedDataLoader
from streampack.training.checkpoint import STEP_NAME, Checkpoints
from streampack.training.config import RunConfig
from streampack.training.world import World


def begin_phase(
    config: RunConfig,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: PackedDataLoader,
    world: World,
) -> int:
    """Load the model and the optimizer's state of ``resume_from``, and return its step; a collective.

    The optimizer keeps the settings (``lr``, ``weight_decay``) that the config gives it. The data begin anew, or with
    ``continue_data`` behind what that run has packed.

    Raises:
        ValueError: if it is no checkpoint, or ``max_steps`` is over at its step; with ``continue_data``, if the data
            are others than that run's.
        CheckpointError: if it cannot be read, or is of another model.
    """
    assert config.resume_from is not None
    path = Path(config.resume_from)
    name = STEP_NAME.fullmatch(path.name)
    with world.raise_on_all():
        if name is None or not path.is_dir():
            raise ValueError(
                f"resume_from={config.resume_from} is no checkpoint; name a directory such as "
                "OUTPUT_DIR/checkpoints/step_00000100"
            )
    assert name is not None
    step = int(name[1])
    if config.max_steps is not None and config.max_steps <= step:
        raise ValueError(
            f"max_steps={config.max_steps} is over: the steps of resume_from={config.resume_from} count, which are "
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
