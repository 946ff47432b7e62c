"""The folder of a run: locked, interrupted, resumed, finished, exported, and continued by another run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from streampack_recipes.full_finetune import train
from torch.distributed.checkpoint import FileSystemReader, state_dict_loader

from streampack import cli
from streampack.training import run_folder
from streampack.training.run import Step
from streampack.training.run_folder import Interrupted
from streampack.training.weights import export
from tests.harness.processes import run_ranks
from tests.harness.raising import fail
from tests.harness.runs import Run, lora_run
from tests.harness.tiny import interrupt_step, lora_config, losses, mixed_config, numbers, tiny_config

LOCK_FILE = ".lock"
HOLDER = """
import sys, time
from streampack.storage.folders import lock_folder
with lock_folder(sys.argv[1], way_out="-"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other_run(tmp_path: Path) -> Iterator[int]:
    """Let a process hold the lock of the folder ``shared``; return its number."""
    env = os.environ | {"PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "shared")]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.kill()


@pytest.mark.parametrize("shared", ["output_dir", "checkpointer.output_dir"])
def test_a_second_run_in_one_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_run: int, shared: str
) -> None:
    config = tiny_config(tmp_path, resume_from_checkpoint=True, **{shared: str(tmp_path / "shared")})
    monkeypatch.setattr(run_folder, "lock_folder", partial(run_folder.lock_folder, patience=0))
    expected = rf"/shared is in use by process {other_run} on \S+, since .*; wait until it has ended, or choose another"
    with pytest.raises(ValueError, match=expected):
        train(config)
    assert [path.name for path in (tmp_path / "shared").iterdir()] == [LOCK_FILE]


# Finished runs.


def train_rank_by_rank(*configs: Any) -> list[str]:
    """Train each config, which differs between ranks; return the message of each."""
    said = []
    for of_ranks in configs:
        with pytest.raises(ValueError, match="give all ranks the same config") as found:
            train(of_ranks[int(os.environ["RANK"])])
        said.append(str(found.value))
    return said


def test_ranks_with_different_configs_say_so_before_they_train(tmp_path: Path) -> None:
    """Other learning rates would train a part of the model each, other numbers of steps would wait for one another."""
    plain = {"max_steps": 4, "collective_timeout": 40, "validation": None, "save_every_n_steps": None}
    changes = {
        "optimizer.lr": 1.0, "max_steps": 2, "clip_grad_norm": 3.0, "log_every_n_steps": 3,
        "validation": {"fraction": 0.1},
    }  # fmt: skip
    configs = [tiny_config(tmp_path, **plain)]
    configs += [tiny_config(tmp_path, **plain | {key: value}) for key, value in changes.items()]
    first, second = run_ranks(train_rank_by_rank, 2, *[(configs[0], other) for other in configs[1:]])
    assert first == second
    for said, key in zip(first, changes, strict=True):
        assert said.startswith(f"rank 1 has {key.partition('.')[0]}=")


def train_with_workers_of_its_own(config: Any) -> int:
    config.num_workers = config.seed = int(os.environ["RANK"])
    config.output_dir += "/." * config.num_workers
    step: int = train(config)["step"]
    return step


def test_machines_may_have_names_of_files_and_workers_of_their_own(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_steps=2, validation=None, save_every_n_steps=None)
    assert run_ranks(train_with_workers_of_its_own, 2, config) == [2, 2]


def written(folder):
    """Return time and content of every file but the lock."""
    files = [path for path in (folder / "out").rglob("*") if path.is_file() and path.name != LOCK_FILE]
    return {path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def config_of_copy(run: Run, folder: Path) -> Any:
    """Copy a run; return the config that resumes it on the same data."""
    config = tiny_config(
        run.copy_to(folder), resume_from_checkpoint=True, log_rows=True, keep_last_n_checkpoints=9
    )
    config.data.source.paths = str(run.folder / "rows.jsonl")
    return config


def test_resuming_a_finished_run_changes_nothing(
    tmp_path: Path, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of_copy(whole, tmp_path)
    before = written(tmp_path)
    for max_steps in (12, 11):
        config.max_steps = max_steps
        assert train(config) == {"step": 12}
        [said] = capsys.readouterr().out.splitlines()
        assert said.startswith(
            f"{tmp_path}/out holds a run that is over: step 12, weights in {tmp_path}/out/epoch_0"
        )
    with pytest.raises(ValueError, match="max_seq_len=32 and this dataset has max_seq_len=24"):
        train(OmegaConf.merge(config, {"max_steps": 13, "data": {"max_seq_len": 24}}))
    assert written(tmp_path) == before

    config.max_steps = 13
    assert train(config)["step"] == 13
    assert "continuing from step 12 of 13\n" in capsys.readouterr().out
    assert written(tmp_path) != before


@pytest.mark.parametrize("lost", ["finished.json", "epoch_0"])
def test_missing_weights_are_written_again(tmp_path: Path, whole: Run, lost: str) -> None:
    """A run that was killed after its last checkpoint leaves none."""
    config = config_of_copy(whole, tmp_path)
    before = files(tmp_path / "out" / "epoch_0")
    path = tmp_path / "out" / lost
    path.unlink() if path.is_file() else shutil.rmtree(path)
    train(config)
    require_equal(files(tmp_path / "out" / "epoch_0"), before)
    assert losses(tmp_path) == losses(whole.folder)


def test_weights_without_checkpoints_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path, max_steps=4, save_every_n_steps=None, validation=None)
    train(config)
    before = written(tmp_path)
    message = (
        rf"{tmp_path}/out/epoch_0 holds weights of an earlier run, and .*/out/checkpoints no checkpoint: this run "
        "would begin at step 0 and overwrite them; choose another output_dir, or remove the weights"
    )
    with pytest.raises(ValueError, match=message):
        train(OmegaConf.merge(config, {"resume_from_checkpoint": True, "max_steps": 5}))
    capsys.readouterr()
    train(OmegaConf.merge(config, {"resume_from_checkpoint": True}))
    assert (
        "it kept no checkpoint (save_every_n_steps), so to train on, begin another" in capsys.readouterr().out
    )
    assert written(tmp_path) == before


def test_a_run_that_continues_is_not_over(
    tmp_path: Path, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of_copy(whole, tmp_path)
    config.max_steps = 20
    with monkeypatch.context() as patched, pytest.raises(Interrupted, match="resumes from step 12"):
        patched.setattr(Step, "scale_gradients", lambda _: fail(KeyboardInterrupt()))
        train(config)
    assert not (tmp_path / "out" / "finished.json").exists()
    config.max_steps = 12
    assert train(config)["step"] == 12
    assert (tmp_path / "out" / "finished.json").exists()


def test_a_run_of_another_release_is_refused(tmp_path: Path, whole: Run) -> None:
    config = config_of_copy(whole, tmp_path)
    file = tmp_path / "out" / "checkpoints" / "step_00000012" / "run.pt"
    run = torch.load(file)
    run["settings"] = run.pop("optimizer_settings")
    torch.save(run | {"stream": run["stream"] | {"version": 4}}, file)
    with pytest.raises(ValueError, match="format 4, of another release"):
        train(OmegaConf.merge(config, {"max_steps": 13}))


# Interrupted runs.


@pytest.mark.parametrize(("step", "every", "message"), [
    (6, 4, "/out: interrupted; resume_from_checkpoint=True resumes from step 4, its newest checkpoint"),
    (3, 4, r"interrupted; there is no checkpoint yet \(save_every_n_steps=4\), and the same command restarts"),
])  # fmt: skip
def test_ctrl_c_prints_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, every: int, message: str
) -> None:
    interrupt_step(step, monkeypatch)
    with pytest.raises(Interrupted, match=message):
        train(tiny_config(tmp_path, save_every_n_steps=every, validation=None))


# Weights, exported while a run continues.


def files(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights in every file below a folder."""
    paths = [path for path in Path(folder).rglob("*") if path.suffix in (".bin", ".pt")]
    found = {str(path.relative_to(folder)): torch.load(path, weights_only=True) for path in paths}
    assert found
    return found


def require_equal(left, right):
    assert left.keys() == right.keys()
    for name, weights in left.items():
        assert weights.keys() == right[name].keys()
        for key, value in weights.items():
            assert torch.equal(value, right[name][key]), f"{name}: {key}"


@pytest.mark.parametrize("lora", [False, True])
def test_an_export_of_the_last_checkpoint_is_what_the_run_writes(
    tmp_path: Path, whole: Run, tmp_path_factory: pytest.TempPathFactory, lora: bool
) -> None:
    run = lora_run(tmp_path_factory) if lora else whole
    config = (lora_config if lora else tiny_config)(run.folder)
    before = {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}
    saved = export(run.checkpoint(run.result["step"]), config=config, out=tmp_path / "exported")
    assert set(saved) == {"weights"} | ({"adapters"} if lora else set())
    folders = {Path(folder).name for folder in saved.values()}
    assert {path.name for path in (tmp_path / "exported").iterdir()} == folders
    for folder in folders:
        require_equal(files(tmp_path / "exported" / folder), files(run.folder / "out" / folder))
    assert before == {path: path.stat().st_mtime_ns for path in run.folder.rglob("*")}

    with pytest.raises(ValueError, match="exported/epoch_0.* holds weights; choose another folder"):
        export(run.checkpoint(run.result["step"]), config=config, out=tmp_path / "exported")
    with pytest.raises(ValueError, match=f"{run.folder}/out is where the run itself writes its weights"):
        export(run.checkpoint(run.result["step"]), config=config, out=run.folder / "out")


def test_the_export_command(tmp_path: Path, whole: Run, capsys: pytest.CaptureFixture[str]) -> None:
    OmegaConf.save(tiny_config(whole.folder), tmp_path / "my.yaml")
    rest = ["--config", str(tmp_path / "my.yaml"), "--out", str(tmp_path / "exported")]
    assert cli.main(["export", str(whole.checkpoint(4)), *rest]) == 0
    assert f"weights      {tmp_path}/exported/epoch_0" in capsys.readouterr().out.splitlines()
    [early], [final] = (
        files(place / "epoch_0").values() for place in (tmp_path / "exported", whole.folder / "out")
    )
    assert not torch.equal(early["output.weight"], final["output.weight"])

    assert cli.main(["export", str(whole.folder / "out"), *rest]) == 1
    said = capsys.readouterr().err
    assert "/out is no checkpoint; name a directory such as OUTPUT_DIR/checkpoints/step_00000100" in said


# Phases: a run that continues from another run's checkpoint with other data.

FIRST = {"max_steps": 6, "save_every_n_steps": 6, "data.max_seq_len": 16, "data.overlong": "split"}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the checkpoint of a run of 6 steps with short packs, which no later phase may touch."""
    folder = tmp_path_factory.mktemp("first")
    train(tiny_config(folder, **FIRST))
    checkpoints = folder / "out" / "checkpoints"
    before = {path: path.stat().st_mtime_ns for path in checkpoints.rglob("*")}
    yield checkpoints / "step_00000006"
    assert before == {path: path.stat().st_mtime_ns for path in checkpoints.rglob("*")}


def optimizer_steps(path):
    """Return how many steps the states of AdamW in a checkpoint count."""
    names = FileSystemReader(path).read_metadata().state_dict_metadata
    found = {name: torch.zeros(()) for name in names if name.endswith(".step")}
    state_dict_loader.load(found, checkpoint_id=path, no_dist=True)
    return {int(value) for value in found.values()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_second_phase_continues_with_model_optimizer_and_step(tmp_path, first):
    config = mixed_config(tmp_path, max_steps=10, save_every_n_steps=2, resume_from=str(first))
    result = train(config)
    assert result["step"] == 10
    assert list(losses(tmp_path)) == [7, 8, 9, 10]
    assert result["held_out"][0][0] == 6
    assert result["ledger"].packs == 4 * 4, "its data restarted"
    rates = numbers(tmp_path, "lr")
    whole = mixed_config(tmp_path / "whole", max_steps=10, validation=None)
    train(whole)
    assert rates == {step: rate for step, rate in numbers(tmp_path / "whole", "lr").items() if step > 6}
    assert optimizer_steps(tmp_path / "out" / "checkpoints" / "step_00000010") == {10}
    alone = numbers(tmp_path / "whole", "loss")
    assert numbers(tmp_path)[7] < alone[1] - 0.2, "the model had learned in the first phase"


@pytest.mark.slow
def test_a_second_phase_on_two_ranks_resumes_from_its_own_checkpoints(tmp_path: Path, first: Path) -> None:
    """The settings of its optimizer are its own."""
    settings = {
        "validation": None,
        "resume_from_checkpoint": True,
        "resume_from": str(first),
        "optimizer.lr": 0.003,
    }
    settings |= {"lr_scheduler": None, "save_every_n_steps": 2}
    assert train(tiny_config(tmp_path / "one", max_steps=9, **settings))["step"] == 9
    for steps in (8, 9):
        assert (
            run_ranks(
                phase,
                2,
                tiny_config(tmp_path / "two", max_steps=steps, gradient_accumulation_steps=1, **settings),
            )
            == [steps] * 2
        )
    assert numbers(tmp_path / "two") == pytest.approx(numbers(tmp_path / "one"), rel=1e-5)
    assert numbers(tmp_path / "two", "lr") == dict.fromkeys((7, 8, 9), 0.003)


def phase(config):
    return train(config)["step"]


def stream_of(path):
    return torch.load(path / "run.pt")["stream"]["lanes"]


def test_a_second_phase_continues_the_data_of_the_first_if_asked(tmp_path: Path, first: Path) -> None:
    before, places = stream_of(first), {}
    settings = {"save_every_n_steps": 1, "resume_from": str(first), "lr_scheduler": None}
    for continued in (False, True):
        folder = tmp_path / str(continued)
        train(tiny_config(folder, max_steps=9, continue_data=continued, **settings))
        lanes = stream_of(folder / "out" / "checkpoints" / "step_00000009")
        places[continued] = {lane: tuple(each["reader"][:2]) for lane, each in lanes.items()}
        assert sum(lane["ledger"][0] for lane in lanes.values()) > 0
    assert all(places[True][lane] >= tuple(each["reader"][:2]) for lane, each in before.items())
    assert places[True] != places[False]
    # It is resumed from its own checkpoints, with the same losses.
    for steps in (8, 9):
        train(
            tiny_config(
                tmp_path / "again",
                max_steps=steps,
                resume_from_checkpoint=True,
                continue_data=True,
                **settings,
            )
        )
    assert losses(tmp_path / "again") == losses(tmp_path / "True")


@pytest.mark.parametrize(("changes", "message"), [
    ({"resume_from": ""}, "checkpoints is no checkpoint; name a directory such as OUTPUT_DIR/checkpoints/step_0000"),
    ({"resume_from": "step_00000007"}, "step_00000007 is no checkpoint"),
    ({"max_steps": 6}, "max_steps=6 is over: the steps of resume_from=.* count, which are 6"),
    ({"continue_data": True, "resume_from": None}, "continues the data of another run; name its checkpoint"),
    ({"continue_data": True, "validation": None}, "the state was made with corpus"),
    ({"continue_data": True, "seed": 5}, "the state was made with seed"),
])  # fmt: skip
def test_phases_that_cannot_be_are_refused(
    tmp_path: Path, first: Path, changes: dict[str, Any], message: str
) -> None:
    name = changes.get("resume_from", first.name)
    given = {**changes, "resume_from": None if name is None else str(first.parent / name)}
    with pytest.raises(ValueError, match=message):
        train(tiny_config(tmp_path, **{"max_steps": 8} | given))
