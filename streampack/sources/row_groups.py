"""Parquet's footers and row groups: a cache of the footers, and a reader of a part's rows."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

from streampack.sources.arrow_rows import ArrowBatch
from streampack.sources.parts import Damage, Part, Record
from streampack.storage.base import File
from streampack.storage.ranges import Block, Fetcher, blocks

FOOTER_BYTES = 1 << 13  # bytes of the first request; a longer footer takes a second one
KEPT_GROUPS = 1 << 16  # row groups, of all footers in the cache; each takes about 1 kB of memory
BATCH_ROWS = 1024  # rows that are decoded at a time
BATCH_BYTES = (
    1 << 24
)  # about; fewer rows are decoded at a time if they have more. A sample may hold its batch.
PADDING_BYTES = 100  # old writers' column chunks may end that much later than their footers say (PARQUET-816)


class Footers:
    """A cache of the metadata of Parquet files.

    Args:
        files: the files of the corpus.
        columns: the columns that every file must have; None if it may have any.
    """

    def __init__(
        self,
        files: Sequence[File],
        columns: Sequence[str] | None,
    ) -> None:
        self.files = files
        self.columns = columns
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._groups = 0  # in the footers that are kept
        self.largest_group = 0  # the most bytes that were read of a row group

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict(), "_groups": 0}

    def known(self, number: int) -> Any:
        """Return a file's metadata if it is in the cache, else None."""
        return self._kept.get(number)

    def get(self, number: int, take: Callable[[Block], bytes]) -> Any:
        """Return a file's metadata, pyarrow's ``FileMetaData``; read it by ``take`` if it is not in the cache.

        Raises:
            Damage: if the file has no readable footer.
        """
        if (footer := self._kept.get(number)) is None:
            footer = self._kept[number] = self._read(self.files[number], take)
            self._groups += footer.num_row_groups
            while self._groups > KEPT_GROUPS and len(self._kept) > 1:
                self._groups -= self._kept.popitem(last=False)[1].num_row_groups
        return footer

    def _read(self, file: File, take: Callable[[Block], bytes]) -> Any:
        import pyarrow
        from pyarrow import parquet

        tail = take(_tail(file))
        rest = _rest(file, tail)
        whole = tail if rest is None else take(rest) + tail
        try:
            return parquet.read_metadata(pyarrow.BufferReader(b"PAR1" + whole[-_length(file, tail) :]))
        except (pyarrow.ArrowException, OSError) as error:
            raise Damage(f"the footer is damaged: {error}", offset=0) from None

    def problem(self, footer: Any) -> str | None:
        """Return why a file with this metadata cannot be read: it lacks a column; None if it does not."""
        there = footer.schema.to_arrow_schema().names if self.columns else []
        for name in self.columns or []:
            if name not in there:
                return f"it has no column {name!r}; it has {', '.join(map(repr, there))}"
        return None


