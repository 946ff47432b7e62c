"""The simulation of `benchmarks.scale` is the real thing: what real loaders hand out, rank by rank, batch by batch."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.scale import simulation as sim
from streampack import IterablePackedDataset, JSONLSource, MapSource, PackedDataLoader, plan_packs
from tests.harness.corpus import Numbers, rows, write
from tests.harness.threads import Board, ThreadSync, run_threads

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
    board = Board(topology.ranks)
    handed: Handed = [[] for _ in range(topology.ranks)]
    states: dict[int, Any] = {}

    def rank(number: int) -> None:
        data = IterablePackedDataset(MapSource(DATA), encoder=Numbers(), num_lanes=topology.lanes, **PACKING)
        loader = PackedDataLoader(
            data, batch_size=topology.batch_size, packs_per_step=topology.packs_per_step
        )
        loader.rank_sync = ThreadSync(board, number)
        if state is not None:
            loader.load_state_dict(state)
        for batch in islice(loader, steps and steps * topology.batches_per_step):
            packs = [[fragment.row_id[0] for fragment in pack] for pack in batch.fragments]
            handed[number].append([sorted(pack) for pack in packs if pack])
            assert len(packs) == topology.packs_per_batch
        states[number] = loader.state_dict()

    run_threads(topology.ranks, rank)
    return handed, states[0]


def simulated(packs: sim.Packs, dealt: sim.Dealt, topology: sim.Topology) -> Handed:
    lanes = [planned(range(lane, len(DATA), topology.lanes)) for lane in range(topology.lanes)]
    batches = range(dealt.steps * topology.batches_per_step)
    handed: Handed = [[[] for _ in batches] for _ in range(topology.ranks)]
    for pack in np.lexsort((packs.lane, packs.number)):
        held = lanes[packs.lane[pack]][packs.number[pack]]
        handed[dealt.rank[pack]][dealt.batch[pack]].append(held)
    return handed


def packs_of(lanes: int) -> sim.Packs:
    return sim.Packs.of(np.array([len(planned(range(lane, len(DATA), lanes))) for lane in range(lanes)]))


@pytest.mark.parametrize(
    "topology",
    [
        sim.Topology(4, 12, LANES, batch_size=2),
        sim.Topology(3, 15, LANES, batch_size=4),  # five in two batches of three
        sim.Topology(5, 7, LANES, batch_size=2),  # neither ranks nor steps divide the lanes: null packs
        sim.Topology(4, 6, 4),  # other ranks have the shorter share at every second step
    ],
    ids=str,
)
def test_an_epoch_is_that_of_real_loaders(topology: sim.Topology) -> None:
    packs = packs_of(topology.lanes)
    assert simulated(packs, sim.deal(packs, topology), topology) == really(topology)[0]


@pytest.mark.parametrize("ranks", [2, 3, 5], ids="to {} ranks".format)
def test_a_resume_is_that_of_real_loaders(ranks: int) -> None:
    steps = 7
    before, after = sim.Topology(4, 12, LANES), sim.Topology(ranks, 12, LANES, batch_size=2)
    packs = packs_of(LANES)
    dealt = sim.deal(packs, before)
    rest = packs.where(dealt.step >= steps)
    again = sim.deal(rest, after, slot=steps * before.packs_per_step)
    _, state = really(before, steps=steps)
    assert simulated(rest, again, after) == really(after, state=state)[0]
    same = sim.same_steps((rest, dealt.step[dealt.step >= steps] - steps), (rest, again.step))
    assert steps + same >= sim.first_lane_end(packs, before) > steps


def test_rows_go_to_the_lanes_that_a_source_of_files_gives_them(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n:02}.jsonl", DATA[n * 70 : n * 70 + 70]) for n in range(13)]
    data = IterablePackedDataset(JSONLSource(paths), encoder=Numbers(), num_lanes=9, **PACKING)
    row_bytes = np.array([len(json.dumps(row)) + 1 for row in DATA])
    numbers = {(row // 70, int(row_bytes[row - row % 70 : row].sum())): row for row in range(len(DATA))}
    for lane, own in enumerate(sim.by_bytes(row_bytes, 70, 9)):  # a row_id: file, byte
        real = [sorted(numbers[f.row_id] for f in pack.fragments) for pack in data.stream(lane, 9)]
        assert real == planned(own)
