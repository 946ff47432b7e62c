"""Row groups as parts, only the columns that are needed, damage with its place."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streampack.sources import ParquetSource, Reading, parquet
from streampack.sources.parquet import FEWEST_PARTS, WHOLE_FILE_PARTS
from streampack.sources.parts import Part
from streampack.storage import base as storage


def write(path: Path, data: list[dict[str, Any]], *, group: int = 4, **options: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(data), path, row_group_size=group, **options)
    return path


def read(source: ParquetSource, *, num_lanes: int = 1, **settings: Any) -> list[Any]:
    readings = (Reading(lane, num_lanes=num_lanes, **settings) for lane in range(num_lanes))
    return [row.data for reading in readings for row in source.read(reading)]


# What is read.


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=5).filter(any),
    group=st.integers(1, 12),
    num_lanes=st.integers(1, 5),
    window=st.sampled_from([0, 1, 5, 1000]),
    many=st.booleans(),
)
def test_every_row_exactly_once(
    tmp_path: Path, counts: list[int], group: int, num_lanes: int, window: int, many: bool
) -> None:
    """``many`` files make lanes of whole files, few files lanes of row groups."""
    numbers = itertools.count()
    paths = []
    for shard, count in enumerate(counts):
        table = pa.table({"i": pa.array([next(numbers) for _ in range(count)], pa.int64())})
        pq.write_table(table, tmp_path / f"{shard}.parquet", row_group_size=group)
        paths.append(tmp_path / f"{shard}.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "PARTS_PER_LANE", 0 if many else 10**6)
        source = ParquetSource(paths)
        assert read(source) == [{"i": i} for i in range(sum(counts))], "one lane, unshuffled: in order"
        found = read(source, num_lanes=num_lanes, shuffle_window=window)
    assert sorted(row["i"] for row in found) == list(range(sum(counts)))


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
    assert read(ParquetSource(path)) == data
    for row in read(ParquetSource(path)):
        assert {type(value) for value in row.values()} <= {str, int, float, bool, type(None), list, dict}
    assert read(ParquetSource(path, columns=["deep", "n"])) == [
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
    assert read(ParquetSource(tmp_path / "a.parquet", columns=columns)) == expected
    with pytest.raises(ValueError, match="has no column 'a.c'; it has 'a.b', 'a'"):
        read(ParquetSource(tmp_path / "a.parquet", columns=["a.c"]))


@pytest.mark.parametrize(("compression", "version"), [("none", "1.0"), ("snappy", "1.0"), ("zstd", "2.0")])
def test_all_compressions_and_versions_are_read(tmp_path: Path, compression: str, version: str) -> None:
    data = [{"i": i, "text": "x" * (i % 50), "word": f"w{i % 7}"} for i in range(5000)]
    path = write(
        tmp_path / "a.parquet", data, group=3000, compression=compression, data_page_version=version,
        write_page_index=True, write_page_checksum=True,
    )  # fmt: skip
    source = ParquetSource(path, columns=["word", "i"])
    assert [(row["i"], row["word"]) for row in read(source)] == [(d["i"], d["word"]) for d in data]


def test_a_footer_is_read_only_when_its_file_is(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i:03}.parquet", [{"i": i}]) for i in range(40)]
    source = ParquetSource(paths)
    next(source.read(Reading(1, num_lanes=2)))
    assert [i for i in range(40) if source.footers.known(i) is not None] == [1]
    next(source.read(Reading(1, num_lanes=40)))
    assert all(source.footers.known(i) is not None for i in range(40)), (
        "with few files, all are needed to share their row groups out"
    )


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.lists(
        st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any), min_size=1, max_size=12
    ),
    num_lanes=st.integers(1, 6),
    per_lane=st.integers(1, 16),
)
def test_lanes_are_even_and_parts_few(
    tmp_path: Path, files: list[list[int]], num_lanes: int, per_lane: int
) -> None:
    """Row groups of any sizes, empty ones too: each lies in one part, and no lane is behind by more than a part."""
    paths = []
    for number, counts in enumerate(files):
        paths.append(tmp_path / f"{number:02}.parquet")
        with pq.ParquetWriter(paths[-1], pa.schema([("text", pa.string())]), compression="none") as writer:
            for i, count in enumerate(counts):
                texts = [f"{number} {i} {row}" * 50 for row in range(count)]
                writer.write_table(pa.table({"text": pa.array(texts, pa.string())}), row_group_size=1 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "PARTS_PER_LANE", per_lane)
        source = ParquetSource(paths)
        source.divide(num_lanes, storage.map_in_threads)
    lanes = source._divided[num_lanes]
    found = sorted(part for lane in lanes for part in lane)
    assert [lane == sorted(lane) for lane in lanes] == [True] * num_lanes, "in corpus order"
    step = sum(file.size for file in source.files) // (num_lanes * per_lane)
    groups = sum(map(bool, itertools.chain(*files)))
    assert (
        len(found) <= max(len(files) + num_lanes * per_lane, FEWEST_PARTS * num_lanes) or len(found) == groups
    )
    assert all(lanes) or groups < num_lanes
    largest = WHOLE_FILE_PARTS * step
    for number, counts in enumerate(files):
        parts = [part for part in found if part.file == number]
        if parts == [Part(number)]:
            assert len(found) >= FEWEST_PARTS * num_lanes
            assert source.files[number].size <= WHOLE_FILE_PARTS * step
            assert source.footers.known(number) is None
            continue
        ends = [part.stop for part in parts]
        assert [part.start for part in parts] == [0, *ends[:-1]]
        assert ends[-1] == sum(counts)
        assert set(ends) <= set(itertools.accumulate(counts)), "cut between row groups"
        largest = max(largest, step + source.files[number].size * max(counts) // sum(counts))

    def load(part: Part) -> float:
        """About its bytes; by rows, which differ a little in length."""
        count = sum(files[part.file])
        return source.files[part.file].size * ((part.stop or count) - part.start) / count

    loads = [sum(map(load, lane)) for lane in lanes]
    assert max(loads) - min(loads) <= 1.5 * largest + 1000


def test_the_fingerprint_depends_on_columns_and_content(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"i": 1, "j": 2}])
    prints = {
        ParquetSource(path, columns=columns).fingerprint() for columns in (None, ["i"], ["j"], ["i", "j"])
    }
    assert len(prints) == 4
    write(path, [{"i": 1, "j": 3}])
    assert ParquetSource(path).fingerprint() not in prints


# Estimates.


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


# What is damaged.


def damaged(path: Path, group: int, column: int = 0) -> None:
    """Flip bytes in the middle of a column chunk, whose pages have checksums."""
    footer = pq.read_metadata(path)
    chunk = footer.row_group(group).column(column)
    middle = chunk.data_page_offset + chunk.total_compressed_size // 2
    content = bytearray(path.read_bytes())
    content[middle : middle + 8] = bytes(byte ^ 0xFF for byte in content[middle : middle + 8])
    path.write_bytes(content)


@pytest.mark.parametrize(("window", "many"), [(0, True), (6, False)])
def test_a_damaged_page_is_named_and_can_be_skipped(
    tmp_path: Path, window: int, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "PARTS_PER_LANE", 0 if many else 16)
    data = [{"i": i, "text": "x" * 40} for i in range(40)]
    path = write(tmp_path / "a.parquet", data, group=10, write_page_checksum=True, use_dictionary=False)
    damaged(path, 2)
    source = ParquetSource(path)
    reader = source.read(Reading(shuffle_window=window))
    found = []
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            for row in reader:
                found.append(row.data["i"])
        said = str(error.value)
        assert said.startswith(f"{path}, row 20 (row group 2): row group 2 is damaged: ")
    cursor = reader.cursor
    reader.skip()
    found += [row.data["i"] for row in reader]
    assert sorted(found) == [*range(20), *range(30, 40)]
    again = source.read(Reading(shuffle_window=window, start=cursor))
    with pytest.raises(ValueError):
        next(again)
    again.skip()
    rest = [row.data["i"] for row in again]
    assert rest == found[len(found) - len(rest) :]


def varint(number: int) -> bytes:
    """Encode an i64 as in Thrift's compact protocol."""
    number, written = number << 1, bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*written, number])


