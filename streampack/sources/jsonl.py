"""JSON lines: plain files are cut by byte range, compressed ones are a part each."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice, repeat
from typing import Any
from urllib.parse import urlsplit

from streampack.sources.base import Reader, Reading, spread
from streampack.sources.examples import EXAMPLES, Example, example
from streampack.sources.indexed import places
from streampack.sources.shuffling import Damage, Part, Record, read_parts
from streampack.sources.source import Source
from streampack.storage.base import File, LocalStorage, together
from streampack.storage.compression import BUFFER_BYTES, DAMAGED, NOT_TEXT, content, kind_of, not_text
from streampack.storage.formats import JSON_LINES, require_json_lines, whole_json
from streampack.storage.json_depth import require_shallow
from streampack.storage.listing import Corpus, Name, find_files
from streampack.storage.ranges import Block, Fetcher, Stretch, blocks
from streampack.types import RowId
from streampack.validation import require_positive

PARTS_PER_LANE = 16  # enough for shuffling parts to mix a sorted file, few enough to keep reads long
MAX_PART_BYTES = 1 << 30
LONGEST_LINE = 1 << 26  # bytes, as a rule
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_scan = json.JSONDecoder().raw_decode
NESTED = frozenset((list, dict))
HEAD_BYTES = 16  # that show what kind of file it is
PROBED_FILES = 16  # compressed ones: each takes up to 4 MiB of reading
PROBED_BYTES = 1 << 22  # of a compressed file's content, to learn how well it compresses


class JSONLSource(Source):
    r"""One JSON object a line, in one file, several, or whatever a glob finds; ``.gz`` and ``.zst`` too.

    Plain files are divided into lanes below file granularity, by byte range: a row belongs to the part in
    which its first byte lies. A compressed file cannot seek: it is one lane's part, and is read again
    from its start on resume. The list of files and their sizes is fixed at construction. Of a repository of the Hub, so
    is the commit, which the log names: a run goes on reading it when its branch moves, and a resume after that asks for
    it, as ``hf://datasets/org/name@<commit>/*.jsonl``.

    >>> import tempfile, pathlib
    >>> from streampack.sources import Reading
    >>> path = pathlib.Path(tempfile.mkdtemp(), "rows.jsonl")
    >>> _ = path.write_text('{"text": "a"}\n{"text": "b"}\n')
    >>> [row.data["text"] for row in JSONLSource(path).read(Reading())]
    ['a', 'b']

    Args:
        paths: files, folders or globs of this machine, or URLs (``http``, ``https``, ``s3``, ``hf``); globs where the
            storage can list files. Of a folder, the ``.jsonl`` and ``.ndjson`` files in it, at any depth.
        manifest: instead of ``paths``, a text file that names the files, one a line, relative to its folder.
        storage_options: for the storage behind URLs, as fsspec takes them; may hold secrets, and is never shown.
        retries: how often a read that fails is tried again, with growing waits; not for want of the file
            or of permission.
        timeout: seconds that one request may take.
        read_ahead: bytes, per lane, that are fetched behind a URL before they are needed.
        max_line_bytes: the longest line, decompressed; of a longer one no more than that is held in memory.

    Raises:
        ValueError: if nothing matches, a file is empty, or one is named twice. Rows that are no JSON
            objects raise when they are read, with file and line, and so do lines that are too long, and rows in which
            more than 500 objects and arrays lie inside one another.
    """

    def __init__(
        self,
        paths: Name | Iterable[Name] | None = None,
        *,
        manifest: Name | None = None,
        storage_options: Mapping[str, Any] | None = None,
        retries: int = 5,
        timeout: float = 30.0,
        read_ahead: int = 8 << 20,
        max_line_bytes: int = LONGEST_LINE,
    ) -> None:
        self.max_line_bytes = require_positive(max_line_bytes, "max_line_bytes")
        self.corpus = find_files(
            paths, manifest=manifest, endings=JSON_LINES, storage_options=storage_options, retries=retries,
            timeout=timeout,
        )  # fmt: skip
        self.files = self.corpus.files
        for file in self.files:
            if (name := urlsplit(file.path).path.lower()).endswith(NOT_TEXT):
                raise not_text(
                    file.shown, "a Parquet file" if name.endswith(".parquet") else "no text, by its name,"
                )
        self._kinds: dict[int, str] = {}  # of files with lines that are no JSON, how to say what they are
        self._local = isinstance(self.corpus.storage, LocalStorage)
        require_json_lines(self.files, local=self._local)
        self.read_ahead = self.corpus.read_ahead(read_ahead)
        self._size = sum(file.size for file in self.files)  # bytes in the storage, compressed where they are
        self.bytes_read = 0  # by this copy of the source, decompressed
        self._divided: list[list[Part]] | None = None  # for the last number of lanes asked for

    def fingerprint(self) -> str:
        """Names, sizes, and each file's ETag or a hash of its first and last 64 KiB; never a modification time."""
        return self.corpus.fingerprint()

    def identity(self) -> dict[str, Any]:
        """See `identity_of`."""
        return {"source": "JSONLSource", "files": self.corpus}

    def corpora(self) -> list[Corpus]:
        """What the fingerprint reads."""
        return [self.corpus]

    def read(self, reading: Reading) -> Reader:
        """See `Source.read`."""
        if self._divided is None or len(self._divided) != reading.num_lanes:
            self._divided = divide(self.files, reading.num_lanes)
        fetcher = Fetcher(self.corpus.storage, self.corpus.retries, ahead=self.read_ahead)
        return read_parts(
            self._divided[reading.lane],
            reading,
            open_part=lambda part, offset, following: _Lines(self, part, offset, fetcher, following),
            decode=self._decode,
            place=lambda part, offset: f"{self.files[part.file].shown} from byte {offset} on",
            locate=self.locate,
        )

    def locate(self, row_id: RowId) -> str:
        """``file:line``; counts the lines before the row, so it reads that much of the file. Behind a URL, the byte."""
        file, offset = row_id
        if not self._local:
            return f"{self.files[file].shown}, byte {offset}"
        line, left = 1, offset
        with self._stream(self.files[file]) as stream:
            while left and (chunk := stream.read(min(left, 1 << 20))):
                line += chunk.count(b"\n")
                left -= len(chunk)
        return f"{self.files[file].path}:{line}"

    def shard(self, row_id: RowId) -> str:
        """The file's name in the corpus."""
        return self.files[row_id[0]].name

    def fetch(self, row_id: RowId) -> Mapping[str, Any]:
        """See `Source.fetch`."""
        file, offset = row_id
        part = Part(file, offset, offset + 1)
        _, raw, _ = next(_Lines(self, part, offset, self._fetcher()))
        try:
            return self._decode(part, offset, raw)
        except ValueError as error:
            raise ValueError(f"{self.locate(row_id)}: {error}") from None

    @property
    def retry_budget(self) -> float:
        """Seconds that one read may take in waits and in requests that bring no answer."""
        return self.corpus.retry_budget

    def natural_lanes(self) -> int:
        """One per 256 KiB of what can be divided, one per compressed file."""
        plain = sum(file.size for file in self.files if file.seekable)
        return max(1, (plain >> 18) + sum(not file.seekable for file in self.files))

    def probe(self, count: int) -> tuple[list[Mapping[str, Any]], float]:
        """Rows at places all over the files, and the corpus's size over theirs.

        Of compressed files, the first rows of up to 16. However many files there are, about ``count`` are opened.
        """
        rows: dict[tuple[int, int], bytes | Damage] = {}
        plain = [number for number, file in enumerate(self.files) if file.seekable]
        sizes = [self.files[number].size for number in plain]
        whole = float(sum(sizes))  # bytes of content
        wanted = max(1, round(count * whole / self._size))
        parts = [Part(plain[i], at, at + 1) for i, at in places(sizes, wanted)] if plain else []
        for part, record in zip(parts, together(self._first_from, parts), strict=True):
            if record:
                rows[part.file, record[0]] = record[1]
        if packed := [number for number, file in enumerate(self.files) if not file.seekable]:
            some = [packed[i] for i in spread(len(packed), PROBED_FILES)]
            left = max(1, count - wanted) if plain else count
            read = stored = 0
            for number in some:
                lines = _Lines(self, Part(number), 0, self._fetcher())
                with suppress(Damage):
                    for i, (offset, raw, end) in enumerate(lines):
                        if i * len(some) < left:
                            rows[number, offset] = raw
                        elif end > PROBED_BYTES:
                            break
                read, stored = read + lines.offset, stored + lines.raw.tell()
            whole += read / max(1, stored) * sum(self.files[number].size for number in packed)
        decoded = []
        for (number, offset), raw in rows.items():
            with suppress(ValueError):  # a broken record is found when it is read
                decoded.append(self._decode(Part(number), offset, raw))
        sizes = [len(raw) for raw in rows.values() if isinstance(raw, bytes)]
        return decoded, whole / max(1, sum(sizes))

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """Rows all over the files; of compressed ones, if all are, the first rows of the first file."""
        plain = [number for number, file in enumerate(self.files) if file.seekable]
        if plain:
            found = places([self.files[number].size for number in plain], count)
            parts = [Part(plain[i], at, at + 1) for i, at in found]
            records = zip(parts, together(self._found_from, parts), strict=True)
        else:
            lines = islice(_Lines(self, Part(0), 0, self._fetcher()), count)
            records = zip(repeat(Part(0)), list(_until_damage(lines)), strict=False)
        return [
            example(partial(self._decoded, part, record[1]), (part.file, record[0]))
            for part, record in records
            if record is not None
        ]

    def _found_from(self, place: Part) -> Record | None:
        with suppress(ValueError):  # a file without rows is found when it is read
            return self._first_from(place)
        return None

    def _decoded(self, part: Part, raw: bytes, row_id: RowId) -> Mapping[str, Any]:
        return self._decode(part, row_id[1], raw)

    def _first_from(self, place: Part) -> Record | None:
        # A row belongs to where it begins; from here, that is wherever the next one does. Behind the last row comes the
        # first: a row that is alone in its file would never be found otherwise.
        starts = (place.start, 0) if place.start else (0,)
        lines = (
            _Lines(self, Part(place.file, start), start, self._fetcher(), small=True) for start in starts
        )
        return next(chain.from_iterable(lines), None)

    def _fetcher(self) -> Fetcher:
        return Fetcher(self.corpus.storage, self.corpus.retries, ahead=0)

    def _kind(self, number: int) -> str:
        """End a message by what a file is, by its first bytes, if it is no text. Looks once."""
        file = self.files[number]
        if number not in self._kinds:
            self._kinds[number] = ""
            with suppress(OSError, ValueError):
                kind = kind_of(self.corpus.storage.fetch(file, 0, min(HEAD_BYTES, file.size)))
                self._kinds[number] = f"; {file.shown} is {kind}" if kind and file.seekable else ""
        return self._kinds[number]

    def _stream(self, file: File) -> Any:
        return content(Stretch(self._fetcher(), file, 0, file.size), name=file.shown)

    def _decode(self, part: Part, offset: int, raw: bytes | Damage) -> Mapping[str, Any]:
        if isinstance(raw, Damage):
            raise ValueError(str(raw))
        try:
            row = parsed(raw)
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError alike
            whole = f"; if the file is one JSON document, {whole_json(self.files[part.file].shown)}"
            hint = self._kind(part.file) or (whole if raw[:1] in (b"[", b"{") else "")
            raise ValueError(f"not a line of JSON ({error}){hint}") from None
        if not isinstance(row, dict):
            raise ValueError(f"a row must be a JSON object, this is a {type(row).__name__}")
        return row


