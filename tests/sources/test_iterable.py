"""Iterables: which are refused, strides, errors, fingerprints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import IterableSource
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
    assert source.max_lanes == 1


@given(count=st.integers(0, 12), num_lanes=st.integers(1, 5))
def test_strides_divide_the_rows(count: int, num_lanes: int) -> None:
    source = IterableSource(numbered(count), stride=True)
    assert source.max_lanes is None
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
