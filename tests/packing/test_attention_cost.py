"""The cost of a pack's attention, compared with counting the pairs of a mask one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack.packing.attention_cost import AttentionCost


def pairs(length: int, cost: AttentionCost) -> int:
    """Count the pairs (query, key) of one sequence."""
    count = 0
    for query in range(length):
        for key in range(query + 1):
            near = cost.sliding_window is None or query - key < cost.sliding_window
            same = cost.chunk_size is None or query // cost.chunk_size == key // cost.chunk_size
            count += near and same
    return count


@given(
    st.lists(st.integers(1, 40), max_size=4),
    st.sampled_from([None, "sliding_window", "chunk_size"]),
    st.integers(1, 50),
)
def test_cost_counts_the_pairs_of_the_mask(seq_lens: list[int], kind: str | None, limit: int) -> None:
    cost = AttentionCost.from_setting({kind: limit} if kind else None)
    assert cost.of(seq_lens) == sum(pairs(length, cost) for length in seq_lens)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"window": 4}, "balance_cost has no 'window'; its keys are sliding_window, chunk_size"),
        ({"sliding_window": 0}, "balance_cost.sliding_window=0"),
        ({"chunk_size": 2.5}, "balance_cost.chunk_size=2.5"),
        ({"sliding_window": 4, "chunk_size": 4}, "give one of the two"),
        ("squared", "balance_cost='squared' is no mapping"),
    ],
)
def test_settings_that_cannot_be_are_refused(setting: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        AttentionCost.from_setting(setting)
