"""JSON lines: broken lines, damaged and foreign files, lines that are too long, and parsing one line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import zstandard

from streampack import IterablePackedDataset, JSONLSource
from streampack.sources import Reading
from streampack.sources.lines import parsed
from tests.support.corpus import PACK, next_error, numbered, read_all, write

BAD_LINES = {
    b"{'i': 1}": "not a line of JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
    b'{"i": 1': "not a line of JSON (Expecting ',' delimiter",
    b'{"i": 1} {"i": 2}': "not a line of JSON (Extra data",
    b'{"i": "\xff\xfe"}': "not a line of JSON ('utf-8' codec can't decode byte 0xff in position 7",
    b"\x00\x00": "not a line of JSON",
    b"[1, 2]": "a row must be a JSON object, this is a list",
    b'"text"': "a row must be a JSON object, this is a str",
    b"null": "a row must be a JSON object, this is a NoneType",
    b"3": "a row must be a JSON object, this is a int",
}


@pytest.mark.parametrize(("suffix", "num_lanes"), [("", 4), (".gz", 1), (".zst", 4)])
def test_bad_lines_are_named_by_file_and_line(tmp_path: Path, suffix: str, num_lanes: int) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    good = [b'{"i": %d, "text": "%s"}' % (i, b"x" * 30) for i in range(20)]
    for line, message in BAD_LINES.items():
        content = b"\n".join([*good[:10], b"", line, *good[10:]]) + b"\n"
        path.write_bytes(PACK[suffix](content))
        source = JSONLSource(path)
        rows, errors = [], []
        for lane in range(num_lanes):
            reader = source.read(Reading(lane, num_lanes=num_lanes))
            try:
                rows.extend(row.data["i"] for row in reader)
            except ValueError:
                errors.append(next_error(reader))
                assert reader.cursor
        assert len(errors) == 1
        assert errors[0].startswith(f"{path}:12: {message}")
        assert len(set(rows)) == len(rows) >= 10


@pytest.mark.parametrize(
    ("suffix", "damage"),
    [(".gz", "cut"), (".gz", "block"), (".gz", "checksum"), (".zst", "flipped"), (".zst", "checksum")],
)
def test_damaged_archives_are_errors_that_name_the_file(tmp_path: Path, suffix: str, damage: str) -> None:
    """The rows before the damage are read, and then each call raises the same error. No row is lost or invented."""
    rows = [{"i": i, "r": random.Random(i).random()} for i in range(8_000)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if suffix == ".gz":
        packed = bytearray(gzip.compress(lines))
    else:
        packed = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(lines))
    if damage == "cut":
        del packed[len(packed) // 2 :]
    elif damage == "flipped":
        packed[len(packed) // 2 : len(packed) // 2 + 64] = b"\xff" * 64
    elif damage == "block":
        packed[10] = 0xFF  # of gzip: the first block's type
    else:
        packed[-6 if suffix == ".gz" else -2] ^= 0xFF
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed)
    reader = JSONLSource(path).read(Reading(0, num_lanes=1))
    found = []
    with pytest.raises(ValueError, match=f"^{path}") as error:
        found.extend(row.data for row in reader)
    assert "JSON" not in str(error.value), "it is the archive that is broken, not a line of it"
    assert "holds no rows" not in str(error.value)
    with pytest.raises(ValueError, match=f"^{path}"):
        next(reader)


def test_an_archive_cut_off_at_the_end_of_a_line(tmp_path: Path) -> None:
    """All lines are whole, and half of the corpus is missing."""
    compressor = zstandard.ZstdCompressor().compressobj()
    first = "".join(json.dumps(row) + "\n" for row in numbered(100)).encode()
    packed = compressor.compress(first) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    kept = len(packed)
    packed += compressor.compress(first) + compressor.flush()
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(packed)
    assert len(read_all(JSONLSource(path))) == 200
    path.write_bytes(packed[:kept])
    with pytest.raises(ValueError, match=f"{path}"):
        read_all(JSONLSource(path))


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
def test_a_line_is_parsed_like_the_json_module(line: bytes, value: Any) -> None:
    assert parsed(line) == json.loads(line) == value


@pytest.mark.parametrize(
    "line",
    [b'  {"a":x}', b'{"a": 1} {', b"{", b"\xff", b'{"a": "\xc3"}', b"{'a': 1}", b"[1,]", b" \xc2\xa0{}"],
)
def test_bad_json_has_the_error_of_the_json_module(line: bytes) -> None:
    with pytest.raises(ValueError, match=".") as ours:
        parsed(line)
    with pytest.raises(ValueError, match=".") as theirs:
        json.loads(line)
    assert str(ours.value) == str(theirs.value)


PACKED = {
    "bzip2 data": bz2.compress,
    "xz data": lzma.compress,
    "gzip data": gzip.compress,
    "zstd data": zstandard.compress,
    "lzma data": lambda text: lzma.compress(text, format=lzma.FORMAT_ALONE),
    "UTF-16 text": lambda text: text.decode().encode("utf-16"),
}


@pytest.mark.parametrize("kind", PACKED)
def test_binary_content_is_refused_under_any_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows.data"
    path.write_bytes(PACKED[kind](b'{"text": "a"}\n' * 5000))
    source = JSONLSource(path)
    with pytest.raises(
        ValueError, match=rf"{path} from byte 0 on: it is {kind} and would be read as plain text; "
    ) as error:
        next(source.read(Reading()))
    assert ("let its name end in" in str(error.value)) == (kind in ("gzip data", "zstd data"))
    with pytest.raises(ValueError, match="the source has no rows at all; 1 bad shards left out"):
        list(IterablePackedDataset(source, max_seq_len=8, on_bad_record="skip", num_lanes=1))


@pytest.mark.parametrize("name", ["a.jsonl.bz2", "a.XZ", "a.tar.gz", "a.parquet"])
def test_names_of_other_formats_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    way_out = "ParquetSource" if "parquet" in name else "compress that as .gz or .zst"
    with pytest.raises(ValueError, match=rf"{tmp_path}/{name}: it is .*; .*{way_out}"):
        JSONLSource(tmp_path / name)


@pytest.mark.parametrize(("suffix", "num_lanes"), [("", 3), (".gz", 1), (".zst", 3)])
@pytest.mark.parametrize("at", [0, 19])
def test_a_line_that_is_too_long_is_a_bad_record(
    tmp_path: Path, suffix: str, num_lanes: int, at: int
) -> None:
    rows = numbered(20)
    rows[at] = {"i": at, "text": "x" * 300_000}
    source = JSONLSource(write(tmp_path / f"a.jsonl{suffix}", rows), max_line_bytes=1000)
    found, bad = [], []
    for lane in range(num_lanes):
        reader = source.read(Reading(lane, num_lanes=num_lanes))
        while True:
            try:
                if (row := next(reader, None)) is None:
                    break
                found.append(row.data["i"])
            except ValueError as error:
                bad.append(str(error))
                reader.skip()
    assert sorted(found) == [i for i in range(20) if i != at]
    words = f"a.jsonl{suffix}:{at + 1}: the line is longer than max_line_bytes=1000; write its rows shorter"
    assert len(bad) == 1
    assert words in bad[0]
    assert {row.data["i"] for row in source.probe(20)[0] if row.data} <= set(found)
    with pytest.raises(ValueError, match="the line is longer than max_line_bytes=1000"):
        source.fetch((0, sum(len(json.dumps(row)) + 1 for row in rows[:at])))


def test_the_longest_line_is_one_byte_shorter_than_the_first_that_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"i": 1, "text": "x" * 50}, {"i": 2}])
    longest = len(path.read_bytes().splitlines(keepends=True)[0])
    assert len(read_all(JSONLSource(path, max_line_bytes=longest))) == 2
    with pytest.raises(ValueError, match=f"longer than max_line_bytes={longest - 1}"):
        read_all(JSONLSource(path, max_line_bytes=longest - 1))
    path.write_bytes(path.read_bytes().rstrip() + b" " * 100)  # no newline at the end
    with pytest.raises(ValueError, match="longer than max_line_bytes=100"):
        read_all(JSONLSource(path, max_line_bytes=100))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_memory_does_not_grow_with_a_line(tmp_path: Path, suffix: str) -> None:
    """24 MiB without a newline, on each of eight lanes, most of which only look for its end."""
    path = tmp_path / f"a.jsonl{suffix}"
    data = b'{"i": 1}\n' + b"x" * (24 << 20) + b'\n{"i": 2}\n'
    path.write_bytes(PACK[suffix](data))
    source = JSONLSource(path, max_line_bytes=1 << 16)
    tracemalloc.start()
    try:
        found = []
        for lane in range(8):
            reader = source.read(Reading(lane, num_lanes=8))
            while True:
                try:
                    if (row := next(reader, None)) is None:
                        break
                    found.append(row.data["i"])
                except ValueError:
                    reader.skip()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sorted(found) == [1, 2]
    assert peak < 8 << 20, f"{peak / 2**20:.0f} MiB"
