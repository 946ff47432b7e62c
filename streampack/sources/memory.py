"""Rows in memory: `MapSource` of anything with ``__len__`` and ``__getitem__``, `IterableSource`, and `Columns`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Protocol
from zlib import crc32

import numpy as np
from typing_extensions import override

from streampack.fingerprint import digest
from streampack.sources.examples import EXAMPLES, UNKNOWN, Example, example, leading, leading_marks, marks
from streampack.sources.mechanics.arrow_rows import Clean
from streampack.sources.mechanics.parts import Part, shared_parts
from streampack.sources.reading import BadRecord, Reader, Reading, own_row, permutation, reason_of, spread
from streampack.sources.source import Source
from streampack.sources.torchtune_rows import null_safe
from streampack.types import Cursor, Row, RowId

ROWS_PER_LANE = 100


class Columns:
    """A map-style dataset of the rows of a table, given as columns of equal length.

    >>> rows = Columns({"input_ids": [[1, 2], [3]]})
    >>> len(rows), rows[1]
    (2, {'input_ids': [3]})

    Args:
        columns: by name.
        clean: is applied to each value of a row.

    Raises:
        ValueError: if the columns are of different lengths, or there are none.
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]], *, clean: Clean | None = None) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            shown = ", ".join(f"{name!r}: {length}" for name, length in lengths.items()) or "none"
            raise ValueError(
                f"the columns must be of one length, to make rows of them; their lengths are {shown}"
            )
        self.columns = dict(columns)
        self.clean = clean
        [self._length] = set(lengths.values())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {name: column[index] for name, column in self.columns.items()}
        return row if self.clean is None else {name: self.clean(value) for name, value in row.items()}