def rewrite(path: Path, before: int, after: int, *, first: bool = False) -> None:
    """Replace a number in the footer by one of the same length, everywhere or only at its first place."""
    assert len(varint(before)) == len(varint(after))
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer = content[start:].replace(varint(before), varint(after), 1 if first else -1)
    assert footer != content[start:]
    path.write_bytes(content[:start] + footer)


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
        assert sorted(row["i"] for row in read(ParquetSource(path), num_lanes=num_lanes)) == [*range(1000)]
    beside = write(tmp_path / "b.parquet", [{"i": i} for i in range(1000, 60_000)], group=500)
    both = ParquetSource([whole, beside])
    assert sorted(row["i"] for row in read(both, num_lanes=2)) == [*range(60_000)]
    assert Part(0) in both._divided[2][0]


@pytest.mark.parametrize("num_lanes", [1, 8])
def test_a_damaged_row_group_loses_only_its_rows(tmp_path: Path, num_lanes: int) -> None:
    data = [{"i": i, "text": f"{i:9}"} for i in range(20_000)]
    path = write(tmp_path / "a.parquet", data, group=200, compression="none", use_dictionary=False)
    column = pq.read_metadata(path).row_group(40).column(1)
    outside = (1 << 7 * len(varint(column.data_page_offset)) - 1) - 1
    assert outside > path.stat().st_size
    rewrite(path, column.data_page_offset, outside)
    source = ParquetSource(path)
    found = []
    for lane in range(num_lanes):
        reader = source.read(Reading(lane, num_lanes=num_lanes))
        while True:
            try:
                found.append(next(reader).data["i"])
            except StopIteration:
                break
            except ValueError as error:
                assert "row group 40 is damaged: it lies outside the file" in str(error)
                reader.skip()
    assert sorted(found) == [*range(8000), *range(8200, 20_000)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}" * 20, "this is no Parquet file, or its end is missing"),
        (b"PAR1" + b"\xff" * 40 + (40).to_bytes(4, "little") + b"PAR1", "the footer is damaged"),
        (
            b"PAR1" + (1 << 30).to_bytes(4, "little") + b"PAR1",
            "this is no Parquet file, or its end is missing",
        ),
    ],
)
def test_damaged_footers(tmp_path: Path, content: bytes, message: str) -> None:
    write(tmp_path / "a.parquet", [{"i": i} for i in range(3)])
    (tmp_path / "b.parquet").write_bytes(content)
    write(tmp_path / "c.parquet", [{"i": i} for i in range(3, 6)])
    reader = ParquetSource(str(tmp_path / "*.parquet")).read(Reading())
    assert [next(reader).data["i"] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError) as error:
        next(reader)
    assert str(error.value).startswith(f"{tmp_path}/b.parquet from row 0 on: {message}")
    reader.skip()
    assert [row.data["i"] for row in reader] == [3, 4, 5]


def test_text_that_is_no_utf8_is_a_bad_row(tmp_path: Path) -> None:
    table = pa.table(
        {"i": [0, 1, 2], "text": pa.array([b"a", b"\xff\xfe", b"c"], pa.binary()).view(pa.string())}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    reader = ParquetSource(tmp_path / "a.parquet").read(Reading())
    assert next(reader).data == {"i": 0, "text": "a"}
    with pytest.raises(ValueError, match="row 1 .*'utf-8' codec can't decode byte 0xff"):
        next(reader)
    reader.skip()
    assert next(reader).data == {"i": 2, "text": "c"}


def test_columns_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"i": 1, "text": "a"}])
    with pytest.raises(ValueError, match=f"{path} from row 0 on: it has no column 'txt'; it has 'i', 'text'"):
        list(ParquetSource(path, columns=["txt"]).read(Reading()))
    for wrong in ("text", []):
        with pytest.raises(ValueError, match="is no list of columns; give their names, or None for all"):
            ParquetSource(path, columns=wrong)  # type: ignore[arg-type]
