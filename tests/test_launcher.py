"""Ranks of a killed launcher end, whenever it is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from streampack.training.distributed import join_world
from streampack.training.launcher import INTERVAL

LAUNCHER = """
import os, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], start_new_session=True)
rank.wait()
"""
RANK = """
import os, sys, time
from pathlib import Path
from streampack.training.launcher import end_with_launcher
folder, orphan = Path(sys.argv[1]), sys.argv[2] == "orphan"
parent = os.getppid()
(folder / "pid").write_text(str(os.getpid()))
(folder / "started").touch()
while orphan and os.getppid() == parent:
    time.sleep(0.01)
try:
    end_with_launcher()
except OSError as error:
    (folder / "said").write_text(str(error))
    sys.exit(1)
(folder / "ready").touch()
time.sleep(120)
"""


def wait_until(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def lives(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat")
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def launch(folder, *, when="alive"):
    """(launcher, pid of its rank), once the rank is ready."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK, str(folder), when],
        env=os.environ | {"PYTHONPATH": str(Path.cwd())},
    )
    ready = folder / ("started" if when == "orphan" else "ready")
    wait_until(ready.exists, "the rank did not start")
    return launcher, int((folder / "pid").read_text())


@pytest.fixture(autouse=True)
def as_under_torchrun(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")


def test_a_rank_ends_with_a_launcher_that_is_killed(tmp_path):
    launcher, rank = launch(tmp_path)
    assert lives(rank)
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not lives(rank), f"rank {rank} outlived its launcher")


@pytest.mark.skipif(not Path("/proc/self/exe").exists(), reason="asks /proc who the parent is")
def test_a_rank_whose_launcher_was_killed_before_it_joined_ends(tmp_path):
    launcher, rank = launch(tmp_path, when="orphan")
    launcher.kill()
    launcher.wait()
    wait_until(lambda: not lives(rank), f"rank {rank} outlived its launcher")
    assert (tmp_path / "said").read_text().startswith("the torchrun that launched this rank was killed")


def test_what_torchrun_did_not_start_may_outlive_its_parent(tmp_path, monkeypatch):
    """A rank that a shell started with nohup, for one."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    launcher, rank = launch(tmp_path)
    try:
        launcher.kill()
        launcher.wait()
        time.sleep(3 * INTERVAL)
        assert lives(rank)
    finally:
        os.kill(rank, signal.SIGKILL)


def test_a_rank_whose_launcher_keeps_no_store_any_more_does_not_wait(monkeypatch):
    with socket.socket() as ears:
        ears.bind(("localhost", 0))
        port = ears.getsockname()[1]
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    rank = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    for name, value in (rank | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    refused = rf"store at localhost:{port} has ended, and this rank"
    with pytest.raises(ConnectionRefusedError, match=refused), join_world(torch.device("cpu"), timeout=600):
        pass
