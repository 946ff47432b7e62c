"""JSON lines: plain files are cut by byte range, compressed ones are a part each."""

from __future__ import annotations

import glob
import gzip
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

from streampack.sources.base import Part, Record, WindowReader, digest
from streampack.types import Origin, Position

COMPRESSED = (".gz", ".zst")
PARTS_PER_LANE = 16  # enough for shuffling parts to mix a sorted file, few enough to keep reads long
MAX_PART_BYTES = 1 << 30
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


class JSONLSource:
    r"""One JSON object a line, in one file, several, or whatever a glob finds; ``.gz`` and ``.zst`` too.

    Plain files are divided into lanes below file granularity, by byte range: a row belongs to the part in
    which its first byte lies. A compressed file cannot seek: it is one lane's part, and is read again
    from its start on resume. The list of files and their sizes is fixed at construction.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp(), "rows.jsonl")
    >>> _ = path.write_text('{"text": "a"}\n{"text": "b"}\n')
    >>> [row.data["text"] for row in JSONLSource(path).read(0, num_lanes=1)]
    ['a', 'b']

    Raises:
        ValueError: if nothing matches, a file is empty, or one is named twice. Rows that are no JSON
            objects raise when they are read, with file and line.
    """

    max_lanes: int | None = None

    def __init__(self, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> None:
        self.files = _manifest([paths] if isinstance(paths, str | os.PathLike) else list(paths))
        self._size = sum(file.size for file in self.files)  # bytes on the disk, compressed where they are
        self.bytes_read = 0  # by this copy of the source, decompressed
        self._fingerprint: str | None = None

    def fingerprint(self) -> str:
        """Names, sizes and a hash of each file's first and last 64 KiB; never a modification time."""
        if self._fingerprint is None:
            self._fingerprint = digest(*((file.name, file.size, _ends(file)) for file in self.files))
        return self._fingerprint

    def read(
        self,
        lane: int,
        *,
        num_lanes: int,
        epoch: int = 0,
        seed: int = 0,
        shuffle_window: int = 0,
        start: Position | None = None,
    ) -> WindowReader:
        """See `Source.read`."""
        return WindowReader(
            divide(self.files, num_lanes)[lane],
            open_part=lambda part, offset: _Lines(self, part, offset),
            decode=self._decode,
            key=(seed, epoch, lane),
            shuffle_window=shuffle_window,
            start=start,
        )

    def locate(self, origin: Origin) -> str:
        """``file:line``; counts the lines before the row, so it reads that much of the file."""
        file, offset = origin
        line, left = 1, offset
        with _open(self.files[file]) as stream:
            while left and (chunk := stream.read(min(left, 1 << 20))):
                line += chunk.count(b"\n")
                left -= len(chunk)
        return f"{self.files[file].path}:{line}"

    def fetch(self, origin: Origin) -> Mapping[str, Any]:
        """See `Source.fetch`."""
        file, offset = origin
        _, raw = next(_Lines(self, Part(file), offset))
        return self._decode(Part(file), offset, raw)

    def natural_lanes(self) -> int:
        """One per 256 KiB on the disk."""
        return max(1, self._size >> 18)

    def probe(self, count: int) -> tuple[list[Mapping[str, Any]], float]:
        """Rows at evenly spaced places (the first rows of compressed files), and the corpus's size over theirs."""
        rows: dict[tuple[int, int], Mapping[str, Any]] = {}
        used = 0
        for number, file in enumerate(self.files):
            share = max(1, round(count * file.size / self._size))
            if file.seekable:
                for i in range(share):
                    offset, raw = next(_Lines(self, Part(number), file.size * i // share), (0, b""))
                    if raw and (number, offset) not in rows:
                        rows[number, offset] = self._decode(Part(number), offset, raw)
                        used += len(raw)
            else:
                lines = _Lines(self, Part(number), 0)
                for offset, raw in (record for record, _ in zip(lines, range(share), strict=False)):
                    rows[number, offset] = self._decode(Part(number), offset, raw)
                used += min(file.size, lines.bytes_on_disk)
        return list(rows.values()), self._size / max(1, used)

    def _decode(self, part: Part, offset: int, raw: bytes) -> Mapping[str, Any]:
        try:
            row = json.loads(raw.removeprefix(b"\xef\xbb\xbf"))
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError alike
            raise ValueError(f"{self.locate((part.file, offset))}: not a line of JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(
                f"{self.locate((part.file, offset))}: a row must be a JSON object, this is a {type(row).__name__}"
            )
        return row


def divide(files: Sequence[File], num_lanes: int) -> list[list[Part]]:
    """The parts of every lane, in corpus order: each part goes to the lane with the fewest bytes so far."""
    total = sum(file.size for file in files if file.seekable)
    length = min(MAX_PART_BYTES, max(1, -(-total // (num_lanes * PARTS_PER_LANE))))
    lanes: list[list[Part]] = [[] for _ in range(num_lanes)]
    load = [0] * num_lanes
    for number, file in enumerate(files):
        step = length if file.seekable else file.size
        for start in range(0, file.size, step):
            lane = load.index(min(load))
            stop = min(start + step, file.size)
            lanes[lane].append(Part(number, start, stop) if file.seekable else Part(number))
            load[lane] += stop - start
    return lanes


class _Lines:
    """The lines of one part that hold anything, each with the offset of its first byte."""

    def __init__(self, source: JSONLSource, part: Part, offset: int) -> None:
        self.source = source
        self.file = source.files[part.file]
        self.stop = part.stop
        self.stream = _open(self.file)
        self.offset = offset
        if offset and self.file.seekable:
            # A row that starts exactly at `offset` is ours, one that started before is not.
            self.stream.seek(offset - 1)
            self.offset = offset - 1 + len(self.stream.readline())
        elif offset:
            self.stream.seek(offset)  # decompresses and throws away all that comes before

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> Record:
        while self.stop is None or self.offset < self.stop:
            try:
                line = self.stream.readline()
            except (OSError, EOFError) as error:
                raise ValueError(f"{self.file.path}: broken after byte {self.offset}: {error}") from error
            if not line:
                break
            offset, self.offset = self.offset, self.offset + len(line)
            self.source.bytes_read += len(line)
            if not line.isspace():
                return offset, line
        if self.offset == 0:
            raise ValueError(f"{self.file.path} holds no rows; remove it from the corpus")
        self.stream.close()
        raise StopIteration

    def __del__(self) -> None:
        if hasattr(self, "stream"):  # not if opening failed
            self.stream.close()

    @property
    def bytes_on_disk(self) -> int:
        """How far the file itself was read; all of it once the lines have ended."""
        return self.file.size if self.stream.closed else self.stream.raw_tell()


class _Stream(io.BufferedReader):
    """Decompressed bytes, with the place in the file below."""

    def __init__(self, raw: IO[bytes], decompressed: Any) -> None:
        super().__init__(decompressed, 1 << 18)
        self.below = raw

    def raw_tell(self) -> int:
        return self.below.tell()

    def close(self) -> None:
        super().close()
        self.below.close()


def _open(file: File) -> _Stream:
    raw = Path(file.path).open("rb", buffering=0)  # noqa: SIM115 - the stream that is returned closes it
    if (size := os.fstat(raw.fileno()).st_size) != file.size:
        raw.close()
        raise ValueError(
            f"{file.path} has {size} bytes and had {file.size} when the run began; a corpus must not change "
            "during a run: restore the file, or start anew"
        )
    if file.path.endswith(".gz"):
        return _Stream(raw, gzip.GzipFile(fileobj=raw))
    if file.path.endswith(".zst"):
        return _Stream(raw, _zstd_reader(raw))
    return _Stream(raw, raw)


def _zstd_reader(raw: IO[bytes]) -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ImportError("reading .zst files needs zstandard: pip install 'streampack[zstd]'") from error
    return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)


def _manifest(patterns: list[str | os.PathLike[str]]) -> tuple[File, ...]:
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
    paths = sorted(str(Path(path).absolute()) for path in found)
    for path, following in pairwise(paths):
        if path == following:
            raise ValueError(f"{path} is named twice; name every file once (a mixture can weight it)")
    folder = os.path.commonpath([Path(path).parent for path in paths])
    files = tuple(File(path, os.path.relpath(path, folder), Path(path).stat().st_size) for path in paths)
    for file in files:
        if file.size == 0 or (file.size <= 4096 and Path(file.path).read_bytes().isspace()):
            raise ValueError(f"{file.path} is empty; remove it from the corpus")
    return files


def _ends(file: File) -> str:
    with Path(file.path).open("rb") as stream:
        head = stream.read(HASHED_BYTES)
        stream.seek(max(0, file.size - HASHED_BYTES))
        return digest(head, stream.read(HASHED_BYTES))
