"""`MDSSource`: MosaicML's MDS shards with version 2 of their index, read without the package mosaicml-streaming.

A shard begins with the number of its samples. Then come the offsets of the samples from the file's start, and that of
the end; a JSON header, which the index repeats; and the samples, whose form is described in `mds_columns`. Numbers are
``uint32``.
https://docs.mosaicml.com/projects/streaming/en/stable/preparing_datasets/dataset_format.html
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from streampack.sources.examples import EXAMPLES, Example, example
from streampack.sources.files import divide
from streampack.sources.indexed import IndexedSource, Offsets, read_index, read_records, require_sound
from streampack.sources.mds_columns import Column, decoder, left_out, row_of
from streampack.sources.parts import Damage, Part, Record
from streampack.storage.base import File, ParallelMap, redact
from streampack.storage.compression import DAMAGED, content
from streampack.storage.listing import Name, Once, alone, require_some
from streampack.storage.ranges import Block, Fetcher, RangeStream, blocks

MAX_CONTENT_BYTES = 1 << 30  # A compressed shard may not have more content, whatever its index says.
COMPRESSIONS = {"gz": ".gz", "zstd": ".zst"}


class Shard(NamedTuple):
    """The index's entry of a shard."""

    samples: int  # how many samples the shard has
    columns: list[Column]
    suffix: str  # ".gz" or ".zst" if the shard is compressed, else ""
    size: int  # the most bytes that the content may have, decompressed

    @property
    def first_sample(self) -> int:
        """The first byte that can belong to a sample."""
        return 4 * (self.samples + 2)


