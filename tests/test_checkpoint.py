import pytest
import torch
from torch import nn

from streampack.training.checkpoint import Checkpoints


def trained(seed, steps=3):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()


def test_model_and_optimizer_come_back_and_train_on_the_same(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    model, optimizer = trained(1)
    checkpoints.save(3, model=model, optimizer=optimizer, run={"step": 3, "stream": {"lanes": {0: b"x"}}})
    other, other_optimizer = trained(2, steps=0)
    run = checkpoints.load(3, model=other, optimizer=other_optimizer)
    assert run == {"step": 3, "stream": {"lanes": {0: b"x"}}}
    for _ in range(2):
        step(model, optimizer)
        step(other, other_optimizer)
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def test_keeps_the_newest(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    model, optimizer = trained(1)
    for number in (5, 10, 15):
        checkpoints.save(number, model=model, optimizer=optimizer, run={})
    assert checkpoints.steps() == [10, 15]


def test_what_was_not_finished_does_not_count(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    model, optimizer = trained(1)
    checkpoints.save(5, model=model, optimizer=optimizer, run={"good": 1})

    def dies(*_args, **_kwargs):
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        broken.setattr(torch, "save", dies)
        with pytest.raises(RuntimeError, match="step_00000010 could not be written: rank 0: disk full"):
            checkpoints.save(10, model=model, optimizer=optimizer, run={})
    assert checkpoints.steps() == [5]
    assert checkpoints.load(5, model=model, optimizer=optimizer) == {"good": 1}
    checkpoints.save(10, model=model, optimizer=optimizer, run={})  # over the remains
    assert checkpoints.steps() == [5, 10]


def test_no_folder_no_checkpoints(tmp_path):
    assert Checkpoints(tmp_path / "none").steps() == []


def test_run_files_hold_plain_values_only(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    model, optimizer = trained(1)
    checkpoints.save(1, model=model, optimizer=optimizer, run={"bad": Checkpoints(tmp_path)})
    with pytest.raises(Exception, match="weights_only|Weights only"):
        checkpoints.load(1, model=model, optimizer=optimizer)
