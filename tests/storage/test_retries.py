"""Storage that fails for a moment costs a moment; storage that fails for good is named."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import IterablePackedDataset, JSONLSource, PackedDataLoader
from streampack.sources import Holdout
from streampack.storage import ranges
from streampack.storage import retries as retry
from streampack.storage.base import File, LocalStorage
from streampack.storage.retries import PERMANENT, Busy, Retries
from tests.support.corpus import Numbers, make_source, plain, rows, write

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


def stream(source: Any, **changes: Any) -> IterablePackedDataset:
    common = {"max_seq_len": 24, "buffer_size": 6, "encoder": Numbers(), "num_lanes": 2, "shuffle": True}
    return IterablePackedDataset(source, **{**common, "shuffle_window": 5, "epochs": 2, **changes})


def packs(dataset: IterablePackedDataset) -> list[Any]:
    return [plain(pack) for pack in dataset.stream()]


@pytest.mark.parametrize("kind", ["jsonl", "zst"])
def test_each_single_read_may_fail(
    tmp_path: Path, kind: str, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ROWS[:30]
    whole = packs(stream(make_source(kind, tmp_path, data), epochs=1))
    storage = Shaky()
    monkeypatch.setattr(ranges, "TAIL_BYTES", 8)
    sources = [shaken(make_source(kind, tmp_path, data), storage) for _ in range(2)]
    assert packs(stream(sources[0], epochs=1)) == whole
    calls = storage.calls
    assert calls >= 12
    for call in range(calls):
        storage.calls, storage.fails = 0, {call}
        assert packs(stream(sources[1], epochs=1)) == whole, f"call {call}"
    assert len(slept) == calls


def test_a_permanent_failure_names_the_place(
    tmp_path: Path, slept: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    storage = Shaky()
    monkeypatch.setattr(ranges, "TAIL_BYTES", 8)
    dataset = stream(shaken(JSONLSource(path), storage), num_lanes=1, shuffle=False, epochs=1)
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
    assert found == packs(stream(path, num_lanes=1, shuffle=False, epochs=1))


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
        assert len(list(loader)) > 20, "alone, nobody waits"
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
    loader = PackedDataLoader(stream(JSONLSource(path, retries=4)), timeout=15)
    loader.rank_sync = Ranks(loader.rank_sync.timeout)  # type: ignore[assignment]
    iter(loader)
