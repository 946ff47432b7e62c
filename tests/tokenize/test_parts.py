"""Parts of a corpus by processes that know nothing of one another, in any order, killed, at once; and into stores."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streampack import TokenShardSource, cli
from streampack.sources import Reading
from tests.harness.stores import Store, Versioned, lacking, running, short_waits
from tests.harness.tokenizing import Dies, Killed, Logged, content, corpus, into, run, stored, wait_for


@pytest.mark.parametrize("count", [1, 3, 5])
def test_shards_of_the_work_make_the_same_bytes(tmp_path: Path, count: int) -> None:
    source = corpus(tmp_path / "corpus")
    expected = content(run(source, tmp_path / "whole"))
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    out = tmp_path / "link" / ".." / "parts"  # which is not the one beside the link
    order = [*range(count)][::-1]
    for index in [*order, order[0]]:  # one of them twice
        run(source, out, shard=(index, count), workers=1 + index % 2)
        assert not (out / "index.json").exists()
    assert len(content(run(source, out, finish=True))) == len(expected)
    assert content(out) == expected
    assert sorted(path.name for path in out.iterdir()) == sorted(expected)


def test_shards_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = corpus(tmp_path / "corpus")
    for shard, message in (
        ((5, 5), "shard=5/5 is none of 0/5 to 4/5"),
        ((0, 6), "shard=0/6 of 5 lanes: some shards would have nothing to do; give all of them"),
    ):
        with pytest.raises(ValueError, match=message):
            run(source, tmp_path / "out", shard=shard)
    with pytest.raises(
        ValueError, match="finish=True writes the index of all shards, and shard= writes some"
    ):
        run(source, tmp_path / "out", shard=(0, 2), finish=True)
    with pytest.raises(ValueError, match="is not complete: 5 of 5 lanes are missing"):
        run(source, tmp_path / "out", finish=True)
    assert cli.main(["tokenize", "--config", "quickstart", "--out", "x", "--shard", "1-2"]) == 2
    assert "argument --shard: invalid shard value: '1-2'" in capsys.readouterr().err


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("TMPDIR", str(scratch(tmp_path)))
    with running("versioned", tmp_path) as store:
        yield store


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    if (what := lacking("s3")) is not None:
        pytest.skip(what)
    with running("s3", tmp_path_factory.mktemp("s3")) as store:
        yield store


@pytest.fixture(autouse=True)
def own_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)


def scratch(folder: Path, name: str = "scratch") -> Path:
    (folder / name).mkdir(exist_ok=True)
    return folder / name


def watched(monkeypatch: pytest.MonkeyPatch, act: Callable[[str, str], Any]) -> None:
    """Let ``act`` look at each file that is stored, by its place here and its name there."""
    put = Versioned.put_file

    def put_file(self: Versioned, local: str, path: str, **settings: Any) -> None:
        if act(local, path.rpartition("/")[2]) is None:
            put(self, local, path, **settings)

    monkeypatch.setattr(Versioned, "put_file", put_file)


def test_the_bytes_in_a_store_are_those_of_a_local_run(
    memory: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And shards that are stored are not made again."""
    source, place, made = corpus(tmp_path / "corpus"), f"{memory.url}/tokens/", []
    watched(monkeypatch, lambda local, name: made.append(name))
    expected = content(run(source, tmp_path / "local"))
    assert into(memory, source, place) == expected
    assert sorted(made) == sorted(expected)
    found = TokenShardSource(place, storage={"options": memory.options})
    assert sum(1 for _ in found.read(Reading())) == 300
    assert list((tmp_path / "scratch").iterdir()) == [], "nothing is left on this machine"
    made.clear()
    memory.remove("tokens/tokens-00002-00001.bin")
    assert into(memory, source, place) == expected
    later = [name for name in expected if name.startswith("tokens-00002") and name > "tokens-00002-00000.bin"]
    assert made == [*later, "index.json"]


