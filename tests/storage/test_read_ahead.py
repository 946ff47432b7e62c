"""Many lanes of one process fetch side by side, within one budget of memory, and yield the same packs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from streampack import IterablePackedDataset, JSONLSource, Mix
from streampack.sources import ParquetSource
from streampack.storage import read_ahead
from streampack.storage.base import File, LocalStorage
from streampack.storage.ranges import Fetcher
from streampack.storage.read_ahead import AT_ONCE, SOON, FetchThreads, ReadAhead
from streampack.storage.retries import Retries
from tests.support.corpus import Numbers, plain
from tests.support.shards import COLUMNS, shards

LANES = SOON + 8


class Network:
    """A storage that counts the requests that are under way, and can make them wait for one another."""

    block = 1 << 21
    patience = 1.0

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.under_way: dict[str, int] = {}  # file name -> its requests that are not answered
        self.together = 0  # a request is answered when those of so many files are under way
        self.lonely: list[str] = []  # files whose request waited in vain
        self.fails: set[str] = set()
        self.requests: list[tuple[str, int, int]] = []

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        with self.changed:
            self.requests.append((file.name, start, stop))
            self.under_way[file.name] = self.under_way.get(file.name, 0) + 1
            self.changed.notify_all()
            if self.together and not self.changed.wait_for(self._released, timeout=10):
                self.lonely.append(file.name)
            self.under_way[file.name] -= 1
            if file.name in self.fails:
                raise ConnectionError(f"{file.name} is out of reach")
        return LocalStorage().fetch(file, start, stop)

    def _released(self) -> bool:
        if sum(map(bool, self.under_way.values())) >= self.together:
            self.together = 0
        return not self.together

    def tag(self, file: File) -> str:
        return LocalStorage().tag(file)


def behind(network: Network, source: Any) -> Any:
    """Let a source of files on this machine read by way of ``network``."""
    source.corpus = replace(source.corpus, storage=network, retries=Retries(attempts=0))
    source.local = False
    return source


def written(folder: Path, kind: str, count: int = LANES, *, rows: int = 40) -> Callable[[], Any]:
    for path, content in shards(kind, count, rows).items():
        (folder / Path(path).name).write_bytes(content)
    if kind == "parquet":
        return lambda: ParquetSource(folder, columns=COLUMNS)
    return lambda: JSONLSource(folder)


def dataset(source: Any, **settings: Any) -> IterablePackedDataset:
    common: dict[str, Any] = {"max_seq_len": 24, "buffer_size": 6, "encoder": Numbers(), "num_lanes": LANES}
    return IterablePackedDataset(
        source, **{**common, "shuffle": True, "shuffle_window": 8, "epochs": 1, **settings}
    )


# Side by side.


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_lanes_whose_turn_comes_soon_fetch_together(tmp_path: Path, kind: str) -> None:
    """Each request waits until those of as many files are under way; one lane after the other would wait in vain."""
    make = written(tmp_path, kind)
    expected = [plain(pack) for pack in dataset(make()).stream()]
    network = Network()
    network.together = SOON
    stream = dataset(behind(network, make())).stream()
    found = [plain(next(stream)) for _ in range(2 * LANES)]
    states = stream.lane_states()
    assert not network.lonely
    network = Network()
    network.together = SOON
    resumed = dataset(behind(network, make())).stream(lane_states=states)
    assert not network.lonely, "a resume, too, before the first pack is asked for"
    assert len(network.requests) >= LANES
    assert [*found, *map(plain, resumed)] == expected


def test_without_read_ahead_one_request_is_made_at_a_time(tmp_path: Path) -> None:
    network = Network()
    data = dataset(behind(network, written(tmp_path, "jsonl", 4)()), num_lanes=4, read_ahead=0)
    under_way = []
    fetch = network.fetch

    def watched(*block: Any) -> bytes:
        under_way.append(sum(network.under_way.values()))
        assert threading.current_thread() is threading.main_thread()
        return fetch(*block)

    network.fetch = watched  # type: ignore[method-assign]
    assert len(list(data.stream())) > 25
    assert set(under_way) == {0}


def test_opening_lanes_reads_nothing_until_all_are_open(tmp_path: Path) -> None:
    network = Network()
    source = behind(network, written(tmp_path, "jsonl")())
    opened: list[int] = []
    read = source.read

    def counted(reading: Any) -> Any:
        assert not network.requests
        opened.append(reading.lane)
        return read(reading)

    source.read = counted
    next(dataset(source).stream())
    assert opened[:LANES] == list(range(LANES))


def test_a_mixtures_sources_fetch_together(tmp_path: Path) -> None:
    network = Network()
    entries = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make = written(tmp_path / name, "jsonl", 4, rows=200)
        source = behind(network, make())
        # Files of one name would be taken for one.
        source.files = tuple(replace(file, name=f"{name}/{file.name}") for file in source.files)
        source.corpus = replace(source.corpus, files=source.files)
        entries.append({"name": name, "source": source, "weight": 1})
    network.together = 8
    assert len(list(dataset(Mix(entries, stop="first_exhausted"), num_lanes=4).stream())) > 50
    assert not network.lonely


# The budget.


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("budget", [350_000, 1_000_000])
def test_all_lanes_together_hold_no_more_than_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, budget: int
) -> None:
    """The corpus has 300 kB; windows and row groups that are being read hold some 130 kB of it."""
    monkeypatch.setattr(read_ahead, "SMALLEST_BLOCK", 200)
    monkeypatch.setattr(Network, "block", 4000)
    make = written(tmp_path, kind)
    expected = [plain(pack) for pack in dataset(make()).stream()]
    fetchers: list[Fetcher] = []
    begin, top_up = Fetcher.__init__, Fetcher.top_up
    held: list[int] = []

    def counted(fetcher: Fetcher, *given: Any, **named: Any) -> None:
        begin(fetcher, *given, **named)
        fetchers.append(fetcher)

    def watched(fetcher: Fetcher, **named: Any) -> None:
        top_up(fetcher, **named)
        blocks = [block for each in fetchers for block in (*each.in_flight, *each.old)]
        ahead = sum(stop - start for _, start, stop in blocks)
        held.append(ahead + sum(each.window + each.reading for each in fetchers))

    monkeypatch.setattr(Fetcher, "__init__", counted)
    monkeypatch.setattr(Fetcher, "top_up", watched)
    network = Network()
    data = dataset(behind(network, make()), read_ahead=budget)
    assert [plain(pack) for pack in data.stream()] == expected
    assert 150_000 < max(held) <= budget
    read = sum(stop - start for _, start, stop in network.requests)
    held.clear()
    fetchers.clear()
    network.requests.clear()
    assert [plain(pack) for pack in dataset(behind(network, make()), read_ahead=0).stream()] == expected
    assert read <= 1.05 * sum(stop - start for _, start, stop in network.requests), "nothing is fetched twice"


@pytest.mark.parametrize("lanes", [1, 8, 240, 5000])
@pytest.mark.parametrize("budget", [0, 1 << 20, 256 << 20])
def test_shares_bursts_and_one_turn_are_within_the_budget(budget: int, lanes: int) -> None:
    whole = ReadAhead.for_lanes(budget, lanes)
    assert lanes * whole.share + min(lanes, SOON) * whole.burst + whole.turn <= budget
    parts = [whole.part(weight) for weight in (0.7, 0.29, 0.01)]
    assert sum(part.share for part in parts) <= whole.share
    assert all(part.threads is whole.threads for part in parts)


def test_windows_that_fill_the_budget_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = dataset(behind(Network(), written(tmp_path, "jsonl")()), read_ahead=48 * 1000)
    assert len(list(data.stream())) > LANES
    [record] = [each for each in caplog.records if each.name.endswith("read_ahead")]
    assert record.getMessage().startswith("a shuffle window holds 0.0 MB, and windows of 0.0 MB in each lane")


# Failures.


def test_an_error_is_raised_where_the_lane_reads(tmp_path: Path) -> None:
    """A file of a later lane is fetched long before, in vain; the packs before its own come, and those after it."""
    make = written(tmp_path, "jsonl")
    expected = [plain(pack) for pack in dataset(make()).stream()]
    network = Network()
    needed: list[str] = []  # files, in the order of their need
    for _ in zip(dataset(behind(network, make()), read_ahead=0).stream(), range(SOON), strict=False):
        needed += [name for name, _, _ in network.requests if name not in needed]
        network.requests.clear()
    network.fails = {name := needed[-1]}
    stream = dataset(behind(network, make())).stream()
    found = [plain(next(stream))]
    asked_for_the_first = {each for each, _, _ in network.requests}
    with pytest.raises(ConnectionError, match=f"{name} is out of reach") as error:
        for pack in stream:
            found.append(plain(pack))
    assert f"{name} from byte " in error.value.__notes__[0]
    assert found == expected[: len(found)]
    assert name in asked_for_the_first
    network.fails.clear()
    assert [*found, *map(plain, stream)] == expected


def test_requests_are_made_in_order_and_so_many_at_a_time() -> None:
    threads, gate, lock = FetchThreads(), threading.Event(), threading.Lock()
    begun: list[int] = []

    def fetch(number: int) -> bytes:
        with lock:
            begun.append(number)
        gate.wait(10)
        return bytes([number])

    futures: list[Future[bytes]] = []
    for number in range(AT_ONCE + 10):
        futures.append(threads.submit(lambda number=number: fetch(number)))  # type: ignore[misc]
    assert len(threads.threads) == AT_ONCE
    assert futures[-1].cancel(), "no thread has begun it"
    gate.set()
    assert [future.result(10) for future in futures[:-1]] == [bytes([i]) for i in range(AT_ONCE + 9)]
    assert begun[AT_ONCE:] == sorted(begun[AT_ONCE:])
    for thread in threads.threads:
        thread.join(10)
        assert not thread.is_alive()


def test_a_block_that_waits_for_a_thread_is_fetched_by_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads are busy with others' requests, which never end."""
    monkeypatch.setattr(read_ahead, "AT_ONCE", 1)
    source = behind(Network(), written(tmp_path, "jsonl", 4)())
    data = dataset(source, num_lanes=4)
    stuck, threads = threading.Event(), FetchThreads()
    threads.submit(lambda: bytes(stuck.wait(60)))
    made = ReadAhead.for_lanes
    monkeypatch.setattr(
        ReadAhead, "for_lanes", lambda budget, lanes: replace(made(budget, lanes), threads=threads)
    )
    assert len(list(data.stream())) > 25
    stuck.set()
