"""JSON lines: how files are divided, read and named, what is bad in them, and a line on its own."""

from __future__ import annotations

import bz2
import gc
import gzip
import itertools
import json
import lzma
import random
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streampack import IterablePackedDataset, JSONLSource
from streampack.sources import Reading
from streampack.sources.base import BadRecord
from streampack.sources.files import divide
from streampack.sources.lines import parsed
from streampack.types import Row
from tests.support.conformance import check_positions
from tests.support.corpus import numbered, read_all, write

WINDOWS = (0, 1, 3, 1000)


def said(error: BaseException) -> str:
    """All an error shows: its message and the notes below it."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


# JSON lines: the division.

texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", "naïve 漢字 🦊", "\u2028 \u2029 \x85 \x0b \x0c", "\ufeff", "x" * 300, '"\\\r\n']),
)
gaps = st.sampled_from(["", "", "", "\n", "\r\n", "  \n", "\t\r\n\n", "\x0c\n"])
endings = st.sampled_from(["\n", "\n", "\r\n", " \n"])


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, list[str], list[int]]:
    """(content, the rows' texts, the rows' offsets): any text, blank lines, BOM, CRLF, maybe no newline at the end."""
    content = b"\xef\xbb\xbf" if draw(st.booleans()) else b""
    rows, offsets = [], []
    for number, text in enumerate(draw(st.lists(texts, min_size=1, max_size=8))):
        if number:  # a blank line between the mark and the first row: see the test of its own
            content += draw(gaps).encode()
        line = json.dumps({"t": text}, ensure_ascii=draw(st.booleans()))
        offsets.append(0 if number == 0 else len(content))
        content += line.encode() + draw(endings).encode()
        rows.append(text)
    content += draw(gaps).encode()
    if draw(st.booleans()):
        content = content.rstrip()
    return content, rows, offsets


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=files(), num_lanes=st.integers(1, 5), window=st.sampled_from(WINDOWS), seed=st.integers(0, 3))
def test_every_row_of_a_file_exactly_once(
    tmp_path: Path, file: tuple[bytes, list[str], list[int]], num_lanes: int, window: int, seed: int
) -> None:
    content, rows, offsets = file
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    source = JSONLSource(path)
    assert [row["t"] for row in read_all(source)] == rows, "one lane, unshuffled: in order"
    found = [
        row
        for lane in range(num_lanes)
        for row in source.read(Reading(lane, num_lanes=num_lanes, seed=seed, shuffle_window=window))
    ]
    assert sorted(row.data["t"] for row in found) == sorted(rows)
    assert sorted(row.row_id for row in found) == [(0, offset) for offset in offsets]
    for row in found:
        line = content[: row.row_id[1]].count(b"\n") + 1
        assert source.locate(row.row_id) == f"{path}:{line}"
        assert source.fetch(row.row_id) == row.data


def test_a_blank_line_after_the_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf\r\n{"t": 1}\n')
    assert read_all(JSONLSource(tmp_path / "a.jsonl")) == [{"t": 1}]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    suffixes=st.lists(st.sampled_from(["", "", ".gz", ".zst"]), min_size=4, max_size=4),
    num_lanes=st.integers(1, 6),
    window=st.sampled_from(WINDOWS),
)
def test_every_row_of_several_files_exactly_once(
    tmp_path: Path, counts: list[int], suffixes: list[str], num_lanes: int, window: int
) -> None:
    paths = []
    start = itertools.count()
    for number, (count, suffix) in enumerate(zip(counts, suffixes, strict=False)):
        rows = [{"i": next(start)} for _ in range(count)]
        paths.append(write(tmp_path / f"{number}.jsonl{suffix}", rows))
    source = JSONLSource(paths)
    rows = [row["i"] for row in read_all(source)]
    assert rows == list(range(sum(counts))), "in the files' order"
    assert sorted(row["i"] for row in read_all(source, num_lanes=num_lanes, shuffle_window=window)) == rows


@given(
    sizes=st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=5),
    num_lanes=st.integers(1, 9),
)
def test_the_division_covers_every_byte_once_and_evenly(
    sizes: list[tuple[int, bool]], num_lanes: int
) -> None:
    lanes = divide([size for size, _ in sizes], num_lanes, whole={i for i, (_, z) in enumerate(sizes) if z})
    assert len(lanes) == num_lanes
    parts = sorted(part for lane in lanes for part in lane if part.stop is not None)
    whole = [(i, size) for i, (size, z) in enumerate(sizes) if not z]
    covered = {i: [(part.start, part.stop) for part in parts if part.file == i] for i, _ in whole}
    for i, size in whole:
        edges = [0, *(stop for _, stop in covered[i])]
        assert [start for start, _ in covered[i]] == edges[:-1]
        assert edges[-1] == size
    compressed = [part.file for lane in lanes for part in lane if part.stop is None]
    assert sorted(compressed) == [i for i, (_, z) in enumerate(sizes) if z]
    if not compressed:
        load = [sum(part.stop - part.start for part in lane if part.stop) for lane in lanes]
        assert max(load) - min(load) <= max(part.stop - part.start for part in parts if part.stop)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("num_lanes", [1, 3])
def test_positions_of_jsonl(tmp_path: Path, suffix: str, window: int, num_lanes: int) -> None:
    paths = [write(tmp_path / f"{i}.jsonl{suffix}", numbered(13 + i)) for i in range(4)]
    source = JSONLSource(paths)
    found = []
    for lane in range(num_lanes):
        found += check_positions(
            lambda start, lane=lane: source.read(
                Reading(lane, num_lanes=num_lanes, epoch=2, seed=5, shuffle_window=window, start=start)
            )
        )
    assert len(found) == 4 * 13 + 6


@pytest.mark.parametrize(
    "pack",
    [
        lambda chunks: b"".join(map(gzip.compress, chunks)),
        lambda chunks: b"".join(map(zstandard.compress, chunks)),
    ],
    ids=["gz", "zst"],
)
def test_compressed_files_of_several_members(
    tmp_path: Path, pack: Any, request: pytest.FixtureRequest
) -> None:
    rows = numbered(3000)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    chunks = [lines[:1000], lines[1000:1001], b"", lines[1001:]]  # cut within a line
    path = tmp_path / f"rows.jsonl.{request.node.callspec.id}"
    path.write_bytes(pack(chunks))
    source = JSONLSource(path)
    assert read_all(source) == rows
    assert len(read_all(source, num_lanes=3)) == 3000
    reader = source.read(Reading(0, num_lanes=1))
    for row in itertools.islice(reader, 2000):
        last = row
    assert last.data == rows[1999]
    assert [row.data for row in source.read(Reading(0, num_lanes=1, start=reader.cursor))] == rows[2000:]
    assert source.fetch(last.row_id) == rows[1999]
    assert source.locate(last.row_id) == f"{path}:2000"


def test_files_are_read_as_needed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", numbered(50_000))
    source = JSONLSource(path)
    next(source.read(Reading(3, num_lanes=4, shuffle_window=16)))
    assert source.bytes_read < 20 * 60


def test_readers_may_be_dropped_halfway(tmp_path: Path) -> None:
    """pytest turns an unclosed file's ResourceWarning into an error."""
    source = JSONLSource([write(tmp_path / f"a.jsonl{s}", numbered(50)) for s in ("", ".gz", ".zst")])
    for start in range(3):
        next(source.read(Reading(start, num_lanes=3)))
        source.fetch((start, 0))
    source.probe(10)
    gc.collect()


