"""JSON lines: what is a line, where files are cut, which files are named, what is read of them, and what is refused."""

from __future__ import annotations

import bz2
import gc
import glob
import gzip
import itertools
import json
import lzma
import random
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streampack import IterablePackedDataset, JSONLSource, Mix
from streampack.sources import Reading
from streampack.sources.holdout import hold_out
from streampack.storage.base import LocalStorage
from tests.harness.corpus import PACK, next_error, numbered, read_all, write

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


@pytest.mark.parametrize("window", [1, 25])
def test_a_window_is_shuffled_as_a_whole(tmp_path: Path, window: int) -> None:
    """Of files in an order of their own, each window holds the rows of its stretch, in an order that none other has."""
    for f in range(10):
        write(tmp_path / f"{f}.jsonl", [{"i": 10 * f + i} for i in range(10)])
    source = JSONLSource(tmp_path)
    order, found = ([row["i"] for row in read_all(source, shuffle_window=each)] for each in (1, window))
    stretch = [10 * f + i for f in dict.fromkeys(i // 10 for i in order) for i in range(10)]
    assert stretch != sorted(stretch), "the files are permuted, too"
    places = {number: place for place, number in enumerate(stretch)}
    orders = set()
    for begin in range(0, 100, window):
        own = [places[i] - begin for i in found[begin : begin + window]]
        assert sorted(own) == list(range(len(own)))
        orders.add(tuple(own))
    assert len(orders) == (100 // window if window > 1 else 1)


def test_lines_that_begin_where_a_file_was_cut(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.jsonl", numbered(256)
    path.write_bytes(b"".join(json.dumps(row).encode().ljust(31) + b"\n" for row in rows))
    source = JSONLSource(path)
    lanes = [[row.data["i"] for row in source.read(Reading(lane, num_lanes=2))] for lane in (0, 1)]
    assert list(map(len, lanes)) == [128, 128], "cut in the middle, where a line ends"
    assert sorted(lanes[0] + lanes[1]) == list(range(256))


def test_a_blank_line_after_the_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf\r\n{"t": 1}\n')
    assert read_all(JSONLSource(tmp_path / "a.jsonl")) == [{"t": 1}]


@pytest.mark.parametrize("num_lanes", [2, 5, 16])
def test_lanes_of_plain_files_are_about_as_long(tmp_path: Path, num_lanes: int) -> None:
    counts = (3000, 500, 1, 90)
    for number, count in enumerate(counts):
        (tmp_path / f"{number}.jsonl").write_bytes(b'{"text": "a line of as many bytes as all"}\n' * count)
    source = JSONLSource(tmp_path)
    found = [len(list(source.read(Reading(lane, num_lanes=num_lanes)))) for lane in range(num_lanes)]
    assert sum(found) == sum(counts)
    assert max(found) - min(found) <= 100, "a part, of some KB"


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


REFUSED = {
    "none": "no file matches '{d}/none' (looked in {cwd}); check the path or the glob",
    "sub": "the folder {d}/sub holds no .jsonl or",
    "empty": "{d}/empty: it is empty",
    "blank": "{d}/blank: it holds blank lines only",
    "a.jsonl.bz2": "{d}/a.jsonl.bz2: it is a binary file, judging by its name and would be read as plain text; make it",
    "a.XZ": "{d}/a.XZ: it is a binary file, judging by its name",
    "a.tar.gz": "{d}/a.tar.gz: it is a binary file, judging by its name",
    "a.parquet": "{d}/a.parquet: it is a Parquet file and would be read as plain text; read it with ParquetSource",
}


@pytest.mark.parametrize("name", REFUSED)
def test_names_that_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "blank").write_text(" \r\n\t\n")
    for other in ("a.jsonl.bz2", "a.XZ", "a.tar.gz", "a.parquet"):
        (tmp_path / other).write_bytes(b"x")
    with pytest.raises(ValueError) as error:
        JSONLSource(tmp_path / name)
    assert str(error.value).startswith(REFUSED[name].format(d=tmp_path, cwd=Path.cwd()))


def test_lists_of_paths_that_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"i": 1}])
    (tmp_path / "sub").mkdir()
    for paths, message in (
        ([], "no files given; name at least one"),
        ("", "no file matches ''"),
        ([path, path], f"{path} is named twice; name every file once"),
        ([path, tmp_path / "sub" / ".." / "a.jsonl"], f"{path} is named twice"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            JSONLSource(paths)


def test_the_fingerprint_depends_on_names_and_content(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", numbered(5)) for name in "ab"]
    fingerprint = JSONLSource(tmp_path).fingerprint()
    paths[0].touch()
    assert JSONLSource(tmp_path).fingerprint() == fingerprint, "the time says nothing"
    before = paths[0].read_bytes()
    for changed in (b"#" + before[1:], before[:-2] + b"#\n", before + b"\n"):
        paths[0].write_bytes(changed)
        assert JSONLSource(tmp_path).fingerprint() != fingerprint
    paths[0].write_bytes(before)
    paths[0].rename(tmp_path / "c.jsonl")
    assert JSONLSource(tmp_path).fingerprint() != fingerprint


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
    for number, offset in enumerate(range(0, 9 * 9, 9)):
        near = f"{path}:{number + 1}" if offset <= 30 else f"{path}, byte {offset}"
        assert JSONLSource(path).locate_cheaply((0, offset)) == near
        assert mixed.locate_cheaply((0, 0, offset)) == f"one: {near}"
    packed = write(tmp_path / "b.jsonl.gz", rows)
    assert JSONLSource(packed).locate_cheaply((0, 9)) == f"{packed}, byte 9"


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
    ("suffix", "at"), [(".gz", 10), (".gz", -6), (".zst", -2)], ids=["block", "sum", "zst"]
)
def test_damaged_archives_are_errors_that_name_the_file(tmp_path: Path, suffix: str, at: int) -> None:
    """The first block's type, or a checksum; `test_bad_records` has archives that are cut off or written over."""
    rows = [{"i": i, "r": random.Random(i).random()} for i in range(8_000)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    zstd = zstandard.ZstdCompressor(write_checksum=True)
    packed = bytearray(gzip.compress(lines) if suffix == ".gz" else zstd.compress(lines))
    packed[at] = packed[at] ^ 0xFF if at < 0 else 0xFF
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(packed)
    reader = JSONLSource(path).read(Reading(0, num_lanes=1))
    found = []
    with pytest.raises(ValueError, match=f"^{path}"):
        found.extend(row.data for row in reader)
    said = next_error(reader)
    assert found == rows[: len(found)]
    assert "JSON" not in said, "it is the archive that is broken, not a line of it"
    assert "holds no rows" not in said


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


# A sample of the rows, and how many lanes they fill.


def texts_of(count: int) -> list[dict[str, Any]]:
    """Return rows sorted by length, so that the first ones do not represent the rest."""
    rng = np.random.default_rng(0)
    return [{"text": "x" * n} for n in sorted(rng.lognormal(4, 1, count).astype(int).tolist())]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_probe_of_compressed_files(tmp_path: Path, suffix: str) -> None:
    rows = texts_of(20_000)
    rng = random.Random(0)
    rng.shuffle(rows)  # only its beginning is looked at
    rows = [{"text": "".join(rng.choices("etaoin shrdlu", k=len(row["text"])))} for row in rows]
    source = JSONLSource(write(tmp_path / f"a.jsonl{suffix}", rows))
    probed, scale = source.probe(512)
    true = sum(len(row["text"]) for row in rows)
    assert sum(len(row.data["text"]) for row in probed) * scale == pytest.approx(true, rel=0.35)
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
    assert sum(len(row.data["text"]) for row in probed) * scale == pytest.approx(true, rel=0.3)
    assert len({number // 50 for number in map(int, (name[:3] for name in looked))}) >= 8, "from all over"


def test_small_corpora_are_looked_at_as_a_whole(tmp_path: Path) -> None:
    source = JSONLSource(write(tmp_path / "a.jsonl", numbered(5)))
    probed, scale = source.probe(256)
    assert (sorted(row.data["i"] for row in probed), scale) == ([0, 1, 2, 3, 4], pytest.approx(1))
    big = tmp_path / "big.jsonl"
    big.write_bytes(b'{"i": 1}\n' * (1 << 17))
    assert [each.natural_lanes() for each in (source, JSONLSource(big))] == [1, 4]


LINES = {
    b'{"a": 1}': {"a": 1},
    b' \t{"a": "\xef\xbb\xbf"}\r': {"a": "\ufeff"},
    b'\xef\xbb\xbf{"a": 1}': {"a": 1},  # where a file was joined to another
    b'{"a": "\xed\xa0\x80"}': {"a": "\ud800"},  # half a pair, raw and escaped
    b'{"a": "\\ud800"}': {"a": "\ud800"},
    b'{"a": 1, "a": 2, "b": 123456789012345678901234567890}': {"a": 2, "b": 123456789012345678901234567890},
}


def test_a_line_is_parsed_like_the_json_module(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 0}\n' + b"\n".join(LINES))
    assert (
        read_all(JSONLSource(tmp_path / "a.jsonl"))[1:]
        == list(LINES.values())
        == list(map(json.loads, LINES))
    )
