"""The readers of parts, in order and within windows, over parts of integers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from streampack.sources import Reading
from streampack.sources.base import Reader
from streampack.sources.parts import Part, Record
from streampack.sources.shuffling import read_parts
from streampack.types import Row
from tests.support.conformance import check_cursors


class Numbers:
    """The numbers of one part; ``hiccup`` may raise."""

    def __init__(self, part: Part, offset: int, hiccup: Callable[[], None]) -> None:
        self.offset, self.stop, self.hiccup = offset, part.stop, hiccup

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> Record:
        self.hiccup()
        assert self.stop is not None
        if self.offset >= self.stop:
            raise StopIteration
        self.offset += 1
        return self.offset - 1, self.offset - 1, self.offset


class Hiccup(Exception):
    pass


def window_reader(
    sizes: list[int], *, window: int, seed: int = 0, start: Any = None, fails: frozenset[int] = frozenset()
) -> Reader:
    """Part f holds the numbers 100 f, 100 f + 1, ...; the calls (open, next, decode alike) in ``fails`` raise."""
    calls = itertools.count()

    def hiccup() -> None:
        if next(calls) in fails:
            raise Hiccup

    def open_part(part: Part, offset: int, following: Part | None) -> Numbers:
        hiccup()
        return Numbers(part, offset, hiccup)

    def decode(part: Part, offset: int, raw: int) -> dict[str, int]:
        hiccup()
        return {"n": raw}

    parts = [Part(f, 100 * f, 100 * f + size) for f, size in enumerate(sizes)]
    reading = Reading(seed=seed, shuffle_window=window, start=start)
    return read_parts(parts, reading, open_part=open_part, decode=decode, locate=str)


part_sizes = st.lists(st.integers(0, 6), max_size=6)


@given(sizes=part_sizes, window=st.integers(0, 8), seed=st.integers(0, 2))
def test_every_cursor_of_windows(sizes: list[int], window: int, seed: int) -> None:
    found = check_cursors(lambda start: window_reader(sizes, window=window, seed=seed, start=start))
    in_order = [100 * f + i for f, size in enumerate(sizes) for i in range(size)]
    numbers = [row["n"] for row in found]
    assert sorted(numbers) == in_order
    if not window:
        assert numbers == in_order


@given(
    sizes=part_sizes,
    window=st.integers(0, 8),
    fails=st.frozensets(st.integers(0, 60), max_size=20),
)
def test_errors_change_nothing(sizes: list[int], window: int, fails: frozenset[int]) -> None:
    """Rows, cursors and order are those of a run without errors; a restart after an error goes on right there."""
    whole = list(window_reader(sizes, window=window))
    reader = window_reader(sizes, window=window, fails=fails)
    found: list[Row] = []
    for _ in range(200):
        cursor = reader.cursor
        try:
            row = next(reader)
        except StopIteration:
            break
        except Hiccup:
            assert reader.cursor == cursor
            rest = list(window_reader(sizes, window=window, start=reader.cursor))
            assert [r.data for r in rest] == [r.data for r in whole[len(found) :]]
            continue
        assert row.cursor == cursor
        found.append(row)
    assert found == whole


def test_the_cursor_after_a_window_is_the_next_windows() -> None:
    """A cursor in the old window would make a resume read it again for nothing."""
    reader = window_reader([10] * 3, window=4)
    for count in range(1, 31):
        next(reader)
        assert reader.cursor[-1] == (count % 4 if count < 30 else 0)


def test_a_window_is_shuffled_as_a_whole() -> None:
    numbers = [row.data["n"] for row in window_reader([10] * 10, window=25)]
    assert numbers != sorted(numbers)
    parts = [n // 100 for n in numbers]
    assert parts != sorted(parts), "parts too"
    # Every window holds the records of its stretch of the permuted parts, and no others.
    order = list(
        dict.fromkeys(n // 100 for n in [row.data["n"] for row in window_reader([10] * 10, window=1)])
    )
    stretch = [100 * f + i for f in order for i in range(10)]
    for begin in range(0, 100, 25):
        assert sorted(numbers[begin : begin + 25]) == sorted(stretch[begin : begin + 25])
        assert numbers[begin : begin + 25] != stretch[begin : begin + 25]
    # No two windows in the same order.
    places = {number: place for place, number in enumerate(stretch)}
    orders = {tuple(places[n] - begin for n in numbers[begin : begin + 25]) for begin in range(0, 100, 25)}
    assert len(orders) == 4
