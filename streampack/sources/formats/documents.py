"""`NumberedRecords`: records stored end to end in files and read in place; `DocumentSource`: such records of token ids.

Local files are mapped into memory; files at URLs are read in ranges.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from streampack.sources.examples import EXAMPLES, Example
from streampack.sources.mechanics.files import FileSource, divide, places
from streampack.sources.mechanics.indexed import cut_off
from streampack.sources.mechanics.parts import Damage, Part, Record
from streampack.storage.base import File, ParallelMap, Resized, resized
from streampack.storage.corpus import Corpus
from streampack.storage.names import Files
from streampack.storage.ranges import Block, Fetcher
from streampack.types import IGNORE_INDEX, IntArray

UNITS_PER_LANE = 1 << 16
"""Tokens per lane by default, 16 packs of 4,096; bytes, if the records are not tokens."""

Stored = npt.NDArray[np.integer[Any]]
"""Ids in the dtype of their file, ``[length]``; bytes, if the records are not tokens."""

Marks = npt.NDArray[np.uint8]
"""0 for each id that is not trained on, ``[length]``."""

Offsets = npt.NDArray[np.int64]
Checksums = npt.NDArray[np.uint32]
Read = Callable[[Block], bytes | memoryview]


class Mask(NamedTuple):
    """Where a file says which tokens are trained on: from byte ``first`` on, with one byte or one bit per token."""

    file: File
    first: int = 0
    bits: bool = False

    def block(self, start: int, end: int) -> Block:
        """Return the block with the marks of tokens ``[start, end)``."""
        each = 8 if self.bits else 1
        return self.file, self.first + start // each, self.first + -(-end // each)

    def marks(self, data: bytes | memoryview, start: int) -> Marks:
        """Return the marks of the tokens from ``start`` on, from the data of their `block`."""
        found = np.frombuffer(data, np.uint8)
        return np.unpackbits(found, bitorder="little")[start % 8 :] if self.bits else found


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of the records in a file.

    Attributes:
        dtype: the type of a unit of a record, such as ``<u2`` for ids, or ``|u1`` for bytes.
        units: the number of units in the file.
        count: the number of records in the file: documents, or tokens if no index says where documents begin.
        first: the byte at which the first record begins.
        index: the file beside it that says where its records begin, if there is one.
        mask: where the marks of the trained tokens are; None if all tokens are trained on.
    """

    dtype: str = "<u2"
    units: int = 0
    count: int = 0
    first: int = 0
    index: File | None = None
    mask: Mask | None = None

    @property
    def width(self) -> int:
        """Bytes of an id."""
        return np.dtype(self.dtype).itemsize

    def block(self, file: File, start: int, end: int) -> Block:
        """Return the block with units ``[start, end)`` of a file."""
        return file, self.first + self.width * start, self.first + self.width * end


