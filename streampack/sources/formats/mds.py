"""`MDSSource`: MosaicML's MDS shards with version 2 of their index, read without the package mosaicml-streaming.

A shard begins with the number of its samples. Then come the offsets of the samples from the file's start, and that of
the end; a JSON header, which the index repeats; and the samples. A sample begins with the sizes of the columns that
have no fixed size; then come the bytes of all columns, end to end. Numbers are ``uint32``.
https://docs.mosaicml.com/projects/streaming/en/stable/preparing_datasets/dataset_format.html
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from streampack.sources.examples import EXAMPLES, Example
from streampack.sources.formats.documents import Layout, NumberedRecords, Offsets, Read
from streampack.sources.mechanics.files import FileSource
from streampack.sources.mechanics.indexed import read_indexes
from streampack.sources.mechanics.parts import Damage, Part, Record
from streampack.storage.base import File
from streampack.storage.compression import DAMAGED, content
from streampack.storage.listing import Name
from streampack.storage.ranges import Fetcher, RangeStream
from streampack.storage.retries import Storage

CUT_OFF = "it is too short for its samples: copy it again"
MAX_CONTENT_BYTES = 1 << 30  # A compressed shard may not have more content, whatever its index says.
COMPRESSIONS = {"gz": ".gz", "zstd": ".zst"}
ARRAYS = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
          64: "uint64", 65: "int64", 66: "float64"}  # fmt: skip
SCALARS = frozenset(ARRAYS.values())
SHAPES = ("uint8", "uint16", "uint32", "uint64")  # types of an array's dimensions, by their code

Decode = Callable[[bytes], Any]


class Column(NamedTuple):
    """A column of a shard's samples."""

    name: str
    size: int | None  # in bytes; None if each sample has its own
    decode: Decode | None  # None if the column is skipped


class Shard(NamedTuple):
    """The index's entry of a shard."""

    samples: int  # how many samples the shard has
    columns: list[Column]
    suffix: str  # ".gz" or ".zst" if the shard is compressed, else ""
    size: int  # the most bytes that the content may have, decompressed


class MDSSource(NumberedRecords):
    """The samples of a folder of MDS shards, as mappings of plain values and arrays.

    The samples of each shard are cut into slices, which are divided among the lanes. In a compressed shard (zstd, gzip)
    one cannot seek: it is one part, and is held decompressed while it is read. If there are fewer such shards than
    lanes to fill, several lanes read the same shard and take turns with its samples.

    Args:
        folder: the folder that holds ``index.json``, on this machine or behind a URL.
        columns: the columns to keep; None for all.
        storage: see `JSONLSource`.

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
        storage: Storage | Mapping[str, Any] | None = None,
    ) -> None:
        corpus, self.shards = read_indexes([folder], partial(_described, columns=columns), storage=storage)
        packed = {number for number, shard in enumerate(self.shards) if shard.suffix}
        super().__init__(corpus, list(map(_layout, corpus.files, self.shards)), whole=packed)

    @override
    def offsets(self, part: Part, read: Read) -> tuple[Offsets, None]:
        assert part.stop is not None
        # The first part is read with the number of samples, which comes before the offsets.
        begin = 4 * (1 + part.start) if part.start else 0
        table = np.frombuffer(read((self.files[part.file], begin, 4 * (part.stop + 2))), "<u4").astype(
            np.int64
        )
        if not part.start:
            if table[0] != self.counts[part.file]:
                says = f"it holds {table[0]} samples and its index says {self.counts[part.file]}"
                raise Damage(says, offset=part.start)
            table = table[1:]
        return table - self.layouts[part.file].first, None

    @override
    def slice(self, part: Part, fetcher: Fetcher, content: bytes | None = None) -> Iterator[Record]:
        if (shard := self.shards[part.file]).suffix:
            file = self.files[part.file]
            content = _content(shard, part, RangeStream(fetcher, file, 0, file.size))
            if len(content) < self.layouts[part.file].first:
                raise Damage(CUT_OFF, offset=part.start)
        yield from super().slice(part, fetcher, content)

    @override
    def decode(self, part: Part, offset: int, raw: Any) -> Mapping[str, Any]:
        try:
            return _row(self.shards[part.file].columns, raw[0].tobytes())
        except (ValueError, LookupError, RecursionError) as error:
            raise ValueError(f"not a sample of its columns ({error})") from None

    @override
    def examples(self, count: int = EXAMPLES) -> list[Example]:
        # Of compressed shards the first samples: each of the others would take a shard to be decompressed.
        packed = any(shard.suffix for shard in self.shards)
        return FileSource.examples(self, count) if packed else super().examples(count)


def _layout(file: File, shard: Shard) -> Layout | str:
    first = 4 * (shard.samples + 2)  # after the number of samples and their offsets
    if shard.suffix:
        return Layout("|u1", file.size, shard.samples, first)
    return Layout("|u1", file.size - first, shard.samples, first) if first <= file.size else CUT_OFF


def _content(shard: Shard, part: Part, stored: RangeStream) -> bytes:
    """Return what a compressed shard holds."""
    try:
        data = content(stored, name=shard.suffix).read(shard.size + 1)
    except DAMAGED as error:
        raise Damage(f"it is damaged: {error}", offset=part.start) from None
    if len(data) > shard.size:
        what = f"it has more content than the {shard.size:,} bytes that its index names, or that are read"
        raise Damage(what, offset=part.start)
    return data


def _described(
    content: Mapping[str, Any], entry: Mapping[str, Any], *, columns: list[str] | None
) -> tuple[str, int, Shard, str | None]:
    if (content.get("version"), entry.get("version"), entry.get("format")) != (2, 2, "mds"):
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
    found = []
    for name, encoding, size in zip(*lists, strict=True):
        if not isinstance(name, str) or not (size is None or (type(size) is int and size >= 0)):
            raise ValueError(f"column {name!r} of {size!r} bytes is none; it has a name and may have a size")
        wanted = columns is None or name in columns
        found.append(Column(name, size or None, _decoder(name, str(encoding)) if wanted else None))
    there = [column.name for column in found]
    lacking = [name for name in columns or [] if name not in there]
    problem = f"it has no column {lacking[0]!r}; it has {', '.join(map(repr, there))}" if lacking else None
    raw = entry.get("raw_data")
    size = raw.get("bytes") if isinstance(raw, dict) else None
    size = min(size, MAX_CONTENT_BYTES) if type(size) is int else MAX_CONTENT_BYTES
    return data.get("basename", ""), data.get("bytes", 0), Shard(samples, found, suffix, size), problem


def _row(columns: list[Column], raw: bytes) -> dict[str, Any]:
    """Return the values of a sample's columns by name; raise ValueError or LookupError if it is damaged."""
    variable = sum(column.size is None for column in columns)
    sizes = iter(np.frombuffer(raw, "<u4", variable).tolist())
    at, row = 4 * variable, {}
    for column in columns:
        size = next(sizes) if column.size is None else column.size
        data, at = raw[at : at + size], at + size
        if column.decode is not None:
            row[column.name] = column.decode(data)
    if at != len(raw):
        raise ValueError(f"the columns take {at} bytes and the sample has {len(raw)}")
    return row


