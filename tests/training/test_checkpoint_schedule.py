"""`restore_schedule`: the learning rate after a resume."""

import torch
from torch.optim.lr_scheduler import LambdaLR

from streampack.training.checkpoint import restore_schedule, step_schedule


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


def test_behind_its_last_step_a_schedule_stays_at_its_end(caplog):
    """The steps of a stream are estimated, and torchtune's cosine rises again behind them."""
    optimizer, scheduler = schedule()
    rates = []
    for step in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        step_schedule(scheduler, step=step, steps=5)
    assert rates == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5]
    assert [record.getMessage()[:52] for record in caplog.records] == [
        "the data go on behind the 5 steps that the schedule "
    ]
