"""`DocumentSource`: documents that lie end to end in files of token ids, and are read in place.

Files of this machine are mapped into memory; those behind URLs are read by ranges.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from streampack.sources.files import divide
from streampack.sources.indexed import IndexedSource, Offsets, require_sound
from streampack.sources.parts import Part, Record
from streampack.storage.base import File, ParallelMap, resized
from streampack.storage.corpus import Corpus, require_some
from streampack.storage.ranges import Block, Fetcher
from streampack.types import IGNORE_INDEX, IntArray

TOKENS_PER_LANE = 1 << 18  # tokens per lane by default: 64 packs of 4,096

Stored = npt.NDArray[np.integer[Any]]
"""Ids in the type of their file, ``[length]``."""

Raw = tuple[Stored, npt.NDArray[np.uint8] | None]
"""A document: (ids, and for each 0 where it is not trained on), both ``[length]``. None if all are trained on."""


class Mask(NamedTuple):
    """Where a file, from byte ``first`` on, says of each token whether it is trained on: by a byte, or by a bit."""

    file: File
    first: int = 0
    bits: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the ids of a file lie.

    Attributes:
        dtype: their type, such as ``<u2``.
        tokens: how many there are.
        count: how many records the file has: documents, or tokens where no index says where documents begin.
        first: the byte of the first id.
        index: the file beside it that says where its documents begin, if there is one.
        mask: what says which tokens are trained on; None if all are.
    """

    dtype: str
    tokens: int
    count: int
    first: int = 0
    index: File | None = None
    mask: Mask | None = None

    @property
    def width(self) -> int:
        """Bytes of an id."""
        return np.dtype(self.dtype).itemsize

    def blocks(self, file: File, start: int, end: int) -> list[Block]:
        """Return where the ids ``[start, end)`` lie, and where their mask does, if there is one."""
        found = [(file, self.first + self.width * start, self.first + self.width * end)]
        if (mask := self.mask) is not None:
            per_byte = 8 if mask.bits else 1
            found.append((mask.file, mask.first + start // per_byte, mask.first + -(-end // per_byte)))
        return found


class DocumentSource(IndexedSource):
    """Documents in files of token ids: rows of ``tokens`` and ``labels``, ``[length]``. A format implements `offsets`,
    or `slice` if it has no index.

    Args:
        corpus: the files of ids.
        layouts: for each file, where its ids lie, or why it cannot be read; see `look_at_each`.
    """

    unit = "document"
    least = 1
    """The length of the shortest part into which a file is cut, in records."""

    def __init__(self, corpus: Corpus, layouts: Sequence[Layout | str]) -> None:
        self.layouts = [Layout("<u2", 0, 0) if isinstance(each, str) else each for each in layouts]
        problems, beside = dict(corpus.problems), {}
        for file, found, layout in zip(corpus.files, layouts, self.layouts, strict=True):
            if isinstance(found, str):
                problems[file.path] = found
            others = (layout.index, layout.mask and layout.mask.file)
            beside[file.path] = [other for other in others if other is not None and other != file]
        corpus = require_some(replace(corpus, problems=problems, beside=beside))
        super().__init__(corpus, [layout.count for layout in self.layouts])
        self.tokens = sum(layout.tokens for layout in self.layouts)
        dtypes = [np.dtype(each.dtype) for each in layouts if isinstance(each, Layout)]
        # A user's subclass may change the ids, and other types may hold ids below 0.
        if type(self).__module__.startswith("streampack.") and all(
            dtype.kind == "u" and dtype.itemsize <= 4 for dtype in dtypes
        ):
            self.ids_below = 1 << 8 * max(dtype.itemsize for dtype in dtypes)

    def offsets(self, part: Part, read: Callable[[Block], bytes]) -> Offsets:
        """Return at which token of its file each document of a part begins, and where the last one ends.

        Raises:
            Damage: if what says so is damaged. That the offsets rise and lie in the file is checked by the caller.
        """
        raise NotImplementedError

    @override
    def cut(self, num_lanes: int, parallel_map: ParallelMap) -> list[list[Part]]:
        # A file of which nothing is known is a part, too, so that a lane lists it.
        unknown = {number for number in self.bad if not self.counts[number]}
        sizes = [layout.tokens for layout in self.layouts]
        return divide(self.counts, num_lanes, sizes=sizes, whole=unknown, least=self.least)

    @override
    def slice(self, part: Part, fetcher: Fetcher) -> Iterator[Record]:
        if part.start == part.stop:
            return
        offsets = self._offsets(part, fetcher.take)
        file, layout = self.files[part.file], self.layouts[part.file]
        runs = _runs(offsets, fetcher.block // layout.width)
        wanted = (block for run in runs for block in layout.blocks(file, int(run[0]), int(run[-1])))
        content, stream = cache(mapped), fetcher.stream(block for block in wanted if block[1] < block[2])

        def read(block: Block) -> Any:
            return content(block[0])[block[1] : block[2]] if self.local else next(stream)

        number, local = part.start, self.local
        for run in _runs(offsets, fetcher.block // layout.width):
            at = int(run[0])
            data, *marks = [
                read(block) if block[1] < block[2] else b"" for block in layout.blocks(file, at, int(run[-1]))
            ]
            ids = _signed(np.frombuffer(data, layout.dtype))
            trained = _unpacked(marks[0], layout.mask, at) if layout.mask is not None else None
            for start, end in pairwise((run - at).tolist()):
                own = ids[start:end]
                # What was fetched is copied, so that a document that waits holds no others.
                raw = own if local else own.copy(), None if trained is None else trained[start:end]
                yield number, raw, number + 1
                number += 1

    @override
    def decode(self, part: Part, offset: int, raw: Raw) -> Mapping[str, Any]:
        stored, trained = raw
        tokens = as_ids(stored)
        if trained is None:
            return {"tokens": tokens, "labels": tokens}
        labels = np.where(trained, tokens, IGNORE_INDEX).astype(tokens.dtype, copy=False)
        labels.setflags(write=False)
        return {"tokens": tokens, "labels": labels}

    @override
    def natural_lanes(self) -> int:
        """Return one lane per 262,144 tokens, but no more than there are records."""
        return max(1, min(sum(self.counts), self.tokens // TOKENS_PER_LANE))

    def _offsets(self, part: Part, read: Callable[[Block], bytes]) -> Offsets:
        limits = (0, self.layouts[part.file].tokens)
        found = self.offsets(part, read)
        return require_sound(found, file=self.files[part.file], first=part.start, limits=limits)


def mapped(file: File) -> memoryview:
    """Return the content of a file of this machine, which stays mapped while a view of it is held.

    Raises:
        ValueError: if the file has another size than when it was listed.
    """
    with Path(file.path).open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    if len(data) != file.size:
        raise resized(file, len(data))
    return memoryview(data)


def as_ids(stored: Stored) -> IntArray:
    """Return ids as int32, or int64 if the file has 8 bytes an id or an id of 4 bytes needs it; read-only.

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

    One look at many short documents spares `as_ids` a look at each: a tenth of the time of a stream.
    """
    if ids.dtype.kind != "u" or ids.itemsize < 4:
        return ids
    signed = ids.view(f"<i{ids.itemsize}")
    return signed if ids.itemsize == 8 or not ids.size or np.minimum.reduce(signed) >= 0 else ids


def _unpacked(data: bytes, mask: Mask, start: int) -> npt.NDArray[np.uint8]:
    """Return a byte for each token from ``start`` on."""
    marks = np.frombuffer(data, np.uint8)
    return np.unpackbits(marks, bitorder="little")[start % 8 :] if mask.bits else marks


def _runs(offsets: Offsets, limit: int) -> Iterator[Offsets]:
    """Divide documents into runs of ``limit`` tokens and the rest of a document. Yields the offsets of each run."""
    first, last = 0, len(offsets) - 1
    while first < last:
        # The end of the document that crosses the run's end, or of the last one.
        stop = min(int(np.searchsorted(offsets, offsets[first] + max(1, limit))), last)
        yield offsets[first : stop + 1]
        first = stop
