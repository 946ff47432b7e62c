"""`JSONLSource`: JSON lines. Plain files are cut into byte ranges; each compressed file is one part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any

from streampack.sources.examples import EXAMPLES, Example, example
from streampack.sources.files import FileSource, divide, places
from streampack.sources.lines import LOOKED_AT, ByteCount, Lines, no_json_lines, parsed, way_out_of
from streampack.sources.parts import Damage, Part, Record
from streampack.sources.reading import spread
from streampack.storage.base import ParallelMap, map_in_threads, path_in
from streampack.storage.compression import COMPRESSED, DAMAGED, content
from streampack.storage.listing import Name, find_files
from streampack.storage.ranges import Fetcher, RangeStream
from streampack.storage.retries import Storage
from streampack.types import RowId
from streampack.validation import require_positive

JSON_LINES = tuple(f".{name}{packed}" for name in ("jsonl", "ndjson") for packed in ("", *COMPRESSED))
LONGEST_LINE = 1 << 26  # bytes
# Bytes; where parts are shorter than most lines, opening them takes longer than reading their lines.
LEAST_PART = 256
COUNTED_BYTES = 1 << 24  # of a file before a row, in which its lines are counted: many rows may be located
NEWLINE = b"\n"
PROBED_FILES = 16  # compressed files that `sample` reads from
PROBED_BYTES = 1 << 22  # bytes of content that `sample` decompresses of each, to learn how well they compress


class JSONLSource(FileSource):
    r"""One JSON object a line, in one file, several, or whatever a glob finds; ``.gz`` and ``.zst`` too.

    Plain files are divided into lanes by byte range: a row belongs to the part in which its first byte lies. In a
    compressed file one cannot seek: it is one part, and a resume reads it again from its start. If there are fewer such
    files than lanes to fill, several lanes read the same file and take turns with its rows; the log says so. The list
    of files and their sizes is fixed at construction. For ``hf://`` paths the commit is fixed too, and logged: if the
    branch moves, the run keeps reading that commit, and to resume it, name the commit:
    ``hf://datasets/org/name@<commit>/*.jsonl``.

    >>> import tempfile, pathlib
    >>> from streampack.sources import Reading
    >>> path = pathlib.Path(tempfile.mkdtemp(), "rows.jsonl")
    >>> _ = path.write_text('{"text": "a"}\n{"text": "b"}\n')
    >>> [row.data["text"] for row in JSONLSource(path).read(Reading())]
    ['a', 'b']

    Args:
        paths: files, folders or globs of this machine, or URLs (``https``, ``s3``, ``gs``, ``az``, ``hf`` and others);
            globs where the storage can list files. Of a folder, the ``.jsonl`` and ``.ndjson`` files in it, at any
            depth.
        manifest: instead of ``paths``, a text file with a file's name on each line, or what `Corpus.manifest` returns;
            with sizes, no file is looked at before it is read. Names are relative to the manifest's folder, or to
            ``paths``.
        storage: how the files are read: a `Storage`, or a mapping of its arguments: ``options`` of the storage behind
            URLs, ``timeout`` of a request, and ``max_outage``, the minutes for which a read that fails is tried again.
        max_line_bytes: bytes of the longest line, decompressed. A longer line is a broken record, of which no more than
            that is held in memory.

    Raises:
        ValueError: if nothing matches, no file can be read, or one is named twice. When rows are read, with file and
            line: for lines that are not JSON objects, or too long.
    """

    unit = "byte"
    near = 1 << 18
    whole = "compressed file"
    probed_by_bytes = True

    def __init__(
        self,
        paths: Name | Iterable[Name] | None = None,
        *,
        manifest: Name | None = None,
        storage: Storage | Mapping[str, Any] | None = None,
        max_line_bytes: int = LONGEST_LINE,
    ) -> None:
        self.max_line_bytes = require_positive(max_line_bytes, "max_line_bytes")
        super().__init__(find_files(paths, manifest=manifest, endings=JSON_LINES, storage=storage))
        self._count = ByteCount()
        self._kinds: dict[int, str | None] = {}
        sound = [number for number in range(len(self.files)) if number not in self.bad]
        self._plain = [number for number in sound if self.files[number].seekable]
        self._compressed = [number for number in sound if not self.files[number].seekable]

    def cut(self, num_lanes: int, parallel_map: ParallelMap) -> list[list[Part]]:
        """See `FileSource.cut`."""
        # An empty file is a part, too, so that a lane lists it as a bad record.
        whole = {number for number, file in enumerate(self.files) if not file.seekable or not file.size}
        sizes = [file.size for file in self.files]
        return divide(sizes, num_lanes, whole=whole, least=LEAST_PART)

    def records(self, part: Part, offset: int, fetcher: Fetcher) -> Iterator[Record]:
        """See `FileSource.records`. Where its first line is no row, the file may be no JSON lines at all.

        Raises:
            Damage: if so.
        """
        lines = self._lines(part, offset, fetcher)
        doubtful = offset == part.start and not lines.like_rows()
        if doubtful and (problem := self._other_kind(part.file)) is not None:
            raise Damage(problem, offset=offset)
        return lines

    def decode(self, part: Part, offset: int, raw: bytes | Damage) -> Mapping[str, Any]:
        """See `FileSource.decode`."""
        if isinstance(raw, Damage):
            raise ValueError(str(raw))
        try:
            row = parsed(raw)
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError alike
            way_out = way_out_of(raw, self.files[part.file].shown)
            if isinstance(error, UnicodeDecodeError):
                way_out = "; JSON is UTF-8: convert the file, such as by iconv -f LATIN1 -t UTF-8"
            raise ValueError(f"not a line of JSON ({error}){way_out}") from None
        if not isinstance(row, dict):
            way_out = '; write {"text": ...} on each line'
            if isinstance(row, list):
                way_out = way_out_of(raw, self.files[part.file].shown)
            raise ValueError(f"a row must be a JSON object, this is a {type(row).__name__}{way_out}")
        return row

    def locate(self, row_id: RowId) -> str:
        """Return ``file:line`` near the beginning of a local file, whose lines are counted for it, else the byte."""
        number, offset = row_id
        file = self.files[number]
        counted = COUNTED_BYTES if file.seekable else COUNTED_BYTES >> 4  # decompressing is slower
        if self.local and number not in self.bad and offset <= counted:
            stream = RangeStream(self.fetcher(), file, 0, file.size)
            with suppress(FileNotFoundError), content(stream, name=path_in(file.path)) as opened:
                return f"{file.path}:{1 + opened.read(offset).count(NEWLINE)}"
        return f"{file.shown}, byte {offset}"

    @property
    def bytes_read(self) -> int:
        """Bytes of lines, decompressed, that this object has read in this process."""
        return self._count.total

    def is_near(self, row_id: RowId, later: RowId) -> bool:
        """See `FileSource.is_near`: a compressed file is always read from its beginning."""
        return not self.files[row_id[0]].seekable or super().is_near(row_id, later)

    def natural_lanes(self) -> int:
        """Return one lane per 256 KiB of plain files, and one per compressed file."""
        plain = sum(self.files[number].size for number in self._plain)
        return max(1, (plain >> 18) + len(self._compressed))

    def sample(self, count: int) -> tuple[list[Example], float]:
        """See `Source.sample`: rows from all over the plain files, the first rows of up to 16 compressed ones."""
        rows: dict[tuple[int, int], bytes | Damage] = {}
        # Bytes of all lines, decompressed.
        whole = float(sum(self.files[number].size for number in self._plain))
        wanted = max(1, round(count * whole / sum(file.size for file in self.files)))
        if self._plain:
            parts = self._places(wanted)
            for part, record in zip(parts, map_in_threads(self._first_if_any, parts), strict=True):
                if record:
                    rows[part.file, record[0]] = record[1]
        if self._compressed:
            some = [self._compressed[i] for i in spread(len(self._compressed), PROBED_FILES)]
            left = max(1, count - wanted) if self._plain else count
            read = stored = 0
            for number in some:
                lines = self._lines(Part(number), 0, self.fetcher())
                with suppress(Damage, FileNotFoundError):
                    for i, (offset, raw, end) in enumerate(lines):
                        if i * len(some) < left:
                            rows[number, offset] = raw
                        elif end > PROBED_BYTES:
                            break
                read, stored = read + lines.offset, stored + lines.raw.tell()
            whole += read / max(1, stored) * sum(self.files[number].size for number in self._compressed)
        found = [
            example((number, offset), partial(self.decode, Part(number), offset, raw))
            for (number, offset), raw in rows.items()
        ]
        return found, whole / max(1, sum(len(raw) for raw in rows.values() if isinstance(raw, bytes)))

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """See `Source.examples`: rows from all over the plain files, or the first rows of the first compressed one."""
        if self._plain:
            parts = self._places(count)
            found = list(zip(parts, map_in_threads(self._first_if_any, parts), strict=True))
        else:
            part = Part(self._compressed[0])
            found = []
            try:
                for record in islice(self._lines(part, 0, self.fetcher()), count):
                    found.append((part, record))
            except (Damage, FileNotFoundError):  # reported when training reads it
                found.append((part, None))
        return [
            Example((part.file, part.start), None)
            if record is None
            else example((part.file, record[0]), partial(self.decode, part, *record[:2]))
            for part, record in found
        ]

    def _other_kind(self, number: int) -> str | None:
        """Return why a file is no JSON lines, by its beginning, which is read once; None if it is, or may be."""
        if number not in self._kinds:
            file = self.files[number]
            stream = RangeStream(self.fetcher(), file, 0, min(LOOKED_AT, file.size))
            with suppress(FileNotFoundError, *DAMAGED), content(stream, name=path_in(file.path)) as opened:
                self._kinds[number] = no_json_lines(opened.read(LOOKED_AT), file.shown)
        return self._kinds.get(number)

    def _places(self, count: int) -> list[Part]:
        found = places([self.files[number].size for number in self._plain], count)
        return [Part(self._plain[i], at, at + 1) for i, at in found]

    def _first_if_any(self, place: Part) -> Record | None:
        with suppress(ValueError, FileNotFoundError):  # reported when training reads it
            return self._first_from(place)
        return None

    def _first_from(self, place: Part) -> Record | None:
        """Return the first row that begins at or after a place; if there is none, the first row of the file."""
        starts = (place.start, 0) if place.start else (0,)
        lines = (self._lines(Part(place.file, at), at, self.fetcher(), few=True) for at in starts)
        return next(chain.from_iterable(lines), None)

    def _lines(self, part: Part, offset: int, fetcher: Fetcher, *, few: bool = False) -> Lines:
        return Lines(
            self.files[part.file], part, offset, fetcher, longest=self.max_line_bytes, count=self._count, few=few
        )  # fmt: skip
