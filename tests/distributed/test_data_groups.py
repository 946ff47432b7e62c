"""Data-parallel groups: equal batches within a group, different ones across, and one state for all."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from streampack import IterablePackedDataset, JSONLSource, PackedDataLoader
from streampack.distributed.data_groups import DataPlace, data_place, is_first_of_data_rank
from tests.harness.corpus import Numbers, rows
from tests.harness.processes import run_forked
from tests.harness.threads import (
    Make,
    PackKey,
    ThreadSync,
    Topology,
    check_steps,
    check_whole,
    make,
    on_ranks,
    packs_of,
    steps_of,
)

Outcome = tuple[list[list[PackKey]], dict[str, Any]]


def drive(
    built: Make,
    place: DataPlace,
    sync: ThreadSync,
    *,
    state: dict[str, Any] | None = None,
    limit: int | None = None,
) -> Outcome:
    """Return the batches of one rank in threads, and the state after them."""
    loader = PackedDataLoader(built(), batch_size=2, packs_per_step=12)
    loader.rank_sync = sync
    if state is not None:
        loader.load_state_dict(state)
    batches = [packs_of(batch) for batch in islice(iter(loader), limit)]
    return batches, loader.state_dict()


def on_places(
    places: Sequence[DataPlace], built: Make, *, state: dict[str, Any] | None = None, limit: int | None = None
) -> list[Outcome]:
    found = on_ranks(
        len(places),
        lambda sync: drive(
            built, places[sync.rank], sync.placed(places[sync.rank]), state=state, limit=limit
        ),
    )
    for outcome in found:
        if isinstance(outcome, Exception):
            raise outcome
    return found


def by_group(outcomes: Sequence[Outcome], places: Sequence[DataPlace]) -> list[list[list[PackKey]]]:
    """Return the batches of each data rank, having checked that all its ranks have the same, and the same state."""
    groups: dict[int, list[list[PackKey]]] = {}
    for (data_rank, _), (batches, state) in zip(places, outcomes, strict=True):
        assert groups.setdefault(data_rank, batches) == batches
        assert state == outcomes[0][1]
    return [groups[data_rank] for data_rank in sorted(groups)]


LAYOUTS = {
    "dp 2 x tp 4": [(rank // 4, 2) for rank in range(8)],
    "tp 4 x dp 2": [(rank % 2, 2) for rank in range(8)],
    "dp 2 x cp 2 x pp 2": [(rank // 4, 2) for rank in range(8)],
    "tp 3": [(0, 1)] * 3,
    "uneven groups": [(0, 3), (1, 3), (1, 3), (2, 3), (2, 3), (2, 3)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_a_group_get_the_same_batches_and_groups_different_ones(layout: str) -> None:
    places, built = LAYOUTS[layout], make(rows(150))
    outcomes = on_places(places, built)
    size = places[0][1]
    topology = Topology(size, 0, 2, 12 // (2 * size))
    steps = steps_of(by_group(outcomes, places), topology.batches_per_step)
    assert check_steps(steps, built, 12, 12) > 3
    check_whole([key for step in steps for key in step], rows(150), 2)


def test_steps_that_groups_cannot_divide_evenly_take_the_slots_of_data_ranks() -> None:
    places, built = [(0, 2), (0, 2), (1, 2), (1, 2)], make(rows(150))

    def begin(sync: ThreadSync) -> Outcome:
        loader = PackedDataLoader(built(), batch_size=3, packs_per_step=5)
        loader.rank_sync = sync.placed(places[sync.rank])
        return [packs_of(batch) for batch in loader], loader.state_dict()

    steps = steps_of(by_group(on_ranks(4, begin), places), 1)
    assert check_steps(steps, built, 12, 5) > 10


def test_a_run_resumes_on_another_number_of_groups() -> None:
    built = make(rows(240))
    [whole] = on_places([(0, 1)], built)
    wanted = steps_of([whole[0]], 6)
    rng = random.Random(1)
    steps: list[list[PackKey]] = []
    state = None
    for places in (LAYOUTS["dp 2 x tp 4"], LAYOUTS["uneven groups"], [(0, 1)] * 2, LAYOUTS["tp 4 x dp 2"]):
        size, last = places[0][1], places is LAYOUTS["tp 4 x dp 2"]
        per_step = 12 // (2 * size)
        outcomes = on_places(places, built, state=state, limit=None if last else per_step * rng.randint(1, 3))
        steps += steps_of(by_group(outcomes, places), per_step)
        state = outcomes[0][1]
    assert [sorted(step) for step in steps] == [sorted(step) for step in wanted]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([(0, 2), (0, 2)], "nobody has data rank 1 .*its part of the data would never be read"),
        ([(0, 2), (1, 2), (0, 1)], "rank 2 has data_world_size=1 and rank 0 has data_world_size=2"),
        ([(0, 2), (1, 2), None], "rank 2 has data_world_size=None"),
    ],
)
def test_places_that_do_not_make_up_a_whole_are_refused_on_all_ranks(
    places: list[DataPlace | None], message: str
) -> None:
    def begin(sync: ThreadSync) -> None:
        loader = PackedDataLoader(make(rows(60))(), packs_per_step=12)
        loader.rank_sync = sync.placed(places[sync.rank])
        iter(loader)

    found = on_ranks(len(places), begin)
    assert all(isinstance(error, ValueError) for error in found), found
    for error in found:
        with pytest.raises(ValueError, match=message):
            raise error


def test_a_group_whose_ranks_make_other_packs_is_refused_when_a_state_is_taken() -> None:
    def drive_one(sync: ThreadSync) -> None:
        loader = PackedDataLoader(make(rows(60))(), packs_per_step=1)
        loader.rank_sync = sync.placed((0, 1))
        batches = iter(loader)
        next(batches)
        if sync.rank == 1:  # as if its encoder had dropped a row
            loader._progress.handed.lane_states[0].packs += 1
        loader.state_dict()

    for error in on_ranks(2, drive_one):
        with pytest.raises(ValueError, match="rank 1 has made other packs of lane 0"):
            raise error


def test_bad_records_are_listed_by_one_rank_of_a_group(tmp_path: Path) -> None:
    path, folder = tmp_path / "a.jsonl", tmp_path / "bad"
    lines = [json.dumps(row) for row in rows(120)]
    lines[7] = lines[55] = "{"
    path.write_text("\n".join(lines) + "\n")

    def built() -> IterablePackedDataset:
        return IterablePackedDataset(
            JSONLSource(path), encoder=Numbers(), max_seq_len=12, num_lanes=4, on_bad_record="skip",
            quarantine=folder,
        )  # fmt: skip

    places = [(0, 2), (0, 2), (1, 2), (1, 2)]
    groups = by_group(on_places(places, built), places)
    assert sum(len(batches) for batches in groups) > 8
    listed = [line for each in folder.iterdir() for line in each.read_text().splitlines()]
    assert len(listed) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data_rank": 1}, "give both"),
        ({"data_rank": 2, "data_world_size": 2}, "count from 0"),
        ({"data_rank": 0, "data_world_size": 0}, "data_world_size=0"),
        ({"data_dims": "dp"}, "name the dimensions of the mesh"),
        ({"data_dims": "dp", "data_rank": 0}, "give either"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data_place(**arguments)


def test_several_data_ranks_need_a_process_group() -> None:
    with pytest.raises(ValueError, match="data_world_size=2 needs as many ranks, and there are 1"):
        PackedDataLoader(make(rows(9))(), data_rank=0, data_world_size=2)


def test_the_first_rank_of_each_data_rank_is_found() -> None:
    places = LAYOUTS["uneven groups"]
    firsts = [is_first_of_data_rank(places, rank) for rank in range(6)]
    assert firsts == [True, True, False, True, False, False]


# On real processes.

forking = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def on_a_mesh(shape: tuple[int, ...], names: tuple[str, ...], dims: Any, workers: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    built = make(rows(100))
    with pytest.raises(ValueError, match="must be given the same batches"):
        iter(PackedDataLoader(built(), packs_per_step=12))
    loader = PackedDataLoader(
        built(), batch_size=2, num_workers=workers, packs_per_step=12, mesh=mesh, data_dims=dims
    )
    batches = [packs_of(batch) for batch in loader]
    return {
        "place": (loader.rank_sync.data_rank, loader.rank_sync.data_world_size),
        "batches": batches,
        "state": loader.state_dict(),
    }


@forking
@pytest.mark.parametrize(
    ("shape", "names", "dims", "workers", "groups"),
    [
        ((2, 2), ("dp", "tp"), "dp", 1, [0, 0, 1, 1]),
        ((2, 1, 2), ("pp", "cp", "dp"), ("dp",), 0, [0, 1, 0, 1]),
    ],
)
def test_a_device_mesh_says_which_ranks_share_batches(
    shape: tuple[int, ...], names: tuple[str, ...], dims: Any, workers: int, groups: list[int]
) -> None:
    outcomes = run_forked(on_a_mesh, 4, shape, names, dims, workers)
    assert [outcome["place"] for outcome in outcomes] == [(group, 2) for group in groups]
    places = [outcome["place"] for outcome in outcomes]
    steps = steps_of(by_group([(o["batches"], o["state"]) for o in outcomes], places), 3)
    check_whole([key for step in steps for key in step], rows(100), 2)


def hybrid_sharded() -> tuple[DataPlace, list[DataPlace]]:
    names = ("pp", "dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", (1, 2, 2, 2), mesh_dim_names=names)
    place = data_place(mesh=mesh, data_dims=("dp_shard", "dp_replicate"))
    assert place is not None
    with pytest.raises(ValueError, match=r"dimensions \['pp'.*data_dims=\['dp'\]"):
        data_place(mesh=mesh, data_dims=["dp"])
    # A group of some ranks only: the others do not iterate.
    some = dist.new_group([1, 3, 4])
    if dist.get_rank() in (1, 3, 4):
        loader = PackedDataLoader(make(rows(40))(), packs_per_step=12, process_group=some, **whole(some))
        batches = [packs_of(batch) for batch in loader]
        found: list[Any] = [None] * 3
        dist.all_gather_object(found, batches, group=some)
        check_whole([key for ranks in found for batch in ranks for key in batch], rows(40), 2)
    return place, [(loader.rank_sync.rank, loader.rank_sync.world_size)] if dist.get_rank() in (
        1,
        3,
        4,
    ) else []


def whole(group: dist.ProcessGroup) -> dict[str, int]:
    return {"data_rank": dist.get_rank(group), "data_world_size": dist.get_world_size(group)}


def test_hybrid_sharding_and_a_group_of_some_ranks() -> None:
    outcomes = run_forked(hybrid_sharded, 8)
    assert [place for place, _ in outcomes] == [(rank // 2, 4) for rank in range(8)]
    assert [groups for _, groups in outcomes if groups] == [[(0, 3)], [(1, 3)], [(2, 3)]]


def a_rank_of_its_own() -> list[PackKey]:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    loader = PackedDataLoader(make(rows(40))(), batch_size=2, process_group=alone)
    packs = [key for batch in islice(loader, 2) for key in packs_of(batch)]
    again = PackedDataLoader(make(rows(40))(), batch_size=2, process_group=alone)
    again.load_state_dict(loader.state_dict())
    return packs + [key for batch in again for key in packs_of(batch)]


def test_a_group_of_one_rank_reads_all_the_data() -> None:
    for packs in run_forked(a_rank_of_its_own, 2):
        check_whole(packs, rows(40), 2)


def without_names() -> str:
    init_device_mesh("cpu", (2, 2))
    with pytest.warns(UserWarning, match="mesh with a dimension 'dim_[01]' of 2 ranks") as caught:
        iter(PackedDataLoader(make(rows(60))(), packs_per_step=12))
    return str(caught[0].message)


def test_a_mesh_with_unknown_dimension_names_warns() -> None:
    assert all("data_dims" in message for message in run_forked(without_names, 4))


def test_a_step_counts_data_ranks() -> None:
    sync = on_ranks(4, lambda sync: sync.placed((sync.rank // 2, 2)))[0]
    loader = PackedDataLoader(make(rows(60))(), batch_size=3)
    loader.rank_sync = sync
    assert (loader.packs_per_step, loader.batches_per_step) == (6, 1)
