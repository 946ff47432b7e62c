"""Tables in memory that are stored by columns (a pandas frame, a dict of columns), read by rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streampack.sources.arrow_dataset import ArrowDataset, is_readable


class Columns:
    """A map-style dataset of the rows of a table, given as columns of equal length.

    >>> rows = Columns({"input_ids": [[1, 2], [3]]})
    >>> len(rows), rows[1]
    (2, {'input_ids': [3]})

    Raises:
        ValueError: if the columns are of different lengths, or there are none.
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            shown = ", ".join(f"{name!r}: {length}" for name, length in lengths.items()) or "none"
            raise ValueError(
                f"the columns must be of one length, to make rows of them; their lengths are {shown}"
            )
        self.columns = dict(columns)
        [self._length] = set(lengths.values())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}


def by_rows(data: Any) -> Any:
    """Turn a pandas frame or a dict of columns into `Columns`, and a dataset of token ids into an `ArrowDataset`.

    Other data is returned unchanged.

    Raises:
        ValueError: for a table of another library, and for a dict whose values are no columns.
    """
    library = type(data).__module__.partition(".")[0]
    if type(data).__module__ == "datasets.arrow_dataset" and is_readable(data):
        return ArrowDataset(data)
    if library == "pandas" and hasattr(data, "columns"):
        return Columns({str(name): data[name].array for name in data.columns})
    if library == "polars" and hasattr(data, "to_dicts"):
        raise ValueError("a polars frame has no rows by number; give frame.to_dicts()")
    if library == "pyarrow" and hasattr(data, "to_pylist"):
        raise ValueError(
            "an Arrow table has no rows by number; give table.to_pylist(), or datasets.Dataset(table)"
        )
    if isinstance(data, Mapping) and data and all(isinstance(name, str) for name in data):
        if all(
            hasattr(column, "__len__") and not isinstance(column, str | Mapping) for column in data.values()
        ):
            return Columns(data)
        raise ValueError(
            f"a dict of {', '.join(map(repr, data))} holds no columns of rows; give a list of rows, or of every column "
            "a list; of several datasets make a Mix, or choose one"
        )
    return data
