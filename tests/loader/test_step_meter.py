"""How evenly ranks share the work of a step, compared with the costs of the batches that they were given."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streampack import PackedDataLoader
from streampack.loader.step_meter import StepMeter
from streampack.packing.attention_cost import AttentionCost
from tests.harness.corpus import rows
from tests.harness.threads import ThreadSync, make, on_ranks


def ratio(costs: list[int]) -> float:
    return max(costs) / fmean(costs) if sum(costs) else 1.0


@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=2, max_size=2), max_size=9
    ),
    st.integers(0, 8),
)
def test_means_over_steps(steps: list[list[list[int]]], asked: int) -> None:
    """Steps of two batches on three ranks; ``asked`` is the step after which metrics are asked for."""
    meter = StepMeter()
    for number, step in enumerate(steps):
        for i, costs in enumerate(step):
            meter.add(costs, waited=number + i, ends_step=i == 1)
        if number == asked:
            meter.metrics()
    found = meter.metrics()
    if not steps:
        assert found == {}
        return
    ratios = [ratio([sum(rank) for rank in zip(*step, strict=True)]) for step in steps]
    waits = [2 * number + 1 for number in range(len(steps))]
    last = asked + 1 if asked + 1 < len(steps) else 0
    assert found == pytest.approx(
        {
            "cost_imbalance": fmean(ratios[last:]),
            "cost_imbalance_mean": fmean(ratios),
            "data_wait": fmean(waits[last:]),
            "data_wait_mean": fmean(waits),
        }
    )
    assert meter.metrics() == found  # as long as there is no further step
    assert meter.waited == sum(waits)


@pytest.mark.parametrize("per_step", [4, 8])
@pytest.mark.parametrize("cost", [None, {"sliding_window": 3}])
def test_a_loader_knows_the_costs_of_all_ranks(per_step: int, cost: dict[str, int] | None) -> None:
    def act(sync: ThreadSync) -> tuple[list[int], dict[str, float]]:
        loader = PackedDataLoader(make(rows(300), balance_cost=cost)(), batch_size=2, packs_per_step=per_step)
        loader.rank_sync = sync
        costs = [
            sum(
                AttentionCost.from_setting(cost).of(f.stop - f.start for f in pack)
                for pack in batch.fragments
            )
            for batch in loader
        ]
        return costs, loader.metrics()

    ranks = on_ranks(2, act)
    batches = per_step // 4
    steps = [
        [sum(costs[first : first + batches]) for costs, _ in ranks]
        for first in range(0, len(ranks[0][0]), batches)
    ]
    wanted = fmean(map(ratio, steps))
    assert wanted > 1.02
    for _, metrics in ranks:
        assert metrics["cost_imbalance"] == metrics["cost_imbalance_mean"] == pytest.approx(wanted)
        assert metrics["data_wait_mean"] * len(steps) <= metrics["data_wait_seconds"] * 1.001


def test_a_single_rank_has_no_imbalance() -> None:
    loader: Any = PackedDataLoader(make(rows(100))(), batch_size=2)
    assert "data_wait" not in loader.metrics()
    for _ in loader:
        pass
    metrics = loader.metrics()
    assert metrics["data_wait"] > 0
    assert "cost_imbalance" not in metrics
