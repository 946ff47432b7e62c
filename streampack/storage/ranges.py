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

TAIL_BYTES = 1 << 12  # read first behind a part's end, for the line that crosses it: most are shorter

Block = tuple[File, int, int]  # (file, start, stop)


class Fetcher:
    """Fetches one lane's blocks, those of its plan ahead of need.

    At most ``ahead`` bytes are held or in flight. Each block has a thread of its own, for as long as the request takes:
    there is nothing to shut down, and no lock that a fork could copy. A block that failed in its thread is fetched
    again by the reader, with all its retries.
    """

    def __init__(self, storage: Storage, retries: Retries, *, ahead: int) -> None:
        self.storage = storage
        self.retries = retries
        self.ahead = ahead
        self.flying: dict[Block, Future[bytes]] = {}
        self.coming: list[Iterator[Block]] = []
        self.held: Block | None = None  # the next block, for which there is no room yet

    def plan(self, *parts: Iterable[Block]) -> None:
        """Set the blocks to fetch ahead, in order. Fetched blocks that are not in the new plan are dropped.

        An iterator of ``parts`` that is exhausted is tried again whenever there is room: see `Ahead`.
        """
        old, self.flying = self.flying, {}
        self.held, self.coming = None, [iter(blocks) for blocks in parts]
        self._top_up(old)

    def peek(self, block: Block) -> bytes | None:
        """Return the bytes of a block if they were fetched ahead and have arrived. `take` still returns them."""
        future = self.flying.get(block)
        if future is None or not future.done() or future.exception() is not None:
            return None
        return future.result()

    def take(self, block: Block) -> bytes:
        """Return the bytes of one block.

        Raises:
            OSError: when all tries failed.
        """
        future = [self.flying.pop(block)] if block in self.flying else []
        if block == self.held:  # too large to be fetched ahead
            self.held = None
        self._top_up({}, taken=block)
        file, start, stop = block
        return self.retries.call(
            lambda: future.pop().result() if future else self.storage.fetch(*block),
            doing=f"reading {file.name}, bytes {start} to {stop}",
        )

    def _top_up(self, old: dict[Block, Future[bytes]], taken: Block | None = None) -> None:
        left = self.ahead - sum(stop - start for _, start, stop in self.flying)
        while (block := self.held or next(chain(*self.coming), None)) is not None:
            if block == taken:  # planned late: the reader fetches it now
                continue
            file, start, stop = block
            self.held = block
            if stop - start > left:
                return
            self.held = None
            left -= stop - start
            if (future := old.get(block)) is None:
                future = Future()
                work = partial(_fulfil, future, self.storage, block)
                threading.Thread(target=work, daemon=True, name=f"read ahead {file.name}").start()
            self.flying[block] = future


def _fulfil(future: Future[bytes], storage: Storage, block: Block) -> None:
    try:
        future.set_result(storage.fetch(*block))
    except BaseException as error:  # or the reader would wait for ever
        future.set_exception(error)


class Ahead:
    """The blocks of a part with a table of offsets: the table; once that has arrived, the blocks that it points to.

    Until then the iterator raises StopIteration, and goes on later, so that nothing waits for the table.

    Args:
        fetcher: whose plan this is a part of.
        table: the first block.
        rest: returns the other blocks, given the table's bytes.
    """

    def __init__(self, fetcher: Fetcher, table: Block, rest: Callable[[bytes], Iterable[Block]]) -> None:
        self.fetcher = fetcher
        self.table = table
        self.rest = rest
        self.begun = False  # the table was returned
        self.blocks: Iterator[Block] | None = None

    def __iter__(self) -> Iterator[Block]:
        return self

    def __next__(self) -> Block:
        if not self.begun:
            self.begun = True
            return self.table
        if self.blocks is None:
            if (table := self.fetcher.peek(self.table)) is None:
                raise StopIteration
            self.blocks = iter(self.rest(table))
        return next(self.blocks)


def tail_of(start: int, stop: int) -> int:
    """Return how many bytes to read behind a part at first: few beside it; for a single row, enough for most."""
    length = stop - start
    return TAIL_BYTES if length <= 2 else min(TAIL_BYTES, max(256, length // 32))


def blocks(
    storage: Storage, file: File, start: int, stop: int, *, tail: int | None = None
) -> Iterator[Block]:
    """Cut the bytes ``[start, stop)`` into blocks; the last one is at least ``tail`` bytes long.

    ``tail`` is `tail_of` the whole part by default; give it where ``start`` is in the middle of the part.
    """
    tail = tail_of(start, stop) if tail is None else tail
    while start < stop:
        end = min(start + storage.block, max(stop, min(start + tail, file.size)))
        yield file, start, end
        start = end


class Stretch(io.RawIOBase):
    """A stream of a file from ``start`` on: blocks up to ``stop``, behind it small ones that grow.

    So a part reads a few KiB beyond its end instead of a block, for the line that crosses it.
    """

    def __init__(
        self, fetcher: Fetcher, file: File, start: int, stop: int, following: Iterable[Block] = ()
    ) -> None:
        self.fetcher = fetcher
        self.file = file
        self.at = start  # offset in the file behind the current block
        self.stop = stop
        self.tail = tail_of(start, stop)
        self.block = memoryview(b"")  # the rest of the current block
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
            self.block = memoryview(self._next())
        count = min(len(buffer), len(self.block))
        buffer[:count] = self.block[:count]
        self.block = self.block[count:]
        return count

    def _next(self) -> bytes:
        block = next(blocks(self.fetcher.storage, self.file, self.at, self.stop, tail=self.tail), None)
        if block is None:
            if self.at >= self.file.size:
                return b""
            block = (self.file, self.at, min(self.at + self.tail, self.file.size))
            self.tail = min(2 * self.tail, self.fetcher.storage.block)
        data = self.fetcher.take(block)
        self.at = block[2]
        return data
