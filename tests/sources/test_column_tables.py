"""Columns in memory as rows: pandas frames, dicts of columns, and what says how else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streampack import IterablePackedDataset, PackedDataset
from streampack.sources import MapSource
from streampack.sources.as_source import as_source

IDS = [[1, 2, 3], [4, 5], [6]]


def tokens_of(data: Any) -> list[list[int]]:
    return [pack["tokens"].tolist() for pack in IterablePackedDataset(data, max_seq_len=6)]


def test_a_dict_of_columns() -> None:
    labels = [[-100, 2, 3], [4, 5], [6]]
    for columns in ({"input_ids": IDS}, {"tokens": [np.array(ids) for ids in IDS], "labels": labels}):
        assert tokens_of(columns) == [[1, 2, 3, 4, 5, 6]]
        assert PackedDataset(columns, max_seq_len=6)[0]["tokens"].tolist() == [1, 2, 3, 4, 5, 6]
    assert tokens_of({"input_ids": np.arange(6).reshape(2, 3)}) == [[0, 1, 2, 3, 4, 5]]


def test_a_pandas_frame() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"input_ids": IDS, "weight": [0.5, 1, 2], "n": [1, 2, 3]})
    assert tokens_of(frame[frame["weight"] < 2]) == [[1, 2, 3, 4, 5, 0]]
    assert PackedDataset(frame, max_seq_len=6)[0]["tokens"].tolist() == [1, 2, 3, 4, 5, 6]
    source = as_source(frame)
    assert isinstance(source, MapSource)
    assert source.fetch((1,)) == {"input_ids": [4, 5], "weight": 1.0, "n": 2}


def test_a_dict_of_rows_by_number_is_not_read_as_columns() -> None:
    rows = {i: {"input_ids": ids} for i, ids in enumerate(IDS)}
    assert tokens_of(rows) == [[1, 2, 3, 4, 5, 6]]


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="the columns must be of one length, .* 'input_ids': 3, 'labels': 2"):
        as_source({"input_ids": IDS, "labels": IDS[:2]})


def test_a_dict_of_datasets_is_refused() -> None:
    with pytest.raises(ValueError, match="a dict of 'train', 'test' holds no columns of rows; .* make a Mix"):
        as_source({"train": "a.jsonl", "test": "b.jsonl"})


def test_tables_of_other_libraries_are_refused_with_a_way_out() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=r"give table.to_pylist\(\), or datasets.Dataset\(table\)"):
        as_source(pyarrow.table({"input_ids": IDS}))
