"""Compressed files: streams of their content."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zstd", ".lz4")
PACKED = (*COMPRESSED, ".tgz")
"""Endings of the names of compressed files, which cannot be read from the middle."""
BUFFER_BYTES = 1 << 18
WINDOW_BYTES = 1 << 28  # most memory of an xz stream; zstd's own limit is half of that
READ_BYTES = 1 << 16  # compressed bytes that are decompressed at a time


class ArchiveError(Exception):
    """A compressed file that cannot be decompressed."""


DAMAGED = (gzip.BadGzipFile, zlib.error, EOFError, ArchiveError)
"""The errors that are raised for a compressed stream that is broken or cut off."""


def content(raw: io.RawIOBase, *, name: str) -> io.BufferedReader:
    """Return the stream of a file's content. The ending of the name says how it is decompressed, if at all.

    Of a stream that is broken or cut off, everything before the damage is returned, then reading raises one of
    `DAMAGED`.
    """
    # A Python may be built without bz2 or lzma, so they are imported where they are used.
    ending = name[name.rfind(".") :]
    if ending in (".gz", ".tgz"):
        raw = _Gzip(raw)
    elif ending == ".bz2":
        raw = _Frames(raw, import_module("bz2").BZ2Decompressor)
    elif ending == ".xz":
        raw = _Frames(raw, partial(import_module("lzma").LZMADecompressor, memlimit=WINDOW_BYTES))
    elif ending in COMPRESSED:
        raw = _Arrow(raw, "lz4" if ending == ".lz4" else "zstd")
    return io.BufferedReader(raw, BUFFER_BYTES)


class _Readable(io.RawIOBase):
    def readable(self) -> bool:
        return True


class _Gzip(_Readable):
    """The content of a gzip stream."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self.stream = gzip.GzipFile(fileobj=raw)

    def readinto(self, buffer: Any) -> int:
        # Its own `readinto` fills the buffer, or raises without what came before.
        data = self.stream.read1(len(buffer))
        buffer[: len(data)] = data
        return len(data)


class _Frames(_Readable):
    """The content of bzip2 or xz streams, end to end.

    Python's `BZ2File` and `LZMAFile` take a stream whose header is damaged for the end of the file.
    """

    def __init__(self, raw: io.RawIOBase, make: Callable[[], Any]) -> None:
        self.raw = raw
        self.make = make
        self.frame = make()

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            more = b""
            if self.frame.eof:
                # Zeros may fill up a file.
                while not (more := (more or self.frame.unused_data).lstrip(b"\0")):
                    if not (more := self.raw.read(READ_BYTES) or b""):
                        return 0
                self.frame = self.make()
            elif self.frame.needs_input and not (more := self.raw.read(READ_BYTES) or b""):
                raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            try:
                data = self.frame.decompress(more, len(buffer))
            except Exception as error:  # OSError of bz2, LZMAError of lzma
                raise ArchiveError(str(error)) from None
        buffer[: len(data)] = data
        return len(data)


class _Arrow(_Readable):
    """The content of a zstd or lz4 stream, by pyarrow.

    zstandard's own reader does not notice that a file was cut off.
    """

    def __init__(self, raw: io.RawIOBase, codec: str) -> None:
        try:
            import pyarrow
        except ImportError as error:
            raise ImportError(
                "reading .zst and .lz4 files needs pyarrow: pip install 'streampack[data]'"
            ) from error
        self.stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(io.BufferedReader(raw), "r"), codec)
        self.damage: ArchiveError | None = None

    def readinto(self, buffer: Any) -> int:
        if self.damage is not None:
            raise self.damage
        # Where the stream is damaged, pyarrow raises, and does not say how many bytes it wrote before. No text holds
        # the byte 0xff.
        buffer[:] = b"\xff" * len(buffer)
        try:
            count: int = self.stream.readinto(buffer)
        except OSError as error:
            if type(error) is not OSError or not str(error).startswith(("Truncated", "ZSTD", "LZ4")):
                raise  # of the storage
            self.damage = ArchiveError(str(error))
            if not (count := len(bytes(buffer).rstrip(b"\xff"))):
                raise self.damage from None
        return count
