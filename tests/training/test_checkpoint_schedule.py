"""`restore_schedule`: the learning rate after a resume."""

import torch
from torch.optim.lr_scheduler import LambdaLR

from streampack.training.checkpoint import restore_schedule


def schedule(rate=1.0):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    return optimizer, LambdaLR(optimizer, lambda step: step / 10)


def test_a_restored_schedule_sets_the_rate_of_its_step():
    optimizer, scheduler = schedule()
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    other, restored = schedule()
    restore_schedule(restored, scheduler.state_dict())
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.4
    other.step()
    restored.step()
    assert other.param_groups[0]["lr"] == 0.5
