"""Deeply nested JSON is refused at one depth, wherever the parser is called."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from streampack import JSONLSource
from streampack.sources import Reading
from streampack.sources.lines import parsed
from streampack.storage.json_depth import DEEPEST, require_shallow, shallow_json


def nested(depth: int, *, mixed: bool = False) -> bytes:
    """Return a row of that many nested objects and arrays, itself included."""
    inner = depth - 1
    begin, end = (b'{"a":' * inner, b"}" * inner) if mixed else (b"[" * inner, b"]" * inner)
    return b'{"text": ' + begin + b"1" + end + b"}"


def from_below(frames: int, ask: Any) -> Any:
    return ask() if not frames else from_below(frames - 1, ask)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("frames", [0, 300])
@pytest.mark.parametrize("parse", [parsed, shallow_json])
def test_the_limit_is_the_same_everywhere(parse: Any, frames: int, mixed: bool) -> None:
    assert from_below(frames, lambda: parse(nested(DEEPEST, mixed=mixed)))["text"]
    for depth in (DEEPEST + 1, 900, 2000, 100_000):
        with pytest.raises(
            ValueError, match=f"{depth} objects and arrays lie inside one another, and 500 may"
        ):
            from_below(frames, lambda: parse(nested(depth, mixed=mixed)))  # noqa: B023


def test_brackets_in_strings_do_not_count() -> None:
    row = {"text": '[{"\\' * 2000, '"[[[["' * 300: ["\\", "[" * 700, {}] * 300}
    assert parsed(json.dumps(row).encode()) == row
    require_shallow(json.dumps([[]] * 5000).encode())


def test_a_line_that_exhausts_the_stack_is_a_bad_row() -> None:
    with pytest.raises(ValueError, match="nested too deep to be parsed here"):
        from_below(sys.getrecursionlimit() - 300, lambda: parsed(nested(400)))


def test_a_nested_row_is_a_bad_record_with_its_place(tmp_path: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"i": 0}\n' + nested(990) + b'\n{"i": 2}\n')
    reader = JSONLSource(path).read(Reading())
    assert next(reader).data == {"i": 0}
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not a line of JSON \(990 objects and arrays lie"):
        next(reader)
    reader.skip()
    assert next(reader).data == {"i": 2}
