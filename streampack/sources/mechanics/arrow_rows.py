"""Rows of Arrow batches, whose columns of token ids are read as arrays and not as Python lists."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.types import IGNORE_INDEX, INT32, Sample

Starts = Sequence[int] | npt.NDArray[Any]
Clean = Callable[[Any], Any]
"""Returns the value of a column without the nulls that Arrow put into it."""

READ_OF_BATCH = 4
"""A batch is looked through when one row of this many was read."""


class IdColumn:
    """The numbers of a column of lists, of all rows of a batch.

    Args:
        values: the numbers of all rows, end to end; read-only memory.  # [numbers]
        starts: where each row begins in ``values``, and where the last one ends; ``[rows + 1]``.
    """

    def __init__(self, values: npt.NDArray[Any], starts: Starts) -> None:
        self.values = values
        self.starts = starts
        self.wide = False  # whether the numbers of a row fit into int32, and are wider in `values`
        self._limits: tuple[int, int] | None = None

    def row(self, index: int) -> npt.NDArray[Any]:
        """Return the numbers of a row, ``[length]``, in memory that nothing will change."""
        found = self.values[self.starts[index] : self.starts[index + 1]]
        return found.astype(INT32) if self.wide else found

    def limits(self, *, narrow: bool) -> tuple[int, int]:
        """Return the least and the largest number; (0, -1) if there are none.

        If both fit into int32, rows are int32 from here on: with ``narrow`` all numbers are converted now, otherwise
        those of each row when it is read.
        """
        if self._limits is None:
            values = self.values
            least, most = (int(values.min()), int(values.max())) if values.size else (0, -1)
            if least >= -(2**31) and most < 2**31 and values.dtype != INT32:
                self.wide = not narrow
                if narrow:
                    self.values = values.astype(INT32)
                    self.values.flags.writeable = False
            self._limits = least, most
        return self._limits


class ArrowBatch:
    """Some rows of an Arrow table, by column.

    Args:
        columns: the columns by name: arrays of pyarrow, of equal length.
        whole: whether all rows of the batch will be read, and soon. A column is then narrowed to int32 when its first
            row is asked for. Otherwise the batch may be mapped from a file, and is looked through only when a quarter
            of its rows were read: so rows in a random order make a process read the file twice at most.
    """

    def __init__(self, columns: Mapping[str, Any], *, whole: bool) -> None:
        self.names = dict.fromkeys(columns)
        found = {name: id_column(column, whole=whole) for name, column in columns.items()}
        self.ids = {name: column for name, column in found.items() if column is not None}
        self.others = {name: column for name, column in columns.items() if name not in self.ids}
        self.cleans = cleans_of({name: column.type for name, column in self.others.items()})
        self.whole = whole
        rows = len(next(iter(columns.values())))
        self.unread = 0 if whole else -(-rows // READ_OF_BATCH)  # rows before the batch is looked through
        # Filled by `TokensEncoder`, by the columns that it was made with.
        self.checked: dict[tuple[str | None, str | None], CheckedIds | None] = {}

    def row(self, index: int) -> Mapping[str, Any]:
        """Return a row as plain Python values: an `ArrowRow` if it has columns of ids, else a dict."""
        if self.unread:
            self.unread -= 1
        values = {name: column[index].as_py() for name, column in self.others.items()}
        values = cleaned(values, self.cleans)
        return ArrowRow(self, index, values) if self.ids else values


@dataclass(frozen=True, slots=True)
class CheckedIds:
    """The samples of all rows of a batch, which were checked together.

    All fit into int32 and are below ``below``; ids are 0 or more, labels too or ``IGNORE_INDEX``; each token has a
    label. Without ``labels``, all tokens are trained.
    """

    tokens: IdColumn
    labels: IdColumn | None
    below: int

    @classmethod
    def of(cls, batch: ArrowBatch, tokens: str, labels: str | None) -> CheckedIds | None:
        """Look through two columns of a batch; return None if a row is other than said above, or may be."""
        ids = batch.ids.get(tokens)
        targets = ids if labels is None else batch.ids.get(labels)
        if ids is None or targets is None:
            return None
        (least, most), (least_label, most_label) = [
            each.limits(narrow=batch.whole) for each in (ids, targets)
        ]
        most = max(most, most_label)
        if least < 0 or most >= 2**31:
            return None
        if least_label < 0 and ((targets.values < 0) != (targets.values == IGNORE_INDEX)).any():
            return None
        if not np.array_equal(ids.starts, targets.starts):
            return None
        return cls(ids, None if labels is None else targets, most + 1)

    def sample(self, index: int) -> Sample:
        """Return the sample of a row, in memory that nothing will change."""
        tokens = self.tokens.row(index)
        return Sample(tokens, tokens if self.labels is None else self.labels.row(index))


class ArrowRow(Mapping[str, Any]):
    """A row of an `ArrowBatch`: plain Python values. Lists of whole numbers are made when they are asked for.

    `column_of` returns such a list as an array, without making it.

    >>> import pyarrow
    >>> row = ArrowBatch({"tokens": pyarrow.array([[1, 2], [3]]), "n": pyarrow.array([7, 8])}, whole=True).row(0)
    >>> row
    {'tokens': [1, 2], 'n': 7}
    >>> column_of(row, "tokens")
    array([1, 2], dtype=int32)
    """

    __slots__ = ("batch", "index", "values_")

    def __init__(self, batch: ArrowBatch, index: int, values: Mapping[str, Any]) -> None:
        self.batch = batch
        self.index = index
        self.values_ = values

    def __getitem__(self, name: str) -> Any:
        column = self.batch.ids.get(name)
        return self.values_[name] if column is None else column.row(self.index).tolist()

    def __contains__(self, name: object) -> bool:
        return name in self.batch.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.batch.names)

    def __len__(self) -> int:
        return len(self.batch.names)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy is a plain dict, and does not hold the batch

    def stored(self, name: str) -> Any:
        """Return a column's value; whole numbers as an array ``[length]`` in memory that nothing will change."""
        batch = self.batch
        if (column := batch.ids.get(name)) is None:
            return self.values_.get(name)
        if batch.whole:
            column.limits(narrow=True)
        return column.row(self.index)


