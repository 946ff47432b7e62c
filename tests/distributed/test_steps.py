"""A run keeps its steps on any number of ranks: more than lanes, or a number that does not divide them."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest

from tests.harness.corpus import rows
from tests.harness.threads import (
    Run,
    Topology,
    by_lane,
    check_steps,
    check_whole,
    make,
    packs_of,
    run,
    steps_of,
)

DATA = rows(300)


def steps(result: Run) -> list[list[Any]]:
    return [
        sorted(step)
        for step in steps_of(
            [[packs_of(batch) for batch in batches] for batches in result.batches], result.batches_per_step
        )
    ]


def cases() -> list[tuple[int, int, int, int]]:
    """Lanes, ranks, packs in a step, packs in a batch."""
    return [
        (lanes, ranks, packs, batch)
        for lanes, ranks, packs, batch in product((1, 3, 8), (2, 3, 5), (1, 6), (1, 2))
        if lanes % ranks
    ]


@pytest.mark.filterwarnings("ignore:.*do not divide .* evenly:UserWarning")
@pytest.mark.parametrize(("lanes", "ranks", "packs", "batch"), cases())
def test_a_resume_on_other_ranks_makes_the_same_steps(lanes: int, ranks: int, packs: int, batch: int) -> None:
    """Of two epochs, each until its first lane ends."""
    build = make(DATA, num_lanes=lanes)
    whole = run(build, Topology(batch_size=batch), packs_per_step=packs)
    reference = steps(whole)
    begun = run(build, Topology(batch_size=batch), packs_per_step=packs, limit=2 * whole.batches_per_step)
    resumed = run(build, Topology(ranks, batch_size=batch), state=begun.states[0], packs_per_step=0)
    made = steps(begun) + steps(resumed)
    check_whole([pack for step in made for pack in step], DATA, 2)
    assert check_steps(made, build, lanes, packs) > 4, (
        "the same packs, until a lane ends; also behind the resume"
    )
    longest = [max(map(len, epoch)) for epoch in by_lane(build, lanes)]
    most = sum(-(-count * lanes // packs) for count in longest)
    assert len(reference) <= len(made) <= most, (
        "a step takes slots of all lanes, and the longest lane decides"
    )
    back = run(build, Topology(1, batch_size=batch), state=resumed.states[0], packs_per_step=0, limit=1)
    assert back.ended == [True]


def test_one_lane_on_two_ranks_keeps_the_number_of_steps() -> None:
    build = make(DATA, num_lanes=1, epochs=1)
    alone = run(build, Topology(batches_per_step=4))
    begun = run(build, Topology(batches_per_step=4), limit=12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed = run(build, Topology(2), state=begun.states[0], packs_per_step=0)
    assert steps(begun) + steps(resumed) == steps(alone)
    assert begun.states[0]["packs_per_step"] == resumed.states[1]["packs_per_step"] == 4
