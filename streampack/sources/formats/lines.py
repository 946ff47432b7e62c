"""`LineSource`: rows that are lines of text. Plain files are cut into byte ranges; a compressed file is one part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from typing_extensions import override

from streampack.sources.examples import EXAMPLES, Example, example
from streampack.sources.mechanics.files import FileSource, divide_scanned, places
from streampack.sources.mechanics.parts import Damage, Part, Record
from streampack.sources.reading import spread
from streampack.storage.base import EMPTY, ParallelMap, map_in_threads, path_in
from streampack.storage.compression import BUFFER_BYTES, DAMAGED, content
from streampack.storage.listing import Name, find_files
from streampack.storage.ranges import Fetcher, RangeStream, tail_of
from streampack.storage.retries import Storage
from streampack.types import RowId
from streampack.validation import require_positive

LONGEST_LINE = 1 << 26  # bytes
# Bytes; where parts are shorter than most lines, opening them takes longer than reading their lines.
LEAST_PART = 256
COUNTED_BYTES = 1 << 24  # of a file before a row, in which its lines are counted: many rows may be located
LOOKED_AT = 1 << 16  # bytes at the beginning of a file that may be of another kind, or an array
SKIPPED_BYTES = BUFFER_BYTES // 4  # that are read at a time where they are not kept
PROBED_FILES = 16  # compressed files that `sample` reads from
PROBED_BYTES = 1 << 22  # bytes of content that `sample` decompresses of each, to learn how well they compress
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
NEWLINE = b"\n"


class LineSource(FileSource):
    """Files with a row on each line that is not blank. A format implements `decode`.

    Args:
        endings, otherwise: names of the files to read of a folder, see `find_files`.
        paths, manifest, storage, max_line_bytes: see `JSONLSource`.
    """

    unit = "byte"
    near = 1 << 18
    whole = "compressed file"
    probed_by_bytes = True
    bytes_read = 0
    """Bytes of lines, decompressed, that this object has read in this process."""

    def __init__(
        self,
        paths: Name | Iterable[Name] | None = None,
        *,
        endings: Sequence[str],
        otherwise: Sequence[str] = (),
        manifest: Name | None = None,
        storage: Storage | Mapping[str, Any] | None = None,
        max_line_bytes: int = LONGEST_LINE,
    ) -> None:
        self.max_line_bytes = require_positive(max_line_bytes, "max_line_bytes")
        super().__init__(
            find_files(paths, manifest=manifest, endings=endings, otherwise=otherwise, storage=storage)
        )
        self._kinds: dict[int, str | None] = {}
        packed = self.files.packed
        self._compressed = sorted(packed - self.bad.keys())
        self._plain = np.setdiff1d(np.arange(len(self.files)), [*packed | self.bad.keys()])

    @override
    def cut(self, num_lanes: int, parallel_map: ParallelMap) -> list[list[Part]]:
        return divide_scanned(
            self.files,
            num_lanes,
            scanned=set(filter(self._may_be_array, self._plain.tolist())),
            starts_after=self._starts_after,
            parallel_map=parallel_map,
            least=LEAST_PART,
        )

    def _may_be_array(self, number: int) -> bool:
        """Return whether a file may be one whose rows are not its lines, by its name."""
        return False

    def _starts_after(self, number: int, at: Sequence[int]) -> Sequence[int]:
        """Return for each of some places where the next record of such a file begins, the file's size if none does."""
        return at

    @override
    def records(self, part: Part, offset: int, fetcher: Fetcher) -> Iterator[Record]:
        _, lines = self._lines(part, offset, fetcher)
        if offset != part.start or (first := next(lines, None)) is None:
            return lines
        if not self.like_row(part.file, first[1]) and (problem := self._other_kind(part.file)) is not None:
            raise Damage(problem, offset=offset)
        return chain([first], lines)

    def like_row(self, number: int, line: bytes | Damage) -> bool:
        """Return whether the first line of a part looks like a row; else the file's beginning is looked at."""
        raise NotImplementedError

    def other_kind(self, path: str, head: bytes) -> str | None:
        """Return why a file with this beginning is of another kind, and what reads it; None if it may be read."""
        raise NotImplementedError

    def _other_kind(self, number: int) -> str | None:
        if number not in self._kinds:
            self._kinds[number] = None
            with suppress(FileNotFoundError, *DAMAGED):
                self._kinds[number] = self.other_kind(
                    self.files[number].shown, self._beginning(number, LOOKED_AT)
                )
        return self._kinds[number]

    @override
    def locate(self, row_id: RowId) -> str:
        """Return ``file:line`` near the beginning of a local file, whose lines are counted for it, else the byte."""
        number, offset = row_id
        file = self.files[number]
        counted = COUNTED_BYTES if file.seekable else COUNTED_BYTES >> 4  # decompressing is slower
        if self.local and number not in self.bad and offset <= counted:
            with suppress(FileNotFoundError):
                lines = self._beginning(number, offset).count(NEWLINE)
                if lines or not offset:  # an array may have all of its records on one line
                    return f"{file.path}:{1 + lines}"
        return f"{file.shown}, byte {offset}"

    @override
    def is_near(self, row_id: RowId, later: RowId) -> bool:
        """See `FileSource.is_near`: a compressed file is always read from its beginning."""
        return not self.files[row_id[0]].seekable or super().is_near(row_id, later)

    @override
    def natural_lanes(self) -> int:
        """Return one lane per 64 KiB of plain files, and one per compressed file."""
        plain = int(self.sizes[self._plain].sum())
        return max(1, (plain >> 16) + len(self._compressed))

    @override
    def sample(self, count: int) -> tuple[list[Example], float]:
        """Return rows from all over the plain files, and the first rows of up to 16 compressed ones."""
        plain, packed = (int(self.sizes[numbers].sum()) for numbers in (self._plain, self._compressed))
        wanted = max(1, round(count * plain / (plain + packed)))
        found = self._lines_at(wanted, scan=True) if plain else {}
        some = [self._compressed[i] for i in spread(len(self._compressed), PROBED_FILES)]
        each = max(1, -(-(count - len(found)) // max(1, len(some))))
        read = stored = 0
        for number in some:
            first, end, compressed = self._first_lines(number, each, PROBED_BYTES)
            found |= first
            read, stored = read + end, stored + compressed
        held = sum(len(raw) for raw in found.values() if isinstance(raw, bytes))
        return self._decoded(found), (plain + packed * read / max(1, stored)) / max(1, held)

    @override
    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """Return rows from all over the plain files, or the first rows of the first compressed one."""
        return self._decoded(
            self._lines_at(count, scan=False)
            if self._plain.size
            else self._first_lines(self._compressed[0], count, 0)[0]
        )

    def _decoded(self, found: Mapping[RowId, bytes | Damage]) -> list[Example]:
        return [
            example((number, offset), partial(self.decode, Part(number), offset, raw))
            for (number, offset), raw in found.items()
        ]

    def _lines_at(self, count: int, *, scan: bool) -> dict[RowId, bytes | Damage]:
        """Return lines at about ``count`` places from all over the plain files."""
        return dict(map_in_threads(self._line_at, self._places(count, scan=scan)))

    def _places(self, count: int, *, scan: bool) -> list[RowId]:
        """Return about ``count`` places to look for lines; with ``scan``, files may be read for them."""
        return [(int(self._plain[i]), at) for i, at in places(self.sizes[self._plain], count)]

    def _line_at(self, place: RowId) -> tuple[RowId, bytes | Damage]:
        """Return the first line that begins at or after a place; if there is none, the first one of the file."""
        number, at = place
        try:
            for start in (at, 0):
                _, lines = self._lines(Part(number, start), start, self.fetcher(), few=True)
                for offset, line, _ in lines:
                    return (number, offset), line
        except (ValueError, FileNotFoundError) as error:  # reported when training reads it
            return place, Damage(str(error), offset=at)
        return place, Damage(EMPTY, offset=at)

    def _first_lines(
        self, number: int, count: int, probed: int
    ) -> tuple[dict[RowId, bytes | Damage], int, int]:
        """Return the first lines of a file; of ``probed`` bytes of content how many there are, and those stored."""
        raw, lines = self._lines(Part(number), 0, self.fetcher())
        found: dict[RowId, bytes | Damage] = {}
        end = 0
        try:
            for offset, line, end in lines:
                if len(found) < count:
                    found[number, offset] = line
                elif end >= probed:
                    break
        except (Damage, FileNotFoundError) as error:  # reported when training reads it
            found.setdefault((number, end), Damage(str(error), offset=end))
        return found, end, raw.tell()

    def _beginning(self, number: int, size: int) -> bytes:
        """Return the first bytes of a file's content."""
        file = self.files[number]
        stream = RangeStream(self.fetcher(), file, 0, min(size, file.size) if file.seekable else file.size)
        with content(stream, name=path_in(file.path)) as opened:
            return opened.read(size)

    def _lines(
        self, part: Part, offset: int, fetcher: Fetcher, *, few: bool = False
    ) -> tuple[RangeStream, Iterator[Record]]:
        """Open a part at an offset of its content. With ``few``, no more is fetched than a line or two need."""
        file = self.files[part.file]
        if not file.seekable:
            stream = RangeStream(fetcher, file, 0, file.size)
            return stream, self._records_in(content(stream, name=path_in(file.path)), 0, offset, None)
        if offset > file.size:
            raise ValueError(
                f"{file.shown} has {file.size} bytes and cannot be read from byte {offset} on; the state or the file "
                "is damaged"
            )
        begin = max(0, offset - 1)
        end = begin + 1 if few else file.size if part.stop is None else part.stop
        stream = RangeStream(fetcher, file, begin, end, tail=tail_of(begin, end))
        return stream, self._records_in(content(stream, name=path_in(file.path)), begin, offset, part.stop)

    def _records_in(self, stream: Any, at: int, offset: int, stop: int | None) -> Iterator[Record]:
        """Yield the lines that are not blank and begin in ``[offset, stop)`` of a stream, which is at byte ``at``.

        Reading begins one byte before ``offset`` and continues to the line's end. If the byte is a line's end, the
        line that begins at ``offset`` is kept; otherwise ``offset`` is in the middle of a line of the part before.
        """
        longest, readline = self.max_line_bytes, stream.readline

        def line_skipped(at: int) -> int:
            while (stop is None or at < stop) and (some := readline(SKIPPED_BYTES)):
                at += len(some)
                if some.endswith(NEWLINE):
                    break
            return at

        try:
            # What is decompressed and thrown away is read in pieces that are smaller than the buffer, as `readline`
            # does, so a damaged file fails at the same line both times.
            while at < offset - 1 and (some := stream.read(min(offset - 1 - at, SKIPPED_BYTES))):
                at += len(some)
            if offset:
                at = line_skipped(at)
            while (stop is None or at < stop) and (line := readline(longest + 1)):
                begin, at = at, at + len(line)
                self.bytes_read += len(line)
                if len(line) > longest:
                    at = at if line.endswith(NEWLINE) else line_skipped(at)
                    what = f"the line is longer than max_line_bytes={longest}; write its rows shorter, or raise that"
                    yield begin, Damage(what, offset=begin, resume=at), at
                    continue
                if begin == 0:
                    line = line.removeprefix(BYTE_ORDER_MARK)
                if line and not line.isspace():
                    yield begin, line, at
        except DAMAGED as error:
            raise torn(at, error) from None
        if at == 0:
            raise Damage(EMPTY, offset=0)


def torn(at: int, error: Exception) -> Damage:
    """Return the damage of a compressed file after ``at`` bytes of its content."""
    what = f"the file is damaged after byte {at} of its content" if at else "it cannot be decompressed"
    return Damage(f"{what}: {error}", offset=at)
