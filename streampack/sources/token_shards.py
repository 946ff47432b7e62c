"""`TokenShardSource`: reads token shards, whose format is described in `token_files`.

Shards on this machine are mapped into memory. Behind a URL, they are read by ranges.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.sources.files import divide
from streampack.sources.indexed import (
    Index,
    IndexedSource,
    Offsets,
    joined,
    offsets_of,
    read_index,
    read_records,
)
from streampack.sources.parts import Damage, Part, Record
from streampack.sources.token_files import HEADER_BYTES, Shard, misdescribed, shard_of
from streampack.storage.base import File, ParallelMap, redact, resized
from streampack.storage.listing import Name, Once, alone
from streampack.storage.ranges import Block, Fetcher, blocks
from streampack.types import IGNORE_INDEX

OFFSETS_AT_ONCE = 1024
"""How many offsets are read at a time. One by one, they took 2 us of the 5.7 us of a document of 1,000 tokens."""
LOOKED_AT = (
    1 << 20
)  # tokens; of longer documents each is looked at by itself, and no more is read than is asked for
TOKENS_PER_LANE = 1 << 18  # tokens per lane by default: 64 packs of 4,096

Raw = tuple[npt.NDArray[Any], npt.NDArray[np.uint8] | None, int]
"""A document as it is stored: (tokens, mask, skipped).

