"""Read files block by block, with retries and read-ahead in threads."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from streampack.storage.base import File, FileStorage
from streampack.storage.counts import ReadCounts
from streampack.storage.read_ahead import NO_READ_AHEAD, Account, ReadAhead

TAIL_BYTES = 1 << 15
"""The most bytes that are read with a part's end, for its last line. A line that goes on behind them costs another
request, for which the lane waits."""
LEAST_TAIL_BYTES = 1 << 8
SINGLE_LINE_BYTES = 1 << 12  # that are first read for a single line

PARTS_AT_ONCE = 4
"""How many parts a plan reads tables of at a time. Each begins with a request or two that the others depend on."""
BLOCKS_AHEAD = 32
"""The most blocks that a reader fetches ahead. Of files of a few kB, its share of memory would hold thousands."""

Block = tuple[File, int, int]  # (file, start, stop)


class Fetcher:
    """Fetches one reader's blocks: those of its plan ahead, in threads, and others when they are asked for.

    A plan is made of parts of files, one after the other. A block of it is first in ``parts``; then in ``waiting``, if
    it is the next one but there is no room for it; then in ``in_flight``, from the moment it is requested until `take`
    returns its bytes. What is fetched
    ahead changes nothing in what is read.

    Args:
        storage: holds the files.
        read_ahead: how much may be fetched ahead.
        counts: of what all readers of a source have read.
    """

    def __init__(
        self,
        storage: FileStorage,
        *,
        read_ahead: ReadAhead = NO_READ_AHEAD,
        counts: ReadCounts | None = None,
    ) -> None:
        self.storage = storage
        self.read_ahead = read_ahead
        self.counts = ReadCounts() if counts is None else counts
        self.block = read_ahead.block(storage.block)
        self.in_flight: dict[Block, Future[bytes]] = {}
        self.old: dict[
            Block, Future[bytes]
        ] = {}  # of the plans before, as far as this one has not come to them
        self.survived: dict[Block, int] = {}  # how many plans have not come to a block of ``old``
        self.waiting: Block | None = None
        self.parts: list[PlannedPart] = []  # those that were begun
        self.later: Iterator[Iterable[Block | None]] = iter(())
        # Bytes that the reader holds besides blocks that were fetched ahead: what it reads from, and its window.
        self.reading = self.window = 0
        # Bytes that it is about to take, how many of them it may fetch ahead, and whether it is its turn.
        self.expected = self.burst = 0
        self.now = False
        self.account = Account(read_ahead.threads)

    def plan(self, blocks: Iterable[Block | None], later: Iterable[Iterable[Block | None]] = ()) -> None:
        """Set the blocks to fetch ahead, in order, and start fetching.

        Blocks of the plans before that are in this one, too, are not fetched again; others are dropped by a later plan.

        Args:
            blocks: those of the part that is read. A None says that the next block depends on one that was yielded and
                has not arrived; the iterator is asked again when it may have. `peek` has the bytes of arrived blocks.
            later: the blocks of parts that are read after that one.
        """
        # A part whose table came late may lie before parts that were fetched already.
        self.survived = {block: self.survived.get(block, 0) + 1 for block in self.old}
        self.old.update(self.in_flight)
        self.in_flight = {}
        for block, plans in self.survived.items():
            if plans >= PARTS_AT_ONCE:
                self.old.pop(block).cancel()
        self.waiting, self.parts, self.later = None, [PlannedPart(iter(blocks))], iter(later)
        self.top_up()

    def expect(self, size: int, *, now: bool = False) -> None:
        """Fetch ahead for a reader that will take ``size`` bytes at once, when its turn comes or ``now``."""
        self.expected, self.now = size, now
        self.burst = self.read_ahead.turn if now else self.read_ahead.burst
        self.top_up()

    def hold(self, window: int) -> None:
        """Set how many bytes the reader's shuffle window holds."""
        self.window = window
        self.read_ahead.check(window)
        self.top_up()

    def peek(self, block: Block) -> bytes | None:
        """Return the bytes of a block if they were fetched ahead and have arrived, else None. `take` still has them."""
        future = self.in_flight.get(block)
        return None if future is None or not future.done() or _failed(future) else future.result()

    def drop(self, block: Block) -> None:
        """Count the bytes of a block that `peek` has returned as read, and let them go."""
        if (future := self.in_flight.pop(block, None)) is not None:
            self._count(future.result())

    def _count(self, data: bytes) -> None:
        self.counts.bytes += len(data)

    def take(self, block: Block) -> bytes:
        """Return the bytes of one block.

        Raises:
            OSError: if all tries failed.
        """
        fetched_ahead = self.in_flight.pop(block, None) or self.old.pop(block, None)
        if block == self.waiting:
            self.waiting = None
        _, start, stop = block
        self.expected = max(0, self.expected - (stop - start))
        self.top_up(taken=block)
        self.read_ahead.threads.wake()
        if fetched_ahead is not None and fetched_ahead.cancel():
            fetched_ahead = None  # no thread has begun it
        data = self.storage.fetch(*block) if fetched_ahead is None else fetched_ahead.result()
        self._count(data)
        return data

    def top_up(self, *, taken: Block | None = None) -> None:
        """Fetch blocks of the plan as long as there is room, except for ``taken``."""
        ahead = self.read_ahead
        held = sum(stop - start for known in (self.in_flight, self.old) for _, start, stop in known)
        needed = self.reading + self.window
        self.account.set(ahead=held, needed=needed)
        room = max(ahead.share - needed, min(self.expected, self.burst)) - held
        room = min(room, ahead.room(now=self.now))
        while (block := self.waiting or self._next_planned()) is not None:
            self.waiting = None
            if (
                block == taken or block in self.in_flight
            ):  # several parts may need the same block of their file
                continue
            if (future := self.old.pop(block, None)) is None:
                full = len(self.in_flight) + len(self.old) >= BLOCKS_AHEAD
                if (size := block[2] - block[1]) > room or full:
                    self.waiting = block
                    return
                room -= size
                held += size
                self.account.set(ahead=held, needed=needed)
                future = ahead.threads.submit(partial(self.storage.fetch, *block))
            self.in_flight[block] = future

    def _next_planned(self) -> Block | None:
        """Return the next block of the plan; None at its end, or if it depends on blocks that have not arrived.

        As long as a part waits for its table, the tables of the following ones are fetched, and nothing else of them.
        """
        waits = False  # whether one of the parts before does
        for part in list(self.parts):
            if waits and part.has_waited:
                continue
            try:
                block = next(part.blocks)
            except StopIteration:
                self.parts.remove(part)
                continue
            if block is not None:
                return block
            part.has_waited = waits = True
        while len(self.parts) < PARTS_AT_ONCE and (following := next(self.later, None)) is not None:
            self.parts.append(part := PlannedPart(iter(following)))
            if (block := next(part.blocks, None)) is not None:
                return block
        if self.parts:
            self.read_ahead.threads.call_later(self)
        return None


