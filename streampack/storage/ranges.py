"""Files read block by block, tried again where that helps, and ahead of need by threads."""

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

TAIL_BYTES = 1 << 12  # behind a part's end, to begin with, for the line that crosses it: most are shorter

Block = tuple[File, int, int]  # (file, start, stop)


class Fetcher:
    """One lane's way to the bytes. Blocks of the plan are fetched before they are asked for.

    At most ``ahead`` bytes are held or under way, however slow the reader. Each block has a thread of its own, for as
    long as the request takes: nothing to shut down, nothing that a fork would leave behind locked. A block
    that failed in its thread is fetched again by the reader, with all its retries.
    """

    def __init__(self, storage: Storage, retries: Retries, *, ahead: int) -> None:
        self.storage = storage
        self.retries = retries
        self.ahead = ahead
        self.flying: dict[Block, Future[bytes]] = {}
        self.coming: list[Iterator[Block]] = []
        self.held: Block | None = None  # the next one, which had no room yet

    def plan(self, *parts: Iterable[Block]) -> None:
        """What will be asked for, in order. What was fetched for an older plan and is not in this one is dropped.

        A part that has come to its end is asked again whenever there is room: see `Ahead`.
        """
        old, self.flying = self.flying, {}
        self.held, self.coming = None, [iter(blocks) for blocks in parts]
        self._top_up(old)

    def peek(self, block: Block) -> bytes | None:
        """The bytes of a block that was fetched ahead, if they are here. They stay, to be taken."""
        future = self.flying.get(block)
        if future is None or not future.done() or future.exception() is not None:
            return None
        return future.result()

    def take(self, block: Block) -> bytes:
        """The bytes of one block.

        Raises:
            OSError: when all tries failed.
        """
        future = [self.flying.pop(block)] if block in self.flying else []
        if block == self.held:  # too large to be fetched ahead
            self.held = None
        self._top_up({})
        file, start, stop = block
        return self.retries.call(
            lambda: future.pop().result() if future else self.storage.fetch(*block),
            doing=f"reading {file.name}, bytes {start} to {stop}",
        )

    def _top_up(self, old: dict[Block, Future[bytes]]) -> None:
        left = self.ahead - sum(stop - start for _, start, stop in self.flying)
        while (block := self.held or next(chain(*self.coming), None)) is not None:
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
    except BaseException as error:  # whatever it is, the reader must not wait for it
        future.set_exception(error)


class Ahead:
    """The blocks of a part whose table of offsets says where its records lie: the table; once it is here, the rest.

    Until then it has nothing more to say, and nobody waits for it: an iterator that goes on after its end.

    Args:
        fetcher: whose plan this is a part of.
        table: the block that is asked for first.
        rest: makes the other blocks of the table's bytes.
    """

    def __init__(self, fetcher: Fetcher, table: Block, rest: Callable[[bytes], Iterable[Block]]) -> None:
        self.fetcher = fetcher
        self.table = table
        self.rest = rest
        self.asked = False  # for the table
        self.blocks: Iterator[Block] | None = None

    def __iter__(self) -> Iterator[Block]:
        return self

    def __next__(self) -> Block:
        if not self.asked:
            self.asked = True
            return self.table
        if self.blocks is None:
            if (table := self.fetcher.peek(self.table)) is None:
                raise StopIteration
            self.blocks = iter(self.rest(table))
        return next(self.blocks)


def tail_of(start: int, stop: int) -> int:
    """How much to read behind a part at first: little beside it; for a single row, enough for most."""
    length = stop - start
    return TAIL_BYTES if length <= 2 else min(TAIL_BYTES, max(256, length // 32))


def blocks(
    storage: Storage, file: File, start: int, stop: int, *, tail: int | None = None
) -> Iterator[Block]:
    """The bytes ``[start, stop)``, cut; the last one is at least as long as what is read behind it at first.

    ``tail`` is that length, where ``start`` is not the part's own: of its rest alone, `tail_of` would be another.
    """
    tail = tail_of(start, stop) if tail is None else tail
    while start < stop:
        end = min(start + storage.block, max(stop, min(start + tail, file.size)))
        yield file, start, end
        start = end


class Stretch(io.RawIOBase):
    """A file from ``start`` on: blocks up to ``stop``, behind it small ones that grow, as far as it is read.

    So a part reads a few KiB beyond its end instead of a block, for the line that begins before it.
    """

    def __init__(
        self, fetcher: Fetcher, file: File, start: int, stop: int, following: Iterable[Block] = ()
    ) -> None:
        self.fetcher = fetcher
        self.file = file
        self.at = start  # of the file, behind the block in hand
        self.stop = stop
        self.tail = tail_of(start, stop)
        self.block = memoryview(b"")  # what is left of the block in hand
        fetcher.plan(blocks(fetcher.storage, file, start, stop), following)

    def readable(self) -> bool:
        """Yes, as `io` asks."""
        return True

    def tell(self) -> int:
        """Bytes of the file that were handed out."""
        return self.at - len(self.block)

    def readinto(self, buffer: Any) -> int:
        """What is left of the block in hand, or the next one."""
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
