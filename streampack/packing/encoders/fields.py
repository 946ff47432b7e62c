"""Numbers of answers and of their tokens: the columns that hold them, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streampack.packing.columns import shown
from streampack.packing.samples import missing_column

Columns = tuple[str, ...]
"""Where something of each answer is: in one column with a list, or in a column for each answer."""


def columns_of(fields: Any, name: str) -> dict[str, Columns]:
    """Return the columns of each field, of a setting that lists columns or maps names of fields to them.

    >>> columns_of(["margin"], "fields"), columns_of({"score": ["good", "bad"]}, "fields")
    ({'margin': ('margin',)}, {'score': ('good', 'bad')})
    """
    found = {}
    for field in fields or ():
        columns = fields[field] if isinstance(fields, Mapping) else field
        columns = (columns,) if isinstance(columns, str) else columns
        if isinstance(fields, str) or not isinstance(columns, Sequence) or not columns:
            raise ValueError(
                f"{name}={fields!r} names no columns; write [column, ...], {{field: column}}, or {{field: [column, "
                "...]} where each answer has its own"
            )
        found[field] = tuple(columns)
    return found


def numbers_of(row: Mapping[str, Any], fields: Mapping[str, Columns], answers: int) -> dict[str, list[float]]:
    """Return the numbers of each field, one for each answer; one number in a column is that of all."""
    found = {}
    for field, columns in fields.items():
        values = [value for _, value in entries_of(row, columns, listed=False)]
        single = len(columns) == 1
        numbers = checked_numbers(
            values[0] if single else values, ", ".join(columns), (answers,), *([()] if single else [])
        )
        found[field] = np.broadcast_to(numbers, answers).tolist()
    return found


def entries_of(
    row: Mapping[str, Any],
    columns: Columns,
    answers: int | None = None,
    *,
    listed: bool = True,
    option: str | None = None,
) -> list[tuple[str, Any]]:
    """Return for each answer of a row the name of its place, for errors, and what is there.

    One column is ``listed`` if it holds a list with an entry for each answer.
    """
    for column in columns:
        if column not in row:
            raise missing_column(row, column, option=option)
    entries = [(column, row[column]) for column in columns]
    if listed and len(columns) == 1:
        [(column, given)] = entries
        if isinstance(given, str | Mapping) or not hasattr(given, "__len__"):
            raise ValueError(
                f"column {column!r} holds a {type(given).__name__}; give a list with one entry for each answer"
            )
        entries = [(f"{column}[{i}]", value) for i, value in enumerate(given)]
    if answers not in (None, len(entries)):
        raise ValueError(
            f"column {', '.join(map(repr, columns))} has {len(entries)} entries for {answers} answers; give one for "
            "each"
        )
    return entries


def checked_numbers(value: Any, column: str, *shapes: tuple[int, ...]) -> Any:
    """Return what a column holds as an array of numbers that float32 holds, of one of these shapes."""
    try:
        found = np.asarray(value)
    except ValueError:  # numpy's error for lists of different lengths
        raise ValueError(
            f"column {column!r} holds lists of different lengths; give one number for each"
        ) from None
    except TypeError as error:  # torch's, for bfloat16
        raise ValueError(f"column {column!r} is no array of numpy ({error}); give float32") from None
    if found.dtype.kind not in "fiub" or not (np.abs(found) <= np.finfo(np.float32).max).all():
        raise ValueError(
            f"column {column!r} holds {shown(value)}; give finite numbers, and remove rows that lack them"
        )
    if found.shape not in shapes:
        wanted = " or ".join(f"{shape[0]} numbers" if shape else "one number" for shape in shapes)
        raise ValueError(f"column {column!r} has shape {list(found.shape)}; give {wanted}")
    return found
