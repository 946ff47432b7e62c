"""JSON lines: what is a line, where files are cut, what is read of them; compressed by any writer, or damaged."""

from __future__ import annotations

import bz2
import gc
import gzip
import json
import lzma
import random
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streampack import IterablePackedDataset, JSONLSource
from streampack.sources import Reading
from tests.harness.conformance import read_with_cursors
from tests.harness.corpus import PACK, numbered, read_all, write

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


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    file=files(), num_lanes=st.integers(1, 5), window=st.sampled_from((0, 1, 3, 1000)), seed=st.integers(0, 3)
)
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
        assert source.fetch_many([row.row_id]) == [row.data]


LINES = {
    b'{"a": 1}': {"a": 1},
    b' \t{"a": "\xef\xbb\xbf"}\r': {"a": "\ufeff"},
    b'\xef\xbb\xbf{"a": 1}': {"a": 1},  # where a file was joined to another
    b'{"a": "\xed\xa0\x80"}': {"a": "\ud800"},  # half a pair, raw and escaped
    b'{"a": "\\ud800"}': {"a": "\ud800"},
    b'{"a": 1, "a": 2, "b": 123456789012345678901234567890}': {"a": 2, "b": 123456789012345678901234567890},
    b'{"a": "' + b'[{\\"' * 2000 + b'"}': {"a": '[{"' * 2000},  # brackets that nest nothing
    b'{"a": [' + b"[]," * 5000 + b"[]]}": {"a": [[]] * 5001},
}


def test_a_line_is_parsed_like_the_json_module(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf\r\n{"a": 0}\n' + b"\n".join(LINES))
    found = read_all(JSONLSource(tmp_path / "a.jsonl"))
    assert found == [{"a": 0}, *LINES.values()] == [{"a": 0}, *map(json.loads, LINES)]


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


def test_files_are_read_only_as_far_as_rows_are_needed_and_are_closed(tmp_path: Path) -> None:
    """pytest turns an unclosed file's ResourceWarning into an error."""
    large = JSONLSource(write(tmp_path / "large.jsonl", numbered(50_000)))
    next(large.read(Reading(3, num_lanes=4, shuffle_window=16)))
    assert large.bytes_read < 20 * 60
    source = JSONLSource([write(tmp_path / f"a.jsonl{s}", numbered(50)) for s in ("", ".gz", ".zst")])
    for start in range(3):
        next(source.read(Reading(start, num_lanes=3)))
        source.fetch_many([(start, 0)])
    source.sample(10)
    gc.collect()


# What is refused.


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
    b'{"text": ' + b"[" * 100_000: "not a line of JSON (its objects and arrays are nested too deep",
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
            except ValueError as error:
                errors.append(str(error))
        assert len(errors) == 1
        assert errors[0].startswith(f"{path}:12: {message}")
        assert len(set(rows)) == len(rows) >= 10


PACKED = {
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "gzip": gzip.compress,
    "zstd": zstandard.compress,
    "UTF-16": lambda text: text.decode().encode("utf-16"),
}


NAMED_AS = {
    **{
        kind: f"it is compressed: let its name end in {suffix}"
        for kind, suffix in (("bzip2", ".bz2"), ("xz", ".xz"), ("gzip", ".gz"), ("zstd", ".zst"))
    },
    "UTF-16": "it is UTF-16: convert it to UTF-8",
}


@pytest.mark.parametrize("kind", PACKED)
def test_binary_content_is_refused_under_any_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows.data"
    path.write_bytes(PACKED[kind](CONTENT))
    source = JSONLSource(path)
    with pytest.raises(ValueError, match=rf"{path}:1: {NAMED_AS[kind]}"):
        next(source.read(Reading()))
    with pytest.raises(ValueError, match=r"all 16 that were read are dropped"):  # one of each part
        list(IterablePackedDataset(source, max_seq_len=8, skip_bad=True, num_lanes=1))


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst", ".lz4"])
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
                with suppress(ValueError):
                    if (row := next(reader, None)) is None:
                        break
                    found.append(row.data["i"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sorted(found) == [1, 2]
    assert peak < 8 << 20, f"{peak / 2**20:.0f} MiB"


# Compressed files.


def skippable(data: bytes) -> bytes:
    return b"\x53\x2a\x4d\x18" + len(data).to_bytes(4, "little") + data


def in_pieces(data: bytes, pack: Callable[[bytes], bytes]) -> bytes:
    return b"".join(pack(data[i : i + 3001]) for i in range(0, len(data), 3001))


WRITERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": (".gz", lambda data: gzip.compress(data, mtime=0)),
    "gzip members": (".gz", lambda data: in_pieces(data, gzip.compress) + gzip.compress(b"")),
    "zstd": (".zst", zstandard.compress),
    "with a checksum": (".zst", lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data)),
    "without the size": (
        ".zst",
        lambda data: zstandard.ZstdCompressor(write_content_size=False).compress(data),
    ),
    "as a stream": (
        ".zst",
        lambda data: (one := zstandard.ZstdCompressor().compressobj()).compress(data) + one.flush(),
    ),
    "frames": (".zst", lambda data: zstandard.compress(b"") + in_pieces(data, zstandard.compress)),
    "with frames to skip": (
        ".zst",
        lambda data: skippable(b"x" * 70_000) + zstandard.compress(data) + skippable(b""),
    ),
    "bzip2": (".bz2", bz2.compress),
    "bzip2 streams": (".bz2", lambda data: in_pieces(data, bz2.compress) + bz2.compress(b"")),
    "xz": (".xz", lzma.compress),
    "xz streams": (".xz", lambda data: in_pieces(data, lambda part: lzma.compress(part) + bytes(8))),
    "zstd by its other name": (".zstd", zstandard.compress),
    "lz4": (".lz4", PACK[".lz4"]),
    "lz4 frames": (".lz4", lambda data: in_pieces(data, PACK[".lz4"])),
    "in a large window": (
        ".zst",
        lambda data: zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(window_log=27, write_content_size=0)
        ).compress(data),
    ),
}
COMPRESSED_ROWS = [{"i": i, "r": random.Random(i).random()} for i in range(9000)]
CONTENT = "".join(json.dumps(row) + "\n" for row in COMPRESSED_ROWS).encode()


