"""Examples: a few rows of a source, always the same, by whose content two runs are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from streampack.fingerprint import digest, plain
from streampack.sources.reading import BadRecord, Reader, own_row
from streampack.types import RowId

EXAMPLES = 12
UNKNOWN = "-"
"""The mark of a row that could not be read or encoded."""
END = "end"
"""The mark that follows the last row's, if an iterable has fewer rows than `EXAMPLES`."""


class Example(NamedTuple):
    """A copy of one row; ``data`` is None if it could not be read."""

    row_id: RowId
    data: Any


def first_rows(reader: Reader, count: int) -> list[Example]:
    """Return the first rows of a reader; one that cannot be read has no data."""
    found: list[Example] = []
    while len(found) < count:
        try:
            row = next(reader, None)
        except BadRecord as error:
            found.append(Example(error.row_id, None))
            continue
        if row is None:
            break
        found.append(Example(row.row_id, own_row(row.data)))
    return found


def leading(rows: Iterator[Any], count: int, *, part: int) -> list[Example]:
    """Return the first rows of an iterator. The ``row_id`` of row n is ``(part, n)``.

    The first row that raises is the last one returned, and has no data.
    """
    found: list[Example] = []
    try:
        for row in islice(rows, count):
            found.append(Example((part, len(found)), own_row(row)))
    except Exception:
        found.append(Example((part, len(found)), None))
    return found


def example(row_id: RowId, read: Callable[[], Any]) -> Example:
    """Return the row that ``read`` returns, without data if ``read`` raises: training will raise the error again."""
    try:
        return Example(row_id, own_row(read()))
    except Exception:
        return Example(row_id, None)


def mark(value: Any) -> str:
    """Return eight hex digits of the digest of a row or a sample."""
    try:
        return digest(plain(value))[:8]
    except Exception:  # a row that contains itself, or an object with a property that raises
        return UNKNOWN


def marks(
    examples: Iterable[Example], mark_of: Callable[[Example], str] = lambda row: mark(row.data)
) -> dict[str, str]:
    """Return the marks of rows, or of what becomes of them, by their ids.

    >>> marks([Example((0, 7), None)])
    {'0.7': '-'}
    """
    return {".".join(map(str, row.row_id)): UNKNOWN if row.data is None else mark_of(row) for row in examples}


def leading_marks(given: Sequence[Example]) -> dict[str, str]:
    """Return the marks of rows that `leading` returned, and of the end if they are all rows of part 0."""
    found = marks(given)
    if len(given) < EXAMPLES and not (given and given[-1].data is None):
        found[f"0.{len(given)}"] = END
    return found
