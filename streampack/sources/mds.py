"""MosaicML's MDS shards, read without their package. The format is that of mosaicml-streaming, version 2 of its index.

A shard is the number of its samples; the offset of each from the file's start, and of the end; a JSON header that the
index repeats; then the samples, as `columns` says. Numbers are ``uint32``.
https://docs.mosaicml.com/projects/streaming/en/stable/preparing_datasets/dataset_format.html
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

from streampack.sources.base import Reader, Reading, readable
from streampack.sources.examples import EXAMPLES, Example, example
from streampack.sources.indexed import Offsets, divide, offsets_of, places, read_index, records
from streampack.sources.mds_columns import Column, decoder, left_out, row_of
from streampack.sources.shuffling import Damage, Part, Record, read_parts
from streampack.sources.source import Source
from streampack.storage.base import File, redact, together
from streampack.storage.compression import DAMAGED, content
from streampack.storage.listing import Corpus, Name
from streampack.storage.ranges import Ahead, Block, Fetcher, Stretch, blocks
from streampack.types import RowId

LARGEST = 1 << 30  # bytes of a compressed shard's content, at most, whatever its index says
COMPRESSIONS = {"gz": ".gz", "zstd": ".zst"}


class Shard(NamedTuple):
    """What the index says of a shard."""

    samples: int
    columns: list[Column]
    suffix: str  # of its compression; "" is none
    size: int  # bytes of its content, at most


class MDSSource(Source):
    """The samples of a folder of MDS shards, as mappings of plain values and arrays.

    Args:
        folder: that holds ``index.json``, of this machine, or a URL.
        columns: the columns to keep; default: all.
        storage_options: for the storage behind URLs, see `JSONLSource`, as for the arguments below.
        retries: how often a read that fails is tried again.
        timeout: seconds that one request may take.
        read_ahead: bytes, per lane, fetched ahead behind a URL.

    Lanes share out slices of the samples. A compressed shard (zstd, gzip) cannot seek: it is a part of one lane, and
    is held decompressed while that lane reads it.

    Raises:
        ValueError: for an index that is missing, of another format, or that names what leads out of the folder; for a
            shard of another size than it says; for pickled columns, which could run code, and for images.
    """

    def __init__(
        self,
        folder: Name,
        *,
        columns: list[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        retries: int = 5,
        timeout: float = 30.0,
        read_ahead: int = 8 << 20,
    ) -> None:
        index = read_index(folder, storage_options=storage_options, retries=retries, timeout=timeout)
        entries = index.content.get("shards")
        shown = redact(index.path)
        if index.content.get("version") != 2 or not isinstance(entries, list):
            raise ValueError(f"{shown} is no index of MDS shards, version 2")
        self.columns = None if columns is None else list(columns)
        self.shards, names = [], []
        for number, entry in enumerate(entries):
            try:
                shard, named = _entry(entry, self.columns)
            except ValueError as error:
                raise ValueError(f"{shown}, shard {number}: {error}") from None
            self.shards.append(shard)
            names.append(named)
        self.corpus = index.corpus(names)
        self.files = self.corpus.files
        self.samples = sum(shard.samples for shard in self.shards)
        self.read_ahead = self.corpus.read_ahead(read_ahead)
        self._divided: list[list[Part]] | None = None  # for the last number of lanes asked for

    def fingerprint(self) -> str:
        """Names, sizes, and each file's ETag or a hash of its first and last 64 KiB: an index may lack checksums."""
        return self.corpus.fingerprint()

    def identity(self) -> dict[str, Any]:
        """See `identity_of`."""
        return {"source": "MDSSource", "files": self.corpus}

    def corpora(self) -> list[Corpus]:
        """What the fingerprint reads."""
        return [self.corpus]

    def read(self, reading: Reading) -> Reader:
        """See `Source.read`."""
        if self._divided is None or len(self._divided) != reading.num_lanes:
            self._divided = self._divide(reading.num_lanes)
        fetcher = Fetcher(self.corpus.storage, self.corpus.retries, ahead=self.read_ahead)
        return read_parts(
            self._divided[reading.lane],
            reading,
            open_part=lambda part, offset, following: _Samples(self, part, offset, fetcher, following),
            decode=self._decode,
            place=lambda part, offset: self.locate((part.file, offset)),
            locate=self.locate,
        )

    def locate(self, row_id: RowId) -> str:
        """``file, sample N``, from 0."""
        return f"{self.files[row_id[0]].shown}, sample {row_id[1]}"

    def shard(self, row_id: RowId) -> str:
        """The file's name in the corpus."""
        return self.files[row_id[0]].name

    def fetch(self, row_id: RowId) -> Mapping[str, Any]:
        """See `Source.fetch`. Of a compressed shard, reads all of it."""
        part = Part(row_id[0], row_id[1], row_id[1] + 1)
        fetcher = Fetcher(self.corpus.storage, self.corpus.retries, ahead=0)
        number, raw, _ = next(_Samples(self, part, part.start, fetcher))
        return self._decode(part, number, raw)

    @property
    def retry_budget(self) -> float:
        """See `JSONLSource.retry_budget`."""
        return self.corpus.retry_budget

    def natural_lanes(self) -> int:
        """One per 256 KiB of what can be divided, one per compressed shard."""
        plain = sum(file.size for file, s in zip(self.files, self.shards, strict=True) if not s.suffix)
        return max(1, min(self.samples, (plain >> 18) + sum(bool(shard.suffix) for shard in self.shards)))

    def probe(self, count: int) -> tuple[list[Mapping[str, Any]], float]:
        """Samples from all over the shards, and how many times as many there are."""
        numbers = places([shard.samples for shard in self.shards], count)
        rows = chain.from_iterable(together(readable(self.fetch), numbers))
        return list(rows), self.samples / max(1, len(numbers))

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """Samples from all over the shards; of compressed ones, if any are, the first of one shard."""
        if not any(shard.suffix for shard in self.shards):
            numbers = places([shard.samples for shard in self.shards], count)
            return together(partial(example, self.fetch), numbers)
        number = next((i for i, shard in enumerate(self.shards) if shard.samples), 0)
        part = Part(number, 0, min(count, self.shards[number].samples))
        fetcher = Fetcher(self.corpus.storage, self.corpus.retries, ahead=0)
        with suppress(ValueError):  # damage is found when it is read
            samples = list(_Samples(self, part, 0, fetcher))
            return [example(partial(self._decoded, part, raw), (number, at)) for at, raw, _ in samples]
        return []

    def _divide(self, num_lanes: int) -> list[list[Part]]:
        lanes = divide(
            [shard.samples for shard in self.shards], [file.size for file in self.files], num_lanes
        )
        whole = {i for i, shard in enumerate(self.shards) if shard.suffix}
        if not whole:
            return lanes
        # A slice of a compressed shard costs all of it: whoever has its beginning takes the rest, too.
        return [
            [
                Part(part.file) if part.file in whole else part
                for part in parts
                if part.file not in whole or not part.start
            ]
            for parts in lanes
        ]

    def _decoded(self, part: Part, raw: bytes, row_id: RowId) -> Mapping[str, Any]:
        return self._decode(part, row_id[1], raw)

    def _decode(self, part: Part, offset: int, raw: bytes) -> Mapping[str, Any]:
        columns = self.shards[part.file].columns
        try:
            return row_of(columns, raw)
        except (ValueError, LookupError) as error:
            raise ValueError(f"not a sample of its columns ({error})") from None


