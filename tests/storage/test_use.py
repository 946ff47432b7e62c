"""An outage that is longer than the retries of a read: the run goes on within its budget, and says so."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streampack import JSONLSource, Mix, PackedDataLoader
from streampack.storage import retries as retry
from streampack.storage.base import File, LocalStorage
from streampack.storage.retries import Busy, Retries
from streampack.storage.use import StorageUse
from tests.support.corpus import plain, rows, write
from tests.support.shards import stream

RETRIES = Retries(attempts=3, first=1.0, longest=10.0)  # they wait for 7 s at most


class Clock:
    """Time that passes in waits, and in requests; storage does not answer in ``down`` (from, to)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *down: tuple[float, float]) -> None:
        self.now, self.down = 1000.0, [(1000 + start, 1000 + end) for start, end in down]
        self.tries = 0
        self.request = 0.0
        fake = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(retry, "time", fake)

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds

    def read(self) -> str:
        self.tries += 1
        if any(start <= self.now < end for start, end in self.down):
            self.now += self.request
            raise TimeoutError(f"no answer, try {self.tries}")
        return "read"


def test_without_max_outage_the_retries_are_all(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, (0, 1e9))
    with pytest.raises(TimeoutError, match="try 4") as error:
        RETRIES.call(clock.read)
    assert not hasattr(error.value, "__notes__")
    assert 1003.5 <= clock.now <= 1007


def test_an_outage_within_the_budget_ends_in_a_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, use = Clock(monkeypatch, (0, 300)), StorageUse(limit=600)
    with caplog.at_level(logging.WARNING):
        assert RETRIES.call(clock.read, doing="reading a.jsonl", use=use) == "read"
    assert 1300 <= clock.now <= 1310
    assert use.waited == clock.now - 1000
    # The retries, 3.5 to 7 s, are not counted.
    assert use.waited - 7 <= use.spent <= use.waited - 3.5
    assert use.retries == clock.tries - 1 >= 30
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == use.retries
    assert lines[0].startswith("no answer, try 1 while reading a.jsonl; trying again in ")
    assert lines[3].startswith("no answer, try 4 while reading a.jsonl; the storage has not answered for ")
    assert lines[3].endswith(" s, giving up in 10 min")
    assert "has not answered for 5 min; " in lines[-1] or "has not answered for 4 min; " in lines[-1]


def test_all_outages_of_a_process_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, use = Clock(monkeypatch, (0, 100), (200, 300), (400, 500)), StorageUse(limit=150)
    assert RETRIES.call(clock.read, use=use) == "read"
    assert 90 < use.spent < 110
    clock.now = 1200.0
    with pytest.raises(TimeoutError) as error:
        RETRIES.call(clock.read, use=use)
    assert use.spent == pytest.approx(150, abs=0.1), "the last wait ends when the budget does"
    [note] = error.value.__notes__
    assert note.endswith("and the 2 min of max_outage are used up")
    clock.now = 1400.0
    before = clock.tries
    with pytest.raises(TimeoutError):
        RETRIES.call(clock.read, use=use)
    assert clock.tries == before + 4, "a read still has its retries"
    clock.now = 1497.0
    assert RETRIES.call(clock.read, use=use) == "read", "so that a short failure ends no run"


def test_requests_that_hang_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, use = Clock(monkeypatch, (0, 1e9)), StorageUse(limit=100)
    clock.request = 30.0
    with pytest.raises(TimeoutError):
        RETRIES.call(clock.read, use=use)
    assert 99 <= use.spent <= 130, "a request that has begun is awaited"


def test_a_server_that_names_a_wait_gets_it_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, use = Clock(monkeypatch), StorageUse(limit=50)

    def read() -> None:
        clock.tries += 1
        error = Busy("come back later")
        error.retry_after = 40.0
        raise error

    with pytest.raises(Busy):
        RETRIES.call(read, use=use)
    assert clock.now - 1000 == pytest.approx(7 + 40 + 10)
    assert clock.tries == 4


# Runs.


class Down:
    """A storage that fails all reads after the first ones until the clock says that the outage is over."""

    block, patience = 1 << 10, 0.0

    def __init__(self, clock: Clock, *, after: int) -> None:
        self.clock = clock
        self.left = after

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        self.left -= 1
        if self.left < 0:
            self.clock.read()
        return LocalStorage().fetch(file, start, stop)

    def tag(self, file: File) -> str:
        return LocalStorage().tag(file)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_run_outlives_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mixed: bool) -> None:
    def source(storage: Any = None) -> Any:
        found = []
        for name in ("a", "b")[: 1 + mixed]:
            made = JSONLSource(write(tmp_path / f"{name}.jsonl", rows(300)))
            if storage is not None:
                made.corpus = replace(made.corpus, storage=storage, retries=RETRIES)
            found.append({"name": name, "source": made, "weight": 1})
        return Mix(found) if mixed else found[0]["source"]

    expected = [plain(pack) for pack in stream(source()).stream()]
    clock = Clock(monkeypatch, (0, 1000))
    data = stream(source(Down(clock, after=6)), max_outage=20)
    assert [plain(pack) for pack in data.stream()] == expected
    assert 900 < data.lane_config.use.spent < 1100
    with pytest.raises(TimeoutError) as error:
        list(stream(source(Down(clock := Clock(monkeypatch, (0, 1000)), after=6)), max_outage=10).stream())
    assert "10 min of max_outage are used up" in str(error.value.__notes__)


class TwoRanks:
    """A `RankSync` of two ranks, as far as the check of a loader's settings needs one."""

    alone, has_data_groups, data_world_size = False, False, 2

    def __init__(self, timeout: Any) -> None:
        self.timeout = timeout


def test_other_ranks_must_wait_as_long(tmp_path: Path) -> None:
    data = stream(JSONLSource(write(tmp_path / "a.jsonl", rows(60))), max_outage=30)
    loader = PackedDataLoader(data)
    iteration: Any = iter(loader)
    iteration.rank_sync = TwoRanks(loader.rank_sync.timeout)
    with pytest.raises(ValueError) as error:
        iteration._settings(loader._handed)
    assert str(error.value) == (
        "reading may be tried again for 1816 s and the other ranks wait 0:30:00 at most; lower max_outage or raise the "
        "loader's timeout"
    )


@pytest.mark.parametrize("value", [-1, True, "30", float("inf"), float("nan")])
def test_no_number_of_minutes(value: Any) -> None:
    with pytest.raises(ValueError, match=f"max_outage={value!r} is no number of minutes; give one from 0 to"):
        stream([{"tokens": [1], "labels": [1]}], max_outage=value)
