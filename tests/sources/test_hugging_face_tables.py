"""Streams of Hugging Face's datasets that are read by table: the same rows, cursors and packs as by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import Array2D, Dataset, Features, IterableDataset, Value
from torch.utils.data import DataLoader

from streampack import HFSource, IterablePackedDataset
from streampack.sources import Reading, hugging_face
from streampack.sources.arrow_rows import ArrowRow
from tests.support.conformance import check_cursors, check_resume_everywhere

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a few rows at a time, so that batches end within row groups, at their ends, and beyond them."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(hugging_face, "BATCH_ROWS", 4)


def rows_of(count: int) -> list[Row]:
    rng = np.random.default_rng(count)
    lengths = rng.integers(0, 9, count).tolist()
    rows = [{"tokens": [i] * (n + 1), "labels": [-100, *[i] * n]} for i, n in enumerate(lengths)]
    other = [{"text": str(i), "score": [None, 0.5], "empty": None} for i in range(count)]
    return [row | more for row, more in zip(rows, other, strict=True)]


def files(folder: Path, *, rows: int = 45) -> list[str]:
    """Write three files with row groups of seven rows."""
    made = rows_of(rows)
    paths = []
    for number, part in enumerate(np.array_split(np.arange(rows), 3)):
        table = pyarrow.Table.from_pylist([made[i] for i in part])
        paths.append(str(folder / f"{number}.parquet"))
        parquet.write_table(table, paths[-1], row_group_size=7)
    return paths


def streamed(folder: Path, rows: int = 45) -> IterableDataset:
    return datasets.load_dataset(
        "parquet", data_files=files(folder, rows=rows), split="train", streaming=True
    )


def stream_of(source: HFSource) -> Any:
    return source.source


BY_TABLE: dict[str, Callable[[Path], Any]] = {
    "files": streamed,
    "some columns": lambda folder: streamed(folder).select_columns(["labels", "text"]),
    "row groups": lambda folder: streamed(folder).reshard(),
    "a shard": lambda folder: streamed(folder).shard(3, 1),
    "a table": lambda folder: Dataset.from_list(rows_of(45)).to_iterable_dataset(num_shards=2),
    "a list is missing": lambda folder: Dataset.from_list(
        [*rows_of(9), {**rows_of(1)[0], "tokens": None}, *rows_of(3)]
    ).to_iterable_dataset(),
}


@pytest.mark.parametrize("batch_bytes", [100, 1 << 24])
@pytest.mark.parametrize("kind", BY_TABLE)
def test_rows_are_those_of_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, batch_bytes: int
) -> None:
    monkeypatch.setattr(hugging_face, "BATCH_BYTES", batch_bytes)
    dataset = BY_TABLE[kind](tmp_path)
    source = HFSource(dataset)
    assert stream_of(source).by_table
    expected = list(dataset)
    rows = [row.data for row in source.read(Reading())]
    assert all(type(row) is ArrowRow for row in rows) or kind == "a list is missing"
    assert rows == expected
    assert [list(row) for row in rows] == [list(row) for row in expected]
    for offset in range(len(expected)):
        shard = dataset.shard(dataset.num_shards, 0)
        assert list(stream_of(source)._rows(0, offset)) == list(shard)[offset:]
    assert source.fetch((0, 5)) == expected[5]


BY_ROW: dict[str, Callable[[Path], Any]] = {
    "mapped": lambda folder: streamed(folder).map(lambda row: {"labels": row["tokens"]}),
    "filtered": lambda folder: streamed(folder).filter(lambda row: row["tokens"][0] % 3),
    "formatted": lambda folder: streamed(folder).select_columns(["tokens", "labels"]).with_format("numpy"),
    "text": lambda folder: streamed(folder).select_columns(["text"]),
    "concatenated": lambda folder: datasets.concatenate_datasets([streamed(folder)] * 2),
    "decoded": lambda folder: Dataset.from_list(
        [{"tokens": [1], "image": [[1.0]]}],
        features=Features({"tokens": [Value("int32")], "image": Array2D((1, 1), "float32")}),
    ).to_iterable_dataset(),
}


@pytest.mark.parametrize("kind", BY_ROW)
def test_other_streams_are_read_by_row(tmp_path: Path, kind: str) -> None:
    dataset = BY_ROW[kind](tmp_path)
    source = HFSource(dataset)
    assert not stream_of(source).by_table
    found = [{name: np.asarray(v).tolist() for name, v in row.data.items()} for row in source.read(Reading())]
    assert found == [{name: np.asarray(v).tolist() for name, v in row.items()} for row in dataset]


def test_packs_and_states_are_those_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = streamed(tmp_path)

    def run() -> list[Any]:
        data = IterablePackedDataset(dataset, max_seq_len=16, num_lanes=5, shuffle=True, shuffle_window=6)
        return [([pack[key].tolist() for key in ("tokens", "labels")], data.state_dict()) for pack in data]

    by_table = run()
    monkeypatch.setattr(hugging_face, "BY_TABLE", frozenset())
    assert not stream_of(HFSource(dataset)).by_table
    assert run() == by_table


def test_reading_resumes_at_every_cursor(tmp_path: Path) -> None:
    source = HFSource(streamed(tmp_path, rows=36))
    for num_lanes in (1, 2, 5):
        for lane in range(num_lanes):
            for window in (0, 3):
                check_cursors(
                    lambda start, lane=lane, num_lanes=num_lanes, window=window: source.read(  # type: ignore[misc]
                        Reading(lane, num_lanes=num_lanes, shuffle_window=window, start=start)
                    )
                )


@pytest.mark.parametrize("num_lanes", [2, 5])
def test_resume_at_every_pack(tmp_path: Path, num_lanes: int) -> None:
    dataset = streamed(tmp_path, rows=60)

    def make() -> IterablePackedDataset:
        return IterablePackedDataset(
            dataset, max_seq_len=32, num_lanes=num_lanes, shuffle=True, shuffle_window=5
        )

    assert len(check_resume_everywhere(make, packs=10)) >= 10


def test_errors_of_the_stream_consume_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [3, 2, 0]
    whole = IterableDataset.iter

    def hiccup(self: IterableDataset, batch_size: int) -> Iterator[Any]:
        last = failures.pop() if failures else None
        for number, table in enumerate(whole(self, batch_size)):
            if number == last:
                raise ConnectionError("a hiccup")
            yield table

    source = HFSource(streamed(tmp_path))
    monkeypatch.setattr(IterableDataset, "iter", hiccup)
    reader, got = source.read(Reading()), []
    while True:
        try:
            got.append(next(reader).data["tokens"][0])
        except StopIteration:
            break
        except ConnectionError as error:
            assert error.__notes__[-1].startswith("while reading shard 0, row ")
    assert got == list(range(45))
    assert not failures


def test_a_torch_worker_reads_all_shards(tmp_path: Path) -> None:
    """There, ``iter`` of a stream gives only the worker's own shards."""
    data = IterablePackedDataset(streamed(tmp_path), max_seq_len=32, num_lanes=3)
    seen = {
        token
        for pack in DataLoader(data, batch_size=None, num_workers=2)
        for token in pack["tokens"][: int(pack["seq_lens"][: pack["num_seqs"]].sum())].tolist()
    }
    assert seen == set(range(45))
