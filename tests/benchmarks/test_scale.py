"""The simulation of `benchmarks.scale` is the real thing: what real loaders hand out, rank by rank, batch by batch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.scale import simulation as sim
from streampack import IterablePackedDataset, JSONLSource, MapSource, PackedDataLoader
from streampack.packing.settings import Packing
from tests.harness.corpus import Numbers, rows, write
from tests.harness.threads import Board, InProcess, ThreadSync, run_threads

PACKING = Packing(40, buffer_size=6)
DATA = rows(900, longest=16, seed=5)
LENGTHS = np.array([row["n"] for row in DATA])
Handed = list[list[list[list[int]]]]  # [ranks][batches][packs] the samples of each, null packs left out

uneven = pytest.mark.filterwarnings("ignore:.*do not divide .* evenly")


def dealt_rows(num_lanes: int) -> sim.Corpus:
    """The lanes of a `MapSource`: rows ``l, l + num_lanes, ...``."""
    samples = np.concatenate([np.arange(lane, len(DATA), num_lanes) for lane in range(num_lanes)])
    counts = [len(range(lane, len(DATA), num_lanes)) for lane in range(num_lanes)]
    return sim.Corpus(samples, LENGTHS[samples], np.cumsum(counts))


def really(
    topology: sim.Topology, num_lanes: int, *, state: Any = None, steps: int | None = None, workers: int = 0
) -> tuple[Handed, Any, list[list[int]]]:
    """What loaders on so many threads hand out, their state, and what they told one another."""
    board = Board(topology.ranks)
    handed: Handed = [[] for _ in range(topology.ranks)]
    states: list[Any] = [None] * topology.ranks
    words: list[list[int]] = [[] for _ in range(topology.ranks)]

    def rank(number: int) -> None:
        data = IterablePackedDataset(
            MapSource(DATA), encoder=Numbers(), max_seq_len=40, buffer_size=6, num_lanes=num_lanes
        )
        loader = PackedDataLoader(
            data,
            batch_size=topology.batch_size,
            packs_per_step=topology.packs_per_step,
            num_workers=workers,
        )
        loader.rank_sync = rank_sync = ThreadSync(board, number)
        if state is not None:
            loader.load_state_dict(state)
        assert loader.batches_per_step == topology.batches_per_step
        batches = iter(loader)
        while steps is None or len(handed[number]) < steps * topology.batches_per_step:
            if (batch := next(batches, None)) is None:
                break
            assert len(batch.fragments) == topology.packs_per_batch
            packs = [[fragment.row_id[0] for fragment in pack] for pack in batch.fragments]
            handed[number].append([sorted(pack) for pack in packs if pack])
        states[number] = loader.state_dict()
        words[number] = rank_sync.numbers

    run_threads(topology.ranks, rank)
    return handed, states[0], words


def simulated(corpus: sim.Corpus, packs: sim.Packs, dealt: sim.Dealt, topology: sim.Topology) -> Handed:
    held = sim.samples_of(corpus, packs, len(packs.lane))
    handed: Handed = [
        [[] for _ in range(dealt.steps * topology.batches_per_step)] for _ in range(topology.ranks)
    ]
    for pack in np.lexsort((packs.lane, packs.number)).tolist():
        handed[dealt.rank[pack]][dealt.batch[pack]].append(sorted(held[pack]))
    return handed


@uneven
@pytest.mark.parametrize(
    ("topology", "num_lanes"),
    [
        (sim.Topology(4, 12, batch_size=2), 12),
        (sim.Topology(3, 8, batch_size=2), 12),  # the step does not divide: null packs
        (sim.Topology(3, 15, batch_size=4), 12),  # five in two batches of three
        (sim.Topology(5, 5, num_lanes=12), 12),  # the ranks do not divide the lanes
        (sim.Topology(5, 7, batch_size=2, num_lanes=12), 12),
        (sim.Topology(4, 6), 4),  # other ranks have the shorter share at every second step
    ],
    ids=str,
)
def test_an_epoch_is_that_of_real_loaders(topology: sim.Topology, num_lanes: int) -> None:
    corpus = dealt_rows(num_lanes)
    packs = sim.plan(corpus, PACKING)
    dealt = sim.deal(packs, topology)
    handed, _, words = really(topology, num_lanes)
    assert simulated(corpus, packs, dealt, topology) == handed
    assert {len(batches) for batches in handed} == {dealt.steps * topology.batches_per_step}
    assert sorted(sample for rank in handed for batch in rank for pack in batch for sample in pack) == list(
        range(len(DATA))
    )
    assert len({len(said) for said in words}) == 1
    ends = [max(i for i, batch in enumerate(batches) if batch) + 1 for batches in handed]
    assert sim.agreed(np.array(ends)) == max(ends)


@uneven
@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_matter(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is why the simulation has none. With two or three, ranks x workers do not divide the lanes."""
    monkeypatch.setattr("streampack.loader.merge.Worker", InProcess)
    topology, num_lanes = sim.Topology(4, 12, batch_size=2), 12
    corpus = dealt_rows(num_lanes)
    packs = sim.plan(corpus, PACKING)
    handed, _, _ = really(topology, num_lanes, workers=workers)
    assert simulated(corpus, packs, sim.deal(packs, topology), topology) == handed


