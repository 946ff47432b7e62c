"""Parquet files: row groups as parts, only the columns that are needed, footers that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streampack.sources import ParquetSource, Reading, parquet
from streampack.sources.parts import Part
from tests.harness.corpus import read_all
from tests.harness.files import rewrite


def write(path: Path, data: list[dict[str, Any]], *, group: int = 4, **options: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(data), path, row_group_size=group, **options)
    return path


def test_rows_are_plain_python_values(tmp_path: Path) -> None:
    data = [
        {
            "text": "naïve 漢字",
            "n": 3,
            "x": 0.5,
            "yes": True,
            "none": None,
            "ids": [1, 2],
            "deep": {"a": [{"b": "c"}]},
        },
        {"text": "", "n": -1, "x": 1.5, "yes": False, "none": None, "ids": [], "deep": {"a": []}},
    ]
    path = write(tmp_path / "a.parquet", data)
    assert read_all(ParquetSource(path)) == data
    for row in read_all(ParquetSource(path)):
        assert {type(value) for value in row.values()} <= {str, int, float, bool, type(None), list, dict}
    assert read_all(ParquetSource(path, columns=["deep", "n"])) == [
        {"n": d["n"], "deep": d["deep"]} for d in data
    ]


DOTTED = {
    "a.b": ["x", "y"], "a": [{"b": "deep", "c": 1}, {"b": "deeper", "c": 2}], "text": ["t", "u"], "m.l": [[1], [2, 3]],
    "a.b.c": [4, 5],
}  # fmt: skip


@pytest.mark.parametrize("columns", [None, ["a.b"], ["a"], ["m.l"], ["a.b", "text"]])
def test_names_with_dots_are_names(tmp_path: Path, columns: list[str] | None) -> None:
    """pyarrow also takes them for paths into nested columns."""
    pq.write_table(pa.table(DOTTED), tmp_path / "a.parquet", row_group_size=1)
    names = columns or list(DOTTED)
    expected = [{name: DOTTED[name][i] for name in DOTTED if name in names} for i in range(2)]
    assert read_all(ParquetSource(tmp_path / "a.parquet", columns=columns)) == expected
    with pytest.raises(ValueError, match="has no column 'a.c'; it has 'a.b', 'a'"):
        read_all(ParquetSource(tmp_path / "a.parquet", columns=["a.c"]))


@pytest.mark.parametrize(("compression", "version"), [("none", "1.0"), ("snappy", "1.0"), ("zstd", "2.0")])
def test_all_compressions_and_versions_are_read(tmp_path: Path, compression: str, version: str) -> None:
    data = [{"i": i, "text": "x" * (i % 50), "word": f"w{i % 7}"} for i in range(5000)]
    path = write(
        tmp_path / "a.parquet", data, group=3000, compression=compression, data_page_version=version,
        write_page_index=True, write_page_checksum=True,
    )  # fmt: skip
    source = ParquetSource(path, columns=["word", "i"])
    assert [(row["i"], row["word"]) for row in read_all(source)] == [(d["i"], d["word"]) for d in data]


def test_a_footer_is_read_only_when_its_file_is(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i:03}.parquet", [{"i": i}]) for i in range(40)]
    source = ParquetSource(paths)
    next(source.read(Reading(1, num_lanes=2)))
    assert [i for i in range(40) if source.footers.known(i) is not None] == [1]
    next(source.read(Reading(1, num_lanes=40)))
    assert all(source.footers.known(i) is not None for i in range(40)), (
        "with few files, all are needed to share their row groups out"
    )


@pytest.mark.parametrize("num_lanes", [2, 3, 6])
@pytest.mark.parametrize("per_lane", [1, 16])
def test_lanes_are_even(
    tmp_path: Path, num_lanes: int, per_lane: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lane is behind by more than a part, which is a small file or some row groups, empty ones too."""
    monkeypatch.setattr(parquet, "PARTS_PER_LANE", per_lane)
    rng = np.random.default_rng(per_lane)
    counts = [rng.integers(0, 30, 12) for _ in range(9)]
    for number, groups in enumerate(counts):
        path = tmp_path / f"{number}.parquet"
        with pq.ParquetWriter(path, pa.schema([("text", pa.string())]), compression="none") as writer:
            for count in groups:
                writer.write_table(pa.table({"text": pa.array(["x" * 100] * count, pa.string())}))
    source = ParquetSource(tmp_path)
    lanes = [len(list(source.read(Reading(lane, num_lanes=num_lanes)))) for lane in range(num_lanes)]
    total = sum(map(sum, counts))
    assert sum(lanes) == total
    assert max(lanes) - min(lanes) <= max(map(sum, counts)) + total // (num_lanes * per_lane), (
        "a file, or a part"
    )


def test_the_fingerprint_depends_on_columns_and_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"i": 1, "j": 2}])
    prints = {
        ParquetSource(path, columns=columns).fingerprint() for columns in (None, ["i"], ["j"], ["i", "j"])
    }
    assert len(prints) == 4
    write(path, [{"i": 1, "j": 3}])
    assert ParquetSource(path).fingerprint() not in prints


def test_probe_and_natural_lanes(tmp_path: Path) -> None:
    data = [{"i": i, "text": f"{hash((i, 0))}" * (1 + i // 2000)} for i in range(20_000)]
    source = ParquetSource(
        [write(tmp_path / f"{s}.parquet", data[s * 5000 : (s + 1) * 5000], group=500) for s in range(4)]
    )
    probed, scale = source.probe(256)
    assert 200 <= len(probed) <= 300
    assert len(probed) * scale == pytest.approx(20_000, rel=0.05)
    assert source.natural_lanes() == sum(file.size for file in source.files) >> 18 > 1
    one = ParquetSource(write(tmp_path / "one.parquet", data, group=20_000))
    assert one.natural_lanes() == 1, "a row group is not divided"
    small = ParquetSource(write(tmp_path / "small.parquet", data[:5]))
    probed, scale = small.probe(100)
    assert len(probed) * scale == 5


@pytest.mark.parametrize("count", [999, 1001])
def test_all_rows_are_read_if_the_footers_total_is_wrong(tmp_path: Path, count: int) -> None:
    """Rows are read as the row groups count them, also where the footer's total is wrong."""
    path, whole = (
        write(tmp_path / f"{group}.parquet", [{"i": i} for i in range(1000)], group=group)
        for group in (11, 500)
    )
    for written in (path, whole):
        rewrite(written, 1000, count, first=True)
        assert pq.read_metadata(written).num_rows == count
    for num_lanes in (1, 2, 4, 7):
        assert sorted(row["i"] for row in read_all(ParquetSource(path), num_lanes=num_lanes)) == [
            *range(1000)
        ]
    beside = write(tmp_path / "b.parquet", [{"i": i} for i in range(1000, 60_000)], group=500)
    both = ParquetSource([whole, beside])
    assert sorted(row["i"] for row in read_all(both, num_lanes=2)) == [*range(60_000)]
    assert Part(0) in both._divided[2][0]


def test_columns_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"i": 1, "text": "a"}])
    with pytest.raises(ValueError, match=f"{path} from row 0 on: it has no column 'txt'; it has 'i', 'text'"):
        list(ParquetSource(path, columns=["txt"]).read(Reading()))
    for wrong in ("text", []):
        with pytest.raises(ValueError, match="is no list of columns; give their names, or None for all"):
            ParquetSource(path, columns=wrong)  # type: ignore[arg-type]
