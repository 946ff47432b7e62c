"""Reading of files block by block, with some blocks in flight."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain, islice
from typing import Any

from streampack.storage.base import File, FileStorage
from streampack.storage.prefetch import NO_PREFETCH, Prefetch, result_of

TAIL_BYTES = 1 << 15
"""Most bytes that are read after a part's end, for its last line. A longer line costs another request."""
LEAST_TAIL_BYTES = 1 << 8
SINGLE_LINE_BYTES = 1 << 12  # that are first read for a single line

Block = tuple[File, int, int]  # (file, start, stop)


class Fetcher:
    """Reads blocks of files, some of them before they are needed.

    Args:
        storage: holds the files.
        prefetch: how much may be read before it is needed.
    """

    def __init__(self, storage: FileStorage, *, prefetch: Prefetch = NO_PREFETCH) -> None:
        self.storage = storage
        self.prefetch = prefetch
        self.block = prefetch.block(storage.block)
        self.depth = prefetch.room // self.block  # blocks of a stream that are read before they are needed
        self.bytes = 0  # that were returned

    def take(self, block: Block) -> bytes:
        """Return the bytes of one block."""
        data = self.storage.fetch(*block)
        self.bytes += len(data)
        return data

    def stream(self, blocks: Iterable[Block], *, depth: int | None = None) -> Iterator[bytes]:
        """Yield the bytes of blocks, with up to ``depth`` further ones in flight, by default what there is room for."""
        depth = self.depth if depth is None else depth
        if not depth:
            yield from map(self.take, blocks)
            return
        left = iter(blocks)
        in_flight: deque[tuple[partial[bytes], Future[bytes]]] = deque()
        try:
            while True:
                for block in islice(left, 1 + depth - len(in_flight)):
                    take = partial(self.storage.fetch, *block)
                    in_flight.append((take, self.prefetch.requests.submit(take)))
                if not in_flight:
                    return
                take, future = in_flight.popleft()
                data = result_of(future, take)
                self.bytes += len(data)
                yield data
        finally:
            for _, future in in_flight:
                future.cancel()

    def together(self, file: File, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, bytes]]:
        """Return (start, bytes) of ranges of a file, which are read side by side where anything is prefetched."""
        found = [list(blocks(self.block, file, start, stop)) for start, stop in ranges]
        data = self.stream(chain(*found), depth=sum(map(len, found)) if self.prefetch.room else 0)
        return [
            (start, b"".join(islice(data, len(cut)))) for (start, _), cut in zip(ranges, found, strict=True)
        ]


def tail_of(start: int, stop: int) -> int:
    """Return how many bytes to read after a part of lines, for the line that crosses its end.

    That is a small fraction of the part; for a single row, what most rows need.
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

    It reads complete blocks up to ``stop``, the last with ``tail`` bytes more, then small blocks, each twice as long as
    the one before: the line that crosses a part's end costs a few KiB.
    """

    def __init__(self, fetcher: Fetcher, file: File, start: int, stop: int, *, tail: int = 0) -> None:
        self.fetcher = fetcher
        self.file = file
        self.at = start  # the byte of the file after the current block
        self.blocks = fetcher.stream(blocks(fetcher.block, file, start, stop, tail=tail))
        self.more = max(LEAST_TAIL_BYTES, tail)  # bytes to read next, if more are needed than the tail
        self.error: Exception | None = None  # of the storage; pyarrow's own are of the same classes
        self.block = memoryview(b"")  # those bytes of the current block that were not returned yet

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def tell(self) -> int:
        """Return the offset in the file of the next byte."""
        return self.at - len(self.block)

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
        if not self.block:
            try:
                data = next(self.blocks, None)
                if data is None and self.at < self.file.size:
                    data = self.fetcher.take((self.file, self.at, min(self.at + self.more, self.file.size)))
                    self.more = min(2 * self.more, self.fetcher.block)
            except Exception as error:
                self.error = error
                raise
            self.block = memoryview(data or b"")
            self.at += len(self.block)
        count = min(len(buffer), len(self.block))
        buffer[:count] = self.block[:count]
        self.block = self.block[count:]
        return count
