"""The schedule of the learning rate: for how many steps it is made, and where it resumes."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from streampack.instantiate import build
from streampack.loader.data_loader import PackedDataLoader
from streampack.training.config import RunConfig
from streampack.training.world import World

log = logging.getLogger(__name__)

PROBED_ROWS = 1024
"""Rows that are encoded for an estimate of an epoch or of what is cut off."""


def total_steps(config: RunConfig, loader: PackedDataLoader, *, world: World, run: Mapping[str, Any]) -> int:
    """Collective: return the steps that the learning rate's schedule is made for.

    They are ``max_steps``, or the steps of ``epochs`` if those are fewer, estimated from a sample of the rows. A
    resumed run (``run`` is the content of its checkpoint, ``loader`` has its state) keeps the number while the config
    asks for the same, so that its schedule does not jump. By ``epochs`` it never has fewer steps: the schedule would
    end before the data, and torchtune's cosine would rise again.
    """
    before: int = run["steps"]
    asked = asked_of(config, loader)
    if before and run["asked"] == asked:
        return before
    steps = config.most_steps
    if config.epochs is not None:
        # Only rank 0 reads the sample, so that a thousand ranks do not all read the same rows.
        packs = world.run_on_main(lambda: _packs_of_epoch(config, loader), of="an estimate")
        left = max(0, config.epochs * packs - loader.ledger().packs)
        if left < math.inf:
            epochs, rest = divmod(left, max(1, packs))  # no step mixes two epochs
            of_epoch, of_rest = (math.ceil(part / loader.packs_per_step) for part in (packs, rest))
            steps = min(steps, run["step"] + int(epochs) * of_epoch + of_rest)
        steps = max(before, steps)
    steps = int(steps)
    if before and steps != before and config.lr_scheduler is not None and world.is_main:
        log.warning(
            "the schedule of the learning rate was made for %d steps, and the run now continues to step %d: the "
            "schedule is made again for these, and the rate changes at once",
            before, steps,
        )  # fmt: skip
    return steps


def asked_of(config: RunConfig, loader: PackedDataLoader) -> list[int | None]:
    """Return what decides how many steps a run has."""
    return [config.epochs, config.max_steps, config.max_steps_per_epoch, loader.packs_per_step]


def _packs_of_epoch(config: RunConfig, loader: PackedDataLoader) -> float:
    """Return how many packs an epoch has; infinity if the source cannot tell, and ``max_steps`` ends the run."""
    try:
        lanes = loader.dataset.lanes_for(loader.rank_sync.data_world_size)
        return loader.dataset.estimate(rows=PROBED_ROWS, num_lanes=lanes).at_most
    except ValueError:
        if config.most_steps == math.inf:
            raise
        return math.inf


def build_schedule(
    config: RunConfig, optimizer: Any, *, steps: int, step: int, state: Mapping[str, Any] | None
) -> LRScheduler | None:
    """Build the config's schedule for ``steps``, as it is after ``step`` of them; None if it has none.

    ``state`` is that of the schedule in the checkpoint that the run resumes from, None if there is none.
    """
    inject = {"optimizer": optimizer, "num_training_steps": steps}
    scheduler: LRScheduler | None = build(config.lr_scheduler, inject=inject)
    if scheduler is not None and state is not None:
        restore_schedule(scheduler, state)
    elif scheduler is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler.step\(\)` before")
            for _ in range(step):
                scheduler.step()
    return scheduler


def restore_schedule(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Load the state of a schedule, and set the optimizer's rate.

    Building a scheduler sets the rate of step 0, and torch's ``load_state_dict`` does not undo that: the first step
    after a resume would use it.
    """
    scheduler.load_state_dict(dict(state))
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


def step_schedule(scheduler: LRScheduler | None, *, step: int, steps: int) -> None:
    """Advance a schedule that was made for ``steps``, after the step number ``step`` from 0; then stay at its end.

    The steps of a stream are estimated, and after its end torchtune's cosine rises again.
    """
    if scheduler is None:
        return
    if step < steps:
        scheduler.step()
    elif step == steps:
        log.warning(
            "the data continue after the %d steps that the schedule of the learning rate was made for: the rate stays "
            "at %s; for another, set more max_steps or epochs",
            steps, scheduler.get_last_lr(),
        )  # fmt: skip