class _Samples:
    """The samples of one part, each with its number in the shard."""

    def __init__(
        self, source: MDSSource, part: Part, offset: int, fetcher: Fetcher, following: Part | None = None
    ) -> None:
        shard, file = source.shards[part.file], source.files[part.file]
        stop = shard.samples if part.stop is None else part.stop
        if not 0 <= offset <= stop:
            raise ValueError(f"{file.shown} has no sample {offset}; the state or the index is damaged")
        self.offset = offset
        coming: Iterable[Block] = ()
        if following is not None:
            coming = _ahead(source.shards[following.file], source.files[following.file], following, fetcher)
        read = _decompressed if shard.suffix else _ranged
        part = part._replace(start=offset, stop=stop)
        self.samples = read(shard, file, part, fetcher, coming) if offset < stop else iter(())

    def __iter__(self) -> _Samples:
        return self

    def __next__(self) -> Record:
        raw = next(self.samples)
        self.offset += 1
        return self.offset - 1, raw, self.offset


def _ranged(
    shard: Shard, file: File, part: Part, fetcher: Fetcher, following: Iterable[Block]
) -> Iterator[bytes]:
    _check_length(shard, file, part, file.size)
    offsets = _offsets(shard, file, part, fetcher.take(_table(file, part)))
    yield from records(fetcher, file, offsets, following)