class MDSSource(IndexedSource):
    """The samples of a folder of MDS shards, as mappings of plain values and arrays.

    The samples of each shard are cut into slices, which are divided among the lanes. In a compressed shard (zstd, gzip)
    one cannot seek: it is one part, and is held decompressed while it is read. If there are fewer such shards than
    lanes to fill, several lanes read the same shard and take turns with its samples.

    Args:
        folder: the folder that holds ``index.json``, on this machine or behind a URL.
        columns: the columns to keep; None for all.
        storage_options: see `JSONLSource`, as for the arguments below.
        retries: how often a failed read is tried again.
        timeout: seconds that one request may take.
        once: how ranks share the reading of the index.

    Raises:
        ValueError: for an index that is missing, has another format, or names files outside of the folder; for a shard,
            when it is read, that is missing or is not what the index says; for pickled columns, which could run code,
            and for images.
    """

    unit = "sample"
    whole = "compressed shard"
    sizes_of_index = True

    def __init__(
        self,
        folder: Name,
        *,
        columns: list[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        retries: int = 5,
        timeout: float = 30.0,
        once: Once = alone,
    ) -> None:
        index = read_index(
            folder, storage_options=storage_options, retries=retries, timeout=timeout, once=once
        )
        entries = index.content.get("shards")
        shown = redact(index.path)
        if index.content.get("version") != 2 or not isinstance(entries, list):
            raise ValueError(f"{shown} is no index of MDS shards, version 2")
        self.shards, names, problems = [], [], {}
        for number, entry in enumerate(entries):
            try:
                shard, named, problem = _entry(entry, columns)
            except ValueError as error:
                raise ValueError(f"{shown}, shard {number}: {error}") from None
            self.shards.append(shard)
            names.append(named)
            if problem is not None:
                problems[number] = problem
        corpus = index.corpus(names)
        lacking = {corpus.files[number].path: problem for number, problem in problems.items()}
        corpus = require_some(replace(corpus, problems={**lacking, **corpus.problems}))
        super().__init__(corpus, [shard.samples for shard in self.shards])
        self._packed = frozenset(number for number, shard in enumerate(self.shards) if shard.suffix)

    def cut(self, num_lanes: int, parallel_map: ParallelMap) -> list[list[Part]]:
        """See `FileSource.cut`."""
        sizes = [file.size for file in self.files]
        return divide(self.counts, num_lanes, sizes=sizes, whole=self._packed)

    def decode(self, part: Part, offset: int, raw: bytes) -> Mapping[str, Any]:
        """See `FileSource.decode`."""
        try:
            return row_of(self.shards[part.file].columns, raw)
        except (ValueError, LookupError) as error:
            raise ValueError(f"not a sample of its columns ({error})") from None

    def slice(
        self, part: Part, fetcher: Fetcher, later: Iterable[Iterable[Block | None]]
    ) -> Iterator[Record]:
        """See `IndexedSource.slice`."""
        if part.start == part.stop:
            return
        read = _decompressed if part.file in self._packed else _ranged
        samples = read(self.shards[part.file], self.files[part.file], part, fetcher, later)
        for number, raw in enumerate(samples, part.start):
            yield number, raw, number + 1

    def slice_ahead(self, part: Part, fetcher: Fetcher) -> Iterator[Block | None]:
        """See `IndexedSource.slice_ahead`."""
        shard, file = self.shards[part.file], self.files[part.file]
        if shard.suffix:
            yield from blocks(fetcher.block, file, 0, file.size)
        elif shard.first_sample <= file.size:  # else the shard is damaged, and `slice` raises that
            yield (block := _table(file, part))
            while (table := fetcher.peek(block)) is None:
                yield None
            with suppress(Damage):  # `slice` raises it
                offsets = _offsets(shard, file, part, table)
                yield from blocks(fetcher.block, file, int(offsets[0]), int(offsets[-1]))

    def natural_lanes(self) -> int:
        """Return one lane per 256 KiB of plain shards, and one per compressed shard."""
        plain = sum(file.size for number, file in enumerate(self.files) if number not in self._packed)
        return max(1, min(sum(self.counts), (plain >> 18) + len(self._packed)))

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """See `Source.examples`: where shards are compressed, the first samples of one."""
        if not self._packed:
            return super().examples(count)
        number = next((i for i, samples in enumerate(self.counts) if samples and i not in self.bad), 0)
        part = Part(number, 0, min(count, self.counts[number]))
        with suppress(ValueError, FileNotFoundError):  # training reports damage
            samples = list(self.records(part, 0, self.fetcher()))
            return [example((number, at), partial(self.decode, part, at, raw)) for at, raw, _ in samples]
        return [Example((number, 0), None)]


def _ranged(
    shard: Shard, file: File, part: Part, fetcher: Fetcher, later: Iterable[Iterable[Block | None]]
) -> Iterator[bytes]:
    """Read a plain shard's samples by ranges."""
    _check_length(shard, part, file.size)
    try:
        offsets = _offsets(shard, file, part, fetcher.take(_table(file, part)))
    except Damage:
        _check_count(fetcher.take((file, 0, 4)), shard)  # perhaps it is no shard at all
        raise
    yield from read_records(fetcher, file, offsets, later)


def _decompressed(
    shard: Shard, file: File, part: Part, fetcher: Fetcher, later: Iterable[Iterable[Block | None]]
) -> Iterator[bytes]:
    """Read a compressed shard's samples."""
    stretch = RangeStream(fetcher, file, 0, file.size, later)
    try:
        data = content(stretch, name=shard.suffix).read(shard.size + 1)
    except DAMAGED as error:
        raise Damage(f"it is damaged: {error}", offset=part.start) from None
    if len(data) > shard.size:
        what = f"it has more content than the {shard.size:,} bytes that its index names, or that are read"
        raise Damage(what, offset=part.start)
    _check_length(shard, part, len(data))
    _check_count(data, shard)
    assert part.stop is not None
    table = data[4 * (1 + part.start) : 4 * (part.stop + 2)]
    limits = (shard.first_sample, len(data))
    offsets = require_sound(_ints(table), file=file, first=part.start, limits=limits).tolist()
    for start, end in pairwise(offsets):
        yield data[start:end]


def _table(file: File, part: Part) -> Block:
    """Return the block of the part's offsets, which in a shard's first part begins with the number of samples."""
    assert part.stop is not None
    return file, 4 * (1 + part.start) if part.start else 0, 4 * (part.stop + 2)


def _offsets(shard: Shard, file: File, part: Part, table: bytes) -> Offsets:
    """Return the byte where each of the part's samples begins, and where the last one ends, ``[samples + 1]``."""
    if not part.start:
        _check_count(table, shard)
        table = table[4:]
    return require_sound(_ints(table), file=file, first=part.start, limits=(shard.first_sample, file.size))


def _ints(table: bytes) -> Offsets:
    return np.frombuffer(table, "<u4").astype(np.int64)


def _check_length(shard: Shard, part: Part, size: int) -> None:
    if shard.first_sample > size:
        raise Damage("it is too short for its samples", offset=part.start)


def _check_count(data: bytes, shard: Shard) -> None:
    if (count := int.from_bytes(data[:4], "little")) != shard.samples:
        raise Damage(f"it holds {count} samples and its index says {shard.samples}", offset=0)


def _entry(entry: Any, keep: list[str] | None) -> tuple[Shard, tuple[str, int], str | None]:
    """Check the index's entry of a shard. Returns it with its file's (name, size in bytes), and what it lacks."""
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
    lacking = [name for name in keep or [] if name not in there]
    problem = f"it has no column {lacking[0]!r}; it has {', '.join(map(repr, there))}" if lacking else None
    raw = entry.get("raw_data")
    size = raw.get("bytes") if isinstance(raw, dict) else None
    size = min(size, MAX_CONTENT_BYTES) if type(size) is int else MAX_CONTENT_BYTES
    return Shard(samples, columns, suffix, size), (data.get("basename", ""), data.get("bytes", 0)), problem