# JSON lines: the manifest.


def test_one_many_glob_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    a, b = write(tmp_path / "a.jsonl", [{"i": 1}]), write(tmp_path / "deep" / "b.jsonl", [{"i": 2}])
    c = write(tmp_path / "deep" / "er" / "c.jsonl", [{"i": 3}])

    def names(paths: Any) -> list[str]:
        return [file.name for file in JSONLSource(paths).files]

    assert names(a) == names(str(a)) == names([str(a)]) == ["a.jsonl"]
    assert (
        names([b, a]) == names((a, str(b))) == names(path for path in (a, b)) == ["a.jsonl", "deep/b.jsonl"]
    )
    assert names(str(tmp_path / "**" / "*.jsonl")) == ["a.jsonl", "deep/b.jsonl", "deep/er/c.jsonl"]
    assert names([str(tmp_path / "*.jsonl"), c]) == ["a.jsonl", "deep/er/c.jsonl"]
    monkeypatch.chdir(tmp_path)
    assert names("*.jsonl") == ["a.jsonl"]
    source = JSONLSource("a.jsonl")
    monkeypatch.chdir("/")
    assert read_all(source) == [{"i": 1}], "the path holds wherever the process goes"


def test_a_name_with_glob_characters_is_a_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a[1]*.jsonl", [{"i": 1}])
    write(tmp_path / "a1x.jsonl", [{"i": 2}])
    assert read_all(JSONLSource(path)) == [{"i": 1}]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda d: d / "none.jsonl",
            "no file matches '{d}/none.jsonl' (looked in {cwd}); check the path or the glob",
        ),
        (lambda d: str(d / "*.txt"), "no file matches '{d}/*.txt'"),
        (lambda d: d / "sub", "the folder {d}/sub holds no .jsonl or"),
        (lambda d: [d / "a.jsonl", d / "none.jsonl"], "no file matches '{d}/none.jsonl'"),
        (lambda d: [], "no files given; name at least one"),
        (lambda d: "", "no file matches ''"),
        (lambda d: [d / "a.jsonl", d / "a.jsonl"], "{d}/a.jsonl is named twice; name every file once"),
        (lambda d: [str(d / "*.jsonl"), d / "a.jsonl"], "{d}/a.jsonl is named twice"),
        (lambda d: [d / "a.jsonl", d / "sub" / ".." / "a.jsonl"], "{d}/a.jsonl is named twice"),
        (lambda d: d / "empty", "{d}/empty is empty; remove it from the corpus"),
        (lambda d: [d / "a.jsonl", d / "empty"], "{d}/empty is empty"),
        (lambda d: d / "blank", "{d}/blank is empty"),
    ],
)
def test_bad_manifests(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
    write(tmp_path / "a.jsonl", [{"i": 1}])
    (tmp_path / "sub").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "blank").write_text(" \r\n\t\n")
    with pytest.raises(ValueError) as error:
        JSONLSource(make(tmp_path))
    assert str(error.value).startswith(message.format(d=tmp_path, cwd=Path.cwd()))


