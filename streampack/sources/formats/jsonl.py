"""`JSONLSource`: JSON lines, and arrays of JSON objects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from typing_extensions import override

from streampack.sources.formats.json_array import array_records, starts_after
from streampack.sources.formats.lines import BYTE_ORDER_MARK, LONGEST_LINE, LOOKED_AT, LineSource, torn
from streampack.sources.mechanics.other_kinds import like_row, one_object, other_kind, way_out
from streampack.sources.mechanics.parts import Damage, Part, Record
from streampack.storage.base import path_in
from streampack.storage.compression import COMPRESSED, DAMAGED, content
from streampack.storage.listing import Name
from streampack.storage.ranges import Fetcher, RangeStream, blocks, tail_of
from streampack.storage.retries import Storage
from streampack.types import RowId

JSON_LINES = tuple(f".{name}{packed}" for name in ("jsonl", "ndjson") for packed in ("", *COMPRESSED))
JSON = tuple(f".json{packed}" for packed in ("", *COMPRESSED))

_scan = json.JSONDecoder().raw_decode


class JSONLSource(LineSource):
    r"""JSON objects: one a line, or the records of a JSON array, in files, folders, or whatever a glob finds.

    A file whose name ends in ``.json`` may hold an array, in any layout: its first bracket tells. The records are found
    by their brackets, so a file is never held in memory. A record that is no JSON is a bad record; where a quote or
    bracket is missing, the rest of the file may be one. An array within an object is refused.

    Files may be compressed: ``.gz``, ``.bz2``, ``.xz``, ``.zst`` or ``.zstd``, and ``.lz4``. One that was cut off gives
    the rows that are complete, then a bad record.

    Plain files are divided into lanes by byte range. For that, an array is scanned once when a run starts (1 GB takes
    one to two seconds), unless each lane has several files. A compressed file is one part, and a resume reads it again
    from its start; if there are too few, several lanes read the same file and take turns with its rows. Files and sizes
    are fixed at construction. For ``hf://`` paths the commit is, too, and logged: to resume a run after the branch
    moved, name that commit, ``hf://datasets/org/name@<commit>/*.jsonl``.

    >>> import tempfile, pathlib
    >>> from streampack.sources import Reading
    >>> path = pathlib.Path(tempfile.mkdtemp(), "rows.jsonl")
    >>> _ = path.write_text('{"text": "a"}\n{"text": "b"}\n')
    >>> [row.data["text"] for row in JSONLSource(path).read(Reading())]
    ['a', 'b']

    Args:
        paths: files, folders or globs of this machine, or URLs (``https``, ``s3``, ``gs``, ``az``, ``hf`` and others);
            globs and folders where the storage can list files, as a web server cannot. Of a folder, the ``.jsonl`` and
            ``.ndjson`` files in it, at any depth, and no hidden ones; if it has none, the ``.json`` files.
        manifest: instead of ``paths``, a text file with a file's name on each line, or what `Corpus.manifest` returns;
            with sizes, no file is looked at before it is read. Names are relative to the manifest's folder, or to
            ``paths``.
        storage: how the files are read: a `Storage`, or a mapping of its arguments: ``options`` of the storage behind
            URLs, ``timeout`` of a request, and ``max_outage``, the minutes for which a read that fails is tried again.
        max_line_bytes: bytes of the longest line or record, decompressed. A longer one is a bad record.

    Raises:
        ValueError: if nothing matches, no file can be read, or one is named twice. When rows are read, with file and
            line: for lines that are not JSON objects, or too long.
    """

    def __init__(
        self,
        paths: Name | Iterable[Name] | None = None,
        *,
        manifest: Name | None = None,
        storage: Storage | Mapping[str, Any] | None = None,
        max_line_bytes: int = LONGEST_LINE,
    ) -> None:
        super().__init__(
            paths,
            endings=JSON_LINES,
            otherwise=JSON,
            manifest=manifest,
            storage=storage,
            max_line_bytes=max_line_bytes,
        )
        self._openings: dict[int, int | None] = {}

    @override
    def decode(self, part: Part, offset: int, raw: bytes | Damage) -> Mapping[str, Any]:
        if isinstance(raw, Damage):
            raise raw
        try:
            row = parsed(raw)
        except UnicodeDecodeError as error:
            raise ValueError(f"not a line of JSON ({error}); JSON is UTF-8: convert the file") from None
        except ValueError as error:
            raise ValueError(f"not a line of JSON ({error}){self._way_out(part, offset, raw)}") from None
        if not isinstance(row, dict):
            what = f"a row must be a JSON object, this is a {type(row).__name__}"
            raise ValueError(f'{what}; write {{"text": ...}} on each line{self._way_out(part, offset, raw)}')
        if offset or not self._may_be_array(part.file):
            return row
        file = self.files[part.file]
        if len(raw) >= file.size and (problem := one_object(row, file.shown)) is not None:
            raise ValueError(problem)
        return row

    @override
    def like_row(self, number: int, line: bytes | Damage) -> bool:
        return like_row(line) or self._opening(number) is not None

    @override
    def other_kind(self, path: str, head: bytes) -> str | None:
        return other_kind(path, head)

    def _way_out(self, part: Part, offset: int, line: bytes) -> str:
        """Return the end of the message for a file's first line that is not even like a row: what may read the file."""
        if offset or like_row(line) or line.startswith(b"{"):
            return ""
        return f"; {way_out(self.files[part.file].shown, line)}"

    @override
    def _may_be_array(self, number: int) -> bool:
        return self.files.names[number].endswith(JSON)

    def _opening(self, number: int) -> int | None:
        """Return the byte after the first bracket of a file that holds a JSON array; None if it holds lines."""
        if number not in self._openings and self._may_be_array(number):
            try:
                head = self._beginning(number, LOOKED_AT)
            except (FileNotFoundError, *DAMAGED):  # raised again where its records are read
                return None
            begins = head.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")
            self._openings[number] = head.index(b"[") + 1 if begins else None
        return self._openings.get(number)

    @override
    def _starts_after(self, number: int, at: Sequence[int]) -> Sequence[int]:
        file, fetcher = self.files[number], self.fetcher()
        if (opening := self._opening(number)) is None:
            return at
        stream = fetcher.stream(blocks(fetcher.block, file, opening, file.size))
        return starts_after(stream, opening, at, end=file.size)

    @override
    def _places(self, count: int, *, scan: bool) -> list[RowId]:
        found: list[RowId] = []
        for number, places in groupby(super()._places(count, scan=scan), itemgetter(0)):
            at: Sequence[int] = [place for _, place in places]
            if self._opening(number) is not None:
                some = self._starts_after(number, at) if scan else ()
                first = () if scan else self._first_lines(number, len(at), 0)[0]
                at = [each for each in some if each < self.files[number].size] or [each for _, each in first]
            found += [(number, each) for each in at]
        return found

    @override
    def _lines(
        self, part: Part, offset: int, fetcher: Fetcher, *, few: bool = False
    ) -> tuple[RangeStream, Iterator[Record]]:
        if (opening := self._opening(part.file)) is None:
            return super()._lines(part, offset, fetcher, few=few)
        file, begin, end = self.files[part.file], 0, None
        if file.seekable:
            begin = max(opening, offset)
            end = begin + 1 if few else part.stop
        stop = file.size if end is None else end
        stream = RangeStream(fetcher, file, begin, stop, tail=tail_of(begin, stop))
        return stream, self._array(stream, begin, opening, part._replace(start=offset))

    def _array(self, stream: RangeStream, begin: int, opening: int, part: Part) -> Iterator[Record]:
        """Yield the records of a part of an array, from a stream that is at byte ``begin`` of the file."""
        at = opening
        try:
            opened = content(stream, name=path_in(self.files[part.file].path))
            opened.read(max(0, opening - begin))
            stop = None if part.stop == self.files[part.file].size else part.stop  # the end is looked at
            for record in array_records(opened, max(begin, opening), stop, longest=self.max_line_bytes):
                at = record[2]
                if record[0] >= part.start:
                    self.bytes_read += at - record[0]
                    yield record
        except DAMAGED as error:
            raise torn(at, error) from None


def parsed(line: bytes) -> Any:
    """Return the value of a line of JSON. It must be UTF-8; `json.loads` would spend time on guessing the encoding.

    >>> parsed(b' {"text": "a"} ')
    {'text': 'a'}

    Raises:
        ValueError: if it is no JSON, no UTF-8, or nested too deep.
    """
    # Half a surrogate pair is accepted, as by `json`. A byte order mark at the beginning of a line is ignored: there is
    # one where files were joined.
    text = line.decode("utf-8", "surrogatepass").rstrip(" \t\r\n")
    try:
        value, end = _scan(text, len(text) - len(text.lstrip(" \t\r\n\ufeff")))
    except RecursionError:
        raise ValueError("its objects and arrays are nested too deep") from None
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, len(text) - len(text[end:].lstrip(" \t\r\n")))
    return value
