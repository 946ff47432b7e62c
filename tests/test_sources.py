from __future__ import annotations

import gc
import gzip
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streampack import Holdout, IterableSource, JSONLSource, MapSource
from streampack.sources import Reading, as_source
from streampack.sources.base import Reader
from streampack.sources.jsonl import divide
from streampack.sources.storage import LocalStorage
from streampack.sources.window import Part, Record, read_parts
from streampack.types import Row
from tests.conformance import check_positions

WINDOWS = (0, 1, 3, 1000)


def read_all(source: Any, *, num_lanes: int = 1, **settings: Any) -> list[Mapping[str, Any]]:
    """The rows of all lanes, lane after lane."""
    return [
        row.data
        for lane in range(num_lanes)
        for row in source.read(Reading(lane, num_lanes=num_lanes, **settings))
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """JSON lines; packed as the name says."""
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = zstandard.compress(data)
    path.write_bytes(data)
    return path


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"i": i, "text": "x" * (i * 7 % 23)} for i in range(count)]


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


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    assert sorted(row.origin for row in found) == [(0, offset) for offset in offsets]
    for row in found:
        line = content[: row.origin[1]].count(b"\n") + 1
        assert source.locate(row.origin) == f"{path}:{line}"
        assert source.fetch(row.origin) == row.data


def test_a_blank_line_after_the_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf\r\n{"t": 1}\n')
    assert read_all(JSONLSource(tmp_path / "a.jsonl")) == [{"t": 1}]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    from streampack.sources.storage import File

    manifest = [File(f"/{i}.jsonl" + ".gz" * z, f"{i}", size) for i, (size, z) in enumerate(sizes)]
    lanes = divide(manifest, num_lanes)
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
    assert [row.data for row in source.read(Reading(0, num_lanes=1, start=reader.position))] == rows[2000:]
    assert source.fetch(last.origin) == rows[1999]
    assert source.locate(last.origin) == f"{path}:2000"


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
        (lambda d: d, "no file matches '{d}'"),  # a folder
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
            assert reader.position, "still says where it stands"
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


# The window reader, over parts of integers.


class Numbers:
    """The numbers of one part; fails when told to."""

    def __init__(self, part: Part, offset: int, hiccup: Callable[[], None]) -> None:
        self.offset, self.stop, self.hiccup = offset, part.stop, hiccup

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> Record:
        self.hiccup()
        assert self.stop is not None
        if self.offset >= self.stop:
            raise StopIteration
        self.offset += 1
        return self.offset - 1, self.offset - 1, self.offset


class Hiccup(Exception):
    pass


def window_reader(
    sizes: list[int], *, window: int, seed: int = 0, start: Any = None, fails: frozenset[int] = frozenset()
) -> Reader:
    """Part f holds the numbers 100 f, 100 f + 1, ...; the calls (open, next, decode alike) in ``fails`` raise."""
    calls = itertools.count()

    def hiccup() -> None:
        if next(calls) in fails:
            raise Hiccup

    def open_part(part: Part, offset: int, following: Part | None) -> Numbers:
        hiccup()
        return Numbers(part, offset, hiccup)

    def decode(part: Part, offset: int, raw: int) -> dict[str, int]:
        hiccup()
        return {"n": raw}

    parts = [Part(f, 100 * f, 100 * f + size) for f, size in enumerate(sizes)]
    reading = Reading(seed=seed, shuffle_window=window, start=start)
    return read_parts(parts, reading, open_part=open_part, decode=decode)


part_sizes = st.lists(st.integers(0, 6), max_size=6)


@given(sizes=part_sizes, window=st.integers(0, 8), seed=st.integers(0, 2))
def test_positions_of_windows(sizes: list[int], window: int, seed: int) -> None:
    found = check_positions(lambda start: window_reader(sizes, window=window, seed=seed, start=start))
    in_order = [100 * f + i for f, size in enumerate(sizes) for i in range(size)]
    numbers = [row["n"] for row in found]
    assert sorted(numbers) == in_order
    if not window:
        assert numbers == in_order


