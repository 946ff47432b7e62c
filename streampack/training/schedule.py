"""The schedule of the learning rate: for how many steps it is made, and where it goes on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from streampack.instantiate import build
from streampack.training.config import RunConfig

log = logging.getLogger(__name__)


def build_schedule(
    config: RunConfig, optimizer: Any, *, steps: int, step: int, state: Mapping[str, Any] | None
) -> LRScheduler | None:
    """Build the config's schedule for ``steps``, as it is after ``step`` of them; None if it has none.

    Args:
        config: the run's.
        optimizer: whose rate it sets.
        steps: of the whole run.
        step: steps that were made.
        state: of the schedule in the checkpoint that the run goes on from, None if there is none.
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
    """Go on in a schedule that was made for ``steps``, after the step number ``step`` from 0; then stay at its end.

    The steps of a stream are estimated, and behind its end torchtune's cosine rises again.
    """
    if scheduler is None:
        return
    if step < steps:
        scheduler.step()
    elif step == steps:
        log.warning(
            "the data go on behind the %d steps that the schedule of the learning rate was made for: the rate stays at "
            "%s; to train on with another, set more max_steps or epochs",
            steps, scheduler.get_last_lr(),
        )  # fmt: skip