@pytest.mark.parametrize("writer", WRITERS)
def test_files_of_any_writer_are_read(tmp_path: Path, writer: str) -> None:
    """A resume reads from any row on, though nobody can look for a place in such a file."""
    suffix, pack = WRITERS[writer]
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(pack(CONTENT))
    source = JSONLSource(path)
    rows, cursors = read_with_cursors(source.read(Reading()))
    assert [row.data for row in rows] == COMPRESSED_ROWS
    again = source.read(Reading(start=cursors[5000]))
    assert [row.data for row in again] == COMPRESSED_ROWS[5000:]
    assert source.fetch_many([rows[1999].row_id]) == [COMPRESSED_ROWS[1999]]
    assert source.locate(rows[1999].row_id) == f"{path}:2000"


def flipped(at: float | int) -> Callable[[bytes], bytes]:
    """Flip a byte at a place, or at a share of all."""

    def change(packed: bytes) -> bytes:
        place = int(at * len(packed)) if isinstance(at, float) else at % len(packed)
        return packed[:place] + bytes([packed[place] ^ 0xFF]) + packed[place + 1 :]

    return change


def flipped_second(packed: bytes) -> bytes:
    return flipped(packed.index(packed[:6], 6))(packed)


CHANGED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    **{
        f"{writer} cut at {share}": (writer, lambda packed, share=share: packed[: int(share * len(packed))])
        for writer in ("gzip", "zstd", "with a checksum", "bzip2", "xz", "lz4")
        for share in (0.001, 0.3, 0.9)
    },
    **{
        f"{writer} without its last byte": (writer, lambda packed: packed[:-1])
        for writer in ("gzip", "zstd", "bzip2", "xz", "lz4")
    },
    **{
        f"{writer} flipped {at}": (writer, flipped(at))
        for writer in ("bzip2", "bzip2 streams", "xz", "xz streams")
        for at in (2, 0.5)
    },
    "lz4 flipped": ("lz4", flipped(2)),  # pyarrow writes no sum of the content
    # The header of a stream that is not the first one, which is no end of the file.
    **{f"{writer}, the second": (writer, flipped_second) for writer in ("bzip2 streams", "xz streams")},
    **{f"with a checksum flipped {at}": ("with a checksum", flipped(at)) for at in (0.2, -2)},
    "gzip, another type of block": ("gzip", flipped(10)),
    "gzip, another sum": ("gzip", flipped(-6)),
    "zstd and more": ("zstd", lambda packed: packed + b"trailing"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_damaged_archive_is_an_error_that_names_it_at_the_same_row_from_any_cursor(
    tmp_path: Path, case: str
) -> None:
    writer, change = CHANGED[case]
    suffix, pack = WRITERS[writer]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(change(pack(CONTENT)))
    source = JSONLSource(path)
    reader, found = source.read(Reading()), []
    cursors = [reader.cursor]
    with pytest.raises(ValueError, match=f"^{path}") as raised:
        for row in reader:
            found.append(row)
            cursors.append(reader.cursor)
    said = str(raised.value)
    assert [row.data for row in found] == COMPRESSED_ROWS[: len(found)]
    assert "JSON" not in said, "it is the archive that is broken, not a line of it"
    assert "holds no rows" not in said
    for k in range(0, len(found), max(1, len(found) // 3)):
        resumed, rest = source.read(Reading(start=cursors[k])), []
        with pytest.raises(ValueError) as error:
            rest.extend(resumed)
        assert str(error.value) == said
        assert rest == found[k:]


@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("suffix", [suffix for suffix in PACK if suffix])
def test_the_rows_before_a_tear_are_packed_and_the_rest_is_one_bad_record(
    tmp_path: Path, suffix: str, num_lanes: int
) -> None:
    path, pack = tmp_path / f"a.jsonl{suffix}", PACK[suffix]
    frames = [pack(CONTENT[i : i + 3001]) for i in range(0, len(CONTENT), 3001)]
    path.write_bytes(b"".join(frames[:100]) + frames[100][:-9])
    whole, torn = (CONTENT[: 3001 * count].count(b"\n") for count in (100, 101))
    source, found, errors = JSONLSource(path), [], []
    for lane in range(num_lanes):
        reader = source.read(Reading(lane, num_lanes=num_lanes, shuffle_window=50))
        while True:
            try:
                if (row := next(reader, None)) is None:
                    break
                found.append(row.data["i"])
            except ValueError as error:
                errors.append(str(error))
    assert sorted(found) == list(range(len(found))), "each row before the tear, once, and none behind it"
    assert whole <= len(found) <= torn
    assert len(errors) == 1
    assert errors[0].startswith(f"{path}:{len(found) + 1}: the file is damaged after byte ")


@pytest.mark.parametrize("suffix", [suffix for suffix in PACK if suffix])
def test_a_run_over_a_torn_file_is_resumed_at_every_step(tmp_path: Path, suffix: str) -> None:
    """Rows that waited were fetched by reading on to the tear, which raised for all of them."""
    path, pack = tmp_path / f"a.jsonl{suffix}", PACK[suffix]
    lines = [json.dumps({"input_ids": [i] * (i % 17 + 3)}).encode() + b"\n" for i in range(200)]
    frames = [pack(b"".join(lines[i : i + 20])) for i in range(0, 200, 20)]
    path.write_bytes(b"".join(frames[:-1]) + frames[-1][:-9])

    def make() -> IterablePackedDataset:
        return IterablePackedDataset(
            JSONLSource(path), max_seq_len=64, skip_bad=True, shuffle=30, num_lanes=2
        )

    packs, states = [], []
    for each in (data := make()):
        packs.append(each["tokens"].tolist())
        states.append(data.state_dict())
    assert len({token for each in packs for token in each}) >= 180
    waited = 0
    for step, state in enumerate(states, 1):
        again = make()
        again.load_state_dict(state)
        assert [each["tokens"].tolist() for each in again] == packs[step:]
        waited += state["lanes"][0]["reader"][2] != []
    assert waited > 10
    assert data.trace(next(iter(make()))["fragments"][0])["tokens"] == packs[0][: packs[0].count(packs[0][0])]


def xz_of_4_gib() -> bytes:
    """An xz stream whose header names a dictionary of 4 GiB."""
    packed = bytearray(lzma.compress(b"x" * 1000))
    end = 12 + 4 * packed[12]  # of the header of its block, before the checksum
    packed[16] = 40
    packed[end : end + 4] = zlib.crc32(packed[12:end]).to_bytes(4, "little")
    return bytes(packed)


WINDOWS = {
    ".zst": b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + b"\x01\x00\x00",  # 2 GiB, an empty block
    ".xz": xz_of_4_gib(),
}


@pytest.mark.parametrize("suffix", WINDOWS)
def test_a_window_that_takes_too_much_memory_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(WINDOWS[suffix])
    with pytest.raises(ValueError, match=f"{path}.*(?i:memory|window)"):
        read_all(JSONLSource(path))


# A sample of the rows, and how many lanes they fill.
