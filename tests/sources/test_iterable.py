"""Iterables: which are refused, lanes, errors, fingerprints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import IterableDataset as TorchIterable

from streampack import IterablePackedDataset, IterableSource, Mix, PackedDataLoader
from streampack.sources import Reading
from streampack.sources.as_source import as_source
from tests.support.corpus import numbered, read_all


def test_iterators_are_refused() -> None:
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


@given(count=st.integers(0, 12), num_lanes=st.integers(1, 5))
def test_lanes_take_turns_with_the_rows(count: int, num_lanes: int) -> None:
    source = IterableSource(numbered(count))
    for lane in range(num_lanes):
        assert [row.data for row in source.read(Reading(lane, num_lanes=num_lanes))] == numbered(count)[
            lane::num_lanes
        ]


@pytest.mark.parametrize(("window", "lane"), [(0, 0), (4, 1)])
def test_a_generator_that_raises_midway(window: int, lane: int) -> None:
    """A generator that raised is finished, which a naive reader would take for the end of the data."""
    broken = [True]

    def rows() -> Iterator[dict[str, Any]]:
        for row in numbered(20):
            if row["i"] == 11 and broken[0]:
                raise OSError("gone")
            yield row

    source = IterableSource(rows)
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


class SharesOut(TorchIterable[dict[str, Any]]):
    """A dataset that shares out its rows among torch's workers."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from [{"input_ids": [1 + i] * 5} for i in range(40)][start::step]


@pytest.mark.parametrize(
    "wrap", [IterableSource, lambda data: Mix([{"name": "a", "source": data, "weight": 1}])]
)
def test_an_iterable_that_shares_out_its_rows_loses_none(wrap: Any) -> None:
    data = IterablePackedDataset(wrap(SharesOut()), max_seq_len=8)
    with pytest.raises(
        ValueError, match="2 consumers .* would take turns with the rows of an iterable, and lose"
    ):
        list(DataLoader(data, batch_size=None, num_workers=2))
    for read in (
        DataLoader(IterablePackedDataset(wrap(SharesOut()), max_seq_len=8), batch_size=None, num_workers=1),
        PackedDataLoader(IterablePackedDataset(wrap(SharesOut()), max_seq_len=8), num_workers=2),
    ):
        found = [int(batch["tokens"][0] if isinstance(batch, dict) else batch.tokens[0, 0]) for batch in read]
        assert sorted(found) == list(range(1, 41))
