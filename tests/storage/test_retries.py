"""Storage that fails for a moment costs a moment; an outage costs its budget; what fails for good is named."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streampack import JSONLSource, Mix, PackedDataLoader
from streampack.sources import Holdout
from streampack.storage import ranges
from streampack.storage import retries as retry
from streampack.storage.base import File, LocalStorage
from streampack.storage.retries import PERMANENT, Busy, Retries
from streampack.storage.use import StorageUse
from tests.harness.corpus import make_source, plain, rows, write
from tests.harness.files import packs, stream

ROWS = rows(60)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record waits instead of sleeping."""
    waits: list[float] = []
    monkeypatch.setattr(retry.time, "sleep", waits.append)
    return waits


def failing(times: int, error: Callable[[], BaseException]) -> Callable[[], str]:
    left = [times]

    def read() -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise error()
        return "read"

    return read


# Trying again.


@pytest.mark.parametrize("kind", [ConnectionResetError, TimeoutError])
@pytest.mark.parametrize("times", [0, 1, 5])
def test_a_read_is_retried_until_it_succeeds(slept: list[float], times: int, kind: type[OSError]) -> None:
    assert Retries(attempts=5).call(failing(times, kind)) == "read"
    assert len(slept) == times


@pytest.mark.parametrize("attempts", [0, 5])
def test_the_last_error_is_raised(slept: list[float], attempts: int) -> None:
    errors = iter(range(99))
    with pytest.raises(OSError, match=f"^number {attempts}$"):
        Retries(attempts=attempts).call(failing(99, lambda: OSError(f"number {next(errors)}")))
    assert len(slept) == attempts


