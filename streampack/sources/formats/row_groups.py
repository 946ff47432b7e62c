"""Parquet's footers and row groups: a cache of the footers, and the records of a part."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from typing_extensions import override

from streampack.sources.mechanics.arrow_rows import ArrowBatch
from streampack.sources.mechanics.parts import Damage, Part, Record
from streampack.storage.base import File
from streampack.storage.names import Files
from streampack.storage.prefetch import FirstCall
from streampack.storage.ranges import Block, Fetcher

FOOTER_BYTES = 1 << 13  # bytes of the first request; a longer footer takes a second one
KEPT_GROUPS = 1 << 16  # row groups, of all footers in the cache; each takes about 1 kB of memory
OUTSIDE = "it lies outside the file"
BATCH_ROWS = 1024  # rows that are decoded at a time
BATCH_BYTES = 1 << 24
"""At most about this number of bytes is decoded at a time: a sample may hold its batch."""


def require_pyarrow(what: str) -> None:
    """Raise ImportError if pyarrow is not installed, before it is needed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ImportError(f"reading {what} needs pyarrow: pip install 'streampack[data]'") from error


class Footers:
    """A cache of the metadata of Parquet files, which several threads may read.

    Args:
        files: the files of the corpus.
        columns: the columns that every file must have; None if it may have any.
    """

    def __init__(self, files: Files, columns: Sequence[str] | None) -> None:
        self.files = files
        self.columns = columns
        self._kept: dict[int, Any] = {}
        self._most = 1  # row groups of a footer
        self._first_call = FirstCall()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def get(self, number: int, take: Callable[[Block], bytes]) -> Any:
        """Return a file's metadata, pyarrow's ``FileMetaData``; read it by ``take`` if it is not in the cache."""
        footer = self._kept.get(number)
        return self._first_call(number, lambda: self._read(number, take)) if footer is None else footer

    def _read(self, number: int, take: Callable[[Block], bytes]) -> Any:
        if (footer := self._kept.get(number)) is None:
            footer = self._kept[number] = _read(self.files[number], take)
            self._most = max(self._most, footer.num_row_groups)
            while len(self._kept) > max(1, KEPT_GROUPS // self._most):
                [oldest, *_] = self._kept
                self._kept.pop(oldest, None)
        return footer

    def problem(self, footer: Any) -> str | None:
        """Return why the rows of a file with this metadata cannot be used, because a column is missing."""
        there = footer.schema.to_arrow_schema().names if self.columns else []
        lacking = next((name for name in self.columns or [] if name not in there), None)
        return lacking and f"it has no column {lacking!r}; it has {', '.join(map(repr, there))}"


def _read(file: File, take: Callable[[Block], bytes]) -> Any:
    import pyarrow
    from pyarrow import parquet

    data = take((file, max(0, file.size - FOOTER_BYTES), file.size))
    length = int.from_bytes(data[-8:-4], "little") + 8
    if data[-4:] != b"PAR1" or length > file.size:
        raise Damage("this is no Parquet file, or its end is missing", offset=0)
    if length > len(data):
        data = take((file, file.size - length, file.size - len(data))) + data
    try:
        return parquet.read_metadata(pyarrow.BufferReader(b"PAR1" + data[-length:]))
    except (pyarrow.ArrowException, OSError) as error:
        raise Damage(f"the footer is damaged: {error}", offset=0) from None


def records_of(footers: Footers, part: Part, offset: int, fetcher: Fetcher) -> Iterator[Record]:
    """Yield the records of a part. Offsets are row numbers in the file; raw data is (batch, index in the batch)."""
    footer = footers.get(part.file, fetcher.take)
    if (problem := footers.problem(footer)) is not None:
        raise Damage(problem, offset=offset)
    starts = starts_of(footer)
    # A damaged footer's own count of rows may differ from the sum over its row groups, which are what is read.
    stop = starts[-1] if part.stop is None else part.stop
    group = group_of(footer, offset)
    while group < len(starts) - 1 and starts[group] < stop:
        source = RangeFile(fetcher, footers.files[part.file])
        yield from _rows_of(source, footer, group, max(offset, starts[group]), stop, footers.columns)
        group += 1


def _rows_of(
    source: RangeFile, footer: Any, group: int, offset: int, stop: int, wanted: Sequence[str] | None
) -> Iterator[Record]:
    """Yield the rows ``[offset, stop)`` of a row group."""
    import pyarrow
    from pyarrow import parquet

    first, last = starts_of(footer)[group : group + 2]
    try:
        source.hold(_ranges(footer, group, wanted, size=source.file.size))
        table = parquet.ParquetFile(
            source,
            metadata=footer,
            pre_buffer=False,  # it would read in eight threads of pyarrow's, for all lanes together
            page_checksum_verification=True,
        )
        at = first
        batches = table.iter_batches(
            _rows_at_once(footer, group), row_groups=[group], columns=wanted, use_threads=False
        )
        while (batch := source.fetcher.prefetch.decode(partial(next, batches, None))) is not None:
            found = zip(batch.schema.names, batch.columns, strict=True)
            # "a.b" is the name of a column here; to pyarrow it may also be a field within a column "a".
            columns = {name: column for name, column in found if wanted is None or name in wanted}
            rows = ArrowBatch(columns, whole=True)
            for i in range(max(0, offset - at), min(batch.num_rows, stop - at)):
                offset = at + i + 1
                yield offset - 1, (rows, i), offset
            at += batch.num_rows
        if at != last:
            raise ValueError(f"{at - first} rows are there and {last - first} should be")
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if source.error is not None:
            raise source.error from None
        what = f"row group {group} is damaged: {error}"
        raise Damage(what, offset=offset, resume=last if last < stop else None) from None


def _ranges(footer: Any, group: int, wanted: Sequence[str] | None, *, size: int) -> list[tuple[int, int]]:
    """Return the byte ranges ``[start, stop)`` of a row group's columns. Ranges that touch are joined."""
    metadata = footer.row_group(group)
    found: list[tuple[int, int]] = []
    for column in map(metadata.column, range(metadata.num_columns)):
        name = column.path_in_schema  # of a leaf, which may belong to a column whose name has dots
        if wanted is None or any(name == each or name.startswith(f"{each}.") for each in wanted):
            start = column.data_page_offset
            if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
                start = column.dictionary_page_offset
            stop = start + column.total_compressed_size
            if not 0 <= start <= stop <= size:
                raise ValueError(OUTSIDE)
            found.append((start, stop))
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(found):
        if joined and start <= joined[-1][1]:
            start, stop = joined[-1][0], max(stop, joined.pop()[1])
        joined.append((start, stop))
    return joined


class RangeFile(io.RawIOBase):
    """A file for pyarrow, which reads ranges of it. ``error`` is that of the storage, if a read failed."""

    def __init__(self, fetcher: Fetcher, file: File) -> None:
        self.fetcher = fetcher
        self.file = file
        self.at = 0
        self.error: Exception | None = None
        self.held: list[tuple[int, bytes]] = []  # (first byte, bytes)

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self.at

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.file.size}[whence]
        return self.at

    @override
    def read(self, size: int = -1) -> bytes:
        stop = self.file.size if size < 0 else self.at + size
        if not 0 <= self.at <= stop <= self.file.size:
            raise ValueError(OUTSIDE)
        for start, held in self.held:
            if start <= self.at and stop <= start + len(held):
                data = held[self.at - start : stop - start]
                break
        else:
            data = self._noting(self.fetcher.take, (self.file, self.at, stop))
        self.at = stop
        return data

    def hold(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Read the ranges that will be needed: side by side, where anything is prefetched."""
        self.held = self._noting(self.fetcher.together, self.file, ranges)

    def _noting(self, fetch: Callable[..., Any], *where: Any) -> Any:
        try:
            return fetch(*where)
        except Exception as error:
            self.error = error
            raise


def _rows_at_once(footer: Any, group: int) -> int:
    """Return how many rows of a row group to decode at a time."""
    metadata = footer.row_group(group)
    row_bytes: int = metadata.total_byte_size // max(1, metadata.num_rows)
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, row_bytes)))


def row_groups(footer: Any) -> list[tuple[int, int]]:
    """Return the rows of each row group, and its bytes before compression."""
    groups = map(footer.row_group, range(footer.num_row_groups))
    return [(group.num_rows, group.total_byte_size) for group in groups]


def starts_of(footer: Any) -> list[int]:
    """Return the number of each row group's first row, and the number of rows: ``[row groups + 1]``."""
    return [0, *accumulate(footer.row_group(i).num_rows for i in range(footer.num_row_groups))]


def group_of(footer: Any, row: int) -> int:
    """Return the index of the row group that holds a row."""
    starts = starts_of(footer)
    return max(i for i, start in enumerate(starts[:-1]) if start <= row) if len(starts) > 1 else 0
