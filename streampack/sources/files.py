"""The files of a corpus: which they are, what they hold, and how to read them, compressed ones too."""

from __future__ import annotations

import glob
import gzip
import io
import os
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

from streampack.sources.base import digest

COMPRESSED = (".gz", ".zst")
BUFFER_BYTES = 1 << 18
HASHED_BYTES = 1 << 16  # of each file's head and of its tail


class File(NamedTuple):
    """An entry of the manifest."""

    path: str
    name: str  # relative to the files' common folder, so that a corpus may move
    size: int  # bytes, as they lie on the disk

    @property
    def seekable(self) -> bool:
        """Whether reading can start anywhere."""
        return not self.path.endswith(COMPRESSED)


def manifest(patterns: list[str | os.PathLike[str]]) -> tuple[File, ...]:
    """The files that paths and globs name, sorted.

    Raises:
        ValueError: if nothing matches, a file is empty, or one is named twice.
    """
    found: list[str] = []
    for pattern in (os.fspath(pattern) for pattern in patterns):
        matches = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
        matches = sorted(match for match in matches if Path(match).is_file())
        if not matches:
            raise ValueError(
                f"no file matches {pattern!r} (looked in {Path.cwd()}); check the path or the glob"
            )
        found += matches
    if not found:
        raise ValueError("no files given; name at least one .jsonl file")
    paths = sorted(os.path.normpath(Path(path).absolute()) for path in found)
    for path, following in pairwise(paths):
        if path == following:
            raise ValueError(f"{path} is named twice; name every file once (a mixture can weight it)")
    folder = os.path.commonpath([Path(path).parent for path in paths])
    files = tuple(File(path, os.path.relpath(path, folder), Path(path).stat().st_size) for path in paths)
    for file in files:
        if file.size == 0 or (file.size <= 4096 and Path(file.path).read_bytes().isspace()):
            raise ValueError(f"{file.path} is empty; remove it from the corpus")
    return files


def open_file(file: File) -> tuple[IO[bytes], IO[bytes]]:
    """The file, and the stream of its content."""
    raw = Path(file.path).open("rb", buffering=0)  # noqa: SIM115 - whoever asked closes it
    if (size := os.fstat(raw.fileno()).st_size) != file.size:
        raw.close()
        raise ValueError(
            f"{file.path} has {size} bytes and had {file.size} when the run began; a corpus must not change "
            "during a run: restore the file, or start anew"
        )
    if file.path.endswith(".gz"):
        return raw, io.BufferedReader(gzip.GzipFile(fileobj=raw), BUFFER_BYTES)
    if file.path.endswith(".zst"):
        return raw, io.BufferedReader(_Zstd(raw), BUFFER_BYTES)
    return raw, io.BufferedReader(raw, BUFFER_BYTES)


def ends(file: File) -> str:
    """A digest of the first and last 64 KiB."""
    with Path(file.path).open("rb") as stream:
        head = stream.read(HASHED_BYTES)
        stream.seek(max(0, file.size - HASHED_BYTES))
        return digest(head, stream.read(HASHED_BYTES))


class ArchiveError(Exception):
    """A .zst file that cannot be decompressed."""


class _Zstd(io.RawIOBase):
    """Decompresses frame after frame. zstandard's own reader takes a file that was cut off for one that ends."""

    def __init__(self, raw: IO[bytes]) -> None:
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
            chunk = chunk or self.raw.read(1 << 16)
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
