"""Compressed files: streams of their content."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import Any

COMPRESSED = (".gz", ".zst")
BUFFER_BYTES = 1 << 18


class ArchiveError(Exception):
    """A .zst file that cannot be decompressed."""


DAMAGED = (gzip.BadGzipFile, zlib.error, EOFError, ArchiveError)
"""The errors that are raised for a compressed stream that is broken or cut off."""


def content(raw: io.RawIOBase, *, name: str) -> io.BufferedReader:
    """Return the stream of a file's content. The ending of the name says how it is decompressed, if at all."""
    if name.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), BUFFER_BYTES)
    if name.endswith(".zst"):
        return io.BufferedReader(_Zstd(raw), BUFFER_BYTES)
    return io.BufferedReader(raw, BUFFER_BYTES)


class _Zstd(io.RawIOBase):
    """The content of a zstd stream, by pyarrow: zstandard's own reader does not notice that a file was cut off."""

    def __init__(self, raw: io.RawIOBase) -> None:
        try:
            import pyarrow
        except ImportError as error:
            raise ImportError("reading .zst files needs pyarrow: pip install 'streampack[data]'") from error
        self.stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(io.BufferedReader(raw), "r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count: int = self.stream.readinto(buffer)
        except OSError as error:
            if type(error) is OSError and str(error).startswith(("Truncated", "ZSTD")):
                raise ArchiveError(str(error)) from None
            raise  # of the storage
        return count