def test_an_empty_compressed_file_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", [])
    reader = JSONLSource(path).read(Reading(0, num_lanes=1))
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            next(reader)
        assert str(error.value) == f"{path} holds no rows; remove it from the corpus"


def test_fingerprint_of_files(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        write(tmp_path / folder / "a.jsonl", numbered(5))
        write(tmp_path / folder / "sub" / "b.jsonl", numbered(6))

    def fingerprint(folder: str) -> str:
        return JSONLSource(str(tmp_path / folder / "**" / "*.jsonl")).fingerprint()

    assert fingerprint("one") == fingerprint("other"), "a corpus may move"
    (tmp_path / "one" / "a.jsonl").touch()
    assert fingerprint("one") == fingerprint("other"), "the time says nothing"
    path = tmp_path / "one" / "a.jsonl"
    before = path.read_bytes()
    for changed in (b"#" + before[1:], before[:-2] + b"#\n", before + b"\n"):
        path.write_bytes(changed)
        assert fingerprint("one") != fingerprint("other")
    path.write_bytes(before)
    path.rename(path.with_name("c.jsonl"))
    assert fingerprint("one") != fingerprint("other")


def test_fingerprint_reads_the_ends_only(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", numbered(20_000))
    middle = path.stat().st_size // 2
    assert middle > 2 << 16
    before = JSONLSource(path).fingerprint()
    content = bytearray(path.read_bytes())
    content[middle] ^= 1
    path.write_bytes(content)
    assert JSONLSource(path).fingerprint() == before
    content[-(1 << 16)] ^= 1
    path.write_bytes(content)
    assert JSONLSource(path).fingerprint() != before


# JSON lines: bad content.


def next_error(reader: Iterator[Row]) -> str:
    """The message of the error that comes next, the same when asked again."""
    messages = []
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            next(reader)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    return messages[0]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("num_lanes", [1, 4])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b"{'i': 1}",
            "not a line of JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
        ),
        (b'{"i": 1', "not a line of JSON (Expecting ',' delimiter"),
        (b'{"i": 1} {"i": 2}', "not a line of JSON (Extra data"),
        (b'{"i": "\xff\xfe"}', "not a line of JSON ('utf-8' codec can't decode byte 0xff in position 7"),
        (b"\x00\x00", "not a line of JSON"),
        (b"[1, 2]", "a row must be a JSON object, this is a list"),
        (b'"text"', "a row must be a JSON object, this is a str"),
        (b"null", "a row must be a JSON object, this is a NoneType"),
        (b"3", "a row must be a JSON object, this is a int"),
    ],
)
def test_bad_lines_are_named_by_file_and_line(
    tmp_path: Path, suffix: str, num_lanes: int, line: bytes, message: str
) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    good = [b'{"i": %d, "text": "%s"}' % (i, b"x" * 30) for i in range(20)]
    content = b"\n".join([*good[:10], b"", line, *good[10:]]) + b"\n"
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix](content))
    source = JSONLSource(path)
    rows, errors = [], []
    for lane in range(num_lanes):
        reader = source.read(Reading(lane, num_lanes=num_lanes))
        try:
            rows.extend(row.data["i"] for row in reader)
        except ValueError:
            errors.append(next_error(reader))
            assert reader.cursor, "still says where it stands"
    assert len(errors) == 1
    assert errors[0].startswith(f"{path}:12: {message}")
    assert len(set(rows)) == len(rows) >= 10


