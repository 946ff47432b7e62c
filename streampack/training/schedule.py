"""Learning-rate schedules that go on where they stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


def restore_schedule(scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Load a schedule's state, and give the optimizer its rate back.

    Making a scheduler sets the rate of step 0, over whatever the optimizer was restored with, and torch's
    ``load_state_dict`` does not undo that: the first step after a resume would be taken at that rate.
    """
    scheduler.load_state_dict(dict(state))
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
