"""`ArrowDataset`: a map-style dataset of Hugging Face's, whose rows are those of its Arrow table."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any

import numpy.typing as npt

from streampack.sources.formats.row_groups import BATCH_ROWS
from streampack.sources.mechanics.arrow_rows import ArrowBatch, cleaned, cleans_of, holds_ids

KEPT_BATCHES = 1024  # each takes some 2 kB
PLAIN_FEATURES = frozenset({"Value", "ClassLabel", "List", "LargeList"})
"""Features whose values ``datasets`` returns as Arrow has them. It decodes others, such as images."""


class ArrowDataset:
    """The rows of a ``Dataset`` by number, each a mapping of plain values with ids as arrays (`ArrowRow`).

    >>> from datasets import Dataset
    >>> rows = ArrowDataset(Dataset.from_dict({"input_ids": [[1, 2], [3]]}).select([1, 0]))
    >>> len(rows), rows[0]
    (2, {'input_ids': [3]})

    Ids are views of the table, so a dataset that is mapped from a file stays on disk. `datasets` reads the rows where
    there are no ids, or where it formats or decodes some values.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._by_table = _is_readable(dataset)
        self._cleans = cleans_of(types_of(dataset.features), decoded=True)
        self._tables: list[Any] = []  # slices of the table, of at most `BATCH_ROWS` rows
        self._starts: list[int] = []  # the first row of each
        self._length = len(dataset)
        # The table's row for each row of the dataset, if they differ.
        self._numbers: npt.NDArray[Any] | None = None
        self._batches: dict[int, ArrowBatch] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["dataset"])  # type: ignore[misc]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if not (self._by_table and 0 <= index < self._length):  # counted from the end, or an IndexError
            row = self.dataset[index]
            return cleaned(row, self._cleans) if isinstance(row, dict) else row
        if not self._tables:
            self._open()
        number = index if self._numbers is None else int(self._numbers[index])
        table = bisect_right(self._starts, number) - 1
        if (batch := self._batches.get(table)) is None:
            if len(self._batches) >= KEPT_BATCHES:
                self._batches.clear()
            found = self._tables[table]
            columns = dict(zip(found.schema.names, found.columns, strict=True))
            batch = self._batches[table] = ArrowBatch(columns, whole=False)
        return batch.row(number - self._starts[table])

    def _open(self) -> None:
        if self.dataset._indices is not None:
            self._numbers = self.dataset._indices.column(0).to_numpy()
        self._tables = [batch for batch in self.dataset.data.to_batches(BATCH_ROWS) if batch.num_rows]
        self._starts = [0, *accumulate(batch.num_rows for batch in self._tables[:-1])]


def _is_readable(dataset: Any) -> bool:
    """Return whether a ``Dataset`` has columns of ids, and no formatted or decoded ones: its rows are its table's."""
    form, table = dataset.format, dataset.data
    if form["type"] is not None or set(form["columns"]) != set(table.column_names):
        return False
    return has_plain_ids(dataset.features)


def types_of(features: Any) -> dict[str, Any]:
    """Return the type of pyarrow of each column, by `Features`; of a stream they may not be known."""
    return dict(zip(features, features.arrow_schema.types, strict=True)) if features else {}


def has_plain_ids(features: Any) -> bool:
    """Return whether ``Features`` have columns of ids, and none whose values ``datasets`` decodes."""
    return all(map(_is_plain, features.values())) and any(map(holds_ids, features.arrow_schema.types))


def _is_plain(feature: Any) -> bool:
    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    name = type(feature).__name__
    return name in PLAIN_FEATURES and (not name.endswith("List") or _is_plain(feature.feature))
