"""Runs that go on from another run's checkpoint with other data."""

from __future__ import annotations

import shutil

import pytest
import torch
from streampack_recipes.full_finetune import train
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader
from torch.optim.lr_scheduler import LambdaLR, StepLR

from streampack.training.checkpoint import Checkpoints
from streampack.training.phase import advance
from tests.harness.processes import run_ranks
from tests.harness.tiny import losses, mixed_config, numbers, tiny_config

FIRST = {"max_steps": 6, "checkpoint_every": 6, "data.max_seq_len": 16, "data.overlong": "split"}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Return the checkpoint of a run of 6 steps with short packs."""
    folder = tmp_path_factory.mktemp("first")
    train(tiny_config(folder, **FIRST))
    return folder / "out" / "checkpoints" / "step_00000006"


def optimizer_steps(path):
    """Return how many steps the states of AdamW in a checkpoint count."""
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    found = {name: torch.zeros(()) for name in names if name.endswith(".step")}
    state_dict_loader.load(found, checkpoint_id=path, no_dist=True)
    return {int(value) for value in found.values()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_second_phase_goes_on_with_model_optimizer_and_step(tmp_path, first):
    config = mixed_config(tmp_path, max_steps=10, checkpoint_every=2, resume_from=str(first))
    result = train(config)
    assert result["step"] == 10
    assert list(losses(tmp_path)) == [7, 8, 9, 10]
    assert result["held_out"][0][0] == 6
    assert result["ledger"].packs == 4 * 4, "its data began anew"
    rates = numbers(tmp_path, "lr")
    whole = mixed_config(tmp_path / "whole", max_steps=10, validation=None)
    train(whole)
    assert rates == {step: rate for step, rate in numbers(tmp_path / "whole", "lr").items() if step > 6}
    assert optimizer_steps(tmp_path / "out" / "checkpoints" / "step_00000010") == {10}
    alone = numbers(tmp_path / "whole", "loss")
    assert numbers(tmp_path)[7] < alone[1] - 0.2, "the model had learned in the first phase"


def test_a_second_phase_is_resumed_from_its_own_checkpoints(tmp_path, first):
    # Without validation, because rows held out would be missing from the training data.
    config = tiny_config(
        tmp_path, max_steps=12, log_every=1, resume=True, resume_from=str(first), validation=None
    )
    train(config)
    expected = losses(tmp_path)
    shutil.rmtree(tmp_path / "out")
    config.max_steps = 8
    config.lr_scheduler = None
    train(config)
    config.max_steps = 9
    train(config)
    assert list(losses(tmp_path)) == [7, 8, 9]
    assert numbers(tmp_path)[7] == pytest.approx(float(expected[7]), rel=1e-5)


def phase(config):
    return train(config)["step"]


def test_a_second_phase_on_two_ranks_has_the_same_losses(tmp_path, first):
    settings = {"max_steps": 9, "validation": None, "log_every": 1, "resume_from": str(first)}
    train(tiny_config(tmp_path / "one", **settings))
    assert run_ranks(phase, 2, tiny_config(tmp_path / "two", **settings)) == [9, 9]
    assert numbers(tmp_path / "two") == pytest.approx(numbers(tmp_path / "one"), rel=1e-5)


def test_settings_of_the_optimizer_are_those_of_the_second_phase(tmp_path, first):
    changes = {
        "optimizer.lr": 0.003,
        "lr_scheduler": None,
        "max_steps": 8,
        "validation": None,
        "log_every": 1,
    }
    train(tiny_config(tmp_path, resume_from=str(first), **changes))
    assert numbers(tmp_path, "lr") == {7: 0.003, 8: 0.003}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "",
            {},
            r"checkpoints is no checkpoint; name a directory such as OUTPUT_DIR/checkpoints/step_00000100",
        ),
        ("step_00000007", {}, "step_00000007 is no checkpoint"),
        (
            "step_00000006",
            {"max_steps": 6},
            "max_steps=6 is over: the steps of resume_from=.* count, which are 6",
        ),
    ],
)
def test_what_cannot_go_on_is_refused(tmp_path, first, name, changes, message):
    config = tiny_config(tmp_path, resume_from=str(first.parent / name), **changes)
    with pytest.raises(ValueError, match=message):
        train(config)


def stream_of(path):
    return torch.load(path / "run.pt")["stream"]["lanes"]


def test_a_second_phase_reads_on_behind_the_first_if_asked(tmp_path, first):
    before = stream_of(first)
    places = {}
    for continued in (False, True):
        folder = tmp_path / str(continued)
        settings = {"checkpoint_every": 1, "resume_from": str(first), "log_every": 1}
        if continued:
            settings["continue_data"] = True
        train(tiny_config(folder, max_steps=9, **settings))
        lanes = stream_of(folder / "out" / "checkpoints" / "step_00000009")
        places[continued] = {lane: (each["epoch"], each["cursor"]) for lane, each in lanes.items()}
        assert sum(lane["ledger"][0] for lane in lanes.values()) > 0
    assert all(places[True][lane] >= (each["epoch"], each["cursor"]) for lane, each in before.items())
    assert places[True] != places[False]
    # It is resumed from its own checkpoints, with the same losses.
    expected = losses(tmp_path / "True")
    config = tiny_config(tmp_path / "again", max_steps=8, resume=True, **settings)
    config.lr_scheduler = None
    train(config)
    config.max_steps = 9
    train(config)
    assert list(losses(tmp_path / "again")) == [7, 8, 9]
    assert list(expected) == [7, 8, 9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"resume_from": None},
            "continue_data=True reads on behind another run; name its checkpoint with resume_from",
        ),
        (
            {"data.method": "random_padding"},
            "continue_data=True reads a stream on, and data.method=random_padding",
        ),
        ({"validation": None}, "the state was made with corpus"),
        ({"seed": 5}, "the state was made with seed"),
    ],
)
def test_data_that_cannot_be_read_on_are_refused(tmp_path, first, changes, message):
    settings = {"resume_from": str(first), "continue_data": True, "max_steps": 8, **changes}
    with pytest.raises(ValueError, match=message):
        train(tiny_config(tmp_path, **settings))


@pytest.mark.parametrize(
    "make", [lambda o: LambdaLR(o, lambda n: 1 / (n + 1)), lambda o: StepLR(o, step_size=2, gamma=0.5)]
)
def test_an_advanced_schedule_is_where_a_stepped_one_is(make):
    rates = []
    for advanced in (False, True):
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        schedule = make(optimizer)
        if advanced:
            advance(schedule, 5)
        else:
            for _ in range(5):
                optimizer.step()
                schedule.step()
        rates.append(schedule.get_last_lr())
    assert rates[0] == rates[1]


def test_the_first_phase_stays_as_it_was(tmp_path, first):
    before = {path: path.stat().st_mtime_ns for path in first.parent.rglob("*")}
    train(tiny_config(tmp_path, max_steps=7, validation=None, resume_from=str(first)))
    assert before == {path: path.stat().st_mtime_ns for path in first.parent.rglob("*")}
    assert Checkpoints(first.parent).steps() == [6]
