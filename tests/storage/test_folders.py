"""Folders that files are written to: whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streampack.storage.folders import Folder, LocalFolder, RemoteFolder, folder_at, write_file
from streampack.storage.remote import RemoteStorage
from streampack.storage.retries import Retries
from tests.support.stores import lacking, running


@pytest.fixture(params=["local", "versioned", "gs", "az"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Folder]:
    if (what := lacking(request.param)) is not None:
        pytest.skip(what)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    if request.param == "local":
        yield folder_at(tmp_path / "out" / "tokens", options=None)
        return
    with running(request.param, tmp_path) as store:
        yield folder_at(f"{store.url}/tokens/", options=store.options)


def test_a_file_has_its_name_when_it_is_complete(folder: Folder) -> None:
    assert folder.head("a.bin", 4) is None
    assert folder.whole("a.bin") is None
    with folder.begin("a.bin").open("wb") as file:
        file.write(b"12345")
        file.flush()
        assert folder.head("a.bin", 4) is None
        assert folder.written(".bin") == [5], "as its size so far"
        folder.complete(file, "a.bin")
    assert folder.head("a.bin", 4) == (b"1234", 5)
    assert folder.head("a.bin", 9) == (b"12345", 5)
    write_file(folder, "a.bin", b"678")
    assert folder.whole("a.bin") == b"678"
    assert folder.written(".bin") == [3]


def test_what_a_killed_process_left_is_removed(folder: Folder) -> None:
    for name in ("lane-1-0.bin", "lane-1-1.bin", "lane-2-0.bin"):
        folder.begin(name).write_bytes(b"left")
    folder.clean("lane-1-")
    assert folder.written(".bin") == [4]


def test_locks_hold_among_processes_of_one_machine(folder: Folder) -> None:
    with folder.lock("7", way_out="wait"):
        child = os.fork()
        if not child:
            try:
                with folder.lock("7", way_out="wait", patience=0):
                    os._exit(0)
            except ValueError as error:
                os._exit(3 if str(error).endswith("; wait") else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    folder.remove_locks()
    with folder.lock("7", way_out="wait", patience=0):
        pass


def test_a_file_that_cannot_be_written_leaves_nothing(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(RemoteStorage, "store", fail)
    monkeypatch.setattr("streampack.storage.folders.settle", fail)
    if isinstance(folder, RemoteFolder):
        folder.retries = Retries(attempts=0)
    with pytest.raises(OSError, match="full"):
        write_file(folder, "index.json", b"{}")
    assert folder.whole("index.json") is None
    assert not [*tmp_path.rglob(".index.json*")]


def test_storing_is_tried_again_and_its_result_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    with running("versioned", tmp_path) as store:
        folder = RemoteFolder(f"{store.url}/x", options={}, retries=Retries(attempts=2, first=0.01))
        real: Callable[..., None] = folder.storage.filesystem().put_file
        calls = []

        def shortened(local: str, path: str) -> None:
            calls.append(path)
            real(local, path)
            if len(calls) < 3:
                store.put("x/a", b"cut")

        monkeypatch.setattr(folder.storage.filesystem(), "put_file", shortened)
        write_file(folder, "a", b"whole")
        assert (len(calls), folder.whole("a")) == (3, b"whole")
        calls.clear()
        folder.retries = Retries(attempts=1, first=0.01)
        with pytest.raises(
            ConnectionError, match="versioned://bucket/x/a: 5 bytes were stored, and it has 3"
        ):
            write_file(folder, "a", b"whole")


def test_the_scratch_folder_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = RemoteFolder("memory://x", options={})
    owned = folder.scratch.path
    assert owned.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("os.getuid", lambda: 12345)
    owned.rename(tmp_path / owned.name.replace("-0-", "-12345-"))
    with pytest.raises(ValueError, match="belongs to another user; set TMPDIR to a folder of your own"):
        folder.begin("a")


def test_places() -> None:
    assert isinstance(folder_at("a/b", options=None), LocalFolder)
    assert folder_at("memory://me:secret@bucket/a/?key=1", options=None).shown == "memory://bucket/a"
    for url in ("http://host/a", "hf://datasets/a/b", "file:///a"):
        with pytest.raises(
            ValueError, match="cannot be written to; name a folder|are refused: only plain ones of"
        ):
            folder_at(url, options=None)
