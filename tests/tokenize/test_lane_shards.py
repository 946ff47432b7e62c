"""Processes that know nothing of one another write parts of a corpus: in any order, killed, at the same time."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from streampack import cli
from streampack.tokenize.lane_shards import write_lane
from tests.tokenize.test_tokenize import Logged, content, corpus, run


@pytest.mark.parametrize("count", [1, 3, 5])
def test_shards_of_the_work_make_the_same_bytes(tmp_path: Path, count: int) -> None:
    source = corpus(tmp_path / "corpus")
    expected = content(run(source, tmp_path / "whole"))
    out = tmp_path / "parts"
    order = [*range(count)][::-1]
    for index in [*order, order[0]]:  # one of them twice
        run(source, out, shard=(index, count), workers=1 + index % 2)
        assert not (out / "index.json").exists()
    assert len(content(run(source, out, finish=True))) == len(expected)
    assert content(out) == expected
    assert sorted(path.name for path in out.iterdir() if path.name != ".lock") == sorted(expected)


def test_shards_at_the_same_time(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus")
    expected = content(run(source, tmp_path / "whole"))
    out = tmp_path / "parts"
    context = mp.get_context("fork")
    processes = [context.Process(target=run, args=(source, out), kwargs={"shard": (i, 3)}) for i in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    run(source, out, finish=True)
    assert content(out) == expected


def sleepy(source: Any, out: Path, log: Path) -> None:
    run(source, out, shard=(1, 2), encoder=Logged(log, seconds=0.005))


def test_a_shard_that_was_killed_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = corpus(tmp_path / "corpus")
    out, log = tmp_path / "parts", tmp_path / "log"
    run(source, out, shard=(0, 2), encoder=Logged(log))
    process = mp.get_context("fork").Process(target=sleepy, args=(source, out, log))
    process.start()
    while not list(out.glob("tokens-00001-00000.bin")):
        time.sleep(0.005)
    with (
        pytest.raises(ValueError, match=r"in use by process \d+ on .*; wait until it has ended, or stop it"),
        monkeypatch.context() as impatient,
    ):
        impatient.setitem(write_lane.__kwdefaults__, "patience", 0)
        run(source, out, shard=(1, 2), encoder=Logged(log))
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    with pytest.raises(ValueError, match=r"is not complete: [12] of 5 lanes are missing or end early \([13]"):
        run(source, out, finish=True, encoder=Logged(log))
    run(source, out, shard=(1, 2), encoder=Logged(log))
    run(source, out, finish=True, encoder=Logged(log))
    assert content(out) == content(run(source, tmp_path / "whole", encoder=Logged(log)))
    assert not list(out.glob(".tokens-*"))


def test_a_whole_run_writes_what_shards_left_out(tmp_path: Path) -> None:
    source = corpus(tmp_path / "corpus")
    run(source, tmp_path / "parts", shard=(2, 5))
    assert content(run(source, tmp_path / "parts")) == content(run(source, tmp_path / "whole"))


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
    assert "'1-2' is no shard; write I/N, such as 0/8" in capsys.readouterr().err