def test_a_file_that_changes_during_a_run(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i}.jsonl", numbered(5)) for i in range(2)]
    size = paths[1].stat().st_size
    source = JSONLSource(paths)
    before = paths[1].read_bytes()
    reader = source.read(Reading(0, num_lanes=1))
    assert [next(reader).data["i"] for _ in range(5)] == [0, 1, 2, 3, 4]
    paths[1].write_bytes(before + b'{"i": 5}\n')
    assert next_error(reader) == (
        f"{paths[1]} has {size + 9} bytes and had {size} when the run began; a corpus must not change "
        "during a run: restore the file, or start anew"
    )
    paths[1].unlink()
    for _ in range(2):
        with pytest.raises((ValueError, OSError), match=f"{paths[1]}"):
            next(reader)
    paths[1].write_bytes(before)
    assert [row.data["i"] for row in reader] == [0, 1, 2, 3, 4], "restored, it goes on"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "block", "checksum"])
def test_damaged_archives_are_errors_with_their_place(tmp_path: Path, suffix: str, damage: str) -> None:
    """Never a shorter corpus, never a row that is not there: whole rows, then an error, again and again."""
    rows = [{"i": i, "r": random.Random(i).random()} for i in range(15_000)]
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
    if damage != "flipped" or suffix == ".zst":  # gzip may give a line of nonsense before it notices
        assert "JSON" not in str(error.value), "it is the archive that is broken, not a line of it"
    assert "holds no rows" not in str(error.value)
    with pytest.raises(ValueError, match=f"^{path}"):
        next(reader)


def test_an_archive_that_ends_early_at_a_lines_end(tmp_path: Path) -> None:
    """What is there looks whole, and half the corpus is missing."""
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


def test_a_disk_that_fails_once_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without retries, the error comes in the middle of a line, whose beginning is already in a buffer."""
    rows = [{"i": i, "text": "x" * (i % 977)} for i in range(3000)]
    path = write(tmp_path / "a.jsonl", rows)
    assert path.stat().st_size > 4 << 18
    source = JSONLSource(path, retries=0)
    storage = source.corpus.storage
    reads = itertools.count()

    def fetch(*block: Any) -> bytes:
        if next(reads) in (2, 3, 5):
            raise OSError(5, "Input/output error")
        return type(storage).fetch(storage, *block)

    monkeypatch.setattr(storage, "fetch", fetch, raising=False)
    reader = source.read(Reading(shuffle_window=16))
    found, errors = [], 0
    while True:
        try:
            found.append(next(reader).data)
        except StopIteration:
            break
        except OSError as error:
            assert "Input/output error" in str(error)
            errors += 1
            assert errors < 10
    assert errors
    assert sorted(row["i"] for row in found) == list(range(3000))
    assert sorted(found, key=lambda row: row["i"]) == rows


# One line, and the reader of one file's lines.


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


PACKED = {
    "bzip2 data": bz2.compress,
    "xz data": lzma.compress,
    "gzip data": gzip.compress,
    "zstd data": zstandard.compress,
    "lzma data": lambda text: lzma.compress(text, format=lzma.FORMAT_ALONE),
    "UTF-16 text": lambda text: text.decode().encode("utf-16"),
}


@pytest.mark.parametrize("kind", PACKED)
def test_what_is_no_text_is_refused_whatever_its_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows.data"
    path.write_bytes(PACKED[kind](b'{"text": "a"}\n' * 5000))
    source = JSONLSource(path)
    with pytest.raises(ValueError, match=rf"{path} is {kind} and would be read as plain text; ") as error:
        next(source.read(Reading()))
    assert ("let its name end in" in str(error.value)) == (kind in ("gzip data", "zstd data"))
    with pytest.raises(ValueError, match=f"is {kind}"):
        list(stream := IterablePackedDataset(source, max_seq_len=8, on_bad_record="skip", num_lanes=1))
    assert stream.ledger().dropped_samples["bad"] == 0, "a file is no bad record"


def test_a_part_of_what_is_no_text_says_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.data"
    path.write_bytes(bz2.compress(random.Random(0).randbytes(20_000)))
    with pytest.raises(BadRecord, match=f"not a line of JSON .*; {path} is bzip2 data"):
        next(JSONLSource(path).read(Reading(1, num_lanes=2)))


@pytest.mark.parametrize("name", ["a.jsonl.bz2", "a.XZ", "a.zip", "a.tar.gz", "a.json.lz4", "a.parquet"])
def test_names_of_what_is_not_read_are_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    way_out = "ParquetSource" if "parquet" in name else "compress that as .gz or .zst"
    with pytest.raises(ValueError, match=rf"{tmp_path}/{name} is .*; .*{way_out}"):
        JSONLSource(tmp_path / name)


# Lines that are too long.


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("at", [0, 7, 19])
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
    assert {row["i"] for row in source.probe(20)[0]} <= set(found)
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
    """48 MiB without a newline, on each of eight lanes, most of which only look for its end."""
    path = tmp_path / f"a.jsonl{suffix}"
    data = b'{"i": 1}\n' + b"x" * (48 << 20) + b'\n{"i": 2}\n'
    path.write_bytes({"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix](data))
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
