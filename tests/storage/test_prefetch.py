"""Stretches of files, fetched ahead of need, by many lanes side by side, within one budget of memory."""

from __future__ import annotations

import multiprocessing as mp
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from streampack import Mix
from streampack.sources import Reading
from streampack.storage.prefetch import (  # private: interrupts strike here
    NO_PREFETCH,
    FirstCall,
    Prefetch,
)
from tests.harness.corpus import plain, recorded
from tests.harness.files import shards, small_pieces, source, stream
from tests.harness.interrupts import Injector
from tests.harness.stores import Versioned, running

LANES = 24
SOON = 16  # lanes whose turns a process prepares for


class Network:
    """Counts the requests to the store that are under way, and can make them wait for one another."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.under_way: dict[str, int] = {}  # path -> its requests that are not answered
        self.together = 0  # a request is answered when so many are under way
        self.lonely: list[str] = []  # files whose request waited in vain
        self.fails: set[str] = set()
        self.requests: list[tuple[str, int]] = []  # path, and bytes

    def __call__(self, path: str, start: int, stop: int) -> None:
        with self.changed:
            self.requests.append((path, stop - start))
            self.under_way[path] = self.under_way.get(path, 0) + 1
            self.changed.notify_all()
            if self.together and not self.changed.wait_for(self._released, timeout=10):
                self.lonely.append(path)
            self.under_way[path] -= 1
            if path in self.fails:
                raise ConnectionError("out of reach")

    def _released(self) -> bool:
        if sum(self.under_way.values()) >= self.together:
            self.together = 0
        return not self.together


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with running("versioned", tmp_path):
        found = Network()
        Versioned.fault = staticmethod(found)  # type: ignore[assignment]
        yield found


def filled(kind: str, count: int = LANES, *, place: str = "c", **how: Any) -> Any:
    """Put files into the store, and return a source of them that does not try again."""
    files = Versioned(skip_instance_cache=True)
    for name, content in shards(kind, count, **how).items():
        files.pipe_file(f"/bucket/{place}/{name.rpartition('/')[2]}", content)
    return source(kind, f"versioned://bucket/{place}/*.{kind}", storage={"max_outage": 0})


def dataset(data: Any, **settings: Any) -> Any:
    return stream(data, **{"num_lanes": LANES, **settings})


def packs(data: Any, **settings: Any) -> list[Any]:
    return [plain(pack) for pack in dataset(data, **settings).stream()]


def settle(network: Network) -> None:
    """Wait until nothing more is asked for."""
    for _ in range(100):
        asked = len(network.requests)
        time.sleep(0.02)
        if asked == len(network.requests) and not any(network.under_way.values()):
            break


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_lanes_whose_turn_comes_soon_fetch_together(network: Network, kind: str) -> None:
    """Each request waits until as many are under way; those of one lane after the other would wait in vain."""
    data = filled(kind)
    expected = packs(data)
    network.together = SOON
    states: dict[int, Any] = {}
    running = recorded(dataset(data).events(), states)
    found = [plain(next(running)) for _ in range(2 * LANES)]
    assert not network.lonely
    network.requests.clear()
    network.together = SOON
    resumed = recorded(dataset(data).events(lane_states=states), {})
    found.append(plain(next(resumed)))
    assert not network.lonely, "a resume, too"
    assert [*found, *map(plain, resumed)] == expected


def test_a_mixtures_sources_fetch_together(network: Network) -> None:
    entries = [{"name": name, "source": filled("jsonl", 4, place=name), "weight": 1} for name in ("a", "b")]
    network.together = 8
    assert len(packs(Mix(entries, stop="first_exhausted"), num_lanes=4)) > 10
    assert not network.lonely


@pytest.mark.parametrize(
    ("budget", "least", "most"), [(256 << 20, 20 << 20, 40 << 20), (6 << 20, 0, 13 << 20)]
)
def test_all_lanes_together_fetch_no_more_ahead_than_the_budget(
    network: Network, budget: int, least: int, most: int
) -> None:
    """Of 25 MB, before the second packs are asked for; each lane may hold a block that it needs beside them."""
    data = filled("jsonl", text=26_000)
    network.requests.clear()
    running = dataset(data, prefetch=budget, shuffle=1).stream()
    for _ in range(LANES):
        next(running)
    settle(network)
    assert least <= sum(size for _, size in network.requests) <= most


@pytest.mark.parametrize(("kind", "rows"), [("jsonl", 55), ("parquet", 2)])
def test_rows_that_are_large_are_read_ahead_by_their_bytes(network: Network, kind: str, rows: int) -> None:
    """Of 48 MB in parts of up to 6 MB, no further row or row group of 3 MB is asked for than those that come next."""
    data = filled(kind, 4, per_shard=60, text=200_000)
    first = data.read(Reading(prefetch=NO_PREFETCH))
    assert len(list(islice(first, rows))) == rows
    at_row = first.cursor
    network.requests.clear()
    reader = data.read(Reading(start=at_row, prefetch=Prefetch.for_lanes(1 << 20, 1)))
    for _ in range(3):
        next(reader)
        settle(network)
    assert sum(size for _, size in network.requests) <= 7 << 20


@pytest.mark.parametrize(("rows", "least", "most"), [([1] * 60, 16, 60), ([1, *[200] * 30], 1, 6)])
def test_as_many_parts_are_read_at_once_as_hold_the_records_that_are_wanted(
    network: Network, rows: list[int], least: int, most: int
) -> None:
    """Many where each of several has had few; that of the first tells nothing of the others."""
    files = Versioned(skip_instance_cache=True)
    for number, count in enumerate(rows):
        files.pipe_file(f"/bucket/c/{number:03}.jsonl", b'{"text": "%s"}\n' % (b"x" * 100) * count)
    data = source("jsonl", "versioned://bucket/c/*.jsonl")
    under_way, at_once = [], []

    def fault(path: str, start: int, stop: int) -> None:
        under_way.append(path)
        at_once.append(len(under_way))
        time.sleep(0.02)
        under_way.remove(path)

    Versioned.fault = staticmethod(fault)  # type: ignore[assignment]
    reader = data.read(Reading(prefetch=Prefetch.for_lanes(8 << 20, 1)))
    assert len([next(reader) for _ in range(50)]) == 50
    assert least <= max(at_once) <= most


def test_an_error_is_raised_where_the_lane_reads(network: Network) -> None:
    """A file of a later lane is fetched long before, in vain; the packs before its own come, and those after it."""
    data = filled("jsonl")
    expected = packs(data)
    network.requests.clear()
    needed: list[str] = []  # files, in the order of their need
    for _ in zip(dataset(data, prefetch=0).stream(), range(SOON), strict=False):
        needed += [name for name, _ in network.requests if name not in needed]
        network.requests.clear()
    network.fails = {name := needed[-1]}
    states: dict[int, Any] = {}
    running = recorded(dataset(data).events(), states)
    found = [plain(next(running))]
    for _ in range(500):
        if name in {each for each, _ in network.requests}:
            break
        time.sleep(0.01)
    assert name in {each for each, _ in network.requests}
    with pytest.raises(ConnectionError) as error:
        found.extend(map(plain, running))
    assert f"{name.rpartition('/')[2]} from byte " in error.value.__notes__[-1]
    assert found == expected[: len(found)]
    network.fails.clear()
    again = recorded(dataset(data).events(lane_states=states), {})
    assert [*found, *map(plain, again)] == expected


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("prefetch", [1000, 20_000])
def test_no_byte_is_fetched_twice_whatever_is_fetched_ahead(
    network: Network, kind: str, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pieces(monkeypatch, block=3000)
    data = filled(kind, 6, per_shard=120)
    expected = packs(data, num_lanes=3, prefetch=0)
    sizes = sum(size for _, size in network.requests)
    network.requests.clear()
    assert packs(data, num_lanes=3, prefetch=prefetch) == expected
    assert sum(size for _, size in network.requests) <= 1.05 * sizes


def test_a_forked_process_has_threads_of_its_own(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on with readers for which threads were reading when it was forked."""
    small_pieces(monkeypatch, block=3000)
    data, ahead = filled("jsonl", 2, per_shard=120), Prefetch(1000)
    expected = [row.row_id for row in data.read(Reading())]
    reader, prepared = (data.read(Reading(prefetch=ahead)) for _ in range(2))
    found = [next(reader).row_id]
    network.together, network.requests = 9, []  # threads that read wait for others
    while not network.requests:
        found.append(next(reader).row_id)
        time.sleep(0.02)
    prepared.prepare()
    while len(network.requests) < 2:
        time.sleep(0.01)

    def read_on() -> None:
        network.together = 0
        assert ahead.decode(threading.get_ident) != threading.get_ident()
        assert [*found, *(row.row_id for row in reader)] == expected
        assert [row.row_id for row in prepared] == expected

    assert ahead.decode(threading.get_ident) != threading.get_ident()
    child = mp.get_context("fork").Process(target=read_on, daemon=True)
    child.start()
    child.join(20)
    assert child.exitcode == 0


def test_an_interrupt_anywhere_in_a_shared_call_leaves_nobody_waiting() -> None:
    injector, place = Injector(), 0
    while place == 0 or injector.raised:
        place += 1
        shared, injector = FirstCall(), Injector(place)
        running: list[bool] = []

        def call(running: list[bool] = running) -> str:
            running.append(True)
            time.sleep(0.01)  # the other thread comes, and waits
            return "made"

        def come(running: list[bool] = running, shared: FirstCall = shared) -> None:
            while not running:
                time.sleep(0.001)
            shared("a", lambda: "made")

        other = threading.Thread(target=come, daemon=True)
        other.start()
        with suppress(KeyboardInterrupt):
            assert injector.call(partial(shared, "a", call)) == "made"
        running.append(True)
        other.join(5)
        assert not other.is_alive(), place
        assert shared("a", lambda: "anew") == "anew", "what an interrupt left behind is no result"
    assert place > 5