def _decoder(name: str, encoding: str) -> Decode:
    r"""Return the function that decodes the bytes of a column.

    >>> _decoder("text", "str")(b"caf\xc3\xa9"), _decoder("ids", "ndarray:uint16:2")(b"\x01\x00\x02\x00").tolist()
    ('café', [1, 2])

    Raises:
        ValueError: for an encoding that is not read.
    """
    kind, _, detail = encoding.partition(":")
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind in SCALARS:
        return partial(_scalar, kind)
    if kind == "ndarray":
        dtype, _, dims = detail.partition(":")
        if dtype and dtype not in SCALARS:
            raise ValueError(f"column {name!r} holds arrays of {dtype!r}, which no MDS shard does")
        shape = [int(dim) for dim in dims.split(",")] if dims else None
        return partial(_array, dtype, shape)
    if kind == "pkl":
        raise ValueError(
            f"column {name!r} is pickled, and reading it could run any code; write it as json, or leave it out: "
            "columns=[...]"
        )
    raise ValueError(
        f"column {name!r} is encoded as {encoding!r}, which is not read; leave it out: columns=[...]"
    )


def _scalar(dtype: str, data: bytes) -> Any:
    return np.frombuffer(data, dtype, 1)[0].item()


def _array(dtype: str, shape: list[int] | None, data: bytes) -> Any:
    """Decode an array. If the encoding does not name its type or its shape, they are stored before the values."""
    at = 0
    if not dtype:
        dtype, at = ARRAYS[data[0]], 1
    if shape is None:
        ndim, width = data[at] >> 2, SHAPES[data[at] % 4]
        shape = np.frombuffer(data, width, ndim, at + 1).tolist()
        at += 1 + ndim * np.dtype(width).itemsize
    return np.frombuffer(data, dtype, offset=at).reshape(shape)


_PLAIN: dict[str, Decode] = {  # functions that can be pickled, for spawned workers
    "bytes": bytes,
    "str": partial(str, encoding="utf-8"),
    "json": json.loads,
    "int": partial(int.from_bytes, byteorder="little", signed=True),
    "str_int": int,
    "str_float": float,
}
