"""JSON lines: dividing files, listing them, reading them."""

from __future__ import annotations

import gc
import glob
import itertools
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streampack import JSONLSource, Mix
from streampack.sources import Reading
from streampack.sources.files import divide
from streampack.sources.holdout import hold_out
from streampack.sources.jsonl import LEAST_PART
from tests.support.corpus import PACK, next_error, numbered, read_all, write

WINDOWS = (0, 1, 3, 1000)


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


def test_lines_that_begin_where_a_file_was_cut(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.jsonl", numbered(256)
    path.write_bytes(b"".join(json.dumps(row).encode().ljust(31) + b"\n" for row in rows))
    parts = divide([32 * 256], 2, least=LEAST_PART)
    assert {part.start % 32 for lane in parts for part in lane} == {0}
    assert sorted(row["i"] for row in read_all(JSONLSource(path), num_lanes=2)) == list(range(256))


def test_a_blank_line_after_the_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf\r\n{"t": 1}\n')
    assert read_all(JSONLSource(tmp_path / "a.jsonl")) == [{"t": 1}]


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
    compressed = [i for i, (_, z) in enumerate(sizes) if z]
    turns = {i: [(p.turn, p.turns) for lane in lanes for p in lane if p.file == i] for i in compressed}
    for of_file in turns.values():
        assert sorted(of_file) == [(turn, len(of_file)) for turn in range(len(of_file))]
        assert len(of_file) == 1 or len(compressed) < num_lanes, (
            "where each lane can have a file, none is shared"
        )
    assert whole or all(lanes)
    if not compressed:
        load = [sum(part.stop - part.start for part in lane if part.stop) for lane in lanes]
        assert max(load) - min(load) <= max(part.stop - part.start for part in parts if part.stop)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_of_several_members(tmp_path: Path, suffix: str) -> None:
    rows = numbered(3000)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    chunks = [lines[:1000], lines[1000:1001], b"", lines[1001:]]  # cut within a line
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(b"".join(map(PACK[suffix], chunks)))
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


def test_files_are_read_only_as_far_as_rows_are_needed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", numbered(50_000))
    source = JSONLSource(path)
    next(source.read(Reading(3, num_lanes=4, shuffle_window=16)))
    assert source.bytes_read < 20 * 60


def test_an_abandoned_reader_leaves_no_file_open(tmp_path: Path) -> None:
    """pytest turns an unclosed file's ResourceWarning into an error."""
    source = JSONLSource([write(tmp_path / f"a.jsonl{s}", numbered(50)) for s in ("", ".gz", ".zst")])
    for start in range(3):
        next(source.read(Reading(start, num_lanes=3)))
        source.fetch((start, 0))
    source.probe(10)
    gc.collect()


def test_paths_globs_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    a, b = write(tmp_path / "a.jsonl", [{"i": 1}]), write(tmp_path / "deep" / "b.jsonl", [{"i": 2}])
    c = write(tmp_path / "deep" / "er" / "c.jsonl", [{"i": 3}])

    def names(paths: Any) -> list[str]:
        return [file.name for file in JSONLSource(paths).files]

    assert names(a) == names(str(a)) == names([str(a)]) == ["a.jsonl"]
    assert names([b, a]) == names((a, str(b))) == names(path for path in (a, b)) == ["a.jsonl", "b.jsonl"]
    assert names(str(tmp_path / "**" / "*.jsonl")) == ["a.jsonl", "deep/b.jsonl", "deep/er/c.jsonl"]
    assert names([str(tmp_path / "*.jsonl"), c]) == ["a.jsonl", "c.jsonl"]
    assert names([tmp_path / "deep", a]) == ["a.jsonl", "b.jsonl", "er/c.jsonl"]
    assert names(f"{glob.escape(str(tmp_path))}/d*/**/*.jsonl") == ["deep/b.jsonl", "deep/er/c.jsonl"]
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
        (lambda d: d / "sub", "the folder {d}/sub holds no .jsonl or"),
        (lambda d: [], "no files given; name at least one"),
        (lambda d: "", "no file matches ''"),
        (lambda d: [d / "a.jsonl", d / "a.jsonl"], "{d}/a.jsonl is named twice; name every file once"),
        (lambda d: [d / "a.jsonl", d / "sub" / ".." / "a.jsonl"], "{d}/a.jsonl is named twice"),
        (lambda d: d / "empty", "{d}/empty: it is empty"),
        (lambda d: d / "blank", "{d}/blank: it holds blank lines only"),
    ],
)
def test_paths_that_are_refused(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
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
        assert str(error.value) == f"{path} from byte 0 on: it is empty"


def test_the_fingerprint_depends_on_names_and_content(tmp_path: Path) -> None:
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


def test_the_fingerprint_reads_only_the_ends_of_files(tmp_path: Path) -> None:
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


def test_a_file_that_changes_during_a_run(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i}.jsonl", numbered(5)) for i in range(2)]
    size = paths[1].stat().st_size
    source = JSONLSource(paths)
    before = paths[1].read_bytes()
    reader = source.read(Reading(0, num_lanes=1))
    assert [next(reader).data["i"] for _ in range(5)] == [0, 1, 2, 3, 4]
    paths[1].write_bytes(before + b'{"i": 5}\n')
    assert next_error(reader) == (
        f"{paths[1]} has {size + 9} bytes and had {size} when it was listed; a corpus must not change "
        "during a run: restore the file, or start again (after a new scan, if a manifest lists the file), with "
        'corpus_changes="allow" to resume'
    )
    paths[1].write_bytes(before)
    assert [row.data["i"] for row in reader] == [0, 1, 2, 3, 4], "restored, it goes on"


def test_no_row_is_lost_when_a_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_readers_of_compressed_files_are_freed_without_a_garbage_collector(tmp_path: Path) -> None:
    """Many switch it off, and each reader holds a decompressor and its buffers."""
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


def test_lines_are_counted_for_many_rows_near_the_beginning_of_plain_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streampack.sources.jsonl.COUNTED_BYTES", 30)
    rows = [{"i": i} for i in range(9)]
    path = write(tmp_path / "a.jsonl", rows)
    mixed = Mix([{"name": "one", "source": hold_out(JSONLSource(path), fraction=0.5)[0], "weight": 1}])
    offsets = [len(json.dumps(row)) + 1 for row in rows]
    for number, offset in enumerate(itertools.accumulate(offsets[:-1], initial=0)):
        near = f"{path}:{number + 1}" if offset <= 30 else f"{path}, byte {offset}"
        assert JSONLSource(path).locate_cheaply((0, offset)) == near
        assert mixed.locate_cheaply((0, 0, offset)) == f"one: {near}"
    packed = write(tmp_path / "b.jsonl.gz", rows)
    assert JSONLSource(packed).locate_cheaply((0, 9)) == f"{packed}, byte 9"
