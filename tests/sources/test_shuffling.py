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
    """The numbers of one part; ``maybe_fail`` may raise."""

    def __init__(self, part: Part, offset: int, maybe_fail: Callable[[], None]) -> None:
        self.offset, self.stop, self.maybe_fail = offset, part.stop, maybe_fail

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> Record:
        self.maybe_fail()
        assert self.stop is not None
        if self.offset >= self.stop:
            raise StopIteration
        self.offset += 1
        return self.offset - 1, self.offset - 1, self.offset


class Failure(Exception):
    pass


def reader_of(
    sizes: list[int], *, window: int, seed: int = 0, start: Any = None, fails: frozenset[int] = frozenset()
) -> Reader:
    """Open a reader of parts, of which part f holds the numbers 100 f, 100 f + 1, ...

    Calls that open a part, read a record or decode one are counted together; those whose number is in ``fails`` raise.
    """
    calls = itertools.count()

    def maybe_fail() -> None:
        if next(calls) in fails:
            raise Failure

    def open_part(part: Part, offset: int, following: Part | None) -> Numbers:
        maybe_fail()
        return Numbers(part, offset, maybe_fail)

    def decode(part: Part, offset: int, raw: int) -> dict[str, int]:
        maybe_fail()
        return {"n": raw}

    parts = [Part(f, 100 * f, 100 * f + size) for f, size in enumerate(sizes)]
    reading = Reading(seed=seed, shuffle_window=window, start=start)
    return read_parts(parts, reading, open_part=open_part, decode=decode, locate=str)


part_sizes = st.lists(st.integers(0, 6), max_size=6)


@given(sizes=part_sizes, window=st.integers(0, 8), seed=st.integers(0, 2))
def test_reading_resumes_at_every_cursor(sizes: list[int], window: int, seed: int) -> None:
    found = check_cursors(lambda start: reader_of(sizes, window=window, seed=seed, start=start))
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
def test_errors_change_neither_rows_nor_cursors(sizes: list[int], window: int, fails: frozenset[int]) -> None:
    """After each error, the same reader and a new one at its cursor both return the rows of a run without errors."""
    whole = list(reader_of(sizes, window=window))
    reader = reader_of(sizes, window=window, fails=fails)
    found: list[Row] = []
    for _ in range(200):
        cursor = reader.cursor
        try:
            row = next(reader)
        except StopIteration:
            break
        except Failure:
            assert reader.cursor == cursor
            rest = list(reader_of(sizes, window=window, start=reader.cursor))
            assert [r.data for r in rest] == [r.data for r in whole[len(found) :]]
            continue
        assert row.cursor == cursor
        found.append(row)
    assert found == whole


def test_the_cursor_after_a_window_is_that_of_the_next_window() -> None:
    """With a cursor in the old window, a resume would read that again without need."""
    reader = reader_of([10] * 3, window=4)
    for count in range(1, 31):
        next(reader)
        assert reader.cursor[2] == (count % 4 if count < 30 else 0)


def test_a_window_is_shuffled_as_a_whole() -> None:
    numbers = [row.data["n"] for row in reader_of([10] * 10, window=25)]
    assert numbers != sorted(numbers)
    parts = [n // 100 for n in numbers]
    assert parts != sorted(parts), "the parts are permuted, too"
    # Every window holds the records of its stretch of the permuted parts, and no others.
    order = list(dict.fromkeys(n // 100 for n in [row.data["n"] for row in reader_of([10] * 10, window=1)]))
    stretch = [100 * f + i for f in order for i in range(10)]
    for begin in range(0, 100, 25):
        assert sorted(numbers[begin : begin + 25]) == sorted(stretch[begin : begin + 25])
        assert numbers[begin : begin + 25] != stretch[begin : begin + 25]
    # No two windows have the same order.
    places = {number: place for place, number in enumerate(stretch)}
    orders = {tuple(places[n] - begin for n in numbers[begin : begin + 25]) for begin in range(0, 100, 25)}
    assert len(orders) == 4
