"""A few fixed rows of a source. Two runs are compared by their content, and by their tokens."""

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
"""The mark of a row that could not be read or encoded. It is equal to any other: a run may go on after the row, or the
encoder's bug that it showed, was fixed."""
END = "end"
"""The mark behind the last row of a source that has fewer than `EXAMPLES`."""


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
    """Return an iterator's first rows, up to the first that raises; the ``row_id`` of row n is ``(part, n)``."""
    found: list[Example] = []
    try:
        for row in islice(rows, count):
            found.append(Example((part, len(found)), own_row(row)))
    except Exception:
        found.append(Example((part, len(found)), None))
    return found


def example(row_id: RowId, read: Callable[[], Any]) -> Example:
    """Return the row that ``read`` returns. An error leaves it without data: it is raised where the row is trained."""
    try:
        return Example(row_id, own_row(read()))
    except Exception:
        return Example(row_id, None)


def mark(value: Any) -> str:
    """Return eight hex digits of the digest of a row or a sample."""
    try:
        return digest(plain(value))[:8]
    except Exception:  # nested without end, or with an attribute that raises
        return UNKNOWN


@dataclass(frozen=True)
class MarkedRows:
    """The marks of some rows, and the places of those rows."""

    marks: tuple[str, ...]
    places: tuple[Callable[[], str], ...]  # describe each row's place, only when called

    @classmethod
    def of(
        cls, examples: Iterable[Example], locate: Callable[[RowId], str], *, ended: bool = False
    ) -> MarkedRows:
        """Mark rows by their content. ``ended``: the source has no more."""
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
    """Return the number of the first mark that differs. Where either list ends with `UNKNOWN`, only the shorter counts.

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
    """Return the names of the columns of the first row that could be read."""
    for row in examples:
        if isinstance(row.data, Mapping):
            return sorted(map(str, row.data))
    return None
