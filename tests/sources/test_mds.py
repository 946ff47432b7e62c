"""MDS shards, written here from the format's description, read by `MDSSource`."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import IterablePackedDataset, MDSSource
from streampack.fingerprint import plain
from streampack.packing.encoders import TokensEncoder
from streampack.sources import Reading
from tests.support.conformance import check_positions, check_resume_everywhere

Row = dict[str, Any]
Columns = dict[str, str]

FIXED = {"int": 8, "uint16": 2, "float32": 4, "ndarray:uint16:2,3": 12}
COMPRESS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gz": ("gz", lambda data: gzip.compress(data, mtime=0)),
    "zstd:3": ("zstd", lambda data: zstandard.compress(data, 3)),
}


def array(value: np.ndarray[Any, Any], *, typed: bool) -> bytes:
    """An array whose shape, and if ``typed`` whose type, comes first; dimensions below 256."""
    code = {"uint16": 16, "int64": 65, "float32": 34}[value.dtype.name]
    head = bytes([code] * typed + [value.ndim << 2, *value.shape])
    return head + value.tobytes()


ENCODE: dict[str, Callable[[Any], bytes]] = {
    "str": str.encode,
    "bytes": bytes,
    "json": lambda value: json.dumps(value).encode(),
    "int": lambda value: struct.pack("<q", value),
    "uint16": lambda value: struct.pack("<H", value),
    "float32": lambda value: struct.pack("<f", value),
    "str_int": lambda value: str(value).encode(),
    "str_float": lambda value: repr(value).encode(),
    "ndarray": lambda value: array(value, typed=True),
    "ndarray:uint16": lambda value: array(value, typed=False),
    "ndarray:uint16:2,3": lambda value: value.tobytes(),
}


def write_mds(
    folder: Path, rows: list[Row], columns: Columns, *, per_shard: int = 10, compression: str | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, first in enumerate(range(0, len(rows), per_shard)):
        samples = []
        for row in rows[first : first + per_shard]:
            parts = [ENCODE[encoding](row[name]) for name, encoding in columns.items()]
            sizes = [
                len(p) for p, encoding in zip(parts, columns.values(), strict=True) if encoding not in FIXED
            ]
            samples.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(parts))
        header = json.dumps({"column_names": list(columns)}).encode()
        at = 4 * (len(samples) + 2) + len(header)
        offsets = [at + sum(map(len, samples[:i])) for i in range(len(samples) + 1)]
        data = struct.pack(f"<{len(samples) + 2}I", len(samples), *offsets) + header + b"".join(samples)
        raw = {"basename": f"shard.{number:05d}.mds", "bytes": len(data), "hashes": {}}
        zipped = None
        if compression:
            suffix, compress = COMPRESS[compression]
            data = compress(data)
            zipped = {"basename": f"{raw['basename']}.{suffix}", "bytes": len(data), "hashes": {}}
        (folder / (zipped or raw)["basename"]).write_bytes(data)
        entries.append(
            {
                "column_encodings": list(columns.values()),
                "column_names": list(columns),
                "column_sizes": [FIXED.get(encoding) for encoding in columns.values()],
                "compression": compression,
                "format": "mds",
                "hashes": [],
                "raw_data": raw,
                "samples": len(samples),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": zipped,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return folder


TEXTS: Columns = {"text": "str", "id": "int"}


def texts(count: int) -> list[Row]:
    return [{"text": f"row {i} " * (i % 7), "id": i - 3} for i in range(count)]


def tokens(count: int) -> list[Row]:
    rng = np.random.default_rng(0)
    return [{"tokens": rng.integers(0, 999, rng.integers(1, 30)).astype(np.uint16)} for _ in range(count)]


def read_all(source: MDSSource, num_lanes: int = 1, **reading: Any) -> list[Any]:
    lanes = [source.read(Reading(lane, num_lanes=num_lanes, **reading)) for lane in range(num_lanes)]
    return [plain(row.data) for lane in lanes for row in lane]


@pytest.mark.parametrize("compression", [None, "gz", "zstd:3"])
def test_every_encoding(tmp_path: Path, compression: str | None) -> None:
    row = {
        "str": "naïve 漢字",
        "bytes": b"\x00\xff",
        "json": {"a": [1, None, "x"]},
        "int": -(2**62),
        "uint16": 65535,
        "float32": 0.5,
        "str_int": 10**30,
        "str_float": 0.1,
        "ndarray": np.arange(6, dtype=np.int64).reshape(2, 3),
        "ndarray:uint16": np.array([1, 2, 3], np.uint16),
        "ndarray:uint16:2,3": np.arange(6, dtype=np.uint16).reshape(2, 3),
    }
    columns = {name: name for name in row}
    source = MDSSource(write_mds(tmp_path, [row, row], columns, compression=compression))
    source = pickle.loads(pickle.dumps(source))  # as for a worker that is spawned
    first, second = source.read(Reading())
    for got in (first.data, second.data):
        assert list(got) == list(row)
        assert plain(got) == plain(row)
        assert isinstance(got["uint16"], int)
        assert got["ndarray"].shape == (2, 3)


@settings(max_examples=25)
@given(st.data())
def test_every_sample_exactly_once(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    rows = texts(data.draw(st.integers(1, 60)))
    compression = data.draw(st.sampled_from([None, "gz", "zstd:3"]))
    folder = tmp_path_factory.mktemp("mds")
    write_mds(folder, rows, TEXTS, per_shard=data.draw(st.integers(1, 40)), compression=compression)
    source, window = MDSSource(folder), data.draw(st.sampled_from([0, 1, 9]))
    got = read_all(source, data.draw(st.integers(1, 6)), shuffle_window=window)
    assert sorted(got, key=repr) == sorted(map(plain, rows), key=repr)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_positions(tmp_path: Path, compression: str | None, window: int) -> None:
    rows, found = texts(45), []
    source = MDSSource(write_mds(tmp_path, rows, TEXTS, compression=compression))
    for lane in range(2):
        found += check_positions(
            lambda start, lane=lane: source.read(  # type: ignore[misc]
                Reading(lane, num_lanes=2, shuffle_window=window, start=start)
            )
        )
    assert sorted(row["id"] for row in found) == [row["id"] for row in rows]


@pytest.mark.parametrize("compression", [None, "gz"])
def test_resume_at_every_pack(tmp_path: Path, compression: str | None) -> None:
    write_mds(tmp_path, tokens(80), {"tokens": "ndarray:uint16"}, compression=compression)
    check_resume_everywhere(
        lambda: IterablePackedDataset(
            MDSSource(tmp_path), max_seq_len=40, encoder=TokensEncoder(labels=None), shuffle=True, shuffle_window=8,
            num_lanes=2,
        ),
        packs=15,
    )  # fmt: skip


@pytest.mark.parametrize("compression", [None, "gz"])
def test_here_and_behind_a_url(tmp_path: Path, compression: str | None) -> None:
    here = MDSSource(write_mds(tmp_path, texts(50), TEXTS, compression=compression))
    files = fsspec.filesystem("memory")
    for path in tmp_path.iterdir():
        files.pipe(f"/{tmp_path.name}/{path.name}", path.read_bytes())
    there = MDSSource(f"memory://{tmp_path.name}/")
    assert there.fingerprint() == here.fingerprint()
    assert read_all(there, 3, shuffle_window=4) == read_all(here, 3, shuffle_window=4)


def test_only_the_bytes_that_are_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, read = MDSSource(write_mds(tmp_path, texts(2000), TEXTS, per_shard=500)), [0]
    fetch = source.corpus.storage.fetch

    def counted(file: Any, start: int, stop: int) -> bytes:
        read[0] += stop - start
        return fetch(file, start, stop)

    monkeypatch.setattr(source.corpus.storage, "fetch", counted)
    read_all(source, 4)
    assert read[0] <= 1.05 * sum(file.size for file in source.files)
    read[0] = 0
    assert source.fetch((2, 499))["id"] == 1496
    assert read[0] < 100


def test_rows_are_found_again(tmp_path: Path) -> None:
    source = MDSSource(write_mds(tmp_path, texts(35), TEXTS))
    for row in source.read(Reading(shuffle_window=9)):
        assert source.fetch(row.row_id) == row.data
    assert source.locate((1, 2)) == f"{tmp_path / 'shard.00001.mds'}, sample 2"
    assert source.shard((1, 2)) == "shard.00001.mds"
    rows, scale = source.probe(10)
    assert len(rows) * scale == 35
    assert source.natural_lanes() == 1
    assert MDSSource(write_mds(tmp_path / "zip", texts(35), TEXTS, compression="gz")).natural_lanes() == 4


def test_columns(tmp_path: Path) -> None:
    folder = write_mds(tmp_path, texts(3), TEXTS)
    assert read_all(MDSSource(folder, columns=["id"])) == [[("id", i - 3)] for i in range(3)]
    with pytest.raises(ValueError, match="shard 0: it has no column 'ids'; it has 'text', 'id'"):
        MDSSource(folder, columns=["ids"])


def edit(folder: Path, change: Any) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def first(**changes: Any) -> Callable[[Any], None]:
    return lambda index: index["shards"][0].update(changes)


def file(**changes: Any) -> Callable[[Any], None]:
    return lambda index: index["shards"][0]["raw_data"].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (file(basename="../x.mds"), "the name '../x.mds' is refused: it must be relative"),
        (file(basename="/etc/passwd"), "the name '/etc/passwd' is refused"),
        (file(basename="link.mds"), "it is a link that leads out of"),
        (file(basename="s3::http://x"), "is refused"),
        (file(basename=5), "5 of .* bytes is no shard"),
        (file(bytes=7), "has .* bytes and .*index.json says 7"),
        (file(bytes=-7), "of -7 bytes is no shard"),
        (
            first(column_encodings=["pkl", "int"]),
            "shard 0: column 'text' is pickled, and reading it could run",
        ),
        (first(column_encodings=["jpeg", "int"]), "column 'text' is encoded as 'jpeg', which is not read"),
        (first(column_encodings=["ndarray:object", "int"]), "column 'text' holds arrays of 'object'"),
        (first(column_encodings=["str"]), "its samples or columns do not fit together"),
        (first(column_sizes=[None, -8]), "column 'id' of -8 bytes is none"),
        (first(samples=-1), "its samples or columns do not fit together"),
        (first(format="json"), "it is no MDS shard, version 2"),
        (first(compression="br:11"), "compression 'br:11' is not read; it can be gz, zstd"),
        (first(raw_data=None), "it lacks its file or its columns"),
        (lambda index: index.update(version=3), "is no index of MDS shards, version 2"),
        (lambda index: index.update(shards=[]), "names no shard"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    folder = write_mds(tmp_path / "mds", texts(12), TEXTS)
    (folder / "link.mds").symlink_to("/etc/passwd")
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        MDSSource(folder)


def test_a_pickled_column_may_be_left_out(tmp_path: Path) -> None:
    folder = write_mds(tmp_path, texts(2), TEXTS)
    edit(folder, first(column_encodings=["pkl", "int"]))
    assert read_all(MDSSource(folder, columns=["id"])) == [[("id", -3)], [("id", -2)]]


def poke(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("at", "data", "message"),
    [
        (0, b"\x09\0\0\0", r"shard.00000.mds(.zstd)? holds 9 samples and its index says 10"),
        (
            4 + 4 * 3,
            b"\xff\xff\xff\xff",
            "the offsets of its records lead out of shard.00000.mds(.zstd)?, or backwards",
        ),
        (
            4 + 4 * 3,
            b"\x00\x00\x00\x00",
            "the offsets of its records lead out of shard.00000.mds(.zstd)?, or backwards",
        ),
    ],
)
@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_damaged_shards(tmp_path: Path, compression: str | None, at: int, data: bytes, message: str) -> None:
    folder = write_mds(tmp_path, texts(30), TEXTS)
    poke(folder / "shard.00000.mds", at, data)
    if compression:
        packed = zstandard.compress((folder / "shard.00000.mds").read_bytes())
        (folder / "shard.00000.mds.zstd").write_bytes(packed)
        zipped = {"basename": "shard.00000.mds.zstd", "bytes": len(packed), "hashes": {}}
        edit(folder, first(compression=compression, zip_data=zipped))
    with pytest.raises(ValueError, match=message):
        read_all(MDSSource(folder))
    reader = MDSSource(folder).read(Reading())
    survivors = []
    while True:
        try:
            survivors.append(next(reader).data["id"])
        except StopIteration:
            break
        except ValueError:
            reader.skip()
    assert survivors[-20:] == [row["id"] for row in texts(30)][10:]


def test_a_damaged_archive_and_a_damaged_sample(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "a", texts(10), TEXTS, compression="zstd:3")
    path = folder / "shard.00000.mds.zstd"
    poke(path, path.stat().st_size // 2, b"\xff" * 20)
    with pytest.raises(ValueError, match="shard.00000.mds.zstd is damaged"):
        read_all(MDSSource(folder))
    folder = write_mds(tmp_path / "b", texts(10), TEXTS)
    data = (folder / "shard.00000.mds").read_bytes()
    start = struct.unpack_from("<I", data, 4 + 4 * 3)[0]
    poke(folder / "shard.00000.mds", start, b"\xff\0\0\0")
    with pytest.raises(
        ValueError, match=r"shard.00000.mds, sample 3: not a sample of its columns \(the columns take"
    ):
        read_all(MDSSource(folder))


@pytest.mark.parametrize("name", ["./shard.00000.mds", "link.mds"])
def test_a_shard_by_two_names_is_refused(tmp_path: Path, name: str) -> None:
    write_mds(tmp_path, texts(20), TEXTS)
    (tmp_path / "link.mds").symlink_to("shard.00000.mds")
    index = json.loads((tmp_path / "index.json").read_text())
    second = {**index["shards"][0], "raw_data": {**index["shards"][0]["raw_data"], "basename": name}}
    index["shards"].append(second)
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="(is named twice|and .* are one file); name every file once"):
        MDSSource(tmp_path)


@pytest.mark.parametrize("compression", ["gz", "zstd:3"])
@pytest.mark.parametrize("says", [None, 1 << 20, 1 << 60])
def test_a_shard_that_decompresses_to_more_than_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, says: int | None
) -> None:
    """16 MiB of zeros behind some KB; the index may say anything."""
    write_mds(tmp_path, texts(3), TEXTS, compression=compression)
    index = json.loads((tmp_path / "index.json").read_text())
    [entry] = index["shards"]
    bomb = COMPRESS[compression][1](bytes(16 << 20))
    (tmp_path / entry["zip_data"]["basename"]).write_bytes(bomb)
    entry["zip_data"]["bytes"] = len(bomb)
    entry["raw_data"] = {**entry["raw_data"], "bytes": says}
    (tmp_path / "index.json").write_text(json.dumps(index))
    monkeypatch.setattr("streampack.sources.mds.LARGEST", 2 << 20)
    reader = MDSSource(tmp_path).read(Reading())
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="has more content than the [0-9,]+ bytes that its index names"):
            next(reader)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


def test_a_value_that_is_nested_too_deep_is_a_bad_record(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(600):
        deep = [deep]
    write_mds(tmp_path, [{"value": 1}, {"value": deep}, {"value": 3}], {"value": "json"})
    reader = MDSSource(tmp_path).read(Reading())
    assert next(reader).data == {"value": 1}
    with pytest.raises(ValueError, match="sample 1: not a sample of its columns .601 objects and arrays lie"):
        next(reader)
    reader.skip()
    assert next(reader).data == {"value": 3}


def test_an_index_that_is_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="index.json is no JSON .100000 objects and arrays lie"):
        MDSSource(tmp_path)
