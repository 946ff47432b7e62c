"""Stretches of files, fetched ahead of need, by many lanes side by side, within one budget of memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import IterablePackedDataset, JSONLSource, Mix
from streampack.sources import ParquetSource
from streampack.storage import read_ahead
from streampack.storage.base import File, LocalStorage
from streampack.storage.ranges import TAIL_BYTES, Fetcher, RangeStream, tail_of
from streampack.storage.read_ahead import SOON, FetchThreads, ReadAhead
from streampack.storage.retries import Retries
from tests.harness.corpus import Numbers, plain
from tests.harness.files import COLUMNS, shards


class Memory:
    """A storage of one file that records the requests."""

    patience = 1.0

    def __init__(self, content: bytes, block: int) -> None:
        self.content = content
        self.block = block
        self.asked: list[tuple[int, int]] = []
        self.lock = threading.Lock()

    def fetch(self, file: File, start: int, stop: int) -> bytes:
        with self.lock:
            self.asked.append((start, stop))
        return self.content[start:stop]

    def tag(self, file: File) -> str:
        raise AssertionError("nobody asks")


def opened(size: int, start: int, stop: int, *, block: int, ahead: int) -> tuple[Any, Fetcher, Memory]:
    storage = Memory(bytes(i * i % 251 for i in range(size)), block)
    fetcher = Fetcher(storage, Retries(attempts=0), read_ahead=ReadAhead(ahead, 0, 0, 0, ahead))
    stretch = RangeStream(fetcher, File("/a", "a", size), start, stop, tail=tail_of(start, stop))
    return stretch, fetcher, storage


@settings(max_examples=60)
@given(st.data())
def test_no_byte_is_fetched_twice(data: st.DataObject) -> None:
    """All planned blocks are taken, also the last, short one."""
    block = data.draw(st.integers(600, 6000), label="block")
    start = data.draw(st.integers(0, 3000), label="start")
    length = data.draw(st.integers(0, 4), label="whole blocks") * block + data.draw(st.integers(0, 5000))
    behind = data.draw(st.integers(0, 6000), label="of the file, behind the part")
    beyond = data.draw(st.integers(0, behind), label="that are read")
    stop, ahead = start + length, data.draw(st.sampled_from([0, block, 8 * block + TAIL_BYTES]))
    stretch, fetcher, storage = opened(stop + behind, start, stop, block=block, ahead=ahead)
    got = b""
    while len(got) < length + beyond:
        got += stretch.read(length + beyond - len(got))
    assert got == storage.content[start : stop + beyond]
    asked = sorted(storage.asked)
    assert all(end == following for (_, end), (following, _) in pairwise(asked))
    if asked:
        assert asked[0][0] == start
    assert not fetcher.in_flight
    assert fetcher.waiting is None


def test_the_last_block_brings_the_tail_of_the_whole_part() -> None:
    """The tail of 128 KiB is 4 KiB; that of the 100 bytes behind whole blocks would be 256 bytes."""
    block, rest = 1 << 16, 100
    stop = 2 * block + rest
    stretch, _, storage = opened(stop + 50_000, 0, stop, block=block, ahead=3 * block + 5000)
    assert (tail_of(0, stop), tail_of(2 * block, stop)) == (4099, 256)
    left = stop
    while left:
        left -= len(stretch.read(left))
    assert sorted(storage.asked)[2:] == [(2 * block, stop + tail_of(0, stop))]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_readers_fetch_ahead_within_the_budget_of_all(data: st.DataObject) -> None:
    """Whatever each may hold: what all fetch ahead, read from and have in windows stays in the budget."""
    lanes, block = data.draw(st.integers(2, 6), label="lanes"), 1000
    budget = data.draw(st.integers(lanes, 30 * lanes), label="budget, in blocks") * block
    share = ReadAhead.for_lanes(budget, lanes)
    share = replace(share, burst=data.draw(st.sampled_from([share.burst, budget // 2])))
    storage = Memory(bytes(100_000), block)
    file = File("/a", "a", 100_000)
    fetchers = [Fetcher(storage, Retries(attempts=0), read_ahead=share) for _ in range(lanes)]
    streams = [RangeStream(fetcher, file, 0, 100_000) for fetcher in fetchers]

    def held(fetcher: Fetcher) -> int:
        return sum(stop - start for _, start, stop in (*fetcher.in_flight, *fetcher.old))

    for _ in range(data.draw(st.integers(1, 40), label="turns")):
        i = data.draw(st.integers(0, lanes - 1), label="lane")
        fetchers[i].expect(data.draw(st.integers(0, 60)) * block, now=data.draw(st.booleans()))
        streams[i].read(data.draw(st.integers(1, 3 * block)))
        needed = sum(fetcher.reading + fetcher.window for fetcher in fetchers)
        ahead = sum(map(held, fetchers))
        assert (share.threads.ahead, share.threads.needed) == (ahead, needed)
        # A lane that begins takes a block that the others could not know of.
        assert ahead + needed <= max(budget, needed) + lanes * block
    fetchers.clear()
    streams.clear()
    assert (share.threads.ahead, share.threads.needed, share.threads.reading) == (0, 0, 0)


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
