"""MDS shards: encodings, indexes that are refused, damage."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from streampack import IterablePackedDataset, MDSSource
from streampack.fingerprint import plain
from streampack.sources import Reading
from tests.support.mds import COMPRESS, Columns, Row, write_mds

TEXTS: Columns = {"text": "str", "id": "int"}


def texts(count: int) -> list[Row]:
    return [{"text": f"row {i} " * (i % 7), "id": i - 3} for i in range(count)]


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


def test_only_needed_bytes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_samples_are_located_and_lanes_counted(tmp_path: Path) -> None:
    source = MDSSource(write_mds(tmp_path, texts(35), TEXTS))
    assert source.locate((1, 2)) == f"{tmp_path / 'shard.00001.mds'}, sample 2"
    assert source.shard((1, 2)) == "shard.00001.mds"
    assert source.natural_lanes() == 1
    assert MDSSource(write_mds(tmp_path / "zip", texts(35), TEXTS, compression="gz")).natural_lanes() == 4


def test_only_the_named_columns_are_read(tmp_path: Path) -> None:
    folder = write_mds(tmp_path, texts(3), TEXTS)
    assert read_all(MDSSource(folder, columns=["id"])) == [[("id", i - 3)] for i in range(3)]
    with pytest.raises(ValueError, match="shard.00000.mds: it has no column 'ids'; it has 'text', 'id'"):
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
        (file(basename=5), "5 of .* bytes is no shard"),
        (file(bytes=7), "has .* bytes and its index says 7"),
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
    edit(folder, change)
    with pytest.raises(ValueError, match=message):
        IterablePackedDataset(MDSSource(folder), max_seq_len=8)


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
        (0, b"\x09\0\0\0", r"shard.00000.mds(.zstd)?, sample 0: it holds 9 samples and its index says 10"),
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
    with pytest.raises(ValueError, match="shard.00000.mds.zstd, sample 0: it is damaged"):
        read_all(MDSSource(folder))
    folder = write_mds(tmp_path / "b", texts(10), TEXTS)
    data = (folder / "shard.00000.mds").read_bytes()
    start = struct.unpack_from("<I", data, 4 + 4 * 3)[0]
    poke(folder / "shard.00000.mds", start, b"\xff\0\0\0")
    with pytest.raises(
        ValueError, match=r"shard.00000.mds, sample 3: not a sample of its columns \(the columns take"
    ):
        read_all(MDSSource(folder))


@pytest.mark.parametrize(("compression", "says"), [("gz", None), ("zstd:3", 1 << 20), ("zstd:3", 1 << 60)])
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
    monkeypatch.setattr("streampack.sources.mds.MAX_CONTENT_BYTES", 2 << 20)
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
