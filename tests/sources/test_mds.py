"""MDS shards: every encoding, the columns and bytes that are read."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import MDSSource
from streampack.fingerprint import plain
from streampack.sources import Reading
from tests.harness.files import Columns, Row, write_mds

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


def test_a_pickled_column_may_be_left_out(tmp_path: Path) -> None:
    index = write_mds(tmp_path, texts(2), TEXTS) / "index.json"
    index.write_text(index.read_text().replace('["str", "int"]', '["pkl", "int"]'))
    assert read_all(MDSSource(tmp_path, columns=["id"])) == [[("id", -3)], [("id", -2)]]
    with pytest.raises(ValueError, match="column 'text' is pickled"):
        MDSSource(tmp_path)