class NumberedRecords(FileSource):
    """Records stored end to end in files. A format implements `offsets` and `decode`.

    Args:
        corpus: the files.
        layouts: for each file its layout, or why it cannot be read; see `look_at_each`.
        whole: the numbers of files that cannot be cut.
    """

    unit = "document"

    least = 1
    """Fewest records in a part of a file."""

    sizes_of_index = False
    """Whether an index lists the sizes of files. If so, a file of another size is damaged; else it has changed."""

    def __init__(
        self, corpus: Corpus, layouts: Sequence[Layout | str], *, whole: Collection[int] = ()
    ) -> None:
        self.layouts = [Layout() if isinstance(each, str) else each for each in layouts]
        files = []
        for file, found, layout in zip(corpus.files, layouts, self.layouts, strict=True):
            others = (layout.index, layout.mask and layout.mask.file)
            beside = tuple(other for other in others if other is not None and other != file)
            files.append(
                replace(file, problem=found if isinstance(found, str) else file.problem, beside=beside)
            )
        super().__init__(Corpus(Files.of(files), corpus.storage))
        self.counts = [layout.count for layout in self.layouts]
        # A file without a known number of records is a part, too, so that a lane reports it.
        self.uncut = {*whole, *(number for number in self.bad if not self.counts[number])}

    def offsets(self, part: Part, read: Read) -> tuple[Offsets, Checksums | None]:
        """Return where each record of a part begins and where the last one ends, in units from the file's first record.

        If the format has checksums (`checksum`), those of the records are returned, too.

        Raises:
            Damage: if the data that locates the records is damaged. The caller checks that the offsets rise and are in
                the file.
        """
        raise NotImplementedError

    @override
    def cut(self, num_lanes: int, parallel_map: ParallelMap) -> list[list[Part]]:
        sizes = [layout.units for layout in self.layouts]
        return divide(self.counts, num_lanes, sizes=sizes, whole=self.uncut, least=self.least)

    @override
    def records(self, part: Part, offset: int, fetcher: Fetcher) -> Iterator[Record]:
        count = self.counts[part.file]
        if not 0 <= offset <= count:
            file = self.files[part.file]
            raise ValueError(f"{file.shown} has no {self.unit} {offset}; the state or the file is damaged")
        part = part._replace(start=offset, stop=count if part.stop is None else part.stop)
        return self.slice(part, fetcher) if part.start != part.stop else iter(())

    def slice(self, part: Part, fetcher: Fetcher, content: bytes | None = None) -> Iterator[Record]:
        """Yield the records of a part. The file is read, unless ``content`` is its content."""
        file, layout, number = self.files[part.file], self.layouts[part.file], part.start
        view: Callable[[File], bytes | memoryview] = cache(mapped) if content is None else lambda _: content
        here = self.local or content is not None
        read: Read = (lambda block: view(block[0])[block[1] : block[2]]) if here else fetcher.take
        units = layout.units if content is None else len(content) - layout.first
        offsets, checksums = self.offsets(part, read)
        if not ((offsets[:-1] <= offsets[1:]).all() and offsets[0] >= 0 and offsets[-1] <= units):
            what = f"the offsets of its records lead out of {file.name}, or backwards: it is damaged"
            raise Damage(what, offset=part.start)
        runs = list(_runs(offsets, fetcher.block // layout.width))
        mask, blocks = layout.mask, []
        for run in runs:
            start, end = int(run[0]), int(run[-1])
            blocks.append(layout.block(file, start, end))
            blocks.extend([mask.block(start, end)] if mask is not None else [])
        found = map(read, blocks) if here else fetcher.stream(blocks)
        written = repeat(None) if checksums is None else iter(checksums.tolist())
        for run in runs:
            stored = _signed(np.frombuffer(next(found), layout.dtype))
            marks = mask.marks(next(found), int(run[0])) if mask is not None else None
            for start, end in pairwise((run - run[0]).tolist()):
                own = stored[start:end]
                # Fetched data is copied, so that a buffered record does not keep its entire block in memory.
                own = own if self.local else own.copy()
                yield number, (own, None if marks is None else marks[start:end], next(written)), number + 1
                number += 1

    @override
    def damage(self, error: Exception, part: Part, offset: int) -> Damage | None:
        if self.sizes_of_index and isinstance(error, Resized):
            return Damage(cut_off(error.size, self.files[part.file].size), offset=offset)
        return super().damage(error, part, offset)

    @override
    def place(self, part: Part, offset: int) -> str:
        return self.locate((part.file, offset))

    @property
    @override
    def size(self) -> int | None:
        return sum(self.counts)

    @override
    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """Return records from all over the files."""
        return self.examples_at(places(self.counts, count))

    @override
    def natural_lanes(self) -> int:
        """Return one lane for 65,536 tokens or bytes, and one for each file that cannot be cut."""
        units = sum(layout.units for i, layout in enumerate(self.layouts) if i not in self.uncut)
        return max(1, min(sum(self.counts), units // UNITS_PER_LANE + len(self.uncut)))


class DocumentSource(NumberedRecords):
    """Documents of token ids: rows of ``tokens`` and ``labels``, ``[length]``."""

    def __init__(self, corpus: Corpus, layouts: Sequence[Layout | str]) -> None:
        super().__init__(corpus, layouts)
        self.tokens = sum(layout.units for layout in self.layouts)
        dtypes = [np.dtype(each.dtype) for each in layouts if isinstance(each, Layout)]
        # A user's subclass may change the ids, and other types may hold negative ids.
        if type(self).__module__.startswith("streampack.") and all(
            dtype.kind == "u" and dtype.itemsize <= 4 for dtype in dtypes
        ):
            self.ids_below = 1 << 8 * max(dtype.itemsize for dtype in dtypes)

    @override
    def decode(
        self, part: Part, offset: int, raw: tuple[Stored, Marks | None, int | None]
    ) -> Mapping[str, Any]:
        stored, marks, written = raw
        if written is not None and checksum(stored, marks) != written:
            raise ValueError(
                "its checksum is not the one that was written, so its tokens, mask or offsets are damaged; copy the "
                "file again, or tokenize again"
            )
        tokens = as_ids(stored)
        if marks is None:
            return {"tokens": tokens, "labels": tokens}
        labels = np.where(marks, tokens, IGNORE_INDEX).astype(tokens.dtype, copy=False)
        labels.setflags(write=False)
        return {"tokens": tokens, "labels": labels}


def mapped(file: File) -> memoryview:
    """Return the content of a local file, which stays mapped while a view of it exists."""
    with Path(file.path).open("rb") as opened:
        if (size := os.fstat(opened.fileno()).st_size) != file.size:  # an empty one cannot be mapped
            raise resized(file, size)
        return memoryview(mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ))


def checksum(stored: Stored, marks: Marks | None) -> int:
    """Return the CRC-32 of a document's ids, as they are stored, and then of its marks.

    >>> checksum(np.array([5, 6, 7], "<u2"), None), checksum(np.array([5, 6, 7], "<u2"), np.array([0, 1, 1], np.uint8))
    (2334521611, 326285596)
    """
    # numpy's types do not say that arrays are buffers, and a memoryview of one takes 0.1 us.
    ids: Any = stored
    bits: Any = marks
    return zlib.crc32(ids) if marks is None else zlib.crc32(bits, zlib.crc32(ids))


def as_ids(stored: Stored) -> IntArray:
    """Return read-only ids as int32, or as int64 if they have 8 bytes in the file or an id of 4 bytes needs it.

    Ids of 4 and 8 bytes are not copied, unless one of 4 bytes is 2**31 or more.

    >>> stored = np.array([5, 2**31 - 1], "<u4")
    >>> as_ids(stored).dtype, np.shares_memory(as_ids(stored), stored)
    (dtype('int32'), True)
    >>> as_ids(np.array([2**31], "<u4")), as_ids(np.array([7], "<u2")).dtype
    (array([2147483648]), dtype('int32'))
    """
    ids: Any
    if stored.itemsize < 4:
        ids = stored.astype(np.int32)
    elif (ids := _signed(stored)).dtype.kind == "u":
        ids = ids.astype(np.int64)
    ids.setflags(write=False)  # An array that cannot change need not be copied again.
    found: IntArray = ids
    return found


def _signed(ids: Stored) -> Stored:
    """Return unsigned ids of 4 or 8 bytes as signed ones, if all fit; others as they are.

    Checking many short documents at once spares `as_ids` a check of each, which is 10 % of the time of a stream.
    """
    if ids.dtype.kind != "u" or ids.itemsize < 4:
        return ids
    signed = ids.view(f"<i{ids.itemsize}")
    return signed if ids.itemsize == 8 or not ids.size or np.minimum.reduce(signed) >= 0 else ids


def _runs(offsets: Offsets, limit: int) -> Iterator[Offsets]:
    """Yield the offsets of runs of records. A run ends with the record that reaches ``limit`` units."""
    first, last = 0, len(offsets) - 1
    while first < last:
        # The end of the record that crosses the run's end, or of the last one.
        stop = min(int(np.searchsorted(offsets, offsets[first] + max(1, limit))), last)
        yield offsets[first : stop + 1]
        first = stop
