"""Read files block by block, with retries and read-ahead in threads."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import Any

from streampack.storage.base import File, Storage
from streampack.storage.retries import Retries

TAIL_BYTES = 1 << 12
"""The most bytes that are first read behind a part's end, for its last line. Most lines are shorter."""

Block = tuple[File, int, int]  # (file, start, stop)


class Fetcher:
    """Fetches one lane's blocks: those of its plan ahead, in threads, and others when they are asked for.

    A block of the plan is first in ``planned``; then in ``waiting``, if it is the next one but there is no room for it;
    then in ``in_flight``, from the moment its thread starts until `take` returns its bytes. Blocks in ``in_flight``
    have at most ``ahead`` bytes together.

    Each block has its own thread, which ends with the request. So there is no pool to shut down, and no lock that a
    fork could copy. If the request fails in the thread, `take` tries it again, with all its retries.
    """

    def __init__(self, storage: Storage, retries: Retries, *, ahead: int) -> None:
        self.storage = storage
        self.retries = retries
        self.ahead = ahead
        self.in_flight: dict[Block, Future[bytes]] = {}
        self.planned: list[Iterator[Block]] = []
        self.waiting: Block | None = None

    def plan(self, *sequences: Iterable[Block]) -> None:
        """Set the blocks to fetch ahead, in order, and start fetching. Other blocks that were fetched are dropped.

        An iterator of ``sequences`` that is exhausted is asked again each time there is room, because it may know more
        blocks by then: see `TableFirst`.
        """
        old, self.in_flight = self.in_flight, {}
        self.waiting, self.planned = None, [iter(blocks) for blocks in sequences]
        self._top_up(old)

    def peek(self, block: Block) -> bytes | None:
        """Return the bytes of a block if they were fetched ahead and have arrived, else None. `take` still has them."""
        future = self.in_flight.get(block)
        if future is None or not future.done() or future.exception() is not None:
            return None
        return future.result()

    def take(self, block: Block) -> bytes:
        """Return the bytes of one block.

        Raises:
            OSError: if all tries failed.
        """
        fetched_ahead = self.in_flight.pop(block, None)
        if block == self.waiting:
            self.waiting = None
        self._top_up({}, taken=block)
        file, start, stop = block

        def read() -> bytes:
            nonlocal fetched_ahead
            if (future := fetched_ahead) is None:
                return self.storage.fetch(*block)
            fetched_ahead = None  # if the thread's request failed, the next try is made here
            return future.result()

        return self.retries.call(read, doing=f"reading {file.name}, bytes {start} to {stop}")

    def _top_up(self, old: dict[Block, Future[bytes]], taken: Block | None = None) -> None:
        left = self.ahead - sum(stop - start for _, start, stop in self.in_flight)
        # A new chain each time, because an iterator may know more blocks after it ended.
        while (block := self.waiting or next(chain(*self.planned), None)) is not None:
            if block == taken:  # it was planned only now, and `take` fetches it itself
                continue
            file, start, stop = block
            self.waiting = block
            if stop - start > left:
                return
            self.waiting = None
            left -= stop - start
            if (future := old.get(block)) is None:
                future = Future()
                work = partial(_fulfil, future, self.storage, block)
                threading.Thread(target=work, daemon=True, name=f"read ahead {file.name}").start()
            self.in_flight[block] = future


def _fulfil(future: Future[bytes], storage: Storage, block: Block) -> None:
    try:
        future.set_result(storage.fetch(*block))
    except BaseException as error:  # whatever it is: without a result, the reader would wait for ever
        future.set_exception(error)


class TableFirst:
    """An iterator over the blocks of a part that has a table of offsets: first the table, then what it points to.

    As long as the table has not arrived, the iterator raises StopIteration. It can be asked again later, so nothing
    waits for the table.

    Args:
        fetcher: the fetcher whose plan this iterator is given to.
        table: the block of the table.
        rest: returns the other blocks, given the table's bytes.
    """

    def __init__(self, fetcher: Fetcher, table: Block, rest: Callable[[bytes], Iterable[Block]]) -> None:
        self.fetcher = fetcher
        self.table = table
        self.rest = rest
        self.table_returned = False
        self.blocks: Iterator[Block] | None = None  # the other blocks; None until the table has arrived

    def __iter__(self) -> Iterator[Block]:
        return self

    def __next__(self) -> Block:
        if not self.table_returned:
            self.table_returned = True
            return self.table
        if self.blocks is None:
            if (table := self.fetcher.peek(self.table)) is None:
                raise StopIteration
            self.blocks = iter(self.rest(table))
        return next(self.blocks)


def tail_of(start: int, stop: int) -> int:
    """Return how many bytes to read behind a part at first, for the line that crosses its end.

    That is a small fraction of the part. For a part of a byte or two, from which a single row is read, it is as much as
    most rows need.
    """
    length = stop - start
    return TAIL_BYTES if length <= 2 else min(TAIL_BYTES, max(256, length // 32))


def blocks(
    storage: Storage, file: File, start: int, stop: int, *, tail: int | None = None
) -> Iterator[Block]:
    """Cut the bytes ``[start, stop)`` of a file into blocks. The last may go beyond ``stop`` to have ``tail`` bytes.

    By default ``tail`` is `tail_of` these bytes. If they are only the rest of a part, give that of the whole part.
    """
    tail = tail_of(start, stop) if tail is None else tail
    while start < stop:
        end = min(start + storage.block, max(stop, min(start + tail, file.size)))
        yield file, start, end
        start = end


class RangeStream(io.RawIOBase):
    """A stream of a file's bytes from ``start`` on.

    It reads whole blocks up to ``stop``, and behind that small blocks, each twice as long as the one before. So for the
    line that crosses a part's end, a few KiB are read instead of a whole block.
    """

    def __init__(
        self, fetcher: Fetcher, file: File, start: int, stop: int, following: Iterable[Block] = ()
    ) -> None:
        self.fetcher = fetcher
        self.file = file
        self.at = start  # the byte of the file behind the current block
        self.stop = stop
        self.tail = tail_of(start, stop)
        self.block = memoryview(b"")  # those bytes of the current block that were not returned yet
        fetcher.plan(blocks(fetcher.storage, file, start, stop), following)

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
        block = next(blocks(self.fetcher.storage, self.file, self.at, self.stop, tail=self.tail), None)
        if block is None:
            if self.at >= self.file.size:
                return b""
            block = (self.file, self.at, min(self.at + self.tail, self.file.size))
            self.tail = min(2 * self.tail, self.fetcher.storage.block)
        data = self.fetcher.take(block)
        self.at = block[2]
        return data
