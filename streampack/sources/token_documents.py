"""`TokenDocuments`: documents that lie end to end in files of token ids, each with an index beside it.

Megatron-LM's and datatrove's files are read in place: mapped into memory on this machine, by ranges behind a URL.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from streampack.sources.files import FileSource, divide
from streampack.sources.indexed import IndexedSource, Offsets
from streampack.sources.parts import Damage, Part, Record
from streampack.sources.stored_tokens import TOKENS_PER_LANE, Stored, bound_of, mapped, row_of
from streampack.storage.base import File, ParallelMap
from streampack.storage.listing import Corpus, require_some
from streampack.storage.ranges import Block, Fetcher

Steps = Generator[Block, bytes, Offsets]
"""A generator that asks for blocks of tables, is sent their bytes, and returns offsets: see `TokenDocuments.tables`."""

Raw = tuple[Stored, npt.NDArray[np.uint8] | None]
"""A document as it is stored: (ids, mask), both ``[length]``. The mask is None if every token is trained."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Described:
    """What the index of a file of tokens says of it.

    Attributes:
        documents: how many documents the file has.
        tokens: how many tokens it has.
        dtype: the type of its ids, such as ``<u2``.
        index: the index.
        mask: the file with a byte for each token, 0 where the token is not trained on; None if all are.
    """

    documents: int
    tokens: int
    dtype: str
    index: File
    mask: File | None = None