class MapDataset(Protocol):
    """A map-style dataset, in torch's term."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class MapSource(Source):
    """The rows of a map-style dataset. Lane ``l`` reads rows ``l, l + num_lanes, ...``.

    Shuffling permutes all rows of a lane. That takes 8 bytes of memory for each row of the lanes that a process reads.

    >>> from streampack.sources import Reading
    >>> rows = [{"tokens": [i], "labels": [i]} for i in range(4)]
    >>> [row.data["tokens"] for row in MapSource(rows).read(Reading(1, num_lanes=2))]
    [[1], [3]]

    Raises:
        ValueError: if the dataset is empty.
    """

    map_style = True

    def __init__(self, dataset: MapDataset) -> None:
        if len(dataset) == 0:
            raise ValueError(
                f"the dataset ({type(dataset).__name__}) is empty; it must have at least one row"
            )
        self.dataset: MapDataset = null_safe(dataset)
        self._rows: dict[str, str] | None = None  # marks of the examples, once they were read

    @override
    def identity(self) -> dict[str, Any]:
        """Return the number of rows, marks of twelve, and of a list or of `Columns` a digest of all lengths.

        A million rows take one or two seconds, once. Of other data, twelve rows are read: reading may be slow.
        """
        if self._rows is None:
            data = self.dataset
            lengths = _digest_of_lengths(data) if isinstance(data, list | tuple | Columns) else UNKNOWN
            self._rows = {**marks(self.examples(EXAMPLES)), "lengths": lengths}
        return {"source": "MapSource", "rows": len(self.dataset), "content": self._rows}

    @override
    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """Return the first row, the last, and others from all over the dataset."""
        size = len(self.dataset)
        numbers = set(range(size)) if count >= size else {0, *spread(size, max(1, count - 2)), size - 1}
        return [example((number,), partial(self.dataset.__getitem__, number)) for number in sorted(numbers)]

    @override
    def read(self, reading: Reading) -> _Rows:
        numbers = range(reading.lane, len(self.dataset), reading.num_lanes)
        order = permutation(len(numbers), *reading.key) if reading.shuffle_window else None
        return _Rows(self, numbers, order, reading.start[0] if reading.start else 0)

    @override
    def locate(self, row_id: RowId) -> str:
        return f"sample {row_id[0]}"

    @override
    def fetch_many(self, row_ids: Sequence[RowId]) -> list[Mapping[str, Any]]:
        return [own_row(self.dataset[row_id[0]]) for row_id in row_ids]

    @override
    def natural_lanes(self) -> int:
        return max(1, len(self.dataset) // ROWS_PER_LANE)

    @property
    @override
    def size(self) -> int:
        return len(self.dataset)


def _digest_of_lengths(data: MapDataset) -> str:
    """Return a digest of the lengths of all that the rows hold, the same one of equal lists and arrays."""
    rows = (data[number] for number in range(len(data)))
    lengths = np.fromiter(chain.from_iterable(map(_lengths_of, rows)), np.int64)
    return digest(lengths.size, crc32(lengths.tobytes()))


def _lengths_of(row: Any) -> list[int]:
    if isinstance(row, dict):
        return [_length_of(row[name]) for name in sorted(row, key=str)]
    return list(map(_length_of, row)) if isinstance(row, tuple) else [_length_of(row)]


def _length_of(value: Any) -> int:
    try:
        return len(value) if hasattr(value, "__len__") else -1
    except TypeError:  # an array without dimensions
        return -1


class _Rows(Reader):
    """Reads the rows ``numbers``, or a permutation of them. A cursor is ``(index,)``, a place in that order."""

    def __init__(
        self, source: MapSource, numbers: range, order: np.ndarray[Any, Any] | None, index: int
    ) -> None:
        self.source = source
        self.numbers = numbers
        self.order = order
        self.index = index

    @property
    @override
    def cursor(self) -> Cursor:
        return (self.index,)

    @override
    def __next__(self) -> Row:
        if self.index >= len(self.numbers):
            raise StopIteration
        number = self.numbers[self.index if self.order is None else int(self.order[self.index])]
        try:
            row = Row(self.source.dataset[number], (number,))
        except OSError as error:  # A disk or a network failed: the record is not to blame, and not skipped.
            error.add_note(f"while reading sample {number}")
            raise
        except Exception as error:
            self.index += 1
            if isinstance(error, StopIteration):  # raised again by the lane, it would end the stream silently
                error = RuntimeError(f"sample {number}: the dataset raised StopIteration")
            raise BadRecord(reason_of(error), row_id=(number,), locate=self.source.locate) from error
        self.index += 1
        return row


Rows = Iterable[Mapping[str, Any]]


class IterableSource(Source):
    """Rows of an iterable that yields the same rows each time it is iterated, or of a function that returns one.

    Each lane iterates over all rows and keeps its own; by default a consumer (ranks x workers) has one lane. A resume
    iterates from the start again; where that takes long, write token shards with `streampack tokenize`. 100,000 dropped
    rows in a row are an error, as an iterable may have no end.

    The iterable may reuse the memory of dicts, lists, arrays and tensors for its next row. Objects of other classes are
    not copied, so they must be new for each row.

    >>> from streampack.sources import Reading
    >>> source = IterableSource(lambda: ({"tokens": [i], "labels": [i]} for i in range(3)))
    >>> [row.data["tokens"] for row in source.read(Reading(start=(0, 1, 0)))]
    [[1], [2]]

    Each rank and each worker must read the same rows, all of them. An iterable that divides its rows among ranks or
    torch's workers by itself would lose rows here, so several consumers need a `PackedDataLoader`, which compares the
    ranks' first rows and has workers of its own.

    Raises:
        ValueError: for an iterator or generator, which could be read only once.
    """

    varies_by_process = True

    def __init__(self, rows: Rows | Callable[[], Rows]) -> None:
        if isinstance(rows, Iterator):
            raise ValueError(
                f"a {type(rows).__name__} can be read only once, so neither a second epoch nor a resume is "
                "possible; pass a function that makes it: IterableSource(lambda: ...)"
            )
        self.iterable = rows
        # The last iterator, to notice if the next one is the same object.
        self._newest: Iterator[Any] | None = None
        self._first: dict[str, str] | None = None  # marks of the first rows, once they were read

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_newest": None}

    @override
    def identity(self) -> dict[str, Any]:
        """Return marks of the first twelve rows. The other rows are not read for it.

        Raises:
            ValueError: if the iterable, iterated again, begins with another row.
        """
        if self._first is None:
            first, again = (leading_marks(self.examples(count)) for count in (EXAMPLES, 1))
            both = {marked.get("0.0", UNKNOWN) for marked in (first, again)}
            if len(both) == 2 and UNKNOWN not in both:
                raise ValueError(
                    f"{type(self.iterable).__name__} gives other rows each time it is iterated, so neither a second "
                    "epoch nor a resume is possible; let it restart in the same order: shuffle with "
                    "IterablePackedDataset(..., shuffle=True), and open files in the function that IterableSource "
                    "takes"
                )
            self._first = first
        return {"source": "IterableSource", "content": self._first}

    @override
    def examples(self, count: int = EXAMPLES) -> list[Example]:
        return leading(self._iterate(), count, part=0)

    @override
    def rows(self, start: int, step: int) -> Iterator[Mapping[str, Any]]:
        for number, row in enumerate(self._iterate()):
            if number >= start and (number - start) % step == 0:
                yield row

    @override
    def shared(self, num_lanes: int) -> list[str]:
        return shared_parts([[Part(0, stride=num_lanes)]], what="iterable")

    def _iterate(self) -> Iterator[Mapping[str, Any]]:
        rows = self.iterable() if callable(self.iterable) else self.iterable
        iterator = iter(rows)
        if iterator is self._newest:
            what = "function" if callable(self.iterable) else f"{type(self.iterable).__name__}"
            raise ValueError(f"the {what} returned the same iterator twice; it must make a new one each time")
        self._newest = iterator
        return iterator