@uneven
@pytest.mark.parametrize("ranks", [2, 3, 5], ids="to {} ranks".format)
@pytest.mark.parametrize("steps", [1, 7])
def test_a_resume_is_that_of_real_loaders(ranks: int, steps: int) -> None:
    """Planned anew from what waits, on another number of ranks: the same packs, and as a loader deals them."""
    before, after, num_lanes = sim.Topology(4, 12), sim.Topology(ranks, 12, 2, num_lanes=12), 12
    corpus = dealt_rows(num_lanes)
    packs = sim.plan(corpus, PACKING)
    dealt = sim.deal(packs, before)
    first, state, _ = really(before, num_lanes, steps=steps)
    handed = sim.handed_after(packs, dealt, steps, num_lanes)
    rest = sim.plan(corpus, PACKING, before=packs, handed=handed)
    again = sim.deal(rest, after, slot=steps * before.packs_per_step)
    second, _, _ = really(after, num_lanes, state=state)
    assert simulated(corpus, rest, again, after) == second
    whole = sorted(s for run in (first, second) for rank in run for batch in rank for p in batch for s in p)
    assert whole == list(range(len(DATA)))
    lane_end = sim.first_lane_end(packs, num_lanes, 12)
    assert lane_end > 7, "or nothing is shown"
    for step in range(steps, lane_end):
        ours, theirs = packs.lane[dealt.step == step], rest.lane[again.step == step - steps]
        assert sorted(ours) == sorted(theirs)


def test_rows_go_to_the_lanes_that_a_source_of_files_gives_them(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n:02}.jsonl", DATA[n * 70 : n * 70 + 70]) for n in range(13)]
    source = JSONLSource(paths)
    row_bytes = np.array([len(json.dumps(row)) + 1 for row in DATA])
    corpus = sim.by_bytes(LENGTHS, row_bytes, 70, 9)
    data = IterablePackedDataset(source, encoder=Numbers(), max_seq_len=40, buffer_size=6, num_lanes=9)
    held = sim.samples_of(corpus, packs := sim.plan(corpus, PACKING), 10_000)
    real = [[f.row_id for f in pack.fragments] for lane in range(9) for pack in data.stream(lane, 9)]
    assert len(real) == len(packs.lane)
    numbers = {
        (row // 70, int(row_bytes[row - row % 70 : row].sum())): row for row in range(len(DATA))
    }  # row_id: file, byte
    assert [sorted(numbers[row_id] for row_id in pack) for pack in real] == [
        sorted(pack) for pack in held[: len(real)]
    ]


def test_costs_are_added_up_by_rank_and_step() -> None:
    corpus, topology = dealt_rows(4), sim.Topology(2, 8)
    packs = sim.plan(corpus, PACKING)
    dealt = sim.deal(packs, topology)
    spent = sim.cost_of_ranks(packs, dealt, 2, packs.cost)
    assert spent.shape == (dealt.steps, 2)
    naive = np.zeros_like(spent)
    for pack in range(len(packs.lane)):
        naive[dealt.step[pack], packs.lane[pack] % 2] += packs.cost[pack]
    assert (spent == naive).all()
    lengths = dict(zip(corpus.samples.tolist(), corpus.lengths.tolist(), strict=True))
    held = sim.samples_of(corpus, packs, len(packs.lane))
    assert packs.cost.tolist() == [sum(lengths[s] ** 2 for s in pack) for pack in held]


@pytest.mark.slow
def test_the_command_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.scale", "--smoke", "--out", str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    [result] = tmp_path.iterdir()
    assert result.read_text().count("\n## ") == 4
