"""Checkpoints of a run: kept, replaced, cut off, saved in the background, by several ranks; and its schedule."""

import errno
import itertools
import os
import resource
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from streampack import IterablePackedDataset, PackedDataLoader
from streampack.training.checkpoint import Checkpoints
from streampack.training.schedule import step_schedule, total_steps
from streampack.training.world import World, join_world
from tests.harness.processes import run_ranks
from tests.harness.runs import die_at


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


def test_the_newest_checkpoints_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    model, optimizer = trained(1)
    for number in (10, 20, 30, 37):
        checkpoints.save(number, model=model, optimizer=optimizer, run={})
    assert checkpoints.steps() == [30, 37]


@pytest.mark.parametrize("run", [{}, {"much": "x" * 100_000}])
def test_a_limit_of_the_system_is_named_not_the_librarys_error(tmp_path, run):
    """torch.save of a file that cannot grow raises "[enforce fail at inline_container.cc:672]"."""
    checkpoints = Checkpoints(tmp_path)
    model, optimizer = trained(1)
    checkpoints.save(5, model=model, optimizer=optimizer, run={"good": 1})
    large = nn.Linear(100, 100)
    state = {"model": large, "optimizer": torch.optim.AdamW(large.parameters()), "run": run}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(RuntimeError) as raised:
            checkpoints.save(10, **state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "step_00000010 could not be written: " in str(raised.value)
    assert str(raised.value).endswith("File too large; the newest complete checkpoint is that of step 5")
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]
    assert checkpoints.load(5, model=model, optimizer=optimizer) == {"good": 1}
    checkpoints.save(10, **state)  # over the remains
    assert checkpoints.steps() == [5, 10]


def test_run_files_hold_plain_values_only(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    model, optimizer = trained(1)
    checkpoints.save(1, model=model, optimizer=optimizer, run={"bad": Checkpoints(tmp_path)})
    with pytest.raises(Exception, match="weights_only|Weights only"):
        checkpoints.load(1, model=model, optimizer=optimizer)


def without(name):
    """Return a function that removes the files of this name from a checkpoint, and gives the model back."""
    return lambda folder, model: [path.unlink() for path in folder.rglob(name)] and model


@pytest.mark.parametrize(("change", "message"), [
    (lambda folder, model: nn.Sequential(nn.Linear(4, 9), nn.Linear(9, 2)), "could not be read: .*Size mismatch"),
    (lambda folder, model: nn.Sequential(*model, nn.Linear(2, 2)), "could not be read: .*2.weight"),
    (without("*.distcp"), "could not be read: .*No such file"),
    (lambda folder, model: [p.write_bytes(b"x") for p in folder.rglob(".metadata")] and model, "could not be read"),
    (without("run.pt"), "could not be read: No such file or directory: .*run.pt"),
])  # fmt: skip
def test_the_error_names_a_checkpoint_that_does_not_load(tmp_path, change, message):
    model, optimizer = trained(1)
    Checkpoints(tmp_path).save(1, model=model, optimizer=optimizer, run={})
    other = change(tmp_path, model)
    with pytest.raises(RuntimeError, match=f"step_00000001 {message}"):
        Checkpoints(tmp_path).load(1, model=other, optimizer=torch.optim.AdamW(other.parameters()))


# Kills. The process really ends, so that no handler can clean up.


def crash_everywhere(folder, every):
    """Save step 5, then die at every n-th point of saving step 10; return what was left each time."""
    outcomes = []
    for number in itertools.count(1, every):
        place = Path(folder) / str(number)
        model, optimizer = trained(1)
        checkpoints = Checkpoints(place, keep=1)
        checkpoints.save(5, model=model, optimizer=optimizer, run={"step": 5})
        step(model, optimizer)
        journal = os.open(place.with_suffix(".journal"), os.O_WRONLY | os.O_CREAT)
        child = os.fork()
        if child == 0:
            die_at(number, journal)
            checkpoints.save(10, model=model, optimizer=optimizer, run={"step": 10})
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.close(journal)
        other, other_optimizer = trained(2, steps=0)
        newest = max(checkpoints.steps(), default=None)
        run = checkpoints.load(newest, model=other, optimizer=other_optimizer)
        weights = [value.tolist() for value in other.parameters()]
        step(other, other_optimizer)
        checkpoints.save(15, model=other, optimizer=other_optimizer, run={})
        left = sorted(path.name for path in place.iterdir())
        kinds = place.with_suffix(".journal").read_text().split()
        outcomes.append((kinds[-1], newest, run, weights, left))
        if code == 0:
            break
        assert code == 9
    return outcomes


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_during_a_save_leaves_the_previous_or_the_new_checkpoint(tmp_path, every):
    [outcomes] = run_ranks(crash_everywhere, 1, tmp_path, every)
    model, optimizer = trained(1)
    whole = {5: [value.tolist() for value in model.parameters()]}
    step(model, optimizer)
    whole[10] = [value.tolist() for value in model.parameters()]
    if every == 1:
        kinds = Counter(kind for kind, *_ in outcomes)
        assert kinds["write"] >= 5, kinds  # model, optimizer, metadata, run
        assert kinds["fsync"] >= 5, kinds  # three files, two folders
        assert kinds["rename"] >= 3, kinds  # the metadata's, the new one's, the old one's
    newest = [step for _, step, *_ in outcomes]
    assert newest == sorted(newest)
    assert set(newest) == {5, 10}
    for _, step_, run, weights, left in outcomes:
        assert run == {"step": step_}
        assert weights == whole[step_]
        assert left == ["step_00000015"]


# Background saves.


@pytest.fixture
def held(monkeypatch):
    """Hold DCP's writes until this event is set."""
    released = threading.Event()
    write_data = FileSystemWriter.write_data

    def waits(*args):
        assert released.wait(20)
        return write_data(*args)

    monkeypatch.setattr(FileSystemWriter, "write_data", waits)
    return released


def test_a_background_save_holds_the_state_of_its_step(tmp_path, held):
    checkpoints = Checkpoints(tmp_path, in_background=True)
    model, optimizer = trained(1)
    run = {"lanes": {0: b"before"}}
    checkpoints.save(3, model=model, optimizer=optimizer, run=run)
    before = [value.detach().clone() for value in model.parameters()]
    run["lanes"][0] = b"after"
    step(model, optimizer)
    assert checkpoints.steps() == []
    held.set()
    checkpoints.wait()
    assert checkpoints.steps() == [3]
    other, other_optimizer = trained(2, steps=0)
    assert checkpoints.load(3, model=other, optimizer=other_optimizer) == {"lanes": {0: b"before"}}
    for left, right in zip(before, other.parameters(), strict=True):
        assert torch.equal(left, right)
    step(other, other_optimizer)
    for left, right in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right), "the optimizer's state is of another step"


