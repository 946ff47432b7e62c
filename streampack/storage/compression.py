"""Compressed files: streams of their content, and kinds of files by their first bytes."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import Any

COMPRESSED = (".gz", ".zst")
BUFFER_BYTES = 1 << 18

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
    """The content of a zstd stream, by pyarrow: zstandard's own reader does not notice that a file was cut off."""

    def __init__(self, raw: io.RawIOBase) -> None:
        try:
            import pyarrow
        except ImportError as error:
            raise ImportError("reading .zst files needs pyarrow: pip install 'streampack[zstd]'") from error
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
