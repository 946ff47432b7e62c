"""Loaders on real processes, over gloo, with real signals. `test_ranks.py` and the fuzz test run more in threads."""

from __future__ import annotations

import io
import logging
import multiprocessing as mp
import os
import signal
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from streampack import IterablePackedDataset, JSONLSource, MapSource, PackedDataLoader
from tests.harness.corpus import Numbers, rows, write
from tests.harness.processes import run_forked
from tests.harness.threads import (
    Fails,
    Make,
    PackKey,
    Topology,
    check_steps,
    check_whole,
    make,
    packs_of,
    steps_of,
)
from tests.harness.workers import DeadlyRow, gone, held

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at processes through /proc")


def loader_of(built: Make, topology: Topology, **settings: Any) -> PackedDataLoader:
    return PackedDataLoader(
        built(),
        batch_size=topology.batch_size,
        num_workers=topology.workers,
        packs_per_step=topology.packs_per_step,
        **{"timeout": 60, **settings},
    )


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """Save and load a state as a checkpoint does."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def drive(
    built: Make,
    topology: Topology,
    state: dict[str, Any] | None = None,
    limit: int | None = None,
) -> tuple[list[list[PackKey]], dict[str, Any]]:
    """Return this rank's batches, and the state after them."""
    loader = loader_of(built, topology)
    if state is not None:
        loader.load_state_dict(state)
    iterator = iter(loader)
    batches = [packs_of(batch) for batch in islice(iterator, limit)]
    return batches, through_a_file(loader.state_dict())


def joined(outcomes: list[tuple[list[list[PackKey]], Any]], topology: Topology) -> list[list[PackKey]]:
    return steps_of([batches for batches, _ in outcomes], topology.batches_per_step)


# Finite data.


# Elastic.

ELASTIC = make(rows(500, longest=10), num_lanes=12, epochs=2)


def test_a_run_moves_from_4_to_2_to_3_to_1_ranks(tmp_path: Path) -> None:
    steps: list[list[PackKey]] = []
    state: dict[str, Any] | None = None
    chain = [
        (Topology(4, 1, 2, 3), 2),
        (Topology(2, 2, 3, 4), 3),
        (Topology(3, 0, 4, 2), 1),
        (Topology(1, 4, 6, 4), 2),
    ]
    chain += [(Topology(4, 0, 3, 2), 1), (Topology(2, 1, 12, 1), None)]
    for topology, count in chain:
        limit = count and count * topology.batches_per_step
        outcomes = run_forked(drive, topology.ranks, ELASTIC, topology, state, limit)
        steps += joined(outcomes, topology)
        state = outcomes[0][1]
        assert all(outcome[1] == state for outcome in outcomes)
    assert check_steps(steps, ELASTIC, 12, 24) > 10
    check_whole([key for step in steps for key in step], rows(500, longest=10), 2)


# Errors and deaths.


def one_fails(kind: str, workers: int, folder: Path) -> Any:
    """Fail on the last rank; return this one's error, and the seconds until it was raised."""
    rank, size = dist.get_rank(), dist.get_world_size()
    guilty = rank == size - 1
    data = rows(400)
    source: Any = MapSource(data)
    encoder: Any = Numbers()
    if kind == "row":
        encoder = Fails(12 * 9 + size - 1, KeyError("no luck"))
    elif kind == "unpicklable":
        encoder = Fails(12 * 9 + size - 1, Unpicklable("no luck"))
    elif kind == "worker killed":
        encoder = DeadlyRow(12 * 9 + size - 1)
    elif kind == "missing file":
        (folder / f"{rank}").mkdir()
        path = write(folder / f"{rank}" / "a.jsonl", data)
        source = JSONLSource(path)
    dataset = IterablePackedDataset(
        source, max_seq_len=12, buffer_size=4, num_lanes=12, encoder=encoder, epochs=9
    )
    loader = PackedDataLoader(dataset, batch_size=2, num_workers=workers, timeout=60)
    loader.state_dict()  # later, the fingerprint of a missing file could not be read
    if kind == "missing file" and guilty:
        path.unlink()
    begin, count, told = time.monotonic(), 0, None
    try:
        for _ in loader:
            count += 1
    except Exception as error:
        told = type(error).__name__, str(error)
    took = time.monotonic() - begin
    # All ranks have been told after the same batch, so they can save what they have.
    state = loader.state_dict()
    return told, took, count, state, held()["children"]


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no")


