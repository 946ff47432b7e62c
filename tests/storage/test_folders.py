"""Folders that files are written to: whole or not at all, and by one run at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

# private: the seams of all that writes to folders, which are token shards, scores, lists of files and runs
from streampack.storage import folders
from streampack.storage.folders import LOCK_FILE, lock_folder, write_whole

HOLDER = """
import sys, time
from streampack.storage.folders import lock_folder
with lock_folder(sys.argv[1], way_out="-"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def hold():
    holders = []

    def start(folder):
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder)],
            env=os.environ | {"PYTHONPATH": str(Path.cwd())},
            stdout=subprocess.PIPE,
            text=True,
        )
        holders.append(holder)
        assert holder.stdout.readline() == "held\n"
        return holder

    yield start
    for holder in holders:
        holder.kill()
        holder.communicate()


def test_a_folder_in_use_is_refused_by_the_name_of_its_owner(tmp_path, hold):
    owner = hold(tmp_path / "out")
    expected = (
        rf"^{tmp_path}/out is in use by process {owner.pid} on {re.escape(socket.gethostname())}, since "
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d; choose another folder$"
    )
    with (
        pytest.raises(ValueError, match=expected),
        lock_folder(tmp_path / "out", way_out="choose another folder", patience=0),
    ):
        pass


def test_a_crash_leaves_no_lock_behind(tmp_path, hold):
    owner = hold(tmp_path)
    owner.send_signal(signal.SIGKILL)
    with lock_folder(tmp_path, way_out="-", patience=30):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    with lock_folder(tmp_path, way_out="-", patience=0):
        pass


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", fails)
    with (
        pytest.warns(UserWarning, match=r"cannot be locked \(Function not implemented\): a second run"),
        lock_folder(tmp_path, way_out="-"),
    ):
        pass


def test_a_failed_write_keeps_the_old_content_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(tmp_path / "file", b"old")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "file", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}
