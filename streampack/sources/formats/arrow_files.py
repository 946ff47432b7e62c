"""`ArrowSource`: the rows of Arrow files, Feather files, and folders that the datasets library saves."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from typing_extensions import override

from streampack.sources.examples import EXAMPLES, Example
from streampack.sources.formats.row_groups import BATCH_ROWS, require_pyarrow
from streampack.sources.mechanics.arrow_rows import ArrowBatch
from streampack.sources.mechanics.files import FileSource, divide, places
from streampack.sources.mechanics.other_kinds import by_content
from streampack.sources.mechanics.parts import Damage, Part, Record
from streampack.storage.base import ParallelMap, resized
from streampack.storage.listing import Name, find_files
from streampack.storage.ranges import Fetcher, RangeStream
from streampack.storage.retries import Storage
from streampack.types import RowId

ARROW = (".arrow", ".feather", ".ipc")
MAGIC = b"ARROW1\0\0"  # begins a file with a footer; the stream in it begins after these bytes
STREAM = b"\xff\xff\xff\xff"


class Batches(NamedTuple):
    """The record batches of a local file."""

    starts: list[int]  # the number of each batch's first row, then the number of rows in the file
    get: Callable[[int], Any]
    problem: str | None  # why the batches after these cannot be read


class ArrowSource(FileSource):
    """The rows of Arrow files: streams as datasets writes them, files with a footer, and Feather.

    >>> import tempfile, pyarrow.feather
    >>> from streampack.sources import Reading
    >>> path = tempfile.mkdtemp() + "/a.feather"
    >>> pyarrow.feather.write_feather(pyarrow.table({"text": ["a", "b"]}), path)
    >>> [row.data for row in ArrowSource(path).read(Reading())]
    [{'text': 'a'}, {'text': 'b'}]

    Local files are mapped into memory, and lanes may begin at any row. To count its rows, a compressed Feather file is
    decompressed once; reading decompresses it again, by batches. A compressed stream is held in memory. A file at a URL
    is one part: each lane reads it from its beginning, also at each resume. Prefer Parquet for URLs.

    Rows are like those of `ParquetSource`: ids are arrays, and records in lists come without their null fields.

    Args:
        paths: files, folders or globs, see `JSONLSource`. Of a folder, the ``.arrow``, ``.feather`` and ``.ipc`` files
            in it.
        manifest: see `JSONLSource`.
        storage: see `JSONLSource`.

    Raises:
        ValueError: as `JSONLSource`.
        ImportError: if pyarrow is not installed.
    """

    whole = "Arrow file"

    def __init__(
        self,
        paths: Name | Iterable[Name] | None = None,
        *,
        manifest: Name | None = None,
        storage: Storage | Mapping[str, Any] | None = None,
    ) -> None:
        require_pyarrow("Arrow")
        super().__init__(find_files(paths, manifest=manifest, endings=ARROW, storage=storage))
        self._batches: dict[int, Batches] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_batches": {}}

    @override
    def cut(self, num_lanes: int, parallel_map: ParallelMap) -> list[list[Part]]:
        counts = parallel_map(self._rows_of, range(len(self.files)))
        whole = {number for number, count in enumerate(counts) if not count}
        return divide(counts, num_lanes, sizes=self.files.sizes, whole=whole)

    @override
    def records(self, part: Part, offset: int, fetcher: Fetcher) -> Iterator[Record]:
        for first, batch in self._from(part, offset, fetcher):
            for begin in range(
                (max(0, offset - first)) // BATCH_ROWS * BATCH_ROWS, batch.num_rows, BATCH_ROWS
            ):
                some = batch.slice(begin, BATCH_ROWS)
                rows = ArrowBatch(dict(zip(some.schema.names, some.columns, strict=True)), whole=True)
                for at in range(max(offset, first + begin), first + begin + some.num_rows):
                    if part.stop is not None and at >= part.stop:
                        return
                    yield at, (rows, at - first - begin), at + 1

    @override
    def decode(self, part: Part, offset: int, raw: Any) -> Mapping[str, Any]:
        rows, index = raw
        row: Mapping[str, Any] = rows.row(index)
        return row

    @override
    def is_near(self, row_id: RowId, later: RowId) -> bool:
        """See `FileSource.is_near`: a file at a URL is always read from its beginning."""
        return not self.local

    @property
    @override
    def size(self) -> int | None:
        """Number of rows; None for files at URLs."""
        return sum(map(self._rows_of, range(len(self.files)))) if self.local else None

    @override
    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """Return rows from all over the files if they are local, else the first rows."""
        if not self.local or not (counts := list(map(self._rows_of, range(len(self.files)))))[0]:
            return super().examples(count)
        return self.examples_at(places(counts, count))

    @override
    def natural_lanes(self) -> int:
        """Return one lane per 64 KiB, but at most one per row; for files at URLs, one per file."""
        if (rows := self.size) is None:
            return len(self.files)
        return max(1, min(rows, sum(self.files.sizes) >> 16))

    def _rows_of(self, number: int) -> int:
        """Return the number of rows of a local file; 0 if it is unknown."""
        if not self.local or number in self.bad:
            return 0
        try:
            return self._opened(number).starts[-1]
        except (Damage, FileNotFoundError):  # raised again where it is read
            return 0

    def _from(self, part: Part, offset: int, fetcher: Fetcher) -> Iterator[tuple[int, Any]]:
        """Yield ``(number of its first row, batch)`` of a file, from the batch that holds row ``offset`` on."""
        if not self.local:
            yield from self._streamed(part, fetcher)
            return
        starts, get, problem = self._opened(part.file)
        for number in range(bisect_right(starts, offset) - 1, len(starts) - 1):
            if part.stop is not None and starts[number] >= part.stop:
                return
            yield starts[number], get(number)
        if problem is not None:
            raise Damage(problem, offset=starts[-1])

    def _streamed(self, part: Part, fetcher: Fetcher) -> Iterator[tuple[int, Any]]:
        import pyarrow

        file, at = self.files[part.file], 0
        head = fetcher.take((file, 0, min(len(MAGIC), file.size)))
        _require_arrow(file.shown, head)
        begin = len(MAGIC) if head == MAGIC else 0
        stream = RangeStream(fetcher, file, begin, file.size)
        try:
            for batch in pyarrow.ipc.open_stream(pyarrow.PythonFile(io.BufferedReader(stream), "r")):
                yield at, batch
                at += batch.num_rows
        except (pyarrow.ArrowInvalid, OSError) as error:
            if stream.error is not None:
                raise stream.error from None
            raise Damage(_damaged(at, error), offset=at) from None

    def _opened(self, number: int) -> Batches:
        if (found := self._batches.get(number)) is None:
            found = self._batches[number] = self._open(number)
        return found

    def _open(self, number: int) -> Batches:
        import pyarrow

        file = self.files[number]
        source = pyarrow.memory_map(file.path)
        if (size := source.size()) != file.size:
            raise resized(file, size)
        head = source.read(len(MAGIC))
        _require_arrow(file.shown, head)
        source.seek(0)
        batches, problem, counts = list[Any](), None, list[int]()
        get: Callable[[int], Any] = batches.__getitem__
        try:
            if head == MAGIC:
                reader = pyarrow.ipc.open_file(source)
                get = reader.get_batch
                counts.extend(get(i).num_rows for i in range(reader.num_record_batches))
            else:
                for batch in pyarrow.ipc.open_stream(source):
                    batches.append(batch)
                    counts.append(batch.num_rows)
        except (pyarrow.ArrowInvalid, OSError) as error:
            problem = _damaged(sum(counts), error)
        return Batches([0, *accumulate(counts)], get, problem)


def _require_arrow(path: str, head: bytes) -> None:
    """Raise `Damage` if a file does not begin like an Arrow file."""
    if not head.startswith((MAGIC, STREAM)):
        what = (
            "it is Feather, version 1: write it again" if head.startswith(b"FEA1") else by_content(path, head)
        )
        raise Damage(what or "it is not an Arrow file", offset=0)


def _damaged(rows: int, error: Exception) -> str:
    return f"it is damaged or cut off after row {rows:,}: {error}"
