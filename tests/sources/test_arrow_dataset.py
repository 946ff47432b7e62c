"""Datasets of Hugging Face, read from their Arrow tables: the same rows as by number."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("datasets")
from datasets import Array2D, Dataset, Features, Value, concatenate_datasets

from streampack import HFSource, IterablePackedDataset, MapSource, PackedDataset
from streampack.sources import arrow_dataset
from streampack.sources.arrow_dataset import ArrowDataset, is_readable
from streampack.sources.arrow_rows import ArrowRow
from streampack.sources.as_source import as_source


def rows_of(count: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(count)
    ids = [rng.integers(1, 99, n).tolist() for n in rng.integers(1, 9, count)]
    return [{"input_ids": each, "labels": [-100, *each[1:]], "text": str(i)} for i, each in enumerate(ids)]


HALVES = slice(15), slice(15, 40)
DATASETS = {
    "a list": lambda folder: Dataset.from_list(rows_of(50)),
    "several chunks": lambda folder: concatenate_datasets([Dataset.from_list(rows_of(n)) for n in (9, 1, 30)]),
    "side by side": lambda folder: concatenate_datasets(
        [
            Dataset.from_list(rows_of(40)).select_columns("input_ids"),
            concatenate_datasets([Dataset.from_list(rows_of(40)[part]) for part in HALVES])
            .remove_columns("input_ids"),
        ],
        axis=1,
    ),
    "selected": lambda folder: Dataset.from_list(rows_of(50)).select([3, 3, 40, 0, 7]),
    "shuffled": lambda folder: Dataset.from_list(rows_of(50)).shuffle(seed=1),
    "a range": lambda folder: Dataset.from_list(rows_of(50)).select(range(10, 30)),
    "a shard": lambda folder: Dataset.from_list(rows_of(50)).shard(3, 1),
    "some columns": lambda folder: Dataset.from_list(rows_of(50)).select_columns(["input_ids"]),
    "filtered": lambda folder: Dataset.from_list(rows_of(50)).filter(lambda row: len(row["input_ids"]) > 3),
    "on disk": lambda folder: saved(Dataset.from_list(rows_of(50)), folder),
}  # fmt: skip


def saved(dataset: Dataset, folder: Path) -> Dataset:
    dataset.save_to_disk(folder, num_shards=3)
    return Dataset.load_from_disk(folder)


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_rows_are_those_of_the_dataset(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make(tmp_path)
    monkeypatch.setattr(arrow_dataset, "BATCH_ROWS", 4)
    monkeypatch.setattr(arrow_dataset, "KEPT_BATCHES", 3)
    assert is_readable(dataset)
    rows = ArrowDataset(dataset)
    assert [rows[i] for i in range(len(rows))] == list(dataset)
    for i in np.random.default_rng(0).permutation(len(rows)).tolist():
        assert type(rows[i]) is ArrowRow
        assert rows[i] == dataset[i]
        assert list(rows[i]) == list(dataset[i])
    assert rows[-1] == dataset[-1]
    with pytest.raises(IndexError):
        rows[len(rows)]
    assert pickle.loads(pickle.dumps(rows))[0] == dataset[0]


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_a_run_is_the_same_as_by_rows(make: Any, tmp_path: Path) -> None:
    dataset = make(tmp_path)

    def run(source: Any) -> Any:
        data = IterablePackedDataset(source, max_seq_len=16, num_lanes=2, shuffle=True, vocab_size=99)
        return [([pack[key].tolist() for key in ("tokens", "labels")], data.state_dict()) for pack in data]

    by_row = run(MapSource(dataset))
    for source in (as_source(dataset), HFSource(dataset)):
        assert isinstance(getattr(source, "source", source).dataset, ArrowDataset)
        assert source.fingerprint() == MapSource(dataset).fingerprint()
    assert run(dataset) == by_row
    assert [pack for pack, _ in run(HFSource(dataset))] == [pack for pack, _ in by_row]
    packed = PackedDataset(dataset, max_seq_len=16)
    assert isinstance(packed.ds, ArrowDataset)
    other = PackedDataset(list(dataset), max_seq_len=16)
    assert [packed[i]["tokens"].tolist() for i in range(len(packed))] == [
        other[i]["tokens"].tolist() for i in range(len(other))
    ]


def test_formatted_and_decoded_datasets_are_read_by_row() -> None:
    dataset = Dataset.from_list(rows_of(5))
    for other in (
        dataset.with_format("numpy"),
        dataset.with_format(columns=["text"]),
        dataset.with_transform(lambda batch: batch),
        dataset.select_columns(["text"]),
        Dataset.from_list(
            [{"tokens": [1], "image": [[1.0]]}],
            features=Features({"tokens": [Value("int32")], "image": Array2D((1, 1), "float32")}),
        ),
    ):
        assert not is_readable(other)
        source = as_source(other)
        assert isinstance(source, MapSource)
        assert source.dataset is other


def test_int32_ids_are_views_of_the_table() -> None:
    features = Features({"tokens": [Value("int32")], "labels": [Value("int32")]})
    dataset = Dataset.from_dict({"tokens": [[1, 2], [3]], "labels": [[1, 2], [3]]}, features=features)
    table = dataset.data.column("tokens").chunk(0).values.to_numpy()
    assert np.shares_memory(ArrowDataset(dataset)[1].stored("tokens"), table)