@pytest.mark.parametrize("kind", [*PERMANENT, ValueError, KeyboardInterrupt])
def test_permanent_errors_are_not_retried(slept: list[float], kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        Retries().call(failing(1, kind))
    assert slept == []


def test_waits_double_up_to_the_longest_each_with_its_jitter(slept: list[float]) -> None:
    retries = Retries(attempts=9, first=0.5, longest=30)
    longest = [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    for _ in range(200):
        assert retries.call(failing(9, OSError)) == "read"
    waits = np.array(slept).reshape(200, 9) / longest
    assert (waits >= 0.5).all()
    assert (waits <= 1).all()
    assert (waits.max(axis=0) - waits.min(axis=0) > 0.4).all(), "a thousand ranks do not come back at once"
    assert waits.sum() <= 200 * 9
    assert retries.budget == sum(longest)


def test_the_users_generator_is_not_touched(slept: list[float]) -> None:
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002 - the global one is what must not change
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    Retries().call(failing(5, OSError))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002


def busy(retry_after: float) -> Busy:
    error = Busy("come back later")
    error.retry_after = retry_after
    return error


def test_a_server_that_names_a_wait_is_waited_for(slept: list[float]) -> None:
    assert Retries(attempts=5).call(failing(2, lambda: busy(3.0))) == "read"
    assert slept == [3.0, 3.0]
    slept.clear()
    assert Retries(attempts=5).call(failing(1, lambda: busy(0.1))) == "read"
    assert 0.25 <= slept[0] <= 0.5, "our own wait, if that is longer"


def test_a_long_wait_stays_within_the_budget(slept: list[float]) -> None:
    tries: list[int] = []

    def read() -> None:
        tries.append(1)
        raise busy(10.0)

    with pytest.raises(Busy):
        Retries(attempts=5).call(read)
    assert slept == [10.0, 5.5]
    assert len(tries) == 3, "one last try when the budget is used up"


# Sources.


class Shaky:
    """A storage of small blocks that fails at given reads."""

    block = 24  # bytes: a line has about 16, so that there are many reads, and many end in the middle of one
    patience = 0.0

    def __init__(self, error: Callable[[], Exception] = lambda: OSError(5, "Input/output error")) -> None:
        self.error = error
        self.fails: set[int] = set()
        self.calls = 0

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        self.calls += 1
        if self.calls - 1 in self.fails:
            raise self.error()
        return LocalStorage().fetch(file, start, stop)

    def tag(self, file: File) -> str:
        return LocalStorage().tag(file)


def shaken(source: JSONLSource, storage: Shaky) -> JSONLSource:
    source.corpus = replace(source.corpus, storage=storage)
    return source


@pytest.mark.parametrize("kind", ["jsonl", "zst"])
def test_each_single_read_may_fail(
    tmp_path: Path, kind: str, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ROWS[:30]
    whole = packs(make_source(kind, tmp_path, data))
    storage = Shaky()
    monkeypatch.setattr(ranges, "TAIL_BYTES", 8)
    sources = [shaken(make_source(kind, tmp_path, data), storage) for _ in range(2)]
    assert packs(sources[0]) == whole
    calls = storage.calls
    assert calls >= 12
    for call in range(calls):
        storage.calls, storage.fails = 0, {call}
        assert packs(sources[1]) == whole, f"call {call}"
    assert len(slept) == calls


def test_a_permanent_failure_names_the_place(
    tmp_path: Path, slept: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    storage = Shaky()
    monkeypatch.setattr(ranges, "TAIL_BYTES", 8)
    dataset = stream(shaken(JSONLSource(path), storage), num_lanes=1, shuffle=False)
    storage.fails = set(range(8, 10_000))
    running = dataset.stream()
    found: list[Any] = []
    with caplog.at_level(logging.WARNING, "streampack"), pytest.raises(OSError) as error:
        for pack in running:
            found.append(plain(pack))
    [note] = error.value.__notes__
    offset = int(note.removeprefix(f"while reading {path} from byte ").removesuffix(" on"))
    lines = path.read_bytes()
    assert 0 < offset < len(lines)
    assert lines[offset - 1 : offset] == b"\n", "the start of the row that could not be read"
    assert len(slept) == 5
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 5
    for line, wait in zip(logged, slept, strict=True):
        assert line.startswith(f"[Errno 5] Input/output error while reading {path}, bytes ")
        assert line.endswith(f"; trying again in {wait:.1f} s")
    storage.fails = set()  # and when it is back, and the stream is asked again, nothing is missing
    found += [plain(pack) for pack in running]
    assert found == packs(path, num_lanes=1, shuffle=False)


# Against the other ranks' patience.


class Ranks:
    """A `RankSync` of two ranks, as far as a loader's start needs one."""

    alone, has_data_groups, rank, data_rank, world_size, data_world_size = False, True, 0, 0, 2, 2

    def __init__(self, timeout: Any) -> None:
        self.timeout = timeout

    def lists_bad_records(self) -> bool:
        return True

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def raise_on_all(self, error: Exception | None, *, doing: str) -> None:
        if error is not None:
            raise error


def test_a_budget_longer_than_the_other_ranks_wait_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    for source in (JSONLSource(path), Holdout(JSONLSource(path), fraction=0.1, part="train")):
        loader = PackedDataLoader(stream(source), timeout=15)
        assert len(list(loader)) > 10, "alone, nobody waits"
        loader.rank_sync = Ranks(loader.rank_sync.timeout)  # type: ignore[assignment]
        with pytest.raises(ValueError) as error:
            iter(loader)
        assert str(error.value) == (
            "reading may be tried again for 16 s and the other ranks wait 0:00:15 at most; lower the source's "
            "retries or raise the loader's timeout"
        )
        loader = PackedDataLoader(stream(source), timeout=16)
        loader.rank_sync = Ranks(loader.rank_sync.timeout)  # type: ignore[assignment]
        iter(loader)
    loader = PackedDataLoader(stream(JSONLSource(path), max_outage=30))
    loader.rank_sync = Ranks(loader.rank_sync.timeout)  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match="for 1816 s and the other ranks wait 0:30:00 at most; lower max_outage or"
    ):
        iter(loader)
    loader = PackedDataLoader(stream(JSONLSource(path, retries=4)), timeout=15)
    loader.rank_sync = Ranks(loader.rank_sync.timeout)  # type: ignore[assignment]
    iter(loader)


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