``tokens`` ``[length]`` are uint16 or uint32, int32 if all are known to fit into it, and a view of the file if that is
mapped. ``mask`` are the bytes that hold a bit for each token; None if every token is trained. ``skipped`` is how many
bits of the first byte belong to the document before."""


class TokenShardSource(IndexedSource):
    """The documents of folders that `streampack tokenize` made: rows of ``tokens`` and ``labels``, ``[length]``.

    >>> import tempfile
    >>> from streampack.sources import MapSource, Reading
    >>> from streampack.tokenize.tokenize import tokenize
    >>> rows = [{"tokens": [5, 6, 7], "labels": [-100, 6, 7]}, {"tokens": [8, 9], "labels": [8, 9]}]
    >>> folder = tokenize(MapSource(rows), out=tempfile.mkdtemp(), progress=False)
    >>> for row in TokenShardSource(folder).read(Reading()):
    ...     print(row.data["tokens"], row.data["labels"])
    [5 6 7] [-100    6    7]
    [8 9] [8 9]

    The documents of each shard are cut into slices, which are divided among the lanes. When a document is read, it is
    copied once, from the shard's 2 or 4 bytes a token to int32 (to int64 if an id needs it). The arrays are read-only.
    If all tokens of a document are trained, ``tokens`` and ``labels`` are the same array.

    Args:
        folder: the folder that holds ``index.json``, on this machine or behind a URL; or several folders in one place,
            which are one corpus. Folders that were added are an addition to the corpus:
            with ``corpus_lists``, a run goes on with them in its next epoch.
        storage_options: see `JSONLSource`, as for the arguments below.
        retries: how often a failed read is tried again.
        timeout: seconds that one request may take.
        once: how ranks share the reading of the index.

    Raises:
        ValueError: for an index that is missing, has another format, or names files outside of the folder; for folders
            with the same shards, or on several storages; for a shard when it is read, if it is missing or its size or
            header is not what the index says.
    """

    unit = "document"
    reads_tags = False

    def __init__(
        self,
        folder: Name | Iterable[Name],
        *,
        storage_options: Mapping[str, Any] | None = None,
        retries: int = 5,
        timeout: float = 30.0,
        once: Once = alone,
    ) -> None:
        folders = [folder] if isinstance(folder, str | os.PathLike) else list(folder)
        indexes = [
            read_index(each, storage_options=storage_options, retries=retries, timeout=timeout, once=once)
            for each in folders
        ]
        described = [_shards_of(index) for index in indexes]
        self.shards = [shard for shards in described for shard in shards]
        corpora = [
            index.corpus([(shard.name, shard.size) for shard in shards])
            for index, shards in zip(indexes, described, strict=True)
        ]
        corpus = joined(corpora, [shard.crc32 for shard in self.shards])
        corpus.identify([f"crc32 {shard.crc32}" for shard in self.shards])
        super().__init__(corpus, [shard.documents for shard in self.shards])
        self.tokens = sum(shard.tokens for shard in self.shards)
        if type(self) is TokenShardSource:  # A user's subclass may change the ids, so that no bound is known.
            self.ids_below = 1 << 8 * max(shard.width for shard in self.shards)
        # Indices of shards whose header this process has compared with the index.
        self._checked: set[int] = set()

    def listing(self) -> list[File]:
        """Return the shards, each with the index's checksum as its tag."""
        return [
            replace(file, tag=tag) for file, tag in zip(self.files, self.corpus.marks().tags, strict=True)
        ]

    def cut(self, num_lanes: int, parallel_map: ParallelMap) -> list[list[Part]]:
        """See `FileSource.cut`."""
        return divide(self.counts, num_lanes, sizes=[shard.tokens for shard in self.shards])

    def slice(
        self, part: Part, fetcher: Fetcher, later: Iterable[Iterable[Block | None]]
    ) -> Iterator[Record]:
        """See `IndexedSource.slice`."""
        shard, file = self.shards[part.file], self.files[part.file]
        for header in self._unchecked(part.file):
            if (problem := misdescribed(fetcher.take(header), shard)) is not None:
                raise Damage(problem, offset=part.start)
            self._checked.add(part.file)
        return _mapped(shard, file, part) if self.local else _fetched(shard, file, part, fetcher, later)

    def slice_ahead(self, part: Part, fetcher: Fetcher) -> Iterator[Block | None]:
        """See `IndexedSource.slice_ahead`."""
        shard, file = self.shards[part.file], self.files[part.file]
        yield from self._unchecked(part.file)
        yield (block := _table(shard, file, part))
        while (table := fetcher.peek(block)) is None:
            yield None
        with suppress(Damage):  # `slice` raises it
            offsets = _offsets(shard, file, part, table)
            yield from _mask(shard, file, offsets)
            yield from blocks(fetcher.block, file, int(offsets[0]), int(offsets[-1]))

    def stored_bytes(self, raw: Raw) -> int:
        """See `FileSource.stored_bytes`."""
        return raw[0].nbytes

    def decode(self, part: Part, offset: int, raw: Raw) -> Mapping[str, Any]:
        """Return the row. The tokens are copied as signed integers; that is the only copy before the pack's."""
        stored, bits, skipped = raw
        tokens = stored.astype(np.int32)
        if (
            stored.dtype.kind == "u"
            and stored.itemsize == 4
            and tokens.size
            and np.minimum.reduce(tokens) < 0
        ):
            # An id of 2**31 or more does not fit into int32.
            tokens = stored.astype(np.int64)
        tokens.setflags(write=False)  # An array that cannot change need not be copied again.
        if bits is None:
            return {"tokens": tokens, "labels": tokens}
        trained = np.unpackbits(bits, bitorder="little")[skipped : skipped + tokens.size]
        labels = np.where(trained, tokens, IGNORE_INDEX).astype(tokens.dtype, copy=False)
        labels.setflags(write=False)
        return {"tokens": tokens, "labels": labels}

    def natural_lanes(self) -> int:
        """Return one lane per 262,144 tokens, but no more than there are documents."""
        return max(1, min(sum(self.counts), self.tokens // TOKENS_PER_LANE))

    def _unchecked(self, number: int) -> list[Block]:
        """Return the block of a shard's header, or nothing if the header was compared with the index before.

        The comparison is needed because a state knows a shard only by the index.
        """
        return [] if number in self._checked else [(self.files[number], 0, HEADER_BYTES)]


def _shards_of(index: Index) -> list[Shard]:
    entries = index.content.get("shards")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{redact(index.path)} names no shards; is it one of `streampack tokenize`?")
    common = {key: index.content.get(key) for key in ("format", "version", "dtype")}
    return [shard_of(str(entry.get("name")), {**common, **entry}) for entry in entries]


def _mapped(shard: Shard, file: File, part: Part) -> Iterator[Record]:
    """Yield the records of a part as views of the mapped file, which stays mapped while one of them is held."""
    with Path(file.path).open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    if len(data) != file.size:
        raise resized(file, len(data))
    tokens = np.frombuffer(data, _stored(shard), shard.tokens, HEADER_BYTES)
    offsets = np.frombuffer(data, "<i8", shard.documents + 1, shard.offsets_at)
    bits = np.frombuffer(data, np.uint8, offset=shard.mask_at) if shard.masked else None
    assert part.stop is not None
    for number in range(part.start, part.stop, OFFSETS_AT_ONCE):
        some = offsets[number : min(number + OFFSETS_AT_ONCE, part.stop) + 1].tolist()
        ids = _signed(tokens, min(some), max(some))  # damaged offsets may lie anywhere
        for i, (start, end) in enumerate(pairwise(some), number):
            if not 0 <= start <= end <= shard.tokens:
                what = f"the offsets of document {i} lead out of the shard, or backwards: it is damaged"
                raise Damage(what, offset=i, resume=i + 1)
            mask = None if bits is None else bits[start // 8 : -(-end // 8)]
            yield i, (ids[start:end], mask, start % 8), i + 1


def _signed(tokens: np.ndarray[Any, Any], start: int, end: int) -> np.ndarray[Any, Any]:
    """Return the tokens as int32 if all ids in ``[start, end)`` fit into it; else, and of two bytes, as they are.

    One look at many short documents spares `TokenShardSource.decode` a look at each: a tenth of the time of a stream.
    """
    if tokens.itemsize < 4 or not 0 <= start < end <= tokens.size or end - start > LOOKED_AT:
        return tokens
    signed = tokens.view("<i4")
    return signed if np.minimum.reduce(signed[start:end]) >= 0 else tokens


def _fetched(
    shard: Shard, file: File, part: Part, fetcher: Fetcher, later: Iterable[Iterable[Block | None]]
) -> Iterator[Record]:
    """Yield the records of a part, read by ranges: all its offsets, all its mask, then block after block of tokens."""
    if part.start == part.stop:
        return
    offsets = _offsets(shard, file, part, fetcher.take(_table(shard, file, part)))
    starts = ((offsets - HEADER_BYTES) // shard.width).tolist()
    base = starts[0] // 8
    held = np.frombuffer(b"".join(map(fetcher.take, _mask(shard, file, offsets))), np.uint8)
    for i, data in enumerate(read_records(fetcher, file, offsets, later)):
        start, end = starts[i : i + 2]
        mask = held[start // 8 - base : -(-end // 8) - base] if shard.masked else None
        number = part.start + i
        yield number, (np.frombuffer(data, _stored(shard)), mask, start % 8), number + 1


def _table(shard: Shard, file: File, part: Part) -> Block:
    assert part.stop is not None
    return file, shard.offsets_at + 8 * part.start, shard.offsets_at + 8 * (part.stop + 1)


def _offsets(shard: Shard, file: File, part: Part, table: bytes) -> Offsets:
    """Return the byte where each document of the part begins, and where the last one ends, ``[documents + 1]``."""
    limits = (HEADER_BYTES, HEADER_BYTES + shard.tokens * shard.width)
    return offsets_of(
        table, "<i8", file=file, first=part.start, limits=limits, unit=shard.width, base=HEADER_BYTES
    )


def _mask(shard: Shard, file: File, offsets: Offsets) -> list[Block]:
    """Return the block that holds the mask of the part; nothing if there is no mask."""
    first, end = ((int(offset) - HEADER_BYTES) // shard.width for offset in (offsets[0], offsets[-1]))
    if not shard.masked or first == end:
        return []
    return [(file, shard.mask_at + first // 8, shard.mask_at + -(-end // 8))]


def _stored(shard: Shard) -> np.dtype[Any]:
    return np.dtype(shard.dtype).newbyteorder("<")