def _ahead(shard: Shard, file: File, part: Part, fetcher: Fetcher) -> Iterator[Block]:
    """What the samples of a part will ask for."""
    if shard.suffix:
        return blocks(fetcher.storage, file, 0, file.size)
    try:
        _check_length(shard, file, part, file.size)
    except Damage:  # which is raised again when its turn comes
        return iter(())

    def rest(table: bytes) -> Iterator[Block]:
        with suppress(Damage):  # raised again, as above
            offsets = _offsets(shard, file, part, table)
            yield from blocks(fetcher.storage, file, int(offsets[0]), int(offsets[-1]))

    return Ahead(fetcher, _table(file, part), rest)


def _table(file: File, part: Part) -> Block:
    """Of the part's offsets; the first part looks at the count, too."""
    assert part.stop is not None
    return file, 4 * (1 + part.start) if part.start else 0, 4 * (part.stop + 2)


def _offsets(shard: Shard, file: File, part: Part, table: bytes) -> Offsets:
    """Where the part's samples begin in the file, ``[samples + 1]``."""
    if not part.start:
        _check_count(table, shard, file)
        table = table[4:]
    limits = (4 * (shard.samples + 2), file.size)
    return offsets_of(table, "<u4", file=file, first=part.start, limits=limits)


def _decompressed(
    shard: Shard, file: File, part: Part, fetcher: Fetcher, following: Iterable[Block]
) -> Iterator[bytes]:
    try:
        data = content(Stretch(fetcher, file, 0, file.size, following), name=shard.suffix).read(
            shard.size + 1
        )
    except DAMAGED as error:
        raise Damage(f"{file.name} is damaged: {error}", offset=part.start, resume=None) from error
    if len(data) > shard.size:
        what = f"{file.name} has more content than the {shard.size:,} bytes that its index names, or that are read"
        raise Damage(what, offset=part.start, resume=None)
    _check_length(shard, file, part, len(data))
    _check_count(data, shard, file)
    assert part.stop is not None
    table = data[4 * (1 + part.start) : 4 * (part.stop + 2)]
    limits = (4 * (shard.samples + 2), len(data))
    offsets = offsets_of(table, "<u4", file=file, first=part.start, limits=limits).tolist()
    for start, end in pairwise(offsets):
        yield data[start:end]


def _check_length(shard: Shard, file: File, part: Part, size: int) -> None:
    if 4 * (shard.samples + 2) > size:
        raise Damage(f"{file.name} is too short for its samples", offset=part.start, resume=None)


def _check_count(data: bytes, shard: Shard, file: File) -> None:
    if (count := int.from_bytes(data[:4], "little")) != shard.samples:
        what = f"{file.name} holds {count} samples and its index says {shard.samples}"
        raise Damage(what, offset=0, resume=None)


def _entry(entry: Any, keep: list[str] | None) -> tuple[Shard, tuple[str, int]]:
    """A shard of an index, and its file's name and size."""
    if not isinstance(entry, dict) or entry.get("format") != "mds" or entry.get("version") != 2:
        raise ValueError("it is no MDS shard, version 2")
    compression = entry.get("compression")
    suffix = ""
    if compression is not None and not (suffix := COMPRESSIONS.get(str(compression).split(":")[0], "")):
        raise ValueError(f"compression {compression!r} is not read; it can be {', '.join(COMPRESSIONS)}")
    data = entry.get("raw_data" if compression is None else "zip_data")
    lists: list[Any] = [entry.get(f"column_{what}") for what in ("names", "encodings", "sizes")]
    samples = entry.get("samples")
    if not isinstance(data, dict) or not all(isinstance(each, list) for each in lists):
        raise ValueError("it lacks its file or its columns")
    if type(samples) is not int or samples < 0 or len({len(each) for each in lists}) != 1:
        raise ValueError("its samples or columns do not fit together")
    columns = []
    for name, encoding, size in zip(*lists, strict=True):
        if not isinstance(name, str) or not (size is None or (type(size) is int and size >= 0)):
            raise ValueError(f"column {name!r} of {size!r} bytes is none; it has a name and may have a size")
        wanted = keep is None or name in keep
        columns.append(Column(name, size or None, decoder(name, str(encoding)) if wanted else left_out))
    there = [column.name for column in columns]
    if lacking := [name for name in keep or [] if name not in there]:
        raise ValueError(f"it has no column {lacking[0]!r}; it has {', '.join(map(repr, there))}")
    raw = entry.get("raw_data")
    size = raw.get("bytes") if isinstance(raw, dict) else None
    size = min(size, LARGEST) if type(size) is int else LARGEST
    return Shard(samples, columns, suffix, size), (data.get("basename", ""), data.get("bytes", 0))