def _failed(future: Future[bytes]) -> bool:
    return future.done() and future.exception() is not None


@dataclass(eq=False, slots=True)
class PlannedPart:
    """The blocks of a part in a plan of a `Fetcher`."""

    blocks: Iterator[Block | None]
    has_waited: bool = False  # for a block that the others depend on


def tail_of(start: int, stop: int) -> int:
    """Return how many bytes to read behind a part of lines, for the line that crosses its end.

    That is a small fraction of the part. For a part of a byte or two, from which a single row is read, it is as much as
    most rows need.
    """
    length = stop - start
    return min(TAIL_BYTES, SINGLE_LINE_BYTES - length if length <= 2 else max(LEAST_TAIL_BYTES, length // 32))


def blocks(size: int, file: File, start: int, stop: int, *, tail: int = 0) -> Iterator[Block]:
    """Cut the bytes ``[start, stop)`` of a file into blocks of ``size`` bytes. The last goes ``tail`` bytes beyond."""
    limit = min(stop + tail, file.size)
    while start < stop:
        end = min(start + size, limit)
        yield file, start, end
        start = end


class RangeStream(io.RawIOBase):
    """A stream of a file's bytes from ``start`` on.

    It reads whole blocks up to ``stop``, the last with ``tail`` bytes more, and behind that small blocks, each twice as
    long as the one before. So for the line that crosses a part's end, a few KiB are read instead of a whole block.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        file: File,
        start: int,
        stop: int,
        later: Iterable[Iterable[Block | None]] = (),
        *,
        tail: int = 0,
    ) -> None:
        self.fetcher = fetcher
        self.file = file
        self.at = start  # the byte of the file behind the current block
        self.stop = stop
        self.tail = tail
        self.more = max(LEAST_TAIL_BYTES, tail)  # bytes to read next, if more are needed than the tail
        self.block = memoryview(b"")  # those bytes of the current block that were not returned yet
        fetcher.plan(blocks(fetcher.block, file, start, stop, tail=tail), later)

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def tell(self) -> int:
        """Return the offset in the file of the next byte."""
        return self.at - len(self.block)

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        if not self.block:
            self.block = memoryview(self._next_block())
        count = min(len(buffer), len(self.block))
        buffer[:count] = self.block[:count]
        self.block = self.block[count:]
        return count

    def _next_block(self) -> bytes:
        block = next(blocks(self.fetcher.block, self.file, self.at, self.stop, tail=self.tail), None)
        if block is None:
            if self.at >= self.file.size:
                return b""
            block = (self.file, self.at, min(self.at + self.more, self.file.size))
            self.more = min(2 * self.more, self.fetcher.block)
        self.fetcher.reading = block[2] - block[1]
        data = self.fetcher.take(block)
        self.at = block[2]
        return data
