"""Types of columns that a reader of rows can tell apart, and the files that have others than most."""

from __future__ import annotations

import pyarrow as pa
import pytest

from streampack.sources.schemas import differing, type_of


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (pa.string(), "string"),
        (pa.dictionary(pa.int32(), pa.large_string()), "string"),
        (pa.binary(4), "binary"),
        (pa.uint16(), "integer"),
        (pa.float16(), "float"),
        (pa.list_(pa.large_string()), "list of string"),
        (pa.list_(pa.int8(), 3), "list of integer"),
        (pa.bool_(), "bool"),
        (pa.null(), "null"),
    ],
)
def test_types_whose_values_are_the_same_in_python_have_one_name(kind: pa.DataType, name: str) -> None:
    assert type_of(kind) == name


def test_columns_of_most_files_must_be_in_all() -> None:
    schemas = [{"a": "string", "b": "float"}] * 3 + [
        {"a": "string"},
        {"a": "null", "b": "float", "c": "bool"},
    ]
    assert differing(schemas, None) == {3: "it has no column 'b'; it has 'a'"}
    assert differing(schemas, ["a"]) == {}
    assert differing([*schemas, None], ["c"]).keys() == {0, 1, 2, 3}


def test_no_schema_is_no_problem() -> None:
    assert differing([None, None], ["a"]) == {}
    assert differing([], None) == {}


def test_a_column_of_half_of_the_files_may_be_missing_in_the_others() -> None:
    half = [{"a": "string", "b": "float"}, {"a": "string"}]
    assert differing(half, None) == {}
    assert differing([*half, {"a": "string", "b": "float"}], None).keys() == {1}


def test_columns_without_values_do_not_decide_the_type() -> None:
    schemas = [{"a": "null"}, {"a": "null"}, {"a": "null"}, {"a": "string"}, {"a": "string"}, {"a": "float"}]
    assert differing(schemas, ["a"]) == {5: "its column 'a' is float, and string in most files"}
