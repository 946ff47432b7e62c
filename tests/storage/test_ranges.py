"""A stretch of a file, block by block: what is read ahead of need is what is needed."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from streampack.storage.base import File
from streampack.storage.ranges import TAIL_BYTES, Fetcher, RangeStream, tail_of
from streampack.storage.read_ahead import ReadAhead
from streampack.storage.retries import Retries


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