class RowGroups:
    """An iterator over the records of one part. Offsets are row numbers in the file.

    A record's raw data is (its batch, index of the row in the batch, bytes of an average row).

    Args:
        footers: of all files.
        part: the part to read.
        offset: the row at which to begin.
        fetcher: fetches the bytes.

    Raises:
        Damage: if the footer cannot be read, or the file lacks a column.
    """

    def __init__(self, footers: Footers, part: Part, offset: int, fetcher: Fetcher) -> None:
        self.footers = footers
        self.file = footers.files[part.file]
        self.fetcher = fetcher
        self.footer = footers.get(part.file, fetcher.take)
        if (problem := footers.problem(self.footer)) is not None:
            raise Damage(problem, offset=offset)
        self.starts = starts_of(self.footer)
        # A damaged footer's own count of rows may differ from the sum over its row groups, which are what is read.
        self.stop = self.starts[-1] if part.stop is None else part.stop
        self.offset = offset
        self.rows: Iterator[Record] = iter(())

    def __iter__(self) -> Iterator[Record]:
        return self

    def __next__(self) -> Record:
        while (record := next(self.rows, None)) is None:
            if self.offset >= self.stop:
                raise StopIteration
            self.rows = self._group(group_of(self.footer, self.offset))
        self.offset += 1
        return record

    def _group(self, group: int) -> Iterator[Record]:
        """Yield the rows of a row group from ``self.offset`` on."""
        import pyarrow
        from pyarrow import parquet

        first, last = self.starts[group], self.starts[group + 1]
        ranges = self._ranges(group)
        # The whole group is needed at once, and held until its last row was read.
        self.fetcher.reading = size = sum(stop - start for start, stop in ranges)
        self.footers.largest_group = max(size, self.footers.largest_group)
        self.fetcher.expect(size, now=True)
        held = [
            (start, b"".join(map(self.fetcher.take, blocks(self.fetcher.block, self.file, start, stop))))
            for start, stop in ranges
        ]
        wanted = self.footers.columns
        try:
            table = parquet.ParquetFile(
                _Sparse(held, self.file.size),
                metadata=self.footer,
                pre_buffer=False,  # pre-buffering would also read columns in between, whose bytes are not held
                page_checksum_verification=True,
            )
            at = first
            for batch in table.iter_batches(
                self._rows_at_once(group), row_groups=[group], columns=wanted, use_threads=False
            ):
                found = zip(batch.schema.names, batch.columns, strict=True)
                # "a.b" is the name of a column here; to pyarrow it may also be a field within a column "a".
                columns = {name: column for name, column in found if wanted is None or name in wanted}
                row_bytes = batch.nbytes // max(1, batch.num_rows)
                rows = ArrowBatch(columns, whole=True)
                for i in range(max(0, self.offset - at), min(batch.num_rows, self.stop - at)):
                    yield at + i, (rows, i, row_bytes), at + i + 1
                at += batch.num_rows
            if at != last:
                raise ValueError(f"{at - first} rows are there and {last - first} should be")
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            # The bytes of the group were all read before, so this is no error of the storage that may pass.
            what = f"row group {group} is damaged: {error}"
            raise Damage(what, offset=self.offset, resume=last) from None

    def _rows_at_once(self, group: int) -> int:
        """Return how many rows of a row group to decode at a time."""
        metadata = self.footer.row_group(group)
        row_bytes: int = metadata.total_byte_size // max(1, metadata.num_rows)
        return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, row_bytes)))

    def _ranges(self, group: int) -> list[tuple[int, int]]:
        """Return the byte ranges ``[start, stop)`` of a row group's needed columns. Ranges that touch are joined."""
        metadata, found = self.footer.row_group(group), []
        for i in range(metadata.num_columns):
            column = metadata.column(i)
            if self.footers.columns is None or _is_within(column.path_in_schema, self.footers.columns):
                start = column.data_page_offset
                if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
                    start = column.dictionary_page_offset
                stop = start + column.total_compressed_size
                if not 0 <= start <= stop <= self.file.size:
                    what = f"row group {group} is damaged: it lies outside the file"
                    raise Damage(what, offset=self.offset, resume=self.starts[group + 1])
                found.append((start, min(stop + PADDING_BYTES, self.file.size)))
        joined: list[tuple[int, int]] = []
        for start, stop in sorted(found):
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            else:
                joined.append((start, stop))
        return joined

    def planned(self) -> Iterator[Block]:
        """Yield the blocks of the part's row groups, to be fetched ahead."""
        group = group_of(self.footer, self.offset)
        while group < len(self.starts) - 1 and self.starts[group] < self.stop:
            with suppress(Damage):  # reading the row group raises it again
                for start, stop in self._ranges(group):
                    yield from blocks(self.fetcher.block, self.file, start, stop)
            group += 1


def blocks_ahead(footers: Footers, part: Part, offset: int, fetcher: Fetcher) -> Iterator[Block | None]:
    """Yield the blocks of a part to fetch ahead, the footer first if it is not known; None while that is on its way."""
    file = footers.files[part.file]
    # The reader may come to a part of this file meanwhile, and take these blocks for its footer.
    held: dict[Block, bytes] = {}
    block: Block | None = _tail(file)
    with suppress(ValueError):  # reading the part raises it again
        while block is not None and footers.known(part.file) is None:
            yield block
            while (data := fetcher.peek(block)) is None and footers.known(part.file) is None:
                yield None
            if data is not None:
                held[block] = data
                block = None if len(held) > 1 else _rest(file, data)
        if footers.known(part.file) is None:
            footers.get(part.file, held.__getitem__)
            for arrived in held:
                fetcher.drop(arrived)
    footer = footers.known(part.file)
    if footer is not None and footers.problem(footer) is None:
        yield from RowGroups(footers, part, offset, fetcher).planned()


class _Sparse(io.RawIOBase):
    """A file object for pyarrow, of which only some ranges are held: pairs of (first byte, bytes)."""

    def __init__(self, held: list[tuple[int, bytes]], size: int) -> None:
        self.held = held
        self.size = size
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def read(self, size: int = -1) -> bytes:
        for start, data in self.held:
            if start <= self.at < start + len(data):
                found = data[self.at - start : self.at - start + size]
                self.at += len(found)
                return found
        raise ValueError(f"byte {self.at} is outside the columns")


def _is_within(path: str, columns: Sequence[str]) -> bool:
    """Return whether a leaf may belong to one of these columns, whose names may contain dots."""
    return any(path == name or path.startswith(f"{name}.") for name in columns)


def _tail(file: File) -> Block:
    return (file, max(0, file.size - FOOTER_BYTES), file.size)


def _length(file: File, tail: bytes) -> int:
    """Return the bytes of a footer, with the mark behind it, given the file's end."""
    if tail[-4:] != b"PAR1" or (length := int.from_bytes(tail[-8:-4], "little") + 8) > file.size:
        raise Damage("this is no Parquet file, or its end is missing", offset=0)
    return length


def _rest(file: File, tail: bytes) -> Block | None:
    """Return the block of a footer's beginning; None if the file's end holds all of the footer."""
    length = _length(file, tail)
    return (file, file.size - length, file.size - len(tail)) if length > len(tail) else None


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
