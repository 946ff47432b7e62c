"""Groups of encoded answers: what all begin with is kept once, and numbers go to the answers and tokens they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from streampack.packing.columns import shown
from streampack.packing.groups import ROOT, Group
from streampack.packing.samples import missing_column
from streampack.types import IGNORE_INDEX, FloatArray, Sample

Columns = tuple[str, ...]
"""Where something of each answer is: in one column with a list, or in a column for each answer."""


def group_of(
    wholes: Mapping[str, Sample],
    *,
    fields: Mapping[str, Sequence[float]],
    token_fields: Mapping[str, Sequence[FloatArray]] | None = None,
    share_prefix: bool,
) -> Group:
    """Return sequences as one group: the tokens that all begin with, up to the first that any trains, and the rests.

    >>> wholes = {name: Sample(np.array([5, 6, name]), np.array([-100, -100, name])) for name in (7, 8)}
    >>> pair = group_of(wholes, fields={}, share_prefix=True)
    >>> pair.tokens.tolist(), pair.lengths, pair.parents
    ([5, 6, 7, 8], (2, 1, 1), (-1, 0, 0))

    Args:
        wholes: the sequences, each from its first token to its last, by names for errors.
        fields: for each name one number a sequence.
        token_fields: for each name and sequence one number for each of its last tokens.
        share_prefix: False: the sequences stand side by side, as they do where there is no prefix to share.
    """
    starts = []
    for name, whole in wholes.items():
        trained = np.flatnonzero(whole.labels != IGNORE_INDEX)
        if not trained.size:
            raise ValueError(
                f"{name} has no token to train: it is empty, or all of its messages are masked; leave the row out "
                "(skip_bad: True), or end texts with EOS (add_eos: True)"
            )
        starts.append(int(trained[0]))
    samples = [*wholes.values()]
    # Each trains a token, so each has a segment of its own.
    shared = common_prefix([whole.tokens[: min(starts)] for whole in samples]) if share_prefix else 0
    parts = [whole.cut(shared, whole.tokens.size) for whole in samples]
    if shared:
        parts.insert(0, samples[0].cut(0, shared))
    numbers = {}
    for name, values in (token_fields or {}).items():
        before = [
            np.full(whole.tokens.size - each.size, np.nan, np.float32)
            for whole, each in zip(samples, values, strict=True)
        ]
        full = [np.concatenate(both) for both in zip(before, values, strict=True)]
        numbers[name] = np.concatenate([full[0][:shared], *(each[shared:] for each in full)])
    return Group(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.labels for part in parts]),
        lengths=[part.tokens.size for part in parts],
        parents=[ROOT, *[0] * len(samples)] if shared else None,
        fields={name: [*[np.nan] * bool(shared), *values] for name, values in fields.items()},
        token_fields=numbers,
    )


def common_prefix(sequences: Sequence[Any]) -> int:
    """Return the number of elements that all sequences begin with.

    >>> common_prefix([[1, 2, 3], [1, 2, 4, 5]])
    2
    """
    shortest = min(map(len, sequences))
    equal = np.array(
        [np.asarray(each[:shortest]) == np.asarray(sequences[0][:shortest]) for each in sequences]
    )
    return int(np.logical_and.accumulate(equal.all(axis=0)).sum())


def columns_of(fields: Any, name: str) -> dict[str, Columns]:
    """Return the columns of each field, of a setting that lists columns or maps names of fields to them.

    >>> columns_of(["margin"], "fields"), columns_of({"score": ["good", "bad"]}, "fields")
    ({'margin': ('margin',)}, {'score': ('good', 'bad')})
    """
    wanted = "write [column, ...], {field: column}, or {field: [column, ...]} where each answer has its own"
    if isinstance(fields, str):
        raise ValueError(f"{name}={fields!r} is text; {wanted}")
    found = {}
    for field in fields or ():
        columns = fields[field] if isinstance(fields, Mapping) else field
        several = isinstance(columns, Sequence) and not isinstance(columns, str)
        found[field] = tuple(columns) if several else (columns,)
        if not found[field] or not all(isinstance(each, str) for each in (field, *found[field])):
            raise ValueError(f"{name} has {field!r}: {columns!r}; {wanted}")
    return found


def numbers_of(row: Mapping[str, Any], fields: Mapping[str, Columns], answers: int) -> dict[str, list[float]]:
    """Return the numbers of each field, one for each answer; one number in a column is that of all."""
    found = {}
    for field, columns in fields.items():
        if len(columns) == 1 and columns[0] in row:
            values = _numbers(row[columns[0]], columns[0], (), (answers,))
            found[field] = np.broadcast_to(values, answers).tolist()
        else:
            found[field] = [
                _numbers(value, name, ()).item() for name, value in entries_of(row, columns, answers)
            ]
    return found


def token_numbers_of(
    row: Mapping[str, Any], fields: Mapping[str, Columns], sizes: Sequence[int]
) -> dict[str, list[FloatArray]]:
    """Return for each field and answer one number for each of the answer's ids; ``sizes`` are their counts."""
    return {
        field: [
            _numbers(value, name, (size,)).astype(np.float32)
            for size, (name, value) in zip(sizes, entries_of(row, columns, len(sizes)), strict=True)
        ]
        for field, columns in fields.items()
    }


def entries_of(row: Mapping[str, Any], columns: Columns, answers: int | None = None) -> list[tuple[str, Any]]:
    """Return for each answer of a row the name of its place, for errors, and what is there."""
    for column in columns:
        if column not in row:
            raise missing_column(row, column)
    entries = [(column, row[column]) for column in columns]
    if len(columns) == 1:
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


def _numbers(value: Any, column: str, *shapes: tuple[int, ...]) -> Any:
    """Return what a column holds as an array of numbers that float32 holds, of one of these shapes."""
    try:
        found = np.asarray(value)
    except ValueError:  # numpy's error for lists of different lengths
        raise ValueError(
            f"column {column!r} holds lists of different lengths; give one number for each"
        ) from None
    if found.dtype.kind not in "fiub" or not (np.abs(found) <= np.finfo(np.float32).max).all():
        raise ValueError(
            f"column {column!r} holds {shown(value)}; give finite numbers, and leave out rows that lack them"
        )
    if found.shape not in shapes:
        wanted = " or ".join(f"{shape[0]} numbers" if shape else "one number" for shape in shapes)
        raise ValueError(f"column {column!r} has shape {list(found.shape)}; give {wanted}")
    return found
