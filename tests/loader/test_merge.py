"""The events of several workers as those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import IterablePackedDataset, MapSource
from streampack.loader.merge import RankBatches
from streampack.streaming.lane_state import LaneEvent
from tests.harness.corpus import Numbers, rows


class Failing:
    """Stands in for `Worker`, in this process; the calls, of all workers together, in ``fails`` raise."""

    fails: frozenset[int] = frozenset()
    calls = 0

    def __init__(self, dataset: IterablePackedDataset, *, consumer: int, consumers: int, **_: Any) -> None:
        self.stream = dataset.stream(consumer, consumers)

    def __iter__(self) -> Iterator[LaneEvent]:
        return self

    def __next__(self) -> LaneEvent:
        Failing.calls += 1
        if Failing.calls in Failing.fails:
            raise OSError("once")
        return self.stream.next_event()


def handed_over(workers: int) -> list[tuple[int, int, list[int]]]:
    """Epoch, lane and tokens of all packs, in batches of three; an error is asked again."""
    data = IterablePackedDataset(
        MapSource(rows(60)), max_seq_len=16, encoder=Numbers(), num_lanes=6, epochs=2
    )
    batches = RankBatches(
        data, lane_states={}, epoch=0, rank=0, world_size=1, workers=workers, prefetch=1, max_restarts=0
    )
    found = []
    while batches.epoch < 2:
        try:
            rank_batch = batches.next_batch(3)
        except OSError:
            continue
        found += [(pack.epoch, pack.lane, pack.tokens.tolist()) for pack in rank_batch.packs]
        if not rank_batch.packs:
            batches.epoch += 1
    return found


@settings(max_examples=20, deadline=None)
@given(workers=st.sampled_from([1, 2, 3]), fails=st.frozensets(st.integers(1, 60), max_size=12))
def test_batches_are_the_same_after_errors_of_any_worker(workers: int, fails: frozenset[int]) -> None:
    Failing.fails, Failing.calls = fails, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streampack.loader.merge.Worker", Failing)
        assert handed_over(workers) == handed_over(0)
