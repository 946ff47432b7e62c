"""Schemas of Parquet files, as far as they matter to a reader of rows, and files whose schema is not the others'."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from streampack.storage.details import Schema

ANY = "null"  # the type of a column that holds no value: it fits every other


def schema_of(footer: Any) -> dict[str, str]:
    """Return the types of a file's columns by their names, given pyarrow's ``FileMetaData``."""
    return {field.name: type_of(field.type) for field in footer.schema.to_arrow_schema()}


def type_of(kind: Any) -> str:
    """Return the name of a pyarrow type; types whose values are the same in Python have the same name.

    >>> import pyarrow
    >>> type_of(pyarrow.large_string()), type_of(pyarrow.int8()), type_of(pyarrow.list_(pyarrow.int64()))
    ('string', 'integer', 'list of integer')
    """
    from pyarrow import types

    if types.is_dictionary(kind):
        return type_of(kind.value_type)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return f"list of {type_of(kind.value_type)}"
    names = {
        "string": (types.is_string, types.is_large_string),
        "binary": (types.is_binary, types.is_large_binary, types.is_fixed_size_binary),
        "integer": (types.is_integer,),
        "float": (types.is_floating,),
    }
    for name, tests in names.items():
        if any(test(kind) for test in tests):
            return name
    return str(kind)


def differing(schemas: Sequence[Schema | None], columns: Iterable[str] | None) -> dict[int, str]:
    """Return for the numbers of files what they lack of the columns that most files have, or that are named.

    Of several types of a column, the most frequent is right. A schema of None is not known.

    >>> differing([{"a": "string"}, {"a": "integer"}, {"a": "string", "b": "float"}, {}], ["a"])
    {1: "its column 'a' is integer, and string in most files", 3: "it has no column 'a'; it has none"}
    """
    # Most files share a schema, so schemas are compared and not files.
    counts = Counter(tuple(schema.items()) for schema in schemas if schema is not None)
    total = sum(counts.values())
    types: dict[str, Counter[str]] = {}
    for schema, count in counts.items():
        for name, kind in schema:
            types.setdefault(name, Counter())[kind] += count
    wanted = (
        [name for name, found in types.items() if 2 * found.total() > total]
        if columns is None
        else list(columns)
    )
    right = {
        name: next((kind for kind, _ in types.get(name, Counter()).most_common() if kind != ANY), ANY)
        for name in wanted
    }
    problems = {schema: _problem(dict(schema), right) for schema in counts}
    found = (
        (number, problems[tuple(schema.items())])
        for number, schema in enumerate(schemas)
        if schema is not None
    )
    return {number: problem for number, problem in found if problem is not None}


def _problem(schema: Schema, right: Schema) -> str | None:
    for name, kind in right.items():
        if name not in schema:
            return f"it has no column {name!r}; it has {', '.join(map(repr, schema)) or 'none'}"
        if schema[name] not in (kind, ANY):
            return f"its column {name!r} is {schema[name]}, and {kind} in most files"
    return None
