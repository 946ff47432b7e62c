"""Ranks join and leave a `World`, its collectives work and fail on all of them, and they end with their launcher."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from streampack import cli
from streampack.distributed.rank_sync import OtherRankFailed  # private: an error that users see
from streampack.storage.folders import lock_folder  # private: to ask whether the run still holds its folder
from streampack.training.world import OTHER_FILES, World, end_with_launcher, join_world
from tests.harness.processes import RankError, open_store, run_ranks
from tests.harness.raising import fail
from tests.harness.tiny import losses, tiny_config
from tests.harness.workers import gone

CPU = torch.device("cpu")


# Collectives.


def test_a_single_process_exchanges_nothing():
    with join_world(CPU) as world:
        assert world == World()
        assert not dist.is_initialized()
        with world.raise_on_all(), world.main_first():
            assert world.all_reduce(torch.ones(2)).tolist() == [1, 1]
            assert world.run_on_main(lambda: 3, of="numbers") == 3


def call_every_collective(folder):
    with join_world(CPU) as world:
        found = [world.gather(f"rank {world.rank}"), world.broadcast(world.rank)]
        found.append(world.all_reduce(torch.tensor([1.0, world.rank])).tolist())
        with world.main_first():
            found.append(sorted(path.name for path in Path(folder).iterdir()))
            (Path(folder) / f"{world.rank}").touch()
        try:
            with world.raise_on_all():
                if world.rank == 1:
                    raise OSError("disk full")
        except (OSError, OtherRankFailed) as error:
            found.append((type(error), str(error)))
        found.append(world.run_on_main(lambda: f"by rank {world.rank}", of="the same"))
        for failing in (0, 1):
            try:
                with world.main_first():
                    if world.rank == failing:
                        raise OSError("no file")
            except (OSError, OtherRankFailed) as error:
                found.append((type(error), str(error)))
        for of in ("the same", f"rank {world.rank}'s"):
            try:
                world.run_on_main(lambda: 1 // world.rank, of=of)
            except (ZeroDivisionError, ValueError, OtherRankFailed) as error:
                found.append((type(error), str(error)))
    assert not dist.is_initialized()
    return found


def test_every_collective_on_two_ranks(tmp_path):
    first, second = run_ranks(call_every_collective, 2, tmp_path)
    assert first[:3] == second[:3] == [["rank 0", "rank 1"], 0, [2.0, 1.0]]
    assert (first[3], second[3]) == ([], ["0"])
    assert first[4] == (OtherRankFailed, "rank 1 failed: OSError: disk full")
    assert second[4] == (OSError, "disk full")
    assert first[5] == second[5] == "by rank 0"
    failed = [(OSError, "no file"), (OtherRankFailed, "rank 1 failed: OSError: no file")]
    assert first[6:8] == failed
    assert second[6:8] == [(OtherRankFailed, "rank 0 failed: OSError: no file"), (OSError, "no file")]
    assert first[8][0] is ZeroDivisionError
    assert second[8] == (OtherRankFailed, f"rank 0 failed: ZeroDivisionError: {first[8][1]}")
    refused = "rank 1 reads rank 1's, and rank 0 rank 0's; all ranks must read the same corpus"
    assert first[9] == second[9] == (ValueError, refused)


def fail_in_training(config):
    from streampack_recipes import full_finetune

    step = torch.optim.AdamW.step
    steps = []

    def breaks(optimizer, *args):
        steps.append(1)
        if os.environ["RANK"] == "1" and len(steps) == 3:
            raise ValueError("broken on purpose")
        return step(optimizer, *args)

    torch.optim.AdamW.step = breaks
    try:
        full_finetune.train(config)
    except Exception as error:
        return type(error).__name__, time.time(), dist.is_initialized()


def test_when_a_rank_fails_the_others_do_not_wait(tmp_path):
    (_, there, joined), (name, here, joined_too) = run_ranks(
        fail_in_training, 2, tiny_config(tmp_path, save_every_n_steps=None)
    )
    assert name == "ValueError"
    assert there - here < 10, "the timeout is 600 s"
    assert not joined
    assert not joined_too


def die_after_joining(attempt):
    with join_world(CPU, timeout=20) as world:
        if attempt < 2:
            os._exit(9)
        return world.gather(world.rank)


def test_restarted_ranks_do_not_connect_to_dead_ones():
    """As under torchrun with --max-restarts, which keeps the store; also with fewer ranks than before."""
    store = open_store()
    for attempt, ranks in (0, 3), (1, 2):
        with pytest.raises(RankError, match="exit code 9"):
            run_ranks(die_after_joining, ranks, attempt, store=store)
    assert run_ranks(die_after_joining, 3, 2, store=store) == [[0, 1, 2]] * 3


def join_with_few_files():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    with join_world(CPU) as world:
        return world.gather(resource.getrlimit(resource.RLIMIT_NOFILE))


def test_ranks_may_open_as_many_files_as_their_connections_need():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert run_ranks(join_with_few_files, 2) == [[(3 + OTHER_FILES, hard)] * 2] * 2


def join_without_the_last(size):
    if int(os.environ["RANK"]) < size - 1:
        with join_world(CPU, timeout=1):
            pass


def test_the_error_names_a_rank_that_does_not_join():
    with pytest.raises(RankError, match=r"TimeoutError: ranks \[2\] of 3 did not join within 1 s"):
        run_ranks(join_without_the_last, 3, 3)


def wait_until(condition, what, process=None, *, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def run_rank(folder):
    (folder / "pid").write_text(str(os.getpid()))
    end_with_launcher()
    (folder / "ready").touch()
    time.sleep(120)


def run_launcher(folder):
    if rank := os.fork():
        os.waitpid(rank, 0)
    else:
        os.setsid()
        run_rank(folder)


def start_rank(folder):
    """Start a launcher and its rank; return the launcher and the rank's pid, once the rank is ready."""
    launcher = multiprocessing.get_context("fork").Process(target=run_launcher, args=(folder,))
    launcher.start()
    wait_until((folder / "ready").exists, "the rank did not start")
    return launcher, int((folder / "pid").read_text())