@given(
    sizes=part_sizes,
    window=st.integers(0, 8),
    fails=st.frozensets(st.integers(0, 60), max_size=20),
)
def test_errors_change_nothing(sizes: list[int], window: int, fails: frozenset[int]) -> None:
    """Rows, positions and order are those of a run without errors; a restart after an error goes on right there."""
    whole = list(window_reader(sizes, window=window))
    reader = window_reader(sizes, window=window, fails=fails)
    found: list[Row] = []
    for _ in range(200):
        position = reader.position
        try:
            row = next(reader)
        except StopIteration:
            break
        except Hiccup:
            assert reader.position == position
            rest = list(window_reader(sizes, window=window, start=reader.position))
            assert [r.data for r in rest] == [r.data for r in whole[len(found) :]]
            continue
        assert row.position == position
        found.append(row)
    assert found == whole


def test_behind_a_windows_last_row_begins_the_next_window() -> None:
    """Not in the one that is used up: a resume would read it again, for nothing."""
    reader = window_reader([10] * 3, window=4)
    for count in range(1, 31):
        next(reader)
        assert reader.position[-1] == (count % 4 if count < 30 else 0)


def test_a_window_is_shuffled_as_a_whole() -> None:
    numbers = [row.data["n"] for row in window_reader([10] * 10, window=25)]
    assert numbers != sorted(numbers)
    parts = [n // 100 for n in numbers]
    assert parts != sorted(parts), "parts too"
    # Every window holds the records of its stretch of the permuted parts, and no others.
    order = list(
        dict.fromkeys(n // 100 for n in [row.data["n"] for row in window_reader([10] * 10, window=1)])
    )
    stretch = [100 * f + i for f in order for i in range(10)]
    for begin in range(0, 100, 25):
        assert sorted(numbers[begin : begin + 25]) == sorted(stretch[begin : begin + 25])
        assert numbers[begin : begin + 25] != stretch[begin : begin + 25]
    # No two windows in the same order.
    places = {number: place for place, number in enumerate(stretch)}
    orders = {tuple(places[n] - begin for n in numbers[begin : begin + 25]) for begin in range(0, 100, 25)}
    assert len(orders) == 4


# What holds for every source that shuffles.


def make_sources(tmp_path: Path) -> dict[str, Any]:
    rows = numbered(60)
    return {
        "jsonl": JSONLSource(write(tmp_path / "a.jsonl", rows)),
        "gz": JSONLSource(write(tmp_path / "a.jsonl.gz", rows)),
        "map": MapSource(rows),
        "iterable": IterableSource(rows, stride=True),
        "holdout": Holdout(MapSource(numbered(90)), share=0.3, part="train"),
    }


KINDS = ("jsonl", "gz", "map", "iterable", "holdout")


@pytest.mark.parametrize("kind", KINDS)
def test_shuffling(tmp_path: Path, kind: str) -> None:
    source = make_sources(tmp_path)[kind]
    state, numpy_state = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 - it is to stay

    def order(lane: int = 0, **settings: Any) -> list[int]:
        rows = source.read(Reading(lane, num_lanes=2, **{"shuffle_window": 20, **settings}))
        return [row.data["i"] for row in rows]

    lane = 0 if order(0) else 1  # a compressed file is all in one
    plain = order(lane, shuffle_window=0)
    assert sorted(order(lane)) == sorted(plain)
    orders = [plain, order(lane), order(lane, epoch=1), order(lane, seed=1), order(lane, epoch=1, seed=1)]
    assert len(set(map(tuple, orders))) == 5, "epoch and seed decide"
    assert orders[1] == order(lane), "and nothing else: two readings agree"
    one, other = (source.read(Reading(lane, num_lanes=2, shuffle_window=20)) for _ in range(2))
    interleaved = [(next(one).data["i"], next(other).data["i"]) for _ in range(10)]
    assert [a for a, _ in interleaved] == [b for _, b in interleaved] == orders[1][:10]
    assert random.getstate() == state
    assert np.random.get_state()[1].tolist() == numpy_state  # noqa: NPY002


def test_lanes_shuffle_differently() -> None:
    source = MapSource(numbered(60))
    lanes = [
        [row.data["i"] // 2 for row in source.read(Reading(lane, num_lanes=2, shuffle_window=1))]
        for lane in (0, 1)
    ]
    assert sorted(lanes[0]) == sorted(lanes[1])
    assert lanes[0] != lanes[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("window", [0, 7])
def test_positions_of_every_source(tmp_path: Path, kind: str, num_lanes: int, window: int) -> None:
    source = make_sources(tmp_path)[kind]
    found = []
    for lane in range(num_lanes):
        found += check_positions(
            lambda start, lane=lane: source.read(
                Reading(lane, num_lanes=num_lanes, epoch=1, seed=2, shuffle_window=window, start=start)
            ),
            announced=kind != "holdout",  # which learns only from a row's content that it passes it by
        )
    expected = [row for row in numbered(90) if source.keeps(row)] if kind == "holdout" else numbered(60)
    assert sorted(found, key=lambda row: row["i"]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_found_again(tmp_path: Path, kind: str) -> None:
    source = make_sources(tmp_path)[kind]
    places = set()
    for row in source.read(Reading(0, num_lanes=1, shuffle_window=7)):
        assert source.fetch(row.origin) == row.data
        places.add(source.locate(row.origin))
        if kind in ("jsonl", "gz"):
            assert source.locate(row.origin).endswith(f":{row.data['i'] + 1}")
        else:
            assert source.locate(row.origin).split()[-1] == str(row.data["i"])
    assert len(places) == len(read_all(source))


# Map-style data.


def test_map_style_rows_by_number() -> None:
    source = MapSource(numbered(7))
    assert [[row.data["i"] for row in source.read(Reading(lane, num_lanes=3))] for lane in range(3)] == [
        [0, 3, 6],
        [1, 4],
        [2, 5],
    ]
    assert read_all(source, num_lanes=9) == numbered(7), "some lanes are empty"


class Dataset:
    """A map-style dataset with one bad row."""

    def __init__(self, rows: list[Any], bad: int = -1, error: Exception | None = None) -> None:
        self.rows, self.bad, self.error = rows, bad, error

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index == self.bad and self.error is not None:
            raise self.error
        return self.rows[index]


@pytest.mark.parametrize("window", [0, 1])
def test_map_style_errors_consume_nothing(window: int) -> None:
    data = Dataset(numbered(20), 12, OSError("gone"))
    reader = MapSource(data).read(Reading(0, num_lanes=1, shuffle_window=window))
    found = []
    with pytest.raises(OSError, match="gone"):
        found.extend(row.data for row in reader)
    position = reader.position
    with pytest.raises(OSError, match="gone"):
        next(reader)
    assert reader.position == position
    data.bad = -1
    before = [row.data for row in MapSource(data).read(Reading(0, num_lanes=1, shuffle_window=window))]
    assert before[position[0] :] == [row.data for row in reader]


def test_map_style_must_hold_something() -> None:
    with pytest.raises(ValueError) as error:
        MapSource([])
    assert str(error.value) == "the dataset (list) is empty; it must have at least one row"


def test_map_style_fingerprint() -> None:
    rows = [{"tokens": [i, i + 1], "labels": [i, i + 1]} for i in range(100)]
    fingerprint = MapSource(rows).fingerprint()
    assert MapSource(Dataset(rows)).fingerprint() == fingerprint
    arrays = [{k: np.array(v) for k, v in row.items()} for row in rows]
    assert MapSource(arrays).fingerprint() == fingerprint
    assert MapSource(rows[:-1]).fingerprint() != fingerprint
    assert MapSource([*rows[:-1], rows[0]]).fingerprint() != fingerprint
    long = [{"tokens": np.arange(5000)}, {"tokens": np.arange(5000)}]
    before = MapSource(long).fingerprint()
    long[1]["tokens"][2500] = 7  # where numpy's repr shows an ellipsis
    assert MapSource(long).fingerprint() != before


# Iterables.


def test_what_can_be_read_once_is_refused() -> None:
    for once in ((row for row in numbered(3)), iter(numbered(3)), map(dict, numbered(3))):
        with pytest.raises(ValueError, match=r"can be read only once.*pass a function that makes it"):
            IterableSource(once)
        with pytest.raises(ValueError, match="can be read only once"):
            as_source(once)


@pytest.mark.parametrize("rows", [numbered(10), lambda: iter(numbered(10)), lambda: numbered(10)])
def test_iterables_and_functions_of_iterables(rows: Any) -> None:
    source = IterableSource(rows)
    assert read_all(source) == numbered(10)
    assert read_all(source) == numbered(10), "and once more"
    assert source.rows_read == 20
    assert source.max_lanes == 1


@given(count=st.integers(0, 12), num_lanes=st.integers(1, 5))
def test_strides_share_the_rows_out(count: int, num_lanes: int) -> None:
    source = IterableSource(numbered(count), stride=True)
    assert source.max_lanes is None
    for lane in range(num_lanes):
        assert [row.data for row in source.read(Reading(lane, num_lanes=num_lanes))] == numbered(count)[
            lane::num_lanes
        ]


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("lane", [0, 1])
def test_a_generator_that_raises_midway(window: int, lane: int) -> None:
    """A generator that raised is finished, and a naive reader would take that for the end of the data."""
    broken = [True]

    def rows() -> Iterator[dict[str, Any]]:
        for row in numbered(20):
            if row["i"] == 11 and broken[0]:
                raise OSError("gone")
            yield row

    source = IterableSource(rows, stride=True)
    reader = source.read(Reading(lane, num_lanes=2, shuffle_window=window))
    found = []
    for _ in range(3):
        with pytest.raises(OSError, match="gone"):
            found.extend(row.data["i"] for row in reader)
    broken[0] = False
    found += [row.data["i"] for row in reader]
    assert sorted(found) == list(range(lane, 20, 2))


def test_iterable_fingerprint_is_the_first_row() -> None:
    assert IterableSource(numbered(3)).fingerprint() == IterableSource(numbered(4)).fingerprint()
    assert IterableSource(numbered(3)).fingerprint() != IterableSource(numbered(3)[1:]).fingerprint()
    assert IterableSource([]).fingerprint() != IterableSource(numbered(3)).fingerprint()
    long = [{"tokens": np.arange(5000)}]
    before = IterableSource(long).fingerprint()
    long[0]["tokens"][2500] = 7
    assert IterableSource(long).fingerprint() != before


# Estimates.


def texts_of(count: int) -> list[dict[str, Any]]:
    """Sorted by length, so that the first rows say nothing of the rest."""
    rng = np.random.default_rng(0)
    return [{"text": "x" * n} for n in sorted(rng.lognormal(4, 1, count).astype(int).tolist())]


@pytest.mark.parametrize("files", [1, 3])
def test_probe_of_plain_files(tmp_path: Path, files: int) -> None:
    rows = texts_of(20_000)
    step = len(rows) // files
    source = JSONLSource(
        [write(tmp_path / f"{i}.jsonl", rows[i * step : (i + 1) * step]) for i in range(files)]
    )
    probed, scale = source.probe(256)
    assert 200 <= len(probed) <= 260
    true = sum(len(row["text"]) for row in rows)
    assert sum(len(row["text"]) for row in probed) * scale == pytest.approx(true, rel=0.15)
    assert source.bytes_read < 300 * 1000, "not the whole corpus"


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_probe_of_compressed_files(tmp_path: Path, suffix: str) -> None:
    rows = texts_of(20_000)
    rng = random.Random(0)
    rng.shuffle(rows)  # only its beginning is looked at
    rows = [{"text": "".join(rng.choices("etaoin shrdlu", k=len(row["text"])))} for row in rows]
    source = JSONLSource(write(tmp_path / f"a.jsonl{suffix}", rows))
    probed, scale = source.probe(512)
    true = sum(len(row["text"]) for row in rows)
    assert sum(len(row["text"]) for row in probed) * scale == pytest.approx(true, rel=0.35)
    small = JSONLSource(write(tmp_path / f"small.jsonl{suffix}", rows[:40]))
    probed, scale = small.probe(512)
    assert (len(probed), scale) == (40, pytest.approx(1))


@pytest.mark.parametrize(("suffix", "opened"), [("", 64), (".gz", 16)])
def test_probe_of_more_files_than_rows_are_wanted(
    tmp_path: Path, suffix: str, opened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = texts_of(6000)
    random.Random(0).shuffle(rows)
    names = [write(tmp_path / f"{i:03}.jsonl{suffix}", rows[i * 12 : i * 12 + 12]) for i in range(500)]
    source, looked = JSONLSource(names), set()
    fetch = LocalStorage.fetch

    def watched(storage: LocalStorage, file: Any, start: int, stop: int) -> bytes:
        looked.add(file.name)
        return fetch(storage, file, start, stop)

    monkeypatch.setattr(LocalStorage, "fetch", watched)
    probed, scale = source.probe(64)
    assert 0.8 * opened <= len(looked) <= opened
    assert 60 <= len(probed) <= 70
    true = sum(len(row["text"]) for row in rows)
    assert sum(len(row["text"]) for row in probed) * scale == pytest.approx(true, rel=0.3)
    assert len({number // 50 for number in map(int, (name[:3] for name in looked))}) >= 8, "from all over"


def test_probe_of_rows_that_are_alone_in_their_files(tmp_path: Path) -> None:
    texts = [{"text": "x" * n} for n in range(100, 1100, 10)]
    source = JSONLSource([write(tmp_path / f"{i:03}.jsonl", [row]) for i, row in enumerate(texts)])
    probed, scale = source.probe(400)
    assert len(probed) > 90
    true = sum(len(row["text"]) for row in texts)
    assert sum(len(row["text"]) for row in probed) * scale == pytest.approx(true, rel=0.05)


def test_a_listing_asks_once_for_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata servers are what 1,024 ranks wear out first."""
    names = [write(tmp_path / f"{i:03}.jsonl", [{"text": "x" * 5000}]) for i in range(100)]
    asked, look = [], os.stat

    def watched(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        asked.append(str(path))
        return look(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", watched)
    for paths in (names, str(tmp_path / "*.jsonl")):
        asked.clear()
        assert len(JSONLSource(paths).files) == 100
        assert sorted(path for path in asked if path.endswith("0.jsonl")) == sorted(map(str, names[::10]))


def test_probe_of_small_and_of_map_style_data(tmp_path: Path) -> None:
    source = JSONLSource(write(tmp_path / "a.jsonl", numbered(5)))
    probed, scale = source.probe(256)
    assert (sorted(row["i"] for row in probed), scale) == ([0, 1, 2, 3, 4], pytest.approx(1))
    probed, scale = MapSource(texts_of(5000)).probe(100)
    assert len(probed) in (100, 101)
    assert sum(len(row["text"]) for row in probed) * scale == pytest.approx(
        sum(len(row["text"]) for row in texts_of(5000)), rel=0.15
    )
    assert MapSource(numbered(3)).probe(100) == (numbered(3), 1.0)
    with pytest.raises(ValueError, match="the length of an iterable is unknown; set max_steps"):
        IterableSource(numbered(3)).probe(10)


def test_natural_lanes(tmp_path: Path) -> None:
    assert MapSource(numbered(100)).natural_lanes() == 1
    assert MapSource(Dataset([{}] * 5000)).natural_lanes() == 9
    assert IterableSource(numbered(10)).natural_lanes() == 1
    assert JSONLSource(write(tmp_path / "a.jsonl", numbered(10))).natural_lanes() == 1
    big = tmp_path / "big.jsonl"
    big.write_bytes(b'{"i": 1}\n' * (1 << 17))
    assert JSONLSource(big).natural_lanes() == 4


def test_a_compressed_file_fills_one_lane_however_large(tmp_path: Path) -> None:
    noise = [{"r": random.Random(i).random()} for i in range(60_000)]
    assert JSONLSource(write(tmp_path / "a.jsonl.gz", noise)).natural_lanes() == 1


# What is taken for what.


def test_as_source(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", numbered(3))
    for given_, kind in (
        (path, JSONLSource),
        (str(path), JSONLSource),
        (str(tmp_path / "*.jsonl"), JSONLSource),
        (numbered(3), MapSource),
        (Dataset(numbered(3)), MapSource),
        (lambda: numbered(3), IterableSource),
        ({1: 2}.values(), IterableSource),
    ):
        assert type(as_source(given_)) is kind
    source = MapSource(numbered(3))
    assert as_source(source) is source
    for nothing in (3, None, object()):
        with pytest.raises(
            ValueError, match=f"a {type(nothing).__name__} holds no rows; give a source, a path"
        ):
            as_source(nothing)
    with pytest.raises(ValueError, match="empty"):
        as_source([])


def test_an_iterable_dataset_with_a_length_is_an_iterable() -> None:
    """torch's Dataset has a __getitem__ that raises, and many an IterableDataset knows its length."""
    from torch.utils.data import IterableDataset

    class Sized(IterableDataset[dict[str, Any]]):
        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter(numbered(3))

    assert type(as_source(Sized())) is IterableSource