@pytest.mark.parametrize(
    ("kind", "workers", "raised", "told"),
    [
        pytest.param("row", 2, "KeyError", "KeyError: 'no luck'", marks=pytest.mark.slow),
        ("unpicklable", 1, "RuntimeError", "RuntimeError: Unpicklable: no luck"),
        ("missing file", 0, "FileNotFoundError", "FileNotFoundError: [Errno 2] No such file or directory"),
        ("worker killed", 2, "RuntimeError", "RuntimeError: worker 2 of 6 (pid "),
    ],
)
def test_one_ranks_error_is_raised_on_all(
    tmp_path: Path, kind: str, workers: int, raised: str, told: str
) -> None:
    outcomes = run_forked(one_fails, 3, kind, workers, tmp_path)
    for rank, ((name, message), took, count, state, processes) in enumerate(outcomes):
        if rank == 2:
            assert name == raised
        else:
            assert name == "OtherRankFailed"
            assert message.startswith(f"rank 2 failed while making packs: {told}")
            if kind == "worker killed":
                assert "died of signal SIGKILL, as after each of 3 restarts" in message
        assert took < 10
        assert count == outcomes[0][2], "after the same batch"
        assert state == outcomes[0][3]
        assert not processes, "no worker is left"


def heal(kills: int) -> Any:
    """Kill each rank's workers in turn, each again as soon as it was restarted."""
    built = make(rows(3000, longest=600), max_seq_len=1200, epochs=1)  # packs of 29 kB: few fit into a pipe
    logging.getLogger("streampack").setLevel(logging.ERROR)
    loader = loader_of(built, Topology(2, 2, 2))
    batches = []
    iterator: Any = iter(loader)
    killed: list[set[int]] = [set(), set()]
    for number, batch in enumerate(iterator):
        batches.append(packs_of(batch))
        by_name = sorted(mp.active_children(), key=lambda process: process.name)
        if len(by_name) < 2 or len(killed[number % 2]) == kills:
            continue
        pid = by_name[number % 2].pid  # a new one only after a restart
        if pid not in killed[number % 2]:
            os.kill(pid, signal.SIGKILL)
            killed[number % 2].add(pid)
    return batches, list(map(len, killed))


def test_killed_workers_are_restarted_on_every_rank(tmp_path: Path) -> None:
    healed = run_forked(heal, 2, 4)
    whole = run_forked(heal, 2, 0)
    for (batches, restarts), (expected, none) in zip(healed, whole, strict=True):
        assert none == [0, 0]
        assert restarts == [4, 4]
        assert batches == expected


def one_dies(workers: int, at: int, pids: Path) -> Any:
    """Kill rank 1 after ``at`` batches; return this one's error, and the seconds until it was raised."""
    rank, topology = dist.get_rank(), Topology(dist.get_world_size(), workers, 2)
    loader = loader_of(make(rows(400), epochs=None), topology, timeout=600)
    iterator: Any = iter(loader)
    dist.barrier()
    told, number, begin = "", 0, 0.0
    try:
        for number in range(10_000):
            if rank == 1 and number == at:
                numbers = [str(process.pid) for process in mp.active_children()]
                (pids / "workers").write_text(" ".join(numbers))
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.monotonic()
            next(iterator)
    except RuntimeError as error:
        told = str(error)
    took = time.monotonic() - begin
    if rank == 0:
        time.sleep(1)  # a rank that has noticed may be busy; the others must not wait for it
    begin = time.monotonic()
    del loader, iterator
    left = held()["children"]
    dist.destroy_process_group()
    return told, took, time.monotonic() - begin, number, left


