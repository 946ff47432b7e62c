"""The content of compressed files."""

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
"""What a compressed stream raises that is broken or cut off."""


def content(raw: io.RawIOBase, *, name: str) -> io.BufferedReader:
    """The stream of a file's content, decompressed as its name says."""
    if name.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), BUFFER_BYTES)
    if name.endswith(".zst"):
        return io.BufferedReader(_Zstd(raw), BUFFER_BYTES)
    return io.BufferedReader(raw, BUFFER_BYTES)


class _Zstd(io.RawIOBase):
    """Decompresses frame after frame. zstandard's own reader takes a file that was cut off for one that ends."""

    def __init__(self, raw: io.RawIOBase) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ImportError("reading .zst files needs zstandard: pip install 'streampack[zstd]'") from error
        self.zstandard = zstandard
        self.raw = raw
        self.frame: Any = None  # being decompressed
        self.ready = b""  # decompressed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            chunk = self.frame.unused_data if self.frame is not None and self.frame.eof else b""
            chunk = chunk or self.raw.read(1 << 16) or b""
            if not chunk:
                if self.frame is not None and not self.frame.eof:
                    raise ArchiveError("it ends in the middle")
                return 0
            if self.frame is None or self.frame.eof:
                self.frame = self.zstandard.ZstdDecompressor().decompressobj()
            try:
                self.ready = self.frame.decompress(chunk)
            except self.zstandard.ZstdError as error:
                raise ArchiveError(str(error)) from error
        count = min(len(buffer), len(self.ready))
        buffer[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count
