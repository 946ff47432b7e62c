"""JSON arrays: records are found whatever is in them, one bad record costs one row, and a file is never held."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streampack import JSONLSource
from streampack.sources import Reading, as_source
from streampack.sources.reading import BadRecord
from streampack.storage.base import LocalStorage
from tests.harness.corpus import numbered, read_all, write

texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", '"', "\\", '\\"', "}, {", "]", '{"a": "', "\\\\\\", "\u2028", "\ufeff", "x" * 300, "漢字"]
    ),
)
values = st.recursive(
    st.one_of(texts, st.none(), st.integers(-3, 3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.dictionaries(texts, values, max_size=3), min_size=1, max_size=9),
    indent=st.sampled_from([None, 0, 4]),
    ascii_only=st.booleans(),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf", b" \r\n"]),
    sizes=st.tuples(st.sampled_from([1, 2, 7, 1 << 18]), st.sampled_from([1, 13])),
    lanes=st.integers(1, 5),
    window=st.sampled_from((0, 3)),
)
def test_every_record_exactly_once_on_any_lanes(
    tmp_path: Path,
    rows: Any,
    indent: int | None,
    ascii_only: bool,
    mark: bytes,
    sizes: Any,
    lanes: int,
    window: int,
) -> None:
    """Blocks may end anywhere, in an escape too, and cuts lie anywhere, in nested records too."""
    content = mark + json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode()
    (path := tmp_path / "rows.json").write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streampack.sources.formats.json_array.READ_BYTES", sizes[0])
        patch.setattr("streampack.sources.formats.lines.LEAST_PART", sizes[1])
        source = JSONLSource(path)
        assert read_all(source) == rows, "one lane, unshuffled: in order"
        found = [
            row
            for lane in range(lanes)
            for row in source.read(Reading(lane, num_lanes=lanes, seed=1, shuffle_window=window))
        ]
        found.sort(key=lambda row: row.row_id)
        assert [row.data for row in found] == rows
        assert source.fetch_many([row.row_id for row in found]) == rows
        sampled, scale = source.sample(100)
    assert {row.row_id for row in sampled} <= {row.row_id for row in found}
    assert scale >= 1
    for row in found:
        assert content[row.row_id[1] :].startswith(b"{")


ROWS = [{"i": i, "t": "}, {"} for i in range(6)]
A, B, *_, LAST = [json.dumps(row) for row in ROWS]
NAME = "write an array of JSON objects"
BAD: dict[str, tuple[str, list[int], list[str]]] = {
    "a trailing comma": (f"[{A}, {B},\n]\n", [0, 1], []),
    "nothing": ("[\n]", [], []),
    "a broken record": (f'[{A}, {{"i": 1, "t" 2}}, {LAST}]', [0, 5], ["not a line of JSON (Expecting ':'"]),
    "a single quote": (f"[{A}, {{'i': 1}}, {LAST}]", [0, 5], ["not a line of JSON (Expecting property name"]),
    "a list": (f"[{A}, [1, 2], {LAST}]", [0, 5], ["a row must be a JSON object, this is a list"]),
    "numbers": (
        f"[{A}, 7, null, {B}, 8]",
        [0, 1],
        [f"7, null is no record; {NAME}", f"8 is no record; {NAME}"],
    ),
    "only texts": ('["a", "b"]', [], [f'"a", "b" is no record; {NAME}']),
    "too long": (
        f'[{A}, {{"t": "{"x" * 999}"}}, {LAST}]',
        [0, 5],
        ["the record is longer than max_line_bytes=500"],
    ),
    "torn": (
        f"[{A}, {B}, {LAST[:9]}",
        [0, 1],
        ["its array has no end: the file was cut off, or the record at byte "],
    ),
    "torn between": (f"[{A}, {B},", [0, 1], ["its array has no end: the file was cut off"]),
    "a quote too few": (  # from there on, quotes begin where they should end
        f'[{A}, {{"i": 1, "t}}, {LAST}, {LAST}]',
        [0],
        [*["not a line of JSON"] * 2, "its array has no end: "],
    ),
    "two arrays": (f"[{A}]\n[{B}]", [0], ["more follows after the end of its array; write one array"]),
    "not UTF-8": (
        f'[{A}, {{"t": "\udcff"}}, {B}]',
        [0, 1],
        ["not a line of JSON ('utf-8' codec can't decode"],
    ),
}


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("case", BAD)
def test_only_what_is_wrong_is_a_bad_record(
    tmp_path: Path, case: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same ones from every cursor, on one lane and on three."""
    text, rows, reasons = BAD[case]
    data = text.encode(errors="surrogateescape")
    (path := tmp_path / f"a.json{suffix}").write_bytes(gzip.compress(data, mtime=0) if suffix else data)
    monkeypatch.setattr("streampack.sources.formats.lines.LEAST_PART", 20)
    source = JSONLSource(path, max_line_bytes=500)

    def read(lane: int, lanes: int, start: Any = None) -> tuple[list[Any], list[Any]]:
        reader, found = source.read(Reading(lane, num_lanes=lanes, start=start)), list[Any]()
        cursors = [reader.cursor]
        while True:
            try:
                if (row := next(reader, None)) is None:
                    return found, cursors
                found.append(row.data["i"])
            except BadRecord as error:
                found.append(error.reason)
            cursors.append(reader.cursor)

    found, cursors = read(0, 1)
    assert [each for each in found if isinstance(each, int)] == rows
    said = [each for each in found if isinstance(each, str)]
    assert len(said) == len(reasons)
    assert all(map(str.startswith, said, reasons)), said
    for k, cursor in enumerate(cursors):
        assert read(0, 1, cursor)[0] == found[k:]
    assert sorted(str(each) for lane in range(3) for each in read(lane, 3)[0]) == sorted(map(str, found))


