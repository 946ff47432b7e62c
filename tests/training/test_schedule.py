import torch
from torch.optim.lr_scheduler import LambdaLR

from streampack.training.schedule import restore_schedule


def make(rate=1.0):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    return optimizer, LambdaLR(optimizer, lambda step: step / 10)


def test_the_first_step_after_a_resume_has_the_rate_of_its_step():
    optimizer, scheduler = make()
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    other, restored = make()
    restore_schedule(restored, scheduler.state_dict())
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.4
    other.step()
    restored.step()
    assert other.param_groups[0]["lr"] == 0.5
