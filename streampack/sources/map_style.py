"""`MapSource`: any dataset with ``__len__`` and ``__getitem__``, such as torchtune's, Hugging Face's or a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from streampack.sources.examples import EXAMPLES, Example, example, marks
from streampack.sources.reading import BadRecord, Reader, Reading, own_row, permutation, reason_of, spread
from streampack.sources.source import Source
from streampack.sources.torchtune_rows import refusing_nulls
from streampack.storage.use import StorageUse
from streampack.types import Cursor, Row, RowId


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
        self.dataset: MapDataset = refusing_nulls(dataset)
        self._rows: dict[str, str] | None = None  # marks of the examples, once they were read

    def identity(self) -> dict[str, Any]:
        """Return the number of rows, and marks of twelve of them."""
        if self._rows is None:
            self._rows = marks(self.examples(EXAMPLES))
        return {"source": "MapSource", "rows": len(self.dataset), "content": self._rows}

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """See `Source.examples`: the first row, the last, and others from all over the dataset."""
        size = len(self.dataset)
        numbers = set(range(size)) if count >= size else {0, *spread(size, max(1, count - 2)), size - 1}
        return [example((number,), partial(self.dataset.__getitem__, number)) for number in sorted(numbers)]

    def read(self, reading: Reading) -> _Rows:
        """See `Source.read`. Rows are read by number, so any ``shuffle_window`` but 0 permutes the whole lane."""
        numbers = range(reading.lane, len(self.dataset), reading.num_lanes)
        order = permutation(len(numbers), *reading.key) if reading.shuffle_window else None
        return _Rows(self, numbers, order, reading.start[0] if reading.start else 0)

    def locate(self, row_id: RowId) -> str:
        """Return ``sample N``, its index in the dataset."""
        return f"sample {row_id[0]}"

    def shard(self, row_id: RowId) -> str:
        """Return the dataset's class: there is only one shard."""
        return type(self.dataset).__name__

    def fetch_many(
        self, row_ids: Sequence[RowId], *, use: StorageUse | None = None
    ) -> list[Mapping[str, Any]]:
        """See `Source.fetch_many`."""
        return [own_row(self.dataset[row_id[0]]) for row_id in row_ids]

    def natural_lanes(self) -> int:
        """Return one lane per 512 rows."""
        return max(1, len(self.dataset) // 512)

    @property
    def size(self) -> int:
        """See `Source.size`."""
        return len(self.dataset)


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
    def cursor(self) -> Cursor:
        return (self.index,)

    def __next__(self) -> Row:
        if self.index >= len(self.numbers):
            raise StopIteration
        number = self.numbers[self.index if self.order is None else int(self.order[self.index])]
        try:
            data = self.source.dataset[number]
        except OSError as error:  # A disk or a network failed: the record is not to blame, and not skipped.
            error.add_note(f"while reading sample {number}")
            raise
        except Exception as error:
            if isinstance(error, StopIteration):  # raised again by the lane, it would end the stream silently
                error = RuntimeError(f"sample {number}: the dataset raised StopIteration")
            raise BadRecord(reason_of(error), row_id=(number,), locate=self.source.locate) from error
        row = Row(data, (self.index,), (number,))
        self.index += 1
        return row

    def skip(self) -> None:
        self.index += 1
