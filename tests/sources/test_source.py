"""A source of one's own: two methods, and everything that the package's own sources can do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from streampack import IterablePackedDataset, PackedDataLoader, Source


class Squares(Source):
    def __init__(self, count: int, *, broken: int | None = None) -> None:
        self.count = count
        self.broken = broken

    def fingerprint(self) -> str:
        return f"squares below {self.count}"

    def rows(self, start: int, step: int) -> Iterator[dict[str, Any]]:
        for n in range(start, self.count, step):
            if n == self.broken:
                raise ValueError(f"{n} is broken")
            yield {"input_ids": [n % 1000] * (n % 7 + 1)}


def test_every_row_comes_once_with_workers() -> None:
    dataset = IterablePackedDataset(Squares(300), max_seq_len=32, num_lanes=4, shuffle=True)
    seen = [
        fragment.row_id[-1]
        for batch in PackedDataLoader(dataset, batch_size=2, num_workers=2)
        for fragments in batch.fragments
        for fragment in fragments
    ]
    assert sorted(seen) == list(range(300))


def test_an_error_names_the_row_and_is_raised_again() -> None:
    iterator = iter(IterablePackedDataset(Squares(9, broken=5), max_seq_len=64, num_lanes=1))
    for _ in range(2):
        with pytest.raises(ValueError, match="5 is broken") as error:
            next(iterator)
        assert "while reading row 5" in error.value.__notes__[0]


def test_another_corpus_is_refused() -> None:
    state = IterablePackedDataset(Squares(9), max_seq_len=8, num_lanes=1).state_dict()
    with pytest.raises(ValueError, match="squares below 9"):
        IterablePackedDataset(Squares(10), max_seq_len=8, num_lanes=1).load_state_dict(state)


def test_a_source_without_rows_or_read_is_an_error() -> None:
    class Empty(Source):
        def fingerprint(self) -> str:
            return "nothing"

    with pytest.raises(NotImplementedError, match="Empty needs either rows, or read, locate and fetch"):
        next(iter(IterablePackedDataset(Empty(), max_seq_len=8, num_lanes=1)))
