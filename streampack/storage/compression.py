"""The content of compressed files."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import Any

COMPRESSED = (".gz", ".zst")
BUFFER_BYTES = 1 << 18
LARGEST_WINDOW = 1 << 27  # bytes that a zstd frame may ask to be kept, as `zstd --long` does
FRAME, SKIPPABLE = b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"

KINDS = {
    b"\x1f\x8b": "gzip data",
    b"\x28\xb5\x2f\xfd": "zstd data",
    b"BZh": "bzip2 data",
    b"\xfd7zXZ\x00": "xz data",
    b"\x5d\x00\x00": "lzma data",
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive",
    b"\x04\x22\x4d\x18": "lz4 data",
    b"\xff\x06\x00\x00sNaPpY": "snappy data",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"SQLite format 3": "a SQLite database",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}
"""Kinds of files by their first bytes. None of these can begin a JSON object."""


class ArchiveError(Exception):
    """A .zst file that cannot be decompressed."""


DAMAGED = (gzip.BadGzipFile, zlib.error, EOFError, ArchiveError)
"""Errors of a compressed stream that is broken or cut off."""


def kind_of(head: bytes) -> str | None:
    """Return the kind of a file by its first bytes, None for text.

    >>> kind_of(b"BZh91AY&SY"), kind_of(b'{"text": "a"}')
    ('bzip2 data', None)
    """
    return next((kind for magic, kind in KINDS.items() if head.startswith(magic)), None)


def not_text(shown: str, kind: str) -> ValueError:
    """Make the error for a file that is no plain text."""
    way_out = (
        "read it with ParquetSource"
        if "Parquet" in kind
        else "make it plain text, or compress that as .gz or .zst"
    )
    if kind in ("gzip data", "zstd data"):
        way_out = f"let its name end in {'.gz' if 'gzip' in kind else '.zst'}"
    return ValueError(f"{shown} is {kind} and would be read as plain text; {way_out}")


def content(raw: io.RawIOBase, *, name: str) -> io.BufferedReader:
    """Return the stream of a file's content, decompressed as the ending of its name says."""
    if name.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), BUFFER_BYTES)
    if name.endswith(".zst"):
        return io.BufferedReader(_Zstd(raw), BUFFER_BYTES)
    return io.BufferedReader(raw, BUFFER_BYTES)


class _Zstd(io.RawIOBase):
    """Decompresses frame after frame, and each frame block by block: a block has at most 128 KiB of content.

    zstandard's own reader takes a file that was cut off for one that ends, and its decompressor returns all content of
    its input at once: 600 MiB of 29 KB.
    """

    def __init__(self, raw: io.RawIOBase) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ImportError("reading .zst files needs zstandard: pip install 'streampack[zstd]'") from error
        self.zstandard = zstandard
        self.raw = io.BufferedReader(raw, 1 << 16)
        self.frame: Any = None  # being decompressed
        self.ready = memoryview(b"")  # decompressed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            if (chunk := self._begin() if self.frame is None else self._block()) is None:
                return 0
            try:
                self.ready = memoryview(self.frame.decompress(chunk))
            except self.zstandard.ZstdError as error:
                raise ArchiveError(str(error)) from error
            if self.frame.eof:
                self.frame = None
        count = min(len(buffer), len(self.ready))
        buffer[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count

    def _begin(self) -> bytes | None:
        """Read the header of the next frame; None at the file's end. RFC 8878, 3.1."""
        while (magic := self.raw.read(4)) and magic[1:] == SKIPPABLE and 0x50 <= magic[0] < 0x60:
            left = int.from_bytes(self._take(4), "little")
            while left:
                left -= len(self._take(min(left, 1 << 16)))
        if not magic:
            return None
        if len(magic) < 4:
            raise ArchiveError("it ends in the middle")
        if magic != FRAME:
            raise ArchiveError("there is no zstd frame where one should begin")
        descriptor = self._take(1)
        [flags] = descriptor
        single = flags >> 5 & 1
        size = (0 if single else 1) + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6]
        self.checked = bool(flags & 4)
        self.frame = self.zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()
        return magic + descriptor + self._take(size)

    def _block(self) -> bytes:
        """Read the next block of the frame, with the checksum that follows the last one."""
        head = self._take(3)
        number = int.from_bytes(head, "little")
        size = 1 if number >> 1 & 3 == 1 else number >> 3  # a single byte that is repeated, or the block
        return head + self._take(size + 4 * (number & 1 and self.checked))

    def _take(self, size: int) -> bytes:
        data = self.raw.read(size)
        if len(data) < size:
            raise ArchiveError("it ends in the middle")
        return data