# Several ranks.


def sharded(seed, world, steps):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 2))  # 7 rows do not divide evenly over 2 or 3 ranks
    if world.size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world.size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def numbers(model):
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).tolist() for p in model.parameters()]


def save_on_ranks(folder):
    with join_world(torch.device("cpu")) as world:
        checkpoints = Checkpoints(folder, world=world, in_background=True)
        model, optimizer = sharded(1, world, steps=3)
        checkpoints.save(3, model=model, optimizer=optimizer, run={"rank": world.rank})
        step(model, optimizer)
        checkpoints.wait()
        step(model, optimizer)
        return numbers(model)


def load_on_ranks(folder):
    with join_world(torch.device("cpu")) as world:
        model, optimizer = sharded(2, world, steps=0)
        checkpoints = Checkpoints(folder, world=world)
        run = checkpoints.load(max(checkpoints.steps(), default=None), model=model, optimizer=optimizer)
        for _ in range(2):
            step(model, optimizer)
        return run, numbers(model)


def test_a_checkpoint_of_two_ranks_loads_on_any_number(tmp_path):
    expected, _ = run_ranks(save_on_ranks, 2, tmp_path)
    assert len(list(tmp_path.glob("step_00000003/*.distcp"))) == 2
    for ranks in (1, 3):
        for run, weights in run_ranks(load_on_ranks, ranks, tmp_path):
            assert run == {"rank": 0}
            assert weights[0] == [pytest.approx(row, rel=1e-6) for row in expected[0]]
            assert weights[2] == [pytest.approx(row, rel=1e-6) for row in expected[2]]


def fail_on_rank_1(folder, in_background):
    with join_world(torch.device("cpu")) as world:
        checkpoints = Checkpoints(folder, world=world, in_background=in_background)
        model, optimizer = sharded(1, world, steps=1)
        checkpoints.save(3, model=model, optimizer=optimizer, run={})
        checkpoints.wait()
        works, messages = FileSystemWriter.write_data, []
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EACCES):

            def fails(*_args, number=number):
                raise OSError(number, os.strerror(number))

            if world.rank == 1:
                FileSystemWriter.write_data = fails
            try:
                checkpoints.save(6, model=model, optimizer=optimizer, run={})
                checkpoints.wait()
            except RuntimeError as error:
                messages.append(str(error))
            world.gather(None)
            assert [path.name for path in folder.iterdir()] == ["step_00000003"]
        FileSystemWriter.write_data = works
        checkpoints.save(6, model=model, optimizer=optimizer, run={})
        checkpoints.wait()
        return messages, checkpoints.steps()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_of_one_rank_is_raised_on_all(tmp_path, in_background):
    what = f"checkpoint {tmp_path}/step_00000006 could not be written: rank 1: "
    left = "; the newest complete checkpoint is that of step 3"
    for messages, steps in run_ranks(fail_on_rank_1, 2, tmp_path, in_background):
        assert messages == [
            f"{what}No space left on device{left}",
            f"{what}Disk quota exceeded{left}",
            f"{what}Permission denied{left}",
        ]
        assert steps == [3, 6]


# The learning rate after a resume, and after the end.


def schedule(rate=1.0):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    return optimizer, LambdaLR(optimizer, lambda step: step / 10)


def test_fewer_max_steps_end_the_schedule_earlier_and_with_epochs_do_not():
    packs = IterablePackedDataset([{"tokens": [1], "labels": [1]}] * 400, max_seq_len=1, num_lanes=1)
    for epochs, steps in ((None, 20), (1, 50)):
        config = SimpleNamespace(
            epochs=epochs, max_steps=20, max_steps_per_epoch=None, most_steps=20, lr_scheduler=None
        )
        run = {"steps": 50, "asked": [epochs, 50, None, 4], "step": 10}
        assert total_steps(config, PackedDataLoader(packs, packs_per_step=4), world=World(), run=run) == steps


def test_after_its_last_step_a_schedule_stays_at_its_end(caplog):
    """The steps of a stream are estimated, and torchtune's cosine rises again after them."""
    optimizer, scheduler = schedule()
    rates = []
    for step in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        step_schedule(scheduler, step=step, steps=5)
    assert rates == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5]
    assert [record.getMessage().partition("of the learning")[0] for record in caplog.records] == [
        "the data continue after the 5 steps that the schedule "
    ]