@pytest.fixture
def as_under_torchrun(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")


def test_a_rank_ends_with_a_launcher_that_is_killed(tmp_path, as_under_torchrun):
    launcher, rank = start_rank(tmp_path)
    assert not gone([rank], within=0)
    launcher.kill()
    launcher.join()
    assert gone([rank], within=60)


def test_a_rank_without_its_launchers_store_does_not_wait(monkeypatch):
    with socket.socket() as ears:
        ears.bind(("localhost", 0))
        port = ears.getsockname()[1]
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    for name, value in (rank | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    refused = rf"store at localhost:{port} has ended, and this rank"
    with pytest.raises(ConnectionRefusedError, match=refused), join_world(torch.device("cpu"), timeout=600):
        pass


# `streampack run` with torchrun in its process.


def failed(rank, code, told=""):
    return partial(fail, ChildFailedError("recipe", {rank: ProcessFailure(rank, 123, code, told)}))


@pytest.fixture
def launch(monkeypatch):
    def launched(ends, *words):
        monkeypatch.setattr("torch.distributed.run.run", lambda _: ends())
        return cli.main(["run", "--nproc_per_node", "2", "dpo", "--config", "quickstart", *words])

    return launched


def test_torchrun_does_not_repeat_errors_of_ranks(tmp_path, capsys, launch):
    told = tmp_path / "error.json"
    told.write_text(json.dumps({"message": "error: no file", "timestamp": 1}))
    run = failed(0, 2, str(told))
    assert launch(run) == 2, "the rank's own"
    assert capsys.readouterr().err == ""
    told.unlink()  # a mistake is printed, and not told to torchrun
    assert launch(run) == 2
    assert capsys.readouterr().err == ""
    with pytest.raises(ChildFailedError):
        launch(run, "--traceback")


@pytest.mark.parametrize("words", [[], ["--traceback"]])
def test_a_signal_to_torchrun_or_to_a_rank_decides_the_exit_status(launch, words):
    interrupted = partial(fail, SignalException("got SIGINT", signal.SIGINT))
    for run, status in (interrupted, 130), (failed(0, 143), 143):
        assert launch(run, *words) == status


def test_a_rank_that_was_killed_is_named(capsys, launch):
    assert launch(failed(1, -9)) == 1
    said = "rank 1 ended with exit code -9: Signal 9 (SIGKILL) received by PID 123\n"
    assert capsys.readouterr().err == said


# The commands of docs/guides/several_devices.md, as printed.

SCRIPTS = Path(sys.executable).parent


@pytest.fixture
def shell(tmp_path):
    processes = []

    def start(command):
        env = os.environ | {
            "PYTHONPATH": str(Path.cwd()),
            "OMP_NUM_THREADS": "1",
            "STREAMPACK_TRUST": "tests",
        }
        env["PATH"] = f"{SCRIPTS}{os.pathsep}{env['PATH']}"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=tmp_path, env=env, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def ranks_of(folder):
    """Processes that run a recipe in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == folder and b"full_finetune" in (
                process / "cmdline"
            ).read_bytes():
                found.append(int(process.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="finds processes through /proc")
def test_the_guides_kill_and_resume(tmp_path, shell):
    text = Path("docs/guides/several_devices.md").read_text()
    kill, resume = re.search(
        r"\n(timeout -s KILL .*)\n(tune run .* resume_from_checkpoint=True)\n", text
    ).groups()
    assert "KILL 60 tune run --nproc_per_node 2" in kill
    # So long that it is not over when it is killed, and with a rate that depends on no last step.
    settings = {"max_steps": 100_000, "lr_scheduler": None, "validation": None, "num_workers": 1}
    OmegaConf.save(tiny_config(tmp_path, **settings, **{"data.num_lanes": 4}), tmp_path / "my.yaml")
    # Killed as `timeout` does it, once there is something to resume from: on a busy machine a minute may be too short.
    killed = shell(kill.replace("KILL 60", "KILL 600"))
    checkpoints = tmp_path / "out" / "checkpoints"
    wait_until((checkpoints / "step_00000050").exists, "no checkpoint", killed, seconds=300)
    wait_until(lambda: max(losses(tmp_path)) > 52, "no step after it", killed)
    first = ranks_of(tmp_path)
    assert len(first) >= 5, "the launcher, two ranks, and a worker of each"

    with (
        pytest.raises(ValueError, match=r"/out is in use by process \d+ on ") as refused,
        lock_folder(tmp_path / "out", way_out="-", patience=0),
    ):
        pass
    assert int(re.search(r"in use by process (\d+)", str(refused.value))[1]) in first

    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=120)
    wait_until(lambda: not ranks_of(tmp_path), f"of {first}, {ranks_of(tmp_path)} outlived their launcher")
    before = losses(tmp_path)
    newest = max(int(path.name[5:]) for path in checkpoints.glob("step_????????"))

    (tmp_path / "out" / "logs" / "log.txt").unlink()
    resumed = shell(f"{resume} max_steps={newest + 60}")
    said, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0
    assert f"continuing from step {newest} of {newest + 60}\n" in said
    after = losses(tmp_path)
    assert list(after) == list(range(newest + 1, newest + 61))
    again = [step for step in after if step in before]
    assert again, "it was killed right at a checkpoint"
    assert [float(after[step]) for step in again] == pytest.approx(
        [float(before[step]) for step in again], 1e-5
    )


@pytest.mark.slow
def test_ranks_print_a_mistake_and_torchrun_is_silent(tmp_path, shell):
    """Each rank prints it at most once; the first that ends may end the other before it does."""
    OmegaConf.save(tiny_config(tmp_path), tmp_path / "my.yaml")
    words = "full_finetune --config my.yaml data.source.paths=nowhere.jsonl"
    run = shell(f"streampack run --nproc_per_node 2 {words}")
    _, said = run.communicate(timeout=120)
    assert run.returncode == 1
    lines = said.splitlines()
    found = [re.match(r"error( \(rank 1\))?: no file matches '\S*nowhere.jsonl'", line) for line in lines]
    assert all(found), lines
    assert 1 <= len({each[1] for each in found}) == len(found)