@pytest.mark.parametrize(
    ("size", "workers", "at"), [(4, 1, 3), pytest.param(2, 0, 0, marks=pytest.mark.slow)]
)
def test_a_killed_rank_is_noticed_in_seconds(tmp_path: Path, size: int, workers: int, at: int) -> None:
    """Not after the collective's timeout of ten minutes; also by ranks that are not its neighbours."""
    outcomes = run_forked(one_dies, size, workers, at, tmp_path, dies=1)
    for rank, outcome in enumerate(outcomes):
        if rank != 1:
            told, took, leaving, number, left = outcome
            assert "onnection" in told
            assert took < 10
            assert leaving < 10, "nor does it wait for those that wait for it"
            assert number <= at + 5
            assert not left
    pids = [int(pid) for pid in (tmp_path / "workers").read_text().split()]
    assert len(pids) == workers
    assert gone(pids, within=5), "its workers went with it"


# Which ranks share batches.


def on_a_mesh() -> tuple[Any, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    built = make(rows(100))
    loader = PackedDataLoader(built(), batch_size=2, num_workers=1, packs_per_step=12, data_ranks=mesh["dp"])
    return [packs_of(batch) for batch in loader], loader.state_dict()


def test_a_device_mesh_says_which_ranks_share_batches(tmp_path: Path) -> None:
    (first, state), *others = run_forked(on_a_mesh, 4)
    assert [others[0], others[2]] == [(first, state), others[1]], "ranks 0 and 1, and 2 and 3, are one each"
    assert others[1][1] == state
    check_whole(
        [key for batches in (first, others[1][0]) for batch in batches for key in batch], rows(100), 2
    )


def hybrid_sharded() -> tuple[tuple[int, int], list[PackKey]]:
    """Return this rank's place in a mesh, and the packs of a loader that some ranks only iterate."""
    names = ("pp", "dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", (1, 2, 2, 2), mesh_dim_names=names)
    dataset = make(rows(40))()
    sync = PackedDataLoader(dataset, data_ranks=mesh["dp_replicate", "dp_shard"]).rank_sync
    with pytest.raises(ValueError, match=r"dimension 'tp', along which .* data_ranks=mesh\['dp_replicate'"):
        PackedDataLoader(dataset, data_ranks=mesh["dp_shard", "tp"])
    some, packs = dist.new_group([1, 3, 4]), []
    if dist.get_rank() in (1, 3, 4):
        at = dist.get_rank(some), dist.get_world_size(some)
        loader = PackedDataLoader(dataset, packs_per_step=12, process_group=some, data_ranks=at)
        packs = [key for batch in loader for key in packs_of(batch)]
    return (sync.data_rank, sync.data_world_size), packs


def test_hybrid_sharding_and_a_group_of_some_ranks(tmp_path: Path) -> None:
    outcomes = run_forked(hybrid_sharded, 8)
    assert [place for place, _ in outcomes] == [(rank // 2, 4) for rank in range(8)]
    assert [bool(packs) for _, packs in outcomes] == [rank in (1, 3, 4) for rank in range(8)]
    check_whole([key for _, packs in outcomes for key in packs], rows(40), 2)


def a_rank_of_its_own() -> list[PackKey]:
    """Return the packs of a group of one rank, which goes on midway."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    loader = PackedDataLoader(make(rows(40))(), batch_size=2, process_group=alone)
    packs = [key for batch in islice(loader, 2) for key in packs_of(batch)]
    again = PackedDataLoader(make(rows(40))(), batch_size=2, process_group=alone)
    again.load_state_dict(loader.state_dict())
    packs += [key for batch in again for key in packs_of(batch)]
    return packs


def test_a_group_of_one_rank_reads_all_the_data(tmp_path: Path) -> None:
    for packs in run_forked(a_rank_of_its_own, 4):
        check_whole(packs, rows(40), 2)
