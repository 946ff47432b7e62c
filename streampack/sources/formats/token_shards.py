"""Token shards: files of tokenized documents, made for mapping into memory; `TokenShardSource`, which reads them.

A folder holds shards and an ``index.json`` that names them. A shard, all numbers little-endian:

| bytes | what |
|---|---|
| 4,096 | the header: a JSON object, filled up with spaces, a line's end last |
| ``tokens`` x 2 or 4 | the documents' tokens, end to end, ``uint16`` or ``uint32`` as ``dtype`` says |
| 0 to 6 | zeros, up to a multiple of 8 |
| (``documents`` + 1) x 12 | ``int64``: a document's first token; ``uint32``: its checksum; last the end and a 0 |
| ``tokens`` / 8, rounded up | only if ``masked``: a bit for each token, lowest first: 0 if its label is -100 |

A document's checksum is the CRC-32 of its tokens and then, with a mask, of its bits, each as a byte. It is compared
when the document is decoded, and needs no other bytes.
``crc32`` in the header is the checksum of all bytes after the header; states know the shard by it. The index repeats
what a reader needs of every header; when a shard is opened, the two are compared.

Other programs can read the tokens with ``np.memmap(path, "<u2", offset=4096, shape=tokens)``.
"""

from __future__ import annotations

import json
import os
import zlib
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from streampack.sources.formats.documents import (
    Checksums,
    DocumentSource,
    Layout,
    Mask,
    Offsets,
    Read,
    checksum,
)
from streampack.sources.mechanics.indexed import read_indexes
from streampack.sources.mechanics.parts import Damage, Part
from streampack.storage.base import File
from streampack.storage.folders import Folder
from streampack.storage.listing import Name
from streampack.storage.prefetch import FirstCall
from streampack.storage.retries import Storage
from streampack.types import IntArray

