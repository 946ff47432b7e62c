"""Which lane of a source a lane of a mixture reads in each pass."""

from __future__ import annotations

import pytest

from streampack.sources.passes import lane_in_pass, passes_by_all


@pytest.mark.parametrize("num_lanes", [1, 2, 3, 8, 31, 32, 100])
@pytest.mark.parametrize("first", [0, 1, 17, 5 << 20])
def test_in_each_pass_every_lane_is_read_once(num_lanes: int, first: int) -> None:
    passes = range(first, first + passes_by_all(num_lanes))
    read = [[lane_in_pass(lane, num_lanes, number) for lane in range(num_lanes)] for number in passes]
    assert all(sorted(lanes) == list(range(num_lanes)) for lanes in read)
    assert all(set(by_lane) == set(range(num_lanes)) for by_lane in zip(*read, strict=True)), (
        "each comes by all"
    )


def test_the_first_pass_moves_no_lane() -> None:
    assert [lane_in_pass(lane, 9, 0) for lane in range(9)] == list(range(9))
