"""Token shards as a source: mapped into memory here, read by range behind a URL. `shards` has the format."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.fingerprint import digest
from streampack.sources.base import Reader, Reading, readable
from streampack.sources.examples import EXAMPLES, Example, example
from streampack.sources.indexed import Offsets, divide, offsets_of, places, read_index, records
from streampack.sources.shuffling import Damage, Part, Record, read_parts
from streampack.sources.source import Source
from streampack.sources.token_files import HEADER_BYTES, Shard, require_described, shard_of
from streampack.storage.base import File, LocalStorage, changed, redact, together
from streampack.storage.file_marks import FileMarks
from streampack.storage.listing import Name
from streampack.storage.ranges import Ahead, Block, Fetcher, blocks
from streampack.types import IGNORE_INDEX, RowId

OFFSETS = (
    1024  # read from the table at a time: one by one, they took 2 of the 5.7 us of a document of 1,000 tokens
)
TOKENS_PER_LANE = 1 << 18  # that a lane should have at least: 64 packs of 4,096


Raw = tuple[npt.NDArray[Any], npt.NDArray[np.uint8] | None, int]
"""A document as it is stored: its tokens ``[length]``, uint16 or uint32, on this machine a view of the mapped file; the
bytes with the bits of its mask, None if every token is trained; and how many bits of the first byte are not its own."""


class TokenShardSource(Source):
    """The documents of a folder that `streampack tokenize` made: rows of ``tokens`` and ``labels``, ``[length]``.

    >>> import tempfile
    >>> from streampack.sources import MapSource, Reading
    >>> from streampack.tokenize.tokenize import tokenize
    >>> rows = [{"tokens": [5, 6, 7], "labels": [-100, 6, 7]}, {"tokens": [8, 9], "labels": [8, 9]}]
    >>> folder = tokenize(MapSource(rows), out=tempfile.mkdtemp(), progress=False)
    >>> for row in TokenShardSource(folder).read(Reading()):
    ...     print(row.data["tokens"], row.data["labels"])
    [5 6 7] [-100    6    7]
    [8 9] [8 9]

    Lanes share out slices of the documents. A document is copied once when its turn comes, from the shard's 2 or 4
    bytes a token to 4 (to 8 where an id needs them), and cannot be written to; where all of it is trained, ``tokens``
    and ``labels`` are one array.

    Args:
        folder: of this machine, or a URL.
        storage_options: for the storage behind URLs, see `JSONLSource`, as for the arguments below.
        retries: how often a read that fails is tried again.
        timeout: seconds that one request may take.
        read_ahead: bytes, per lane, fetched ahead behind a URL.

    Raises:
        ValueError: if there is no index, one of another format, or one whose names lead out of the folder; for a shard
            that is missing or of another size than the index says; when it is first read, for one whose header says
            something else than the index.
    """

    def __init__(
        self,
        folder: Name,
        *,
        storage_options: Mapping[str, Any] | None = None,
        retries: int = 5,
        timeout: float = 30.0,
        read_ahead: int = 8 << 20,
    ) -> None:
        index = read_index(folder, storage_options=storage_options, retries=retries, timeout=timeout)
        entries = index.content.get("shards")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(f"{redact(index.path)} names no shards; is it one of `streampack tokenize`?")
        common = {key: index.content.get(key) for key in ("format", "version", "dtype")}
        self.shards = [shard_of(str(entry.get("name")), {**common, **entry}) for entry in entries]
        self.corpus = index.corpus([(shard.name, shard.size) for shard in self.shards])
        self.files = self.corpus.files
        self.documents = sum(shard.documents for shard in self.shards)
        self.tokens = sum(shard.tokens for shard in self.shards)
        self.ids_below = 1 << 8 * max(shard.width for shard in self.shards)  # whatever is in the shards
        self._local = isinstance(self.corpus.storage, LocalStorage)
        self.read_ahead = self.corpus.read_ahead(read_ahead)
        self._divided: list[list[Part]] | None = None  # for the last number of lanes asked for
        self._compared: set[int] = set()  # shards whose header is as the index says, in this process

    def fingerprint(self) -> str:
        """The shards' names and checksums as the index has them: the same wherever the folder lies."""
        return digest("tokens", [(shard.name, shard.tokens, shard.crc32) for shard in self.shards])

    def identity(self) -> dict[str, Any]:
        """See `identity_of`."""
        files = self.listing()
        return {"source": "TokenShardSource", "files": FileMarks(files, [file.tag or "" for file in files])}

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """Documents from all over the shards."""
        numbers = places([shard.documents for shard in self.shards], count)
        return together(partial(example, self.fetch), numbers)

    def listing(self) -> list[File]:
        """The shards, each by the checksum that the index has: no fingerprint reads them, and ranks compare them so."""
        return [
            replace(file, tag=f"crc32 {shard.crc32}")
            for shard, file in zip(self.shards, self.files, strict=True)
        ]

    def read(self, reading: Reading) -> Reader:
        """See `Source.read`."""
        if self._divided is None or len(self._divided) != reading.num_lanes:
            counts, sizes = [s.documents for s in self.shards], [s.tokens for s in self.shards]
            self._divided = divide(counts, sizes, reading.num_lanes)
        fetcher = Fetcher(self.corpus.storage, self.corpus.retries, ahead=self.read_ahead)
        return read_parts(
            self._divided[reading.lane],
            reading,
            open_part=lambda part, offset, following: self._open(part, offset, fetcher, following),
            decode=_row_of,
            place=lambda part, offset: self.locate((part.file, offset)),
            locate=self.locate,
        )

    def locate(self, row_id: RowId) -> str:
        """``file, document N``, from 0."""
        return f"{self.files[row_id[0]].shown}, document {row_id[1]}"

    def shard(self, row_id: RowId) -> str:
        """The file's name in the corpus."""
        return self.files[row_id[0]].name

    def fetch(self, row_id: RowId) -> Mapping[str, Any]:
        """See `Source.fetch`."""
        part = Part(row_id[0], row_id[1], row_id[1] + 1)
        _, raw, _ = next(self._open(part, part.start, self._fetcher()))
        return _row_of(part, part.start, raw)

    @property
    def retry_budget(self) -> float:
        """See `JSONLSource.retry_budget`."""
        return self.corpus.retry_budget

    def natural_lanes(self) -> int:
        """One per 262,144 tokens, but no more than there are documents."""
        return max(1, min(self.documents, self.tokens // TOKENS_PER_LANE))

    def probe(self, count: int) -> tuple[list[Mapping[str, Any]], float]:
        """Documents from all over the shards, and how many times as many there are."""
        numbers = places([shard.documents for shard in self.shards], count)
        rows = chain.from_iterable(together(readable(self.fetch), numbers))
        return list(rows), self.documents / max(1, len(numbers))

    def verify(self) -> None:
        """Read every shard and compare it with its checksum.

        Raises:
            ValueError: naming the first that differs.
        """
        fetcher = self._fetcher()
        for shard, file in zip(self.shards, self.files, strict=True):
            crc32, step = 0, fetcher.storage.block
            for start in range(HEADER_BYTES, file.size, step):
                crc32 = zlib.crc32(fetcher.take((file, start, min(start + step, file.size))), crc32)
            if crc32 != shard.crc32:
                raise ValueError(f"{file.shown} is not what its checksum was made of; copy it anew")

    def _open(
        self, part: Part, offset: int, fetcher: Fetcher, following: Part | None = None
    ) -> Iterator[Record]:
        shard, file = self.shards[part.file], self.files[part.file]
        stop = shard.documents if part.stop is None else part.stop
        if not 0 <= offset <= stop:
            raise ValueError(f"{file.shown} has no document {offset}; the state or the index is damaged")
        for header in self._uncompared(part.file):
            require_described(fetcher.take(header), shard, shown=file.shown)
            self._compared.add(part.file)
        if self._local:
            return _mapped(shard, file, offset, stop)
        part = part._replace(start=offset, stop=stop)
        coming: Iterable[Block] = ()
        if following is not None:
            coming = _ahead(*self._slice(following), fetcher, self._uncompared(following.file))
        return _fetched(*self._slice(part), fetcher, coming)

    def _uncompared(self, number: int) -> list[Block]:
        """The header of a shard that was not opened yet, a page: a state knows the shard by the index alone."""
        return [] if number in self._compared else [(self.files[number], 0, HEADER_BYTES)]

    def _slice(self, part: Part) -> tuple[Shard, File, Part]:
        return self.shards[part.file], self.files[part.file], part

    def _fetcher(self) -> Fetcher:
        return Fetcher(self.corpus.storage, self.corpus.retries, ahead=0)


def _row_of(part: Part, number: int, raw: Raw) -> Mapping[str, Any]:
    """The tokens, signed: the one copy before the pack's. ``labels`` are the same array where none is masked."""
    stored, bits, skipped = raw
    tokens = stored.astype(np.int32)
    if stored.itemsize == 4 and tokens.size and np.minimum.reduce(tokens) < 0:
        # An id needs all of the 32 bits.
        tokens = stored.astype(np.int64)
    tokens.setflags(write=False)  # nobody has to copy once more what cannot change
    if bits is None:
        return {"tokens": tokens, "labels": tokens}
    trained = np.unpackbits(bits, bitorder="little")[skipped : skipped + tokens.size]
    labels = np.where(trained, tokens, IGNORE_INDEX).astype(tokens.dtype, copy=False)
    labels.setflags(write=False)
    return {"tokens": tokens, "labels": labels}


def _mapped(shard: Shard, file: File, first: int, stop: int) -> Iterator[Record]:
    """Views of the mapped file, which stays mapped as long as one of them is held."""
    with Path(file.path).open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    if len(data) != file.size:
        raise changed(file, f"has {len(data)} bytes and had {file.size}")
    tokens = np.frombuffer(data, _stored(shard), shard.tokens, HEADER_BYTES)
    offsets = np.frombuffer(data, "<i8", shard.documents + 1, shard.offsets_at)
    bits = np.frombuffer(data, np.uint8, offset=shard.mask_at) if shard.masked else None
    for number in range(first, stop, OFFSETS):
        some = offsets[number : min(number + OFFSETS, stop) + 1].tolist()
        for i, (start, end) in enumerate(pairwise(some), number):
            if not 0 <= start <= end <= shard.tokens:
                raise _misled(i)
            mask = None if bits is None else bits[start // 8 : -(-end // 8)]
            yield i, (tokens[start:end], mask, start % 8), i + 1


def _fetched(
    shard: Shard, file: File, part: Part, fetcher: Fetcher, following: Iterable[Block]
) -> Iterator[Record]:
    """The same by ranges: the slice's offsets, its mask, then its tokens as they are needed."""
    if part.start == part.stop:
        return
    places = _places(shard, file, part, fetcher.take(_table(shard, file, part)))
    starts = ((places - HEADER_BYTES) // shard.width).tolist()
    base = starts[0] // 8
    held = b"".join(map(fetcher.take, _mask(shard, file, places)))
    for i, data in enumerate(records(fetcher, file, places, following)):
        start, end = starts[i : i + 2]
        mask = (
            np.frombuffer(held, np.uint8)[start // 8 - base : -(-end // 8) - base] if shard.masked else None
        )
        number = part.start + i
        yield number, (np.frombuffer(data, _stored(shard)), mask, start % 8), number + 1


def _ahead(
    shard: Shard, file: File, part: Part, fetcher: Fetcher, header: Iterable[Block]
) -> Iterator[Block]:
    """What opening the part and `_fetched` will ask for."""

    def rest(table: bytes) -> Iterator[Block]:
        yield from header
        with suppress(Damage):  # which is raised when its turn comes
            places = _places(shard, file, part, table)
            yield from _mask(shard, file, places)
            yield from blocks(fetcher.storage, file, int(places[0]), int(places[-1]))

    return Ahead(fetcher, _table(shard, file, part), rest)


def _table(shard: Shard, file: File, part: Part) -> Block:
    assert part.stop is not None
    return file, shard.offsets_at + 8 * part.start, shard.offsets_at + 8 * (part.stop + 1)


def _places(shard: Shard, file: File, part: Part, table: bytes) -> Offsets:
    """Where the slice's documents begin in the file, ``[documents + 1]``."""
    limits = (HEADER_BYTES, HEADER_BYTES + shard.tokens * shard.width)
    return offsets_of(
        table, "<i8", file=file, first=part.start, limits=limits, unit=shard.width, base=HEADER_BYTES
    )


def _mask(shard: Shard, file: File, places: Offsets) -> list[Block]:
    """The bytes that hold the slice's mask: one block, or none."""
    first, end = ((int(place) - HEADER_BYTES) // shard.width for place in (places[0], places[-1]))
    if not shard.masked or first == end:
        return []
    return [(file, shard.mask_at + first // 8, shard.mask_at + -(-end // 8))]


def _stored(shard: Shard) -> np.dtype[Any]:
    return np.dtype(shard.dtype).newbyteorder("<")


def _misled(number: int) -> Damage:
    what = f"the offsets of document {number} lead out of the shard, or backwards: it is damaged"
    return Damage(what, offset=number, resume=number + 1)