def test_memory_does_not_grow_with_the_file_and_a_lane_reads_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"i": i, "t": "x" * 4000} for i in range(6000)], indent=2))
    size, taken = path.stat().st_size, 0
    read = LocalStorage.read

    def counted(self: LocalStorage, file: Any, start: int, stop: int) -> bytes:
        nonlocal taken
        taken += stop - start
        return read(self, file, start, stop)

    monkeypatch.setattr(LocalStorage, "read", counted)
    tracemalloc.start()
    try:
        source = JSONLSource(path)
        found = [row.data["i"] for lane in range(8) for row in source.read(Reading(lane, num_lanes=8))]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sorted(found) == list(range(6000))
    assert peak < 8 << 20, f"{peak / 2**20:.0f} MiB of {size / 2**20:.0f}"
    assert 2 * size <= taken < 2.4 * size, "once to find the cuts, and once to read"


def test_a_folder_has_its_jsonl_files_or_else_its_json_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(numbered(3)))
    assert read_all(as_source(tmp_path)) == numbered(3)
    write(tmp_path / "b.jsonl", numbered(2))
    assert read_all(as_source(tmp_path)) == numbered(2), "a .json beside them may be their description"


OTHERS = {
    "its rows are in the list 'data': write that alone (jq .data ": {
        "version": "1.1",
        "data": [{"text": "a"}],
    },
    "it is one object of columns, not rows: of a pandas frame write to_json": {
        "text": {"0": "a"},
        "n": {"0": 1},
    },
}


@pytest.mark.parametrize("message", OTHERS)
def test_an_object_that_holds_all_rows_is_refused(tmp_path: Path, message: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(OTHERS[message]))
    with pytest.raises(ValueError, match=re.escape(message)):
        read_all(JSONLSource(tmp_path / "a.json"))
    write(tmp_path / "a.json", [OTHERS[message]] * 2)
    assert len(read_all(JSONLSource(tmp_path / "a.json"))) == 2, "of several lines, each is a row"
