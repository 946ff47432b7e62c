from __future__ import annotations

import numpy as np
import pytest

from streampack.inspection.plans import plan_lanes, plan_padding, steps_of
from streampack.loader.batching import Batching
from streampack.packing.attention_cost import AttentionCost
from streampack.packing.settings import Packing
from tests.oracle import packing as oracle


@pytest.mark.parametrize("strategy", list(oracle.CHOOSE))
def test_packs_are_those_of_the_oracle(strategy: str) -> None:
    lanes = [np.random.default_rng(lane).integers(1, 13, 40).tolist() for lane in range(3)]
    plan = plan_lanes(lanes, Packing(12, strategy, 6), AttentionCost())
    packs = [
        [lane[i] for i in pack]
        for lane in lanes
        for pack in oracle.pack(lane, 12, strategy=strategy, buffer_size=6)
    ]
    assert plan.held.tolist() == [sum(pack) for pack in packs]
    assert plan.pairs.tolist() == [sum(n * (n + 1) // 2 for n in pack) for pack in packs]


def test_padding_batch_by_batch() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 50).tolist()
    plan = plan_padding(
        [lengths[:20], lengths[20:]],
        Packing(12, overlong="split"),
        AttentionCost(),
        batch=4,
        rows_per_step=8,
        seed=3,
    )
    pieces = sorted(min(12, length - start) for length in lengths for start in range(0, length, 12))
    assert sorted(plan.held.tolist()) == pieces
    for start in range(0, len(pieces), 4):
        longest = max(plan.held[start : start + 4].tolist())
        assert plan.widths[start : start + 4].tolist() == [longest] * len(plan.held[start : start + 4])
    assert plan.pairs.tolist() == [width * (width + 1) // 2 for width in plan.widths.tolist()]
    assert plan.steps == -(-len(pieces) // 8)


def test_steps_of_an_epoch_slot_by_slot() -> None:
    """A step takes the next slots of each rank; it is made as long as any rank has packs."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        ranks, batch, per_step = (int(rng.integers(1, most)) for most in (5, 4, 12))
        lanes = rng.integers(0, 20, int(rng.integers(1, 12))).tolist()
        queues = [sum(lanes[rank::ranks]) for rank in range(ranks)]
        slot = steps = 0
        while any(queues):
            for number in range(slot, slot + per_step):
                queues[number % len(lanes) % ranks] -= queues[number % len(lanes) % ranks] > 0
            slot, steps = slot + per_step, steps + 1
        assert steps_of(lanes, Batching(batch, per_step, ranks, len(lanes))) == steps
