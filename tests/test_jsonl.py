"""A line of JSON, and the reader of one file's lines."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from streampack import JSONLSource
from streampack.sources import Reading
from streampack.sources.jsonl import parsed
from tests.corpus import write


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b'{"a": 1}', {"a": 1}),
        (b' \t{"a": "\xef\xbb\xbf"}\r\n', {"a": "\ufeff"}),
        (b'\xef\xbb\xbf{"a": 1}\n', {"a": 1}),  # where a file was joined to another
        (b'{"a": "\xed\xa0\x80"}', {"a": "\ud800"}),  # half a pair, raw and escaped
        (b'{"a": "\\ud800"}', {"a": "\ud800"}),
        (
            b'{"a": 1, "a": 2, "b": 123456789012345678901234567890}',
            {"a": 2, "b": 123456789012345678901234567890},
        ),
    ],
)
def test_a_line_is_parsed_as_json_does(line: bytes, value: Any) -> None:
    assert parsed(line) == json.loads(line) == value


@pytest.mark.parametrize(
    "line",
    [b'  {"a":x}', b'{"a": 1} {', b"{", b"\xff", b'{"a": "\xc3"}', b"{'a': 1}", b"[1,]", b" \xc2\xa0{}"],
)
def test_what_json_refuses_is_refused_with_the_same_place(line: bytes) -> None:
    with pytest.raises(ValueError, match=".") as ours:
        parsed(line)
    with pytest.raises(ValueError, match=".") as theirs:
        json.loads(line)
    assert str(ours.value) == str(theirs.value)


def test_readers_of_compressed_files_go_when_they_are_done(tmp_path: Path) -> None:
    """Without the garbage collector, which many switch off: each holds a decompressor and its buffers."""
    source = JSONLSource(write(tmp_path / "a.jsonl.gz", [{"t": 1}, {"t": 2}]))
    reader = source.read(Reading())
    next(reader)
    held = weakref.ref(reader.records)
    gc.disable()
    try:
        del reader
        assert held() is None
    finally:
        gc.enable()
