"""Compressed files: streams of their content, and kinds of files by their first bytes."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import Any

COMPRESSED = (".gz", ".zst")
BUFFER_BYTES = 1 << 18
LARGEST_WINDOW = 1 << 27  # bytes of content that a zstd frame may refer back to; the window of `zstd --long`
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
    b"\x00\x00\x00\x00": "zeros, as a crash leaves them,",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}
"""Kinds of files by their first bytes. None of these can begin a JSON object."""


class ArchiveError(Exception):
    """A .zst file that cannot be decompressed."""


DAMAGED = (gzip.BadGzipFile, zlib.error, EOFError, ArchiveError)
"""The errors that are raised for a compressed stream that is broken or cut off."""


def kind_of(head: bytes) -> str | None:
    """Return the kind of a file by its first bytes; None if it may be text.

    >>> kind_of(b"BZh91AY&SY"), kind_of(b'{"text": "a"}')
    ('bzip2 data', None)
    """
    return next((kind for magic, kind in KINDS.items() if head.startswith(magic)), None)


def not_text(kind: str) -> str:
    """Return why a file of the given kind, which is not plain text, cannot be read as JSON lines."""
    way_out = (
        "read it with ParquetSource"
        if "Parquet" in kind
        else "make it plain text, or compress that as .gz or .zst"
    )
    if "zeros" in kind:
        way_out = "copy it anew"
    if kind in ("gzip data", "zstd data"):
        way_out = f"let its name end in {'.gz' if 'gzip' in kind else '.zst'}"
    return f"it is {kind} and would be read as plain text; {way_out}"


def content(raw: io.RawIOBase, *, name: str) -> io.BufferedReader:
    """Return the stream of a file's content. The ending of the name says how it is decompressed, if at all."""
    if name.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), BUFFER_BYTES)
    if name.endswith(".zst"):
        return io.BufferedReader(_Zstd(raw), BUFFER_BYTES)
    return io.BufferedReader(raw, BUFFER_BYTES)


class _Zstd(io.RawIOBase):
    """The content of a zstd stream, decompressed one block at a time.

    zstandard's own reader does not notice that a file was cut off. Its decompressor returns the content of all its
    input at once, and 29 KB of input can have 600 MiB of content. So the stream is divided into frames and blocks here,
    as a block has at most 128 KiB of content.
    """

    def __init__(self, raw: io.RawIOBase) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ImportError("reading .zst files needs zstandard: pip install 'streampack[zstd]'") from error
        self.zstandard = zstandard
        self.raw = io.BufferedReader(raw, 1 << 16)
        self.frame: Any = None  # the decompressor of the current frame
        self.ready = memoryview(b"")  # decompressed content that was not returned yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            if (chunk := self._begin_frame() if self.frame is None else self._next_block()) is None:
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

    def _begin_frame(self) -> bytes | None:
        """Begin the next frame and return its header (RFC 8878, 3.1); return None at the file's end."""
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

    def _next_block(self) -> bytes:
        """Return the next block of the frame. The last one comes with the checksum that follows it, if there is one."""
        head = self._take(3)
        number = int.from_bytes(head, "little")
        is_one_repeated_byte = number >> 1 & 3 == 1
        size = 1 if is_one_repeated_byte else number >> 3
        return head + self._take(size + 4 * (number & 1 and self.checked))

    def _take(self, size: int) -> bytes:
        data = self.raw.read(size)
        if len(data) < size:
            raise ArchiveError("it ends in the middle")
        return data