def parsed(line: bytes) -> Any:
    """The value of a line of JSON. `json.loads` asks first in which of five encodings it is: JSON lines are UTF-8.

    >>> parsed(b' {"text": "a"} ')
    {'text': 'a'}

    Raises:
        ValueError: if it is no JSON, no UTF-8, or nested too deep.
    """
    # Half a surrogate pair may be where nobody needs it; a byte order mark, where files were joined.
    text = line.decode("utf-8", "surrogatepass").rstrip(" \t\r\n")
    try:
        value, end = _scan(text, len(text) - len(text.lstrip(" \t\r\n\ufeff")))
    except RecursionError:
        require_shallow(line)
        raise ValueError("it is nested too deep to be parsed here") from None
    if type(value) is not dict or not NESTED.isdisjoint(map(type, value.values())):
        require_shallow(line)  # which takes a tenth of the time that parsing does
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, len(text) - len(text[end:].lstrip(" \t\r\n")))
    return value


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


def _until_damage(records: Iterator[Record]) -> Iterator[Record]:
    with suppress(Damage):  # which is found when it is read
        yield from records


class _Lines:
    """The lines of one part that hold anything, each with the offset of its first byte."""

    def __init__(
        self,
        source: JSONLSource,
        part: Part,
        offset: int,
        fetcher: Fetcher,
        following: Part | None = None,
        *,
        small: bool = False,  # a line or two are wanted
    ) -> None:
        self.source = source
        self.file = source.files[part.file]
        self.stop = part.stop
        self.longest = source.max_line_bytes
        self.offset = offset
        self.seekable = seekable = self.file.seekable
        if seekable and offset > self.file.size:
            raise ValueError(
                f"{self.file.shown} has {self.file.size} bytes and cannot be read from byte {offset} on; the state "
                "or the file is damaged"
            )
        # A row that starts exactly at `offset` is ours, one that started before is not.
        begin = max(0, offset - 1) if seekable else 0
        stop = self.file.size
        if seekable and part.stop is not None:
            stop = part.stop
        if small:
            stop = begin + 1
        self.raw = Stretch(fetcher, self.file, begin, stop, self._first_blocks(fetcher, following))
        self.stream = content(self.raw, name=self.file.shown)
        if begin == 0 and seekable and (kind := kind_of(self.stream.peek(HEAD_BYTES)[:HEAD_BYTES])):
            raise not_text(self.file.shown, kind)
        if offset and seekable:
            self.offset = begin
            self._pass_line()
        left = 0 if seekable else offset
        # Decompressed again, and thrown away. In pieces that are below the buffer's size the stream below sees the same
        # reads as it does from `readline`: a damaged file shows its damage at the same line.
        while left and (skipped := self._read(self.stream.read, min(left, BUFFER_BYTES // 4))):
            left -= len(skipped)

    def _first_blocks(self, fetcher: Fetcher, part: Part | None) -> Iterator[Block]:
        if part is not None:
            file = self.source.files[part.file]
            stop = file.size if part.stop is None else part.stop
            yield from blocks(fetcher.storage, file, max(0, part.start - 1), stop)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> Record:
        while self.stop is None or self.offset < self.stop:
            line = self._line(self.longest + 1)
            if not line:
                break
            offset, self.offset = self.offset, self.offset + len(line)
            self.source.bytes_read += len(line)
            if len(line) > self.longest:
                if line[-1:] != b"\n":
                    self._pass_line()
                return offset, self._too_long(offset), self.offset
            if offset == 0:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line and not line.isspace():
                return offset, line, self.offset
        if self.offset == 0:
            raise ValueError(f"{self.file.shown} holds no rows; remove it from the corpus")
        raise StopIteration

    def _line(self, most: int) -> bytes:
        return self.stream.readline(most) if self.seekable else self._read(self.stream.readline, most)

    def _pass_line(self) -> None:
        """Go to the end of the line, or of the part, whose rows begin before its end; hold none of it."""
        while (self.stop is None or self.offset < self.stop) and (some := self._line(BUFFER_BYTES // 4)):
            self.offset += len(some)
            if some.endswith(b"\n"):
                return

    def _too_long(self, offset: int) -> Damage:
        what = f"the line is longer than max_line_bytes={self.longest}; write its rows shorter, or raise max_line_bytes"
        return Damage(what, offset=offset, resume=self.offset)

    def _read(self, read: Callable[..., bytes], *size: int) -> bytes:
        """Of a compressed file."""
        try:
            return read(*size)
        except DAMAGED as error:
            what = f"the file is damaged after byte {self.offset} of its content: {error}"
            raise Damage(what, offset=self.offset, resume=None) from error
