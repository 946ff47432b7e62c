"""The simulation of `benchmarks.scale` is the real thing: what real loaders hand out, rank by rank, batch by batch."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest

from benchmarks.scale import simulation as sim
from streampack import IterablePackedDataset, MapSource, plan_packs
from tests.harness.corpus import Numbers, rows
from tests.harness.threads import Topology, run

DATA = rows(900, longest=16, seed=5)
LENGTHS = np.array([row["n"] for row in DATA])
LANES = 12
PACKING: dict[str, Any] = {"max_seq_len": 40, "buffer_size": 6}
Handed = list[list[list[list[int]]]]  # [ranks][batches][packs] the samples of each, null packs left out

pytestmark = pytest.mark.filterwarnings("ignore:.*do not divide .* evenly")


def planned(own: Any) -> list[list[int]]:
    """The samples of each pack of a lane that reads these samples."""
    packs = plan_packs(LENGTHS[own], **PACKING)
    return [sorted(int(own[span.index]) for span in pack) for pack in packs]


def really(topology: sim.Topology, *, state: Any = None, steps: int | None = None) -> tuple[Handed, Any]:
    """What loaders on so many threads hand out, and their state."""
    made = run(
        lambda: IterablePackedDataset(
            MapSource(DATA), encoder=Numbers(), num_lanes=topology.lanes, **PACKING
        ),
        Topology(topology.ranks, batch_size=topology.batch_size),
        state=state,
        limit=steps and steps * topology.batches_per_step,
        packs_per_step=topology.packs_per_step,
    )
    assert {len(batch.fragments) for batch in chain(*made.batches)} == {topology.packs_per_batch}
    handed = [
        [[sorted(f.row_id[0] for f in pack) for pack in batch.fragments if pack] for batch in batches]
        for batches in made.batches
    ]
    return handed, made.states[0]


@pytest.mark.parametrize(
    ("topology", "steps"),
    [
        (sim.Topology(4, 12, LANES, batch_size=2), 0),
        (sim.Topology(3, 15, LANES, batch_size=4), 0),  # five in two batches of three
        (sim.Topology(5, 7, LANES, batch_size=2), 0),  # neither ranks nor steps divide the lanes: null packs
        (sim.Topology(4, 6, 4), 0),  # other ranks have the shorter share at every second step
        *((sim.Topology(ranks, 12, LANES, batch_size=2), 7) for ranks in (2, 3, 5)),
    ],
    ids=str,
)
def test_a_run_is_that_of_real_loaders(topology: sim.Topology, steps: int) -> None:
    """From the beginning, or resumed after so many steps of four ranks."""
    lanes = [planned(range(lane, len(DATA), topology.lanes)) for lane in range(topology.lanes)]
    packs = sim.Packs.of(np.array(list(map(len, lanes))))
    before = sim.Topology(4, topology.packs_per_step, topology.lanes)
    assigned = sim.assign(packs, before)
    later = assigned.step >= steps
    rest = packs.where(later)
    again = sim.assign(rest, topology, slot=steps * before.packs_per_step)
    batches = range(again.steps * topology.batches_per_step)
    handed: Handed = [[[] for _ in batches] for _ in range(topology.ranks)]
    for pack in np.lexsort((rest.lane, rest.number)):
        handed[again.rank[pack]][again.batch[pack]].append(lanes[rest.lane[pack]][rest.number[pack]])
    state = really(before, steps=steps)[1] if steps else None
    assert handed == really(topology, state=state)[0]
    same = sim.same_steps((rest, assigned.step[later] - steps), (rest, again.step))
    assert steps + same >= sim.first_lane_end(packs, before) > steps