def column_of(row: Mapping[str, Any], name: str) -> Any:
    """Return a column of a row, None if it is missing; of an `ArrowRow`, whole numbers as a read-only array."""
    return row.stored(name) if type(row) is ArrowRow else row.get(name)


def holds_ids(kind: Any) -> bool:
    """Return whether a type of pyarrow is one of lists of whole numbers."""
    from pyarrow import types

    fixed = types.is_fixed_size_list(kind) and kind.list_size > 0
    listed = fixed or types.is_list(kind) or types.is_large_list(kind)
    return bool(listed and types.is_integer(kind.value_type))


def id_column(array: Any, *, whole: bool) -> IdColumn | None:
    """Return a column of pyarrow as an `IdColumn`, without a copy; None if it is no lists of whole numbers.

    None, too, if a row or a number is missing: a row's list then holds None, which is refused where it is encoded.
    """
    if not holds_ids(kind := array.type) or not len(array) or array.null_count:
        return None
    if hasattr(kind, "list_size"):
        size = kind.list_size
        first, last = array.offset * size, (array.offset + len(array)) * size
        starts: Starts = range(0, last - first + 1, size)
    else:
        offsets = array.offsets.to_numpy()
        first, last = int(offsets[0]), int(offsets[-1])
        # A list is read faster than an array, and takes nine times the memory.
        starts = (offsets - first).tolist() if whole else offsets - first
    values = array.values.slice(first, last - first)
    return None if values.null_count else IdColumn(values.to_numpy(), starts)


def cleaned(row: dict[str, Any], cleans: Mapping[str, Clean]) -> dict[str, Any]:
    """Return a row whose columns were cleaned, by the functions of `cleans_of`."""
    if not cleans:
        return row
    return {**row, **{name: clean(row[name]) for name, clean in cleans.items() if name in row}}


def cleans_of(types: Mapping[str, Any], *, decoded: bool = False) -> dict[str, Clean]:
    """Return what cleans the columns of these types of pyarrow; most need nothing, as those of numbers and texts.

    Arrow gives all records of a list, such as messages, the fields of all of them: an argument of one tool's call would
    be a null in the call of every other. So fields that are null are removed from records in lists. Columns that are
    records themselves keep theirs. JSON, whose nulls somebody wrote, is decoded, unless values come ``decoded``.

    >>> import pyarrow
    >>> calls = pyarrow.array([[{"x": 1}, {"y": None}]])
    >>> cleans_of({"calls": calls.type})["calls"](calls[0].as_py())
    [{'x': 1}, {}]
    """
    found = {name: _clean(kind, decoded=decoded, listed=False) for name, kind in types.items()}
    return {name: clean for name, clean in found.items() if clean is not None}


def _clean(kind: Any, *, decoded: bool, listed: bool) -> Clean | None:
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        clean = _clean(kind.value_type, decoded=decoded, listed=True)
        return clean and partial(_clean_list, clean)
    if types.is_struct(kind):
        fields = {field.name: _clean(field.type, decoded=decoded, listed=listed) for field in kind}
        return partial(_clean_record, fields, listed) if listed or any(fields.values()) else None
    if getattr(kind, "extension_name", None) == "arrow.json" and not decoded:
        return lambda text: None if text is None else json.loads(text)
    return None


def _clean_list(clean: Clean, values: Any) -> Any:
    return [*map(clean, values)] if isinstance(values, list | np.ndarray) else values


def _clean_record(fields: Mapping[str, Clean | None], listed: bool, value: Any) -> Any:
    if not isinstance(value, dict):  # null, or what `datasets` made of it, such as a picture
        return value
    kept = {name: each for name, each in value.items() if each is not None or not listed}
    return {name: each if (clean := fields.get(name)) is None else clean(each) for name, each in kept.items()}


def clean_unknown(value: Any, *, lists: type[Any] = list, listed: bool = False) -> Any:
    """Clean a value whose type is not known, but for one of Arrow's; ``lists`` are of this class.

    Of a list of numbers, one is looked at.
    """
    if isinstance(value, dict):
        kept = {name: each for name, each in value.items() if each is not None or not listed}
        return {name: clean_unknown(each, lists=lists, listed=listed) for name, each in kept.items()}
    if isinstance(value, lists) and isinstance(next(iter(value), 0), (dict, lists, type(None))):
        return [clean_unknown(each, lists=lists, listed=True) for each in value]
    return value
