"""Examples: a few rows of a source, always the same, by whose content two runs are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from streampack.fingerprint import digest, plain
from streampack.sources.base import BadRecord, Reader, own_row
from streampack.types import RowId

EXAMPLES = 12
UNKNOWN = "-"
"""The mark of a row that could not be read or encoded. It counts as equal to any other mark, so that a run can go on
after the row, or a bug in the encoder, was fixed."""
END = "end"
"""The mark that follows the last row's, if a source has fewer rows than `EXAMPLES`."""


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
            reader.skip()
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


@dataclass(frozen=True)
class MarkedRows:
    """The marks of some rows, and functions that describe the place of each of them."""

    marks: tuple[str, ...]
    places: tuple[Callable[[], str], ...]

    @classmethod
    def of(
        cls, examples: Iterable[Example], locate: Callable[[RowId], str], *, ended: bool = False
    ) -> MarkedRows:
        """Mark rows by their content. ``ended`` says that the source has no other rows."""
        given = list(examples)
        marks = [UNKNOWN if row.data is None else mark(row.data) for row in given]
        places = tuple(partial(locate, row.row_id) for row in given)
        return cls((*marks, END) if ended else tuple(marks), places)

    def state(self) -> str:
        """See `Compared`."""
        return " ".join(self.marks)

    def listed(self) -> str:
        """See `Compared`."""
        return self.state()

    def difference(self, theirs: Any) -> str | None:
        """Describe the first row whose content differs; None where all are the same."""
        if not isinstance(theirs, str):
            return "the rows that were looked at are unknown"
        number = differs_at(theirs.split(" ") if theirs else [], self.marks)
        if number is None:
            return None
        return (
            f"{self.places[number]()} is another row"
            if number < len(self.places)
            else f"it has {number} row(s)"
        )


def differs_at(theirs: Iterable[str], ours: Iterable[str]) -> int | None:
    """Return the index of the first mark that differs; None if all are the same.

    A list that ends with `UNKNOWN` may have broken off at an unreadable row, so then only as many marks are compared
    as the shorter list has.

    >>> differs_at(["a", "-", "c"], ["a", "b", "d"]), differs_at(["a"], ["a", "b"]), differs_at(["-"], ["a", "b"])
    (2, 1, None)
    """
    theirs, ours = list(theirs), list(ours)
    if UNKNOWN in (*theirs[-1:], *ours[-1:]):
        shorter = min(len(theirs), len(ours))
        theirs, ours = theirs[:shorter], ours[:shorter]
    for number, pair in enumerate(zip(theirs, ours, strict=False)):
        if pair[0] != pair[1] and UNKNOWN not in pair:
            return number
    return None if len(theirs) == len(ours) else min(len(theirs), len(ours))


def columns_of(examples: Iterable[Example]) -> list[str] | None:
    """Return the names of the columns of the first row that could be read; None if there is none."""
    for row in examples:
        if isinstance(row.data, Mapping):
            return sorted(map(str, row.data))
    return None
