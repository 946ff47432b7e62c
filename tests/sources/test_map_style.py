"""Map-style data: rows by number, errors, fingerprints, probes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streampack import MapSource
from streampack.sources import Reading
from tests.support.corpus import numbered


def test_lanes_shuffle_differently() -> None:
    source = MapSource(numbered(60))
    lanes = [
        [row.data["i"] // 2 for row in source.read(Reading(lane, num_lanes=2, shuffle_window=1))]
        for lane in (0, 1)
    ]
    assert sorted(lanes[0]) == sorted(lanes[1])
    assert lanes[0] != lanes[1]


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
def test_errors_of_a_dataset_consume_nothing(window: int) -> None:
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


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        MapSource([])
    assert str(error.value) == "the dataset (list) is empty; it must have at least one row"


def test_the_fingerprint_depends_on_the_number_and_content_of_rows() -> None:
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
