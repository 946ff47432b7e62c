"""JSON lines: plain files are cut by byte range, compressed ones are a part each."""

from __future__ import annotations

import gzip
import heapq
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from streampack.plan import require_positive
from streampack.sources.base import Part, Record, WindowReader, digest, spread
from streampack.sources.files import ArchiveError, File, ends, manifest, open_file
from streampack.sources.retry import Retries
from streampack.types import Origin, Position

PARTS_PER_LANE = 16  # enough for shuffling parts to mix a sorted file, few enough to keep reads long
MAX_PART_BYTES = 1 << 30
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PROBED_BYTES = 1 << 22  # of a compressed file's content, to learn how well it compresses


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

    A read that fails (not for want of the file or of permission) is tried again ``retries`` times, with growing
    waits.

    Raises:
        ValueError: if nothing matches, a file is empty, or one is named twice. Rows that are no JSON
            objects raise when they are read, with file and line.
    """

    max_lanes: int | None = None

    def __init__(
        self, paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, retries: int = 5
    ) -> None:
        self.retries = Retries(attempts=require_positive(retries, "retries", least=0))
        self.files = manifest([paths] if isinstance(paths, str | os.PathLike) else list(paths))
        self._size = sum(file.size for file in self.files)  # bytes on the disk, compressed where they are
        self.bytes_read = 0  # by this copy of the source, decompressed
        self._fingerprint: str | None = None
        self._divided: list[list[Part]] | None = None  # for the last number of lanes asked for

    def fingerprint(self) -> str:
        """Names, sizes and a hash of each file's first and last 64 KiB; never a modification time."""
        if self._fingerprint is None:
            self._fingerprint = digest(*((file.name, file.size, ends(file)) for file in self.files))
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
        if self._divided is None or len(self._divided) != num_lanes:
            self._divided = divide(self.files, num_lanes)
        return WindowReader(
            self._divided[lane],
            open_part=lambda part, offset: _Lines(self, part, offset),
            decode=self._decode,
            place=lambda part, offset: f"{self.files[part.file].path} from byte {offset} on",
            key=(seed, epoch, lane),
            shuffle_window=shuffle_window,
            start=start,
            retries=self.retries,
        )

    def locate(self, origin: Origin) -> str:
        """``file:line``; counts the lines before the row, so it reads that much of the file."""
        file, offset = origin
        line, left = 1, offset
        raw, stream = open_file(self.files[file])
        with raw, stream:
            while left and (chunk := stream.read(min(left, 1 << 20))):
                line += chunk.count(b"\n")
                left -= len(chunk)
        return f"{self.files[file].path}:{line}"

    def fetch(self, origin: Origin) -> Mapping[str, Any]:
        """See `Source.fetch`."""
        file, offset = origin
        _, raw = next(_Lines(self, Part(file), offset))
        return self._decode(Part(file), offset, raw)

    @property
    def retry_budget(self) -> float:
        """Seconds that one read may take in waits."""
        return self.retries.budget

    def natural_lanes(self) -> int:
        """One per 256 KiB of what can be divided, one per compressed file."""
        plain = sum(file.size for file in self.files if file.seekable)
        return max(1, (plain >> 18) + sum(not file.seekable for file in self.files))

    def probe(self, count: int) -> tuple[list[Mapping[str, Any]], float]:
        """Rows at places all over the files (the first rows of compressed files), and the corpus's size over theirs."""
        rows: dict[tuple[int, int], bytes] = {}
        total = 0.0  # bytes of content
        for number, file in enumerate(self.files):
            share = max(1, round(count * file.size / self._size))
            if file.seekable:
                total += file.size
                for place in spread(file.size, share):
                    if record := next(_Lines(self, Part(number), place), None):
                        rows[number, record[0]] = record[1]
            else:
                lines = _Lines(self, Part(number), 0)
                for i, (offset, raw) in enumerate(lines):
                    if i < share:
                        rows[number, offset] = raw
                    elif lines.offset > PROBED_BYTES:
                        break
                total += lines.offset * file.size / max(1, lines.below.tell())
        decoded = [self._decode(Part(file), offset, raw) for (file, offset), raw in rows.items()]
        return decoded, total / max(1, sum(map(len, rows.values())))

    def _decode(self, part: Part, offset: int, raw: bytes) -> Mapping[str, Any]:
        try:
            row = json.loads(raw)
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
    load = [(0, lane) for lane in range(num_lanes)]  # a heap: bytes so far, lane
    for number, file in enumerate(files):
        step = length if file.seekable else file.size
        for start in range(0, file.size, step):
            least, lane = load[0]
            stop = min(start + step, file.size)
            lanes[lane].append(Part(number, start, stop) if file.seekable else Part(number))
            heapq.heapreplace(load, (least + stop - start, lane))
    return lanes


class _Lines:
    """The lines of one part that hold anything, each with the offset of its first byte."""

    def __init__(self, source: JSONLSource, part: Part, offset: int) -> None:
        self.source = source
        self.file = source.files[part.file]
        self.stop = part.stop
        self.below, self.stream = open_file(self.file)
        self.offset = offset
        if self.file.seekable and offset > self.file.size:
            raise ValueError(
                f"{self.file.path} has {self.file.size} bytes and cannot be read from byte {offset} on; the state "
                "or the file is damaged"
            )
        if offset and self.file.seekable:
            # A row that starts exactly at `offset` is ours, one that started before is not.
            self.stream.seek(offset - 1)
            self.offset = offset - 1 + len(self.stream.readline())
        left = 0 if self.file.seekable else offset
        while left and (skipped := self._read(self.stream.read, min(left, 1 << 20))):
            left -= len(skipped)  # decompressed again, and thrown away

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> Record:
        while self.stop is None or self.offset < self.stop:
            line = self._read(self.stream.readline)
            if not line:
                break
            offset, self.offset = self.offset, self.offset + len(line)
            self.source.bytes_read += len(line)
            if offset == 0:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if not line.isspace() and line:
                return offset, line
        if self.offset == 0:
            raise ValueError(f"{self.file.path} holds no rows; remove it from the corpus")
        raise StopIteration

    def _read(self, read: Callable[..., bytes], *size: int) -> bytes:
        if self.file.seekable:
            return read(*size)
        try:
            return read(*size)
        except (gzip.BadGzipFile, zlib.error, EOFError, ArchiveError) as error:
            raise ValueError(
                f"{self.file.path} is damaged after byte {self.offset} of its content: {error}"
            ) from error

    def __del__(self) -> None:
        if hasattr(self, "stream"):  # not if opening failed
            self.stream.close()
            self.below.close()
