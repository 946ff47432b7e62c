"""The folder of a run: locked, interrupted, resumed, finished."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from streampack_recipes.full_finetune import train

from streampack.distributed.world import World
from streampack.storage.locks import LOCK_FILE, lock_folder
from streampack.training import run_folder
from streampack.training.config import read_config
from streampack.training.run_folder import Interrupted, open_checkpoints
from tests.harness.tiny import interrupt_step, losses, tiny_config

HOLDER = """
import sys, time
from streampack.storage.locks import lock_folder
with lock_folder(sys.argv[1], way_out="-"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other_run():
    """Start a process that holds the lock of a folder."""
    processes = []

    def start(folder):
        env = os.environ | {"PYTHONPATH": str(Path.cwd())}
        command = [sys.executable, "-c", HOLDER, str(folder)]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout.readline() == "held\n"
        return processes[-1].pid

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("shared", ["output_dir", "checkpointer.output_dir"])
def test_a_second_run_in_one_folder_is_refused(tmp_path, monkeypatch, other_run, shared):
    config = tiny_config(tmp_path, resume=True, **{shared: str(tmp_path / "shared")})
    pid = other_run(tmp_path / "shared")
    monkeypatch.setattr(run_folder, "lock_folder", partial(lock_folder, patience=0))
    expected = (
        rf"/shared is in use by process {pid} on \S+, since .*; wait until it has ended, or choose another"
    )
    with pytest.raises(ValueError, match=expected):
        train(config)
    assert [path.name for path in (tmp_path / "shared").iterdir()] == [LOCK_FILE]


def written(folder):
    """Return time and content of every file but the lock."""
    files = [path for path in (folder / "out").rglob("*") if path.is_file() and path.name != LOCK_FILE]
    return {path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_resuming_a_finished_run_changes_nothing(tmp_path, capsys):
    config = tiny_config(tmp_path, lr_scheduler=None, max_steps=6, resume=True)
    result = train(config)
    out = capsys.readouterr().out
    assert f"no checkpoint in {tmp_path}/out/checkpoints: the run begins at step 0" in out
    before = written(tmp_path)
    assert train(config) == result
    said = capsys.readouterr().out
    assert said.startswith(
        f"{tmp_path}/out holds a run that is over: step 6, weights in {tmp_path}/out/epoch_0"
    )
    assert len(said.splitlines()) == 1
    config.max_steps = 5
    assert train(config) == result
    assert written(tmp_path) == before

    config.max_steps = 9
    capsys.readouterr()
    assert train(config)["step"] == 9
    assert "going on from step 6 of 9\n" in capsys.readouterr().out
    assert written(tmp_path) != before
    assert train(config)["step"] == 9


def test_a_run_by_epochs_is_finished_when_they_are_read(tmp_path, capsys):
    settings = {"rows": 60, "max_steps": None, "validation": None, "lr_scheduler": None, "resume": True}
    result = train(tiny_config(tmp_path, **settings, epochs=2))
    capsys.readouterr()
    assert train(tiny_config(tmp_path, **settings, epochs=2)) == result
    assert "is over" in capsys.readouterr().out
    longer = train(tiny_config(tmp_path, **settings, epochs=3))
    assert longer["ledger"].samples == 180
    assert f"going on from step {result['step']} of " in capsys.readouterr().out


@pytest.mark.parametrize("lost", ["finished.json", "epoch_0"])
def test_missing_weights_are_written_again(tmp_path, lost):
    """A run that was killed after its last checkpoint leaves none."""
    config = tiny_config(tmp_path, max_steps=4, validation=None, resume=True)
    train(config)
    weights = next((tmp_path / "out" / "epoch_0").glob("*.bin"))
    before = torch.load(weights, weights_only=True)
    path = tmp_path / "out" / lost
    path.unlink() if path.is_file() else [
        weights.unlink(),
        [p.unlink() for p in path.iterdir()],
        path.rmdir(),
    ]
    train(config)
    assert all(
        torch.equal(value, before[name]) for name, value in torch.load(weights, weights_only=True).items()
    )
    assert len(losses(tmp_path)) == 4


def test_a_newer_run_in_the_folder_is_not_finished(tmp_path):
    config = tiny_config(tmp_path, max_steps=4, checkpoint_every=None, validation=None)
    train(config)
    shutil.rmtree(tmp_path / "out" / "epoch_0")
    config.checkpoint_every = 2
    config.max_steps = 2
    train(config)
    note = tmp_path / "out" / "finished.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"step": 4}))  # as the first one left it
    config.max_steps, config.resume = 4, True
    train(config)
    assert sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())[-1] == "step_00000004"


def test_weights_without_checkpoints_are_not_overwritten(tmp_path):
    config = tiny_config(tmp_path, max_steps=3, checkpoint_every=None, validation=None)
    train(config)
    before = written(tmp_path)
    config.resume, config.max_steps = True, 4
    message = (
        rf"{tmp_path}/out/epoch_0 holds weights of an earlier run, and .*/out/checkpoints no checkpoint: this run "
        "would begin at step 0 and overwrite them; choose another output_dir, or remove the weights"
    )
    with pytest.raises(ValueError, match=message):
        train(config)
    assert written(tmp_path) == before
    shutil.rmtree(tmp_path / "out" / "epoch_0")
    assert train(config)["step"] == 4


@pytest.mark.parametrize(
    ("every", "rest"), [(4, ""), (None, ", and leaves none, because checkpoint_every is not set")]
)
def test_resume_without_a_checkpoint_prints_that_it_begins(tmp_path, capsys, every, rest):
    config = read_config(tiny_config(tmp_path, resume=True, checkpoint_every=every))
    assert open_checkpoints(config, world=World())[1] is None
    place = f"{tmp_path}/out/checkpoints"
    assert capsys.readouterr().out == f"no checkpoint in {place}: the run begins at step 0{rest}\n"


def test_a_run_keeps_every_nth_checkpoint(tmp_path):
    train(
        tiny_config(
            tmp_path, checkpoint_every=2, keep_checkpoints=1, keep_every=6, validation=None, max_steps=10
        )
    )
    assert [path.name[-2:] for path in sorted((tmp_path / "out" / "checkpoints").iterdir())] == ["06", "10"]


@pytest.mark.parametrize("every", [4, None])
def test_keep_every_is_a_multiple_of_checkpoint_every(tmp_path, every):
    with pytest.raises(
        ValueError, match=rf"keep_every=6 is no multiple of checkpoint_every={every}, and there"
    ):
        read_config(tiny_config(tmp_path, checkpoint_every=every, keep_every=6))


@pytest.mark.parametrize(
    ("step", "checkpoint_every", "message"),
    [
        (6, 4, "/out: interrupted; resume=True goes on from step 4, its newest checkpoint"),
        (
            3,
            4,
            r"interrupted before its first checkpoint \(checkpoint_every=4\); the same command begins anew",
        ),
        (3, None, "interrupted, and nothing was saved: checkpoint_every is not set; the same command begins"),
    ],
)
def test_ctrl_c_prints_how_to_resume(tmp_path, monkeypatch, step, checkpoint_every, message):
    interrupt_step(step, monkeypatch)
    with pytest.raises(Interrupted, match=message):
        train(tiny_config(tmp_path, checkpoint_every=checkpoint_every, validation=None))
