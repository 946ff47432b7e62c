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
"""Where the numbers of a field are: in one column, or in one for each answer."""


def group_of(
    wholes: Sequence[Sample],
    *,
    fields: Mapping[str, Sequence[float]],
    token_fields: Mapping[str, Sequence[FloatArray]],
    share_prefix: bool,
) -> Group:
    """Return sequences as one group: the tokens that all begin with, and the rest of each.

    The prefix and a rest are always the sequence, token for token. Where there is no prefix to share, the sequences
    stand side by side.

    >>> whole = [Sample(np.array([5, 6, last]), np.array([-100, -100, last])) for last in (7, 8)]
    >>> pair = group_of(whole, fields={}, token_fields={}, share_prefix=True)
    >>> pair.tokens.tolist(), pair.lengths, pair.parents
    ([5, 6, 7, 8], (2, 1, 1), (-1, 0, 0))

    Args:
        wholes: the sequences, each from its first token to its last.
        fields: for each name one number a sequence.
        token_fields: for each name and sequence one number a token.
        share_prefix: False: the sequences stand side by side in any case.
    """
    shared = shared_prefix(wholes) if share_prefix else 0
    parts = [whole.cut(shared, whole.tokens.size) for whole in wholes]
    if shared:
        parts.insert(0, wholes[0].cut(0, shared))
    return Group(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.labels for part in parts]),
        lengths=[part.tokens.size for part in parts],
        parents=[ROOT, *[0] * len(wholes)] if shared else None,
        fields={name: [*[np.nan] * bool(shared), *values] for name, values in fields.items()},
        token_fields={
            name: np.concatenate([values[0][:shared], *(each[shared:] for each in values)])
            for name, values in token_fields.items()
        },
    )


def shared_prefix(wholes: Sequence[Sample]) -> int:
    """Return how many tokens sequences share: those that all begin with, up to the first that any of them trains.

    Each trains a token (`require_trained`), so each has a segment of its own.
    """
    limit = min(map(_untrained, wholes))
    return common_prefix([whole.tokens[:limit] for whole in wholes])


def common_prefix(sequences: Sequence[Any]) -> int:
    """Return the number of elements that all sequences begin with.

    >>> common_prefix([[1, 2, 3], [1, 2, 4, 5]])
    2
    """
    shortest = min(map(len, sequences))
    first = np.asarray(sequences[0][:shortest])
    for other in sequences[1:]:
        unequal = np.flatnonzero(first[:shortest] != np.asarray(other[:shortest]))
        shortest = int(unequal[0]) if unequal.size else shortest
    return shortest


def _untrained(sample: Sample) -> int:
    """Return the number of tokens before the first that is trained."""
    trained = np.flatnonzero(sample.labels != IGNORE_INDEX)
    return int(trained[0]) if trained.size else sample.tokens.size


def require_trained(sample: Sample, answer: str) -> Sample:
    """Return an encoded answer, or raise if none of its tokens is trained.

    Raises:
        ValueError: naming the ``answer``.
    """
    if _untrained(sample) == sample.tokens.size:
        raise ValueError(
            f"{answer} has no token to train: it is empty, or all of its messages are masked; leave the row out "
            "(skip_bad: True), or end texts with EOS (add_eos: True)"
        )
    return sample


def columns_of(fields: Any, name: str, *, several: bool = False) -> dict[str, Columns]:
    """Return the columns of each field, of a setting that lists columns or maps names of fields to them.

    >>> columns_of(["margin"], "fields")
    {'margin': ('margin',)}

    Args:
        fields: the setting.
        name: of the setting, for messages.
        several: whether a field may have a column for each answer.

    Raises:
        ValueError: for anything else.
    """
    wanted = "[column, ...] or {field: column}"
    if several:
        wanted += ", or {field: [column, ...]} where each answer has its own"
    if isinstance(fields, str):
        raise ValueError(f"{name}={fields!r} is text; write {wanted}")
    if not isinstance(fields, Mapping):
        fields = {column: column for column in fields or ()}
    found: dict[str, Columns] = {}
    for field, columns in fields.items():
        of_each = several and isinstance(columns, Sequence) and not isinstance(columns, str)
        given = tuple(columns) if of_each else (columns,)
        if not given or not all(isinstance(each, str) for each in (field, *given)):
            raise ValueError(f"{name} has {field!r}: {columns!r}; write {wanted}")
        found[field] = given
    return found


def numbers_of(row: Mapping[str, Any], field: str, columns: Columns, *, answers: int) -> list[float]:
    """Return the numbers of a field, one for each answer of a row.

    A column holds a list with one number for each answer, or one number for all.

    Raises:
        ValueError: for a missing column, a null, and another count than that of the answers.
    """
    if len(columns) > 1:
        if len(columns) != answers:
            raise ValueError(
                f"fields has {len(columns)} columns for {field!r}, and the row {answers} answers"
            )
        return [_numbers(row, column, ()).item() for column in columns]
    values = _numbers(row, columns[0], None)
    if values.ndim == 0:
        return [values.item()] * answers
    if values.shape != (answers,):
        raise ValueError(
            f"column {columns[0]!r} has shape {list(values.shape)} for {answers} answers; give one number for each, or "
            "one for all"
        )
    return [float(value) for value in values]


def token_numbers(row: Mapping[str, Any], column: str, sizes: Sequence[int]) -> list[FloatArray]:
    """Return a column that holds for each answer one number for each of its ids; ``sizes`` are their counts."""
    return [
        _as_numbers(each, f"column '{column}[{i}]'", (size,)).astype(np.float32)
        for i, (each, size) in enumerate(zip(each_of(row, column, len(sizes)), sizes, strict=True))
    ]


def each_of(row: Mapping[str, Any], column: str, answers: int) -> Sequence[Any]:
    """Return a column that has an entry for each answer.

    Raises:
        ValueError: for any other.
    """
    if column not in row:
        raise missing_column(row, column)
    given = row[column]
    if isinstance(given, str | Mapping) or not hasattr(given, "__len__") or len(given) != answers:
        count = f"{len(given)} entries" if hasattr(given, "__len__") else f"a {type(given).__name__}"
        raise ValueError(
            f"column {column!r} has {count} for {answers} answers; give a list of numbers for each"
        )
    entries: Sequence[Any] = given
    return entries


def _numbers(row: Mapping[str, Any], column: str, shape: tuple[int, ...] | None) -> Any:
    if column not in row:
        raise missing_column(row, column)
    return _as_numbers(row[column], f"column {column!r}", shape)


def _as_numbers(value: Any, place: str, shape: tuple[int, ...] | None) -> Any:
    """Return a value as an array of numbers; ``place`` names it in errors.

    Raises:
        ValueError: for anything but numbers that float32 holds, for NaN, and for another shape than the given one.
    """
    try:
        found = np.asarray(value)
    except ValueError:  # numpy's error for lists of different lengths
        raise ValueError(f"{place} holds lists of different lengths; give one number for each") from None
    if found.dtype.kind not in "fiub" or not (np.abs(found) <= np.finfo(np.float32).max).all():
        raise ValueError(
            f"{place} holds {shown(value)}; give finite numbers, and leave out rows that lack them"
        )
    if shape is not None and found.shape != shape:
        wanted = f"{shape[0]} numbers, one for each token" if shape else "one number"
        raise ValueError(f"{place} has shape {list(found.shape)}; give {wanted}")
    return found
