"""Map-style and iterable sources; probes; `as_source`; files with two names."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from streampack import IterableSource, JSONLSource, MapSource, ParquetSource
from streampack.sources import Reading
from streampack.sources.as_source import as_source
from streampack.storage.base import LocalStorage
from tests.support.corpus import numbered, read_all, write

WINDOWS = (0, 1, 3, 1000)


def test_lanes_shuffle_differently() -> None:
    source = MapSource(numbered(60))
    lanes = [
        [row.data["i"] // 2 for row in source.read(Reading(lane, num_lanes=2, shuffle_window=1))]
        for lane in (0, 1)
    ]
    assert sorted(lanes[0]) == sorted(lanes[1])
    assert lanes[0] != lanes[1]


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
    cursor = reader.cursor
    with pytest.raises(OSError, match="gone"):
        next(reader)
    assert reader.cursor == cursor
    data.bad = -1
    before = [row.data for row in MapSource(data).read(Reading(0, num_lanes=1, shuffle_window=window))]
    assert before[cursor[0] :] == [row.data for row in reader]


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


def test_iterable_fingerprint_is_of_the_first_rows() -> None:
    assert IterableSource(numbered(12)).fingerprint() == IterableSource(numbered(13)).fingerprint()
    assert IterableSource(numbered(3)).fingerprint() != IterableSource(numbered(4)).fingerprint()
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


# One file by two names.


def twice(folder: Path, how: str) -> dict[str, Any]:
    """Arguments of a source of files that name ``data`` twice."""
    folder.mkdir(exist_ok=True)
    (folder / "sub").mkdir()
    [data] = folder.glob("data.*")
    link = data.with_name("link" + "".join(data.suffixes))
    if how == "a link beside it":
        link.symlink_to(data.name)
        return {"paths": str(folder / f"*{data.suffix}")}
    if how == "another name of it":
        os.link(data, link)
        return {"paths": [data, link]}
    if how == "a linked folder":
        (folder / "also").symlink_to(folder)
        return {"paths": [data, folder / "also" / data.name]}
    names = {"a manifest": ["./", ""], "a manifest with a link": ["", "link"]}[how]
    link.symlink_to(data.name)
    lines = [link.name if name == "link" else name + data.name for name in names]
    (folder / "names.txt").write_text("\n".join(lines))
    return {"manifest": folder / "names.txt"}


HOWS = ("a link beside it", "another name of it", "a linked folder", "a manifest", "a manifest with a link")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_a_file_by_two_names_is_refused(tmp_path: Path, how: str, suffix: str) -> None:
    data, source = tmp_path / f"data{suffix}", JSONLSource
    if suffix == ".parquet":
        source = ParquetSource  # type: ignore[assignment]
        parquet.write_table(pyarrow.table({"text": ["a", "b"]}), data)
    else:
        write(data, numbered(5))
    arguments = twice(tmp_path, how)
    with pytest.raises(ValueError, match="(is named twice|and .* are one file); name every file once"):
        source(**arguments)


def test_an_url_by_two_names_is_refused() -> None:
    lines = b'{"name": "./a b.jsonl", "size": 9}\n{"name": "a b.jsonl", "size": 9}\n'
    fsspec.filesystem("memory").pipe("/twice/names.txt", lines)
    with pytest.raises(ValueError, match="are one file; name every file once"):
        JSONLSource(manifest="memory://twice/names.txt")
