"""`Details`: what a scanned manifest says of a file besides its name, size and tag, after checks: it is untrusted."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

LONGEST_PROBLEM = 300  # characters of why a file cannot be read
Schema = Mapping[str, str]
"""The types of columns by their names, such as ``{"text": "string"}``."""


class Details(NamedTuple):
    """The rows, row groups and schema of a file, as far as a scan found them.

    >>> Details(rows=5, groups=array("q", [3, 700, 2, 500])).row_groups
    [(3, 700), (2, 500)]
    """

    rows: int | None = None
    """The number of its rows."""

    groups: array[int] | None = None
    """For each row group of a Parquet file, its rows and its bytes before compression, one after the other."""

    schema: Schema | None = None

    @property
    def row_groups(self) -> list[tuple[int, int]]:
        """``groups`` as pairs of (rows, bytes)."""
        return list(pairwise(self.groups or ()))[::2]


def details_of(entry: Mapping[str, Any], schemas: Sequence[Schema]) -> Details:
    """Check an entry of a manifest, and return what it says.

    Raises:
        ValueError: if a number is none, or the rows of the row groups do not add up.
    """
    rows, groups, schema = entry.get("rows"), entry.get("groups"), entry.get("schema")
    if rows is not None and not _is_count(rows):
        raise ValueError(f"rows={rows!r} is no number of rows")
    if schema is not None and not (_is_count(schema) and schema < len(schemas)):
        raise ValueError(f"schema={schema!r} is none of the {len(schemas)} of the first line")
    if groups is not None:
        sound = isinstance(groups, list) and len(groups) % 2 == 0 and all(map(_is_count, groups))
        if not sound or rows != sum(groups[::2]):
            raise ValueError("the row groups are no numbers of rows and bytes, or do not add up to rows")
    return Details(
        rows, None if groups is None else array("q", groups), None if schema is None else schemas[schema]
    )


def problem_of(entry: Mapping[str, Any]) -> str | None:
    """Return why a file of a manifest cannot be read; None if it can.

    Raises:
        ValueError: if that is no text.
    """
    problem = entry.get("problem")
    if problem is not None and not (isinstance(problem, str) and problem.isprintable()):
        raise ValueError("a problem is text without line breaks")
    return problem[:LONGEST_PROBLEM] if problem else None


def schemas_of(header: Mapping[str, Any]) -> list[Schema]:
    """Return the schemas in the first line of a scanned manifest.

    Raises:
        ValueError: if there are none.
    """
    schemas = header.get("schemas")
    sound = isinstance(schemas, list) and all(
        isinstance(schema, dict) and all(isinstance(kind, str) for kind in schema.values())
        for schema in schemas
    )
    if not sound:
        raise ValueError("schemas is a list of objects, the types of columns by their names")
    return list(schemas or [])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62