class TokenDocuments(IndexedSource):
    """Documents in files of token ids whose indexes lie beside them: rows of ``tokens`` and ``labels``, ``[length]``.

    A format implements `tables`. Documents are cut into slices, which are divided among the lanes.

    Args:
        corpus: the files of tokens.
        found: for each file, what its index says, or why it cannot be read; see `look_at_each`.
    """

    unit = "document"

    def __init__(self, corpus: Corpus, found: Sequence[Described | str]) -> None:
        paths = [file.path for file in corpus.files]
        problems = {path: each for path, each in zip(paths, found, strict=True) if isinstance(each, str)}
        self.described = [None if isinstance(each, str) else each for each in found]
        beside = {
            path: (each.index,) if each.mask is None else (each.index, each.mask)
            for path, each in zip(paths, self.described, strict=True)
            if each is not None
        }
        corpus = require_some(replace(corpus, problems={**corpus.problems, **problems}, beside=beside))
        super().__init__(corpus, [0 if each is None else each.documents for each in self.described])
        sound = [each for each in self.described if each is not None]
        self.tokens = sum(each.tokens for each in sound)
        if type(self).__module__.startswith("streampack."):  # A user's subclass may change the ids.
            self.ids_below = bound_of(np.dtype(each.dtype) for each in sound)

    @abstractmethod
    def tables(self, part: Part, described: Described) -> Steps:
        """Ask for the tables that say where the documents of a part lie. Returns their offsets, ``[documents + 1]``.

        The offsets are the bytes where each document begins, and where the last one ends.

        Raises:
            Damage: if they lead out of the file, or backwards.
        """

    def cut(self, num_lanes: int, parallel_map: ParallelMap) -> list[list[Part]]:
        """See `FileSource.cut`. A file that cannot be read is a part, too, so that a lane lists it."""
        return divide(self.counts, num_lanes, sizes=[file.size for file in self.files], whole=set(self.bad))

    def slice(
        self, part: Part, fetcher: Fetcher, later: Iterable[Iterable[Block | None]]
    ) -> Iterator[Record]:
        """See `IndexedSource.slice`."""
        if part.start == part.stop:
            return
        described, file = self._sound(part), self.files[part.file]
        offsets = _taken(self.tables(part, described), fetcher)
        found = (
            _mapped(file, described, offsets)
            if self.local
            else _fetched(file, described, offsets, fetcher, later)
        )
        for number, raw in enumerate(found, part.start):
            yield number, raw, number + 1

    def slice_ahead(self, part: Part, fetcher: Fetcher) -> Iterator[Block | None]:
        """See `IndexedSource.slice_ahead`."""
        if part.start == part.stop:
            return
        described, file = self._sound(part), self.files[part.file]
        with suppress(Damage):  # `slice` raises it
            offsets = yield from _peeked(self.tables(part, described), fetcher)
            for _, blocks in _stretches(file, described, offsets, fetcher.block):
                yield from blocks

    def decode(self, part: Part, offset: int, raw: Raw) -> Mapping[str, Any]:
        """See `FileSource.decode`."""
        return row_of(*raw)

    def stored_bytes(self, raw: Raw) -> int:
        """See `FileSource.stored_bytes`."""
        return raw[0].nbytes

    def natural_lanes(self) -> int:
        """Return one lane per 262,144 tokens, but no more than there are documents."""
        return max(1, min(sum(self.counts), self.tokens // TOKENS_PER_LANE))

    def damage(self, error: Exception, part: Part, offset: int) -> Damage | None:
        """See `DamageOf`. The sizes were looked up when the source was made, so another one means a change."""
        return FileSource.damage(self, error, part, offset)

    def _sound(self, part: Part) -> Described:
        if (described := self.described[part.file]) is None:
            raise ValueError(self.bad[part.file])
        return described


def _taken(steps: Generator[Block, bytes, Result], fetcher: Fetcher) -> Result:
    try:
        block = next(steps)
        while True:
            block = steps.send(fetcher.take(block))
    except StopIteration as done:
        result: Result = done.value
        return result


def _peeked(
    steps: Generator[Block, bytes, Result], fetcher: Fetcher
) -> Generator[Block | None, None, Result]:
    """Yield the blocks that ``steps`` asks for, and None while one that others depend on has not arrived."""
    try:
        block = next(steps)
        while True:
            yield block
            while (data := fetcher.peek(block)) is None:
                yield None
            block = steps.send(data)
    except StopIteration as done:
        result: Result = done.value
        return result


def _mapped(file: File, described: Described, offsets: Offsets) -> Iterator[Raw]:
    """Yield documents as views of the mapped file."""
    dtype = np.dtype(described.dtype)
    ids = mapped(file, dtype)
    mask = None if described.mask is None else mapped(described.mask, np.dtype(np.uint8))
    for start, end in pairwise((offsets // dtype.itemsize).tolist()):
        yield ids[start:end], None if mask is None else mask[start:end]


def _stretches(
    file: File, described: Described, offsets: Offsets, size: int
) -> Iterator[tuple[list[int], list[Block]]]:
    """Cut documents into stretches of ``size`` bytes and the rest of a document.

    Yields the offsets of each stretch's documents, the end last, and the block of its ids, then that of its mask.
    """
    first, width = 0, np.dtype(described.dtype).itemsize
    while first < len(offsets) - 1:
        start = int(offsets[first])
        # The end of the document that crosses the stretch's end, or of the last one.
        stop = min(int(np.searchsorted(offsets, start + size)), len(offsets) - 1)
        within = offsets[first : stop + 1].tolist()
        blocks = [(file, start, within[-1])]
        if described.mask is not None:
            blocks.append((described.mask, start // width, within[-1] // width))
        yield within, [block for block in blocks if block[1] < block[2]]
        first = stop


def _fetched(
    file: File,
    described: Described,
    offsets: Offsets,
    fetcher: Fetcher,
    later: Iterable[Iterable[Block | None]],
) -> Iterator[Raw]:
    """Yield documents that are read by ranges. Each is copied, so that one that waits holds no others."""
    dtype = np.dtype(described.dtype)
    stretches = list(_stretches(file, described, offsets, fetcher.block))
    fetcher.plan((block for _, blocks in stretches for block in blocks), later)
    for within, blocks in stretches:
        fetcher.reading = sum(stop - start for _, start, stop in blocks)
        ids, *masks = [fetcher.take(block) for block in blocks] or [b""]
        begin = within[0]
        for start, end in pairwise(within):
            first, last = (start - begin) // dtype.itemsize, (end - begin) // dtype.itemsize
            yield (
                np.frombuffer(ids[start - begin : end - begin], dtype),
                np.frombuffer(masks[0][first:last], np.uint8) if masks else None,
            )