@pytest.mark.parametrize("shard", [(0, 1), None])
@pytest.mark.parametrize("place", ["here", "store"])
def test_two_writers_of_every_lane_of_a_folder(
    memory: Store, tmp_path: Path, place: str, shard: tuple[int, int] | None
) -> None:
    """Whichever is first to complete the folder removes what the other has begun."""
    source = corpus(tmp_path / "corpus")
    out: Any = tmp_path / "out" if place == "here" else f"{memory.url}/tokens"
    settings = {"shard": shard, "storage": {"options": memory.options}}

    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(run, source, out, encoder=Logged(tmp_path / "log", seconds=seconds), **settings)
            for seconds in (0.001, 0.003)
        ]
    assert [call.result() for call in calls] == [out, out]
    assert (tmp_path / "log").read_text().count("\n") > 400, "both wrote"
    run(source, out, finish=True, storage=settings["storage"])
    made = content(tmp_path / "out") if place == "here" else stored(memory, out)
    assert made == content(run(source, tmp_path / "whole"))


@pytest.mark.parametrize("after", [40, 250])
def test_a_stopped_call_goes_on(memory: Store, tmp_path: Path, after: int) -> None:
    source, place = corpus(tmp_path / "corpus"), f"{memory.url}/tokens"
    expected = content(run(source, tmp_path / "local"))
    with pytest.raises(Killed):
        into(memory, source, place, encoder=Dies(after))
    complete = stored(memory, place)
    assert complete.items() < expected.items()
    assert "index.json" not in complete
    assert into(memory, source, place) == expected


def test_a_part_of_a_file_is_no_shard(memory: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storing fails: each second time it leaves a part of the file, as file systems that are no object stores may."""
    source, place, calls = corpus(tmp_path / "corpus"), f"{memory.url}/tokens", []
    expected = content(run(source, tmp_path / "local"))

    def fails(local: str, name: str) -> None:
        if name.endswith(".bin"):
            calls.append(name)
            if len(calls) % 2:
                memory.put(f"tokens/{name}", Path(local).read_bytes()[: 100 if len(calls) % 4 == 1 else 5000])
            raise OSError("reset")

    with monkeypatch.context() as broken:
        short_waits(broken)
        watched(broken, fails)
        for lane in (0, 1):
            with pytest.raises(OSError, match="tokens-0000"):
                into(memory, source, place, shard=(lane, 5))
    assert len(calls) > 12, "each is tried again"
    assert into(memory, source, place) == expected


def test_places_that_cannot_be_written_to(memory: Store, tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus")
    refused = "cannot be written to; name a folder|are refused: only plain ones of"
    for place, options, message in (
        (
            "https://me:canary@host/tokens",
            {},
            "https://host/tokens cannot be written to; name a folder of this",
        ),
        ("hf://datasets/a/b", {}, refused),
        ("file:///a", {}, refused),
    ):
        with pytest.raises(ValueError, match=message) as error:
            run(source, place, storage={"options": options})  # type: ignore[arg-type]
        assert "canary" not in str(error.value)


def write_all_lanes(store: Store, source: Any, folder: Path, machine: str, seconds: float) -> None:
    """Write all lanes, with a scratch folder of its own, as on another machine."""
    tempfile.tempdir = str(scratch(folder, machine))
    encoder = Logged(folder / "log", seconds=seconds)
    place: Any = f"{store.url}/{folder.name}"
    run(source, place, encoder=encoder, shard=(0, 1), storage={"options": store.options})


@pytest.mark.slow
def test_s3_killed_in_the_middle_with_two_writers_of_every_lane(moto: Store, tmp_path: Path) -> None:
    source, place = corpus(tmp_path / "corpus"), f"{moto.url}/{tmp_path.name}"
    with pytest.raises(
        FileNotFoundError, match="s3://nowhere/tokens/.*: there is no such bucket, or container"
    ):
        into(moto, source, "s3://nowhere/tokens")
    expected = content(run(source, tmp_path / "local"))

    def start(machine: str, seconds: float) -> Any:
        process = mp.get_context("fork").Process(
            target=write_all_lanes, args=(moto, source, tmp_path, machine, seconds)
        )
        process.start()
        return process

    first = start("first", 0.03)
    wait_for(lambda: len(stored(moto, place)) > 2)
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    complete = stored(moto, place)
    assert complete.items() < expected.items()
    pair = [start(name, 0.001) for name in ("first", "second")]
    for process in pair:
        process.join()
    assert [process.exitcode for process in pair] == [0, 0]
    assert into(moto, source, place, finish=True) == expected
    found = TokenShardSource(place, storage={"options": moto.options})
    assert sum(1 for _ in found.read(Reading())) == 300
