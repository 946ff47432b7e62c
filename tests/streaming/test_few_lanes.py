"""Fewer lanes than consumers, and lanes without rows."""

from __future__ import annotations

import logging
from itertools import islice
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from streampack import IterablePackedDataset, PackedDataLoader
from tests.support.conformance import check_resume_everywhere
from tests.support.ranks import run_ranks

ROWS = [{"tokens": [i + 1] * (2 + i % 7), "labels": [i + 1] * (2 + i % 7)} for i in range(60)]
FEW = ROWS[:5]


def dataset(rows: Any = ROWS, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(rows, **{"max_seq_len": 12, **settings})


def tokens(loader: Any) -> list[Any]:
    return [batch.tokens.tolist() for batch in loader]


# A resume on more consumers than the run has lanes.


def state_after(batches: int, **settings: Any) -> tuple[dict[str, Any], list[Any]]:
    """Of a run that began on one process, and what it would hand out then."""
    loader = PackedDataLoader(dataset(**settings))
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    state = loader.state_dict()
    assert state["num_lanes"] == 1, "small data makes one lane"
    return state, tokens(iterator)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_run_of_one_lane_resumes_with_several_workers(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    state, rest = state_after(5)
    loader = PackedDataLoader(dataset(), num_workers=workers)
    loader.load_state_dict(state)
    with caplog.at_level(logging.WARNING):
        assert tokens(loader) == rest
    said = [record.getMessage() for record in caplog.records if record.name == "streampack.loader.batching"]
    assert said == (
        [f"num_workers={workers}: 1 of them has work, for there is 1 lane; a new run may set num_lanes"]
        if workers > 1
        else []
    )


def test_a_run_of_one_lane_resumes_in_workers_of_torch() -> None:
    data = dataset()
    iterator = iter(data)
    for _ in range(5):
        next(iterator)
    resumed = dataset()
    resumed.load_state_dict(data.state_dict())
    loader = DataLoader(resumed, batch_size=None, num_workers=2)
    assert [pack["tokens"].tolist() for pack in loader] == [pack["tokens"].tolist() for pack in iterator]


def _go_on(state: dict[str, Any]) -> tuple[list[Any], list[str]]:
    dist.init_process_group("gloo")
    loader = PackedDataLoader(dataset(), batch_size=1, packs_per_step=2)
    loader.load_state_dict(state)
    with pytest.warns(UserWarning, match="do not divide 1 lane evenly") as warned:
        iterator = iter(loader)
    return tokens(iterator), [str(warning.message) for warning in warned]


def test_a_run_of_one_lane_resumes_on_several_ranks() -> None:
    state, rest = state_after(6)
    (first, warned), (second, _) = run_ranks(_go_on, 2, state)
    if len(rest) % 2:  # an epoch's last step is filled up
        assert set(first.pop()[0]) == {0}
        second.pop()
    assert first == rest
    assert len(second) == len(first) > 0
    assert all(set(row) == {0} for batch in second for row in batch), "null packs"
    assert "2 ranks do not divide 1 lane evenly: 1 of them hand out null packs only" in warned[0]


def test_fewer_lanes_than_consumers_are_refused_where_they_were_set() -> None:
    with pytest.raises(
        ValueError, match=r"2 lanes cannot feed 3 consumers .*; use fewer workers, or .* num_lanes"
    ):
        iter(PackedDataLoader(dataset(num_lanes=2), num_workers=3))


def test_iterating_in_one_process_does_not_fix_the_number_of_lanes() -> None:
    data = dataset()
    next(iter(data))
    assert len({str(batch) for batch in tokens(PackedDataLoader(data, num_workers=2))}) > 10


# Lanes without rows.


@pytest.mark.parametrize("workers", [0, 3])
def test_an_endless_stream_skips_empty_lanes(workers: int) -> None:
    data = dataset(FEW, epochs=None, num_lanes=8)
    batches = list(islice(PackedDataLoader(data, num_workers=workers), 25))
    assert [int(batch.tokens[0, 0]) for batch in batches] == [1, 2, 3, 4, 5] * 5
    assert all(batch.num_tokens > 8 for batch in batches), "samples of several epochs share packs"


def test_an_endless_stream_with_empty_lanes_resumes_exactly() -> None:
    check_resume_everywhere(lambda: dataset(FEW, epochs=None, num_lanes=8, shuffle=True), packs=40)


def test_an_endless_stream_skips_lanes_whose_rows_are_all_dropped() -> None:
    rows = [{"tokens": [9] * (20 if i % 4 else 5), "labels": [9] * (20 if i % 4 else 5)} for i in range(16)]
    data = dataset(rows, epochs=None, num_lanes=4, overlong="drop")
    packs = list(islice(data, 12))
    assert {pack["lane"] for pack in packs} == {0}
    assert data.ledger().dropped_samples["overlong"] == 12


def _endless() -> list[Any]:
    dist.init_process_group("gloo")
    loader = PackedDataLoader(dataset(ROWS[:1], epochs=None, num_lanes=2))
    return [batch.tokens.tolist() for batch in islice(loader, 20)]


def test_a_rank_without_rows_hands_out_null_packs() -> None:
    first, second = run_ranks(_endless, 2)
    assert len(first) == len(second) == 20
    assert all(batch == [[1] * 12] for batch in first)
    assert second == [[[0] * 12]] * 20