FORMAT = "streampack-tokens"
VERSION = 2
HEADER_BYTES = 4096  # a page of memory, so that the mapped tokens begin with a page
DTYPES = ("uint16", "uint32")
COUNTS = ("documents", "tokens", "crc32")
ENTRY = np.dtype([("start", "<i8"), ("crc32", "<u4")])
"""A document's entry in a shard: its first token, and its checksum."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The description of a shard in its index and header, and where in the file its parts begin."""

    name: str
    dtype: str
    documents: int
    tokens: int
    masked: bool
    crc32: int

    @property
    def width(self) -> int:
        """Bytes of a token."""
        return np.dtype(self.dtype).itemsize

    @property
    def offsets_at(self) -> int:
        """The byte where the offsets and checksums begin."""
        return -(-(HEADER_BYTES + self.tokens * self.width) // 8) * 8

    @property
    def mask_at(self) -> int:
        """The byte where the mask begins, if there is one."""
        return self.offsets_at + ENTRY.itemsize * (self.documents + 1)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.mask_at + (-(-self.tokens // 8) if self.masked else 0)


def shard_of(name: str, header: Mapping[str, Any]) -> Shard:
    """Return the header of a shard, or its entry in an index; raise ValueError if it is none of this version."""
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise ValueError(
            f"{name} is of format {header.get('format')!r}, version {header.get('version')!r}; this reads {FORMAT!r}, "
            f"version {VERSION}; tokenize again to another folder"
        )
    counts = [header.get(key) for key in COUNTS]
    sound = all(type(count) is int and 0 <= count < 1 << 48 for count in counts)
    if header.get("dtype") not in DTYPES or type(header.get("masked")) is not bool or not sound:
        raise ValueError(f"{name}: its description is damaged; tokenize again")
    return Shard(name, **{key: header[key] for key in ("dtype", "documents", "tokens", "masked", "crc32")})


def read_header(folder: Folder, name: str) -> dict[str, Any] | None:
    """Read the header of a shard; return None if there is no such file, or only a part of it.

    Folders on this machine and object stores show no parts of files, but other file systems at URLs may.
    """
    if (found := folder.head(name, HEADER_BYTES)) is None:
        return None
    raw, size = found
    if size < HEADER_BYTES:
        return None
    header = _parsed(raw, shown=f"{folder.shown}/{name}")
    return header if shard_of(name, header).size == size else None


def misdescribed(raw: bytes | memoryview, shard: Shard) -> str | None:
    """Compare the header of a shard, ``raw``, with its description in the index; return how they differ, if so."""
    try:
        own = shard_of(shard.name, _parsed(bytes(raw), shown="the shard"))
    except ValueError as error:
        return str(error)
    if own == shard:
        return None
    return (
        f"it is not the shard that its index describes: its header says {own}, the index {shard}; one of them was "
        "replaced: copy the folder again, the index and all shards"
    )


def _parsed(raw: bytes, *, shown: str) -> dict[str, Any]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise ValueError(f"{shown} is no token shard: it does not begin with a header")
    return header


class ShardWriter:
    """Writes one shard of tokens of a type in `DTYPES`. It gets its name when it is complete."""

    def __init__(self, folder: Folder, name: str, *, dtype: str) -> None:
        self.folder = folder
        self.name = name
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.unfinished = folder.begin(name)
        self.file = self.unfinished.open("wb")
        self.file.write(bytes(HEADER_BYTES))
        self.offsets = array("q", [0])
        self.checksums: list[int] = []
        self.trained: list[npt.NDArray[np.bool_]] = []
        self.masked = False
        self.crc32 = 0

    @property
    def tokens(self) -> int:
        """The number of tokens written so far."""
        return self.offsets[-1]

    def append(self, tokens: IntArray, trained: npt.NDArray[np.bool_]) -> None:
        """Write one document; raise ValueError for a token id that does not fit into the shard's type."""
        limit = np.iinfo(self.dtype).max
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) <= limit:
            bad = tokens[(tokens < 0) | (tokens > limit)][0]
            raise ValueError(
                f'token id {bad} does not fit into {self.dtype.name} (0 to {limit}); use dtype="uint32"'
            )
        stored = tokens.astype(self.dtype)
        self._write(stored.tobytes())
        self.checksums.append(checksum(stored, None))
        self.offsets.append(self.tokens + tokens.size)
        self.trained.append(trained)
        self.masked |= not trained.all()

    def close(self, notes: Mapping[str, Any]) -> Shard:
        """Complete the shard and give it its name. ``notes`` are further values for the header, by name."""
        self._write(bytes(-(HEADER_BYTES + self.tokens * self.dtype.itemsize) % 8))
        table = np.zeros(len(self.offsets), ENTRY)
        table["start"] = self.offsets
        table["crc32"][:-1] = self.checksums
        if self.masked:  # which is known only now
            marked = zip(self.trained, self.checksums, strict=True)
            table["crc32"][:-1] = [zlib.crc32(own.tobytes(), found) for own, found in marked]
        self._write(table.tobytes())
        if self.masked:
            self._write(np.packbits(np.concatenate(self.trained), bitorder="little").tobytes())
        header = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype.name,
            "documents": len(self.offsets) - 1,
            "tokens": self.tokens,
            "masked": self.masked,
            "crc32": self.crc32,
        }
        text = json.dumps({**header, **notes}).encode()
        assert len(text) < HEADER_BYTES, f"a header of {len(text)} bytes"
        self.file.seek(0)
        self.file.write(text.ljust(HEADER_BYTES - 1) + b"\n")
        try:
            self.folder.complete(self.file, self.name)
        except FileNotFoundError:
            # A call that completed the folder meanwhile has removed this file, as one that nobody writes to.
            if read_header(self.folder, self.name) is None:
                raise
        return shard_of(self.name, header)

    def abandon(self) -> None:
        """Remove the unfinished file."""
        with suppress(OSError):  # on a full disk, what is buffered cannot be written
            self.file.close()
        self.unfinished.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        self.crc32 = zlib.crc32(data, self.crc32)
        self.file.write(data)


class TokenShardSource(DocumentSource):
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

    The documents of each shard are cut into slices, which are divided among the lanes. Ids of 2 bytes are copied once,
    to int32; those of 4 bytes are not, unless one needs int64. The arrays are read-only. If all tokens of a document
    are trained, ``tokens`` and ``labels`` are the same array.

    Args:
        folder: the folder that holds ``index.json``, on this machine or behind a URL; or several folders in one place,
            which are one corpus. With ``corpus_lists``, a run reads folders that were added in its next epoch.
        storage: see `JSONLSource`.

    Raises:
        ValueError: for an index that is missing, has another format, or names files outside of the folder; for folders
            with the same shards, or on several storages; for a shard when it is read, if it is missing or its size or
            header is not what the index says.
    """

    reads_tags = False
    sizes_of_index = True

    def __init__(
        self,
        folder: Name | Iterable[Name],
        *,
        storage: Storage | Mapping[str, Any] | None = None,
    ) -> None:
        folders = [folder] if isinstance(folder, str | os.PathLike) else list(folder)
        corpus, self.shards = read_indexes(folders, _described, storage=storage)
        known: dict[Shard, File] = {}
        for file, shard in zip(corpus.files, self.shards, strict=True):
            if (twin := known.setdefault(shard, file)) is not file:
                raise ValueError(f"{twin.shown} and {file.shown} are the same shard; name each folder once")
        super().__init__(corpus, list(map(_layout, corpus.files, self.shards)))
        self.corpus.identify([f"crc32 {shard.crc32}" for shard in self.shards])
        self._sound: set[int] = set()  # the numbers of shards whose header was compared with the index
        self._first_call = FirstCall()

    @override
    def offsets(self, part: Part, read: Read) -> tuple[Offsets, Checksums]:
        shard, file = self.shards[part.file], self.files[part.file]
        if (problem := self._first_call(part.file, lambda: self._problem(part.file, read))) is not None:
            raise Damage(problem, offset=part.start)
        assert part.stop is not None
        at, each = shard.offsets_at, ENTRY.itemsize
        table = np.frombuffer(read((file, at + each * part.start, at + each * (part.stop + 1))), ENTRY)
        return np.ascontiguousarray(table["start"]), table["crc32"]

    def _problem(self, number: int, read: Read) -> str | None:
        """Return how a shard's header differs from the index, by which alone a state knows the shard."""
        if number in self._sound:
            return None
        problem = misdescribed(read((self.files[number], 0, HEADER_BYTES)), self.shards[number])
        if problem is None:
            self._sound.add(number)
        return problem


def _described(content: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[str, int, Shard, None]:
    common = {key: content.get(key) for key in ("format", "version", "dtype")}
    name: Any = entry.get("name")  # which the caller checks
    shard = shard_of(str(name), {**common, **entry})
    return name, shard.size, shard, None


def _layout(file: File, shard: Shard) -> Layout:
    mask = Mask(file, shard.mask_at, bits=True) if shard.masked else None
    dtype = np.dtype(shard.dtype).newbyteorder("<").str
    return Layout(dtype, shard.tokens, shard.documents, HEADER_BYTES, mask=mask)
