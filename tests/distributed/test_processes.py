"""Loaders on real processes, over gloo, with real signals. `test_rank_sync.py` runs many more cases in threads."""

from __future__ import annotations

import io
import logging
import os
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from streampack import IterablePackedDataset, JSONLSource, MapSource, PackedDataLoader
from streampack.distributed.rank_sync import RankSync, combine_counts
from tests.harness.corpus import Numbers, rows, write
from tests.harness.processes import run_forked
from tests.harness.threads import (
    CORPORA,
    Fails,
    Make,
    PackKey,
    Topology,
    by_lane,
    check_steps,
    check_whole,
    in_turn,
    make,
    packs_of,
    split_epochs,
    steps_of,
)
from tests.harness.workers import gone, held

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at processes through /proc"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


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


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process.*multi-threaded", DeprecationWarning)
        yield


def drive(
    built: Make,
    topology: Topology,
    state: dict[str, Any] | None = None,
    limit: int | None = None,
) -> tuple[list[list[PackKey]], dict[str, Any]]:
    """Return this rank's batches, and the state after them."""
    with quiet():
        loader = loader_of(built, topology)
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        batches = [packs_of(batch) for batch in islice(iterator, limit)]
        return batches, through_a_file(loader.state_dict())


def joined(outcomes: list[tuple[list[list[PackKey]], Any]], topology: Topology) -> list[list[PackKey]]:
    return steps_of([batches for batches, _ in outcomes], topology.batches_per_step)


# Finite data.


def every_corpus(workers: int) -> dict[str, Any]:
    return {
        name: drive(
            make(data, num_lanes=num_lanes, overlong="split", epochs=3),
            Topology(dist.get_world_size(), workers, 3, 2),
        )
        for name, (data, num_lanes) in CORPORA.items()
        if dist.get_world_size() * max(1, workers) <= num_lanes
    }


@pytest.mark.filterwarnings("ignore:.*do not divide .* evenly")
def test_finite_data_ends_on_all_ranks_at_once() -> None:
    """Skewed lanes, lanes without a row, one document: no rank waits for ever; each sample comes once an epoch."""
    size, workers = 2, 2
    outcomes = run_forked(every_corpus, size, workers)
    for name in outcomes[0]:
        data, num_lanes = CORPORA[name]
        topology = Topology(size, workers, 3, 2)
        steps = joined([outcome[name] for outcome in outcomes], topology)
        check_whole([key for step in steps for key in step], data, 3)
        epochs = by_lane(make(data, num_lanes=num_lanes, overlong="split", epochs=3), num_lanes)
        for lanes, part in zip(epochs, split_epochs(steps, epochs), strict=True):
            assert sorted(in_turn(lanes)) == sorted(key for step in part for key in step), name
        assert all(outcome[name][1] == outcomes[0][name][1] for outcome in outcomes), "one state for all"


# Elastic.

ELASTIC = make(rows(500, longest=10), num_lanes=12, epochs=2)


def test_a_run_moves_from_4_to_2_to_3_to_1_ranks() -> None:
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


# Collectives.


def agree_many_times() -> Any:
    rank = dist.get_rank()
    rank_sync = RankSync(timeout=timedelta(seconds=60))
    words = [[0, 3, 5, 0, ~2][(n + rank) % 5] if n % 7 else 0 for n in range(50)]
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:  # the others have sent theirs before it does; if they waited for it, this would raise
        store.wait(["sent 1", "sent 2"], timedelta(seconds=30))
    answers = [rank_sync.agree(max(word, ~word), failed=word < 0) for word in words]
    store.set(f"sent {rank}", "")
    # The agreements are still under way.
    merged = rank_sync.merge_lanes(dict.fromkeys(range(7), b"%d" % rank))
    return words, [answer.wait() for answer in answers], merged, rank_sync.gather(rank)


def test_agreements_are_asynchronous_and_arrive_on_all_ranks() -> None:
    outcomes = run_forked(agree_many_times, 3)
    said = [outcome[0] for outcome in outcomes]
    for _, heard, merged, gathered in outcomes:
        assert heard == [combine_counts(words) for words in zip(*said, strict=True)]
        assert merged == {lane: b"%d" % (lane % 3) for lane in range(7)}
        assert gathered == [0, 1, 2]


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
    elif kind == "missing file":
        (folder / f"{rank}").mkdir()
        path = write(folder / f"{rank}" / "a.jsonl", data)
        source = JSONLSource(path)
    # A worker that is killed must have something left to make.
    epochs = None if kind == "worker killed" else 9
    dataset = IterablePackedDataset(
        source, max_seq_len=12, buffer_size=4, num_lanes=12, encoder=encoder, epochs=epochs
    )
    loader = PackedDataLoader(dataset, batch_size=2, num_workers=workers, max_worker_restarts=0, timeout=60)
    loader.state_dict()  # later, the fingerprint of a missing file could not be read
    if kind == "missing file" and guilty:
        path.unlink()
    begin, count, told = time.monotonic(), 0, None
    iterator = iter(loader)
    try:
        for _ in iterator:
            count += 1
            if kind == "worker killed" and guilty and count == 5:
                begin = time.monotonic()
                os.kill(iterator.rank_batches.streams[0].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
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
        ("row", 2, "KeyError", "KeyError: 'no luck'"),
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
                assert "died of signal SIGKILL, after 0 restart(s)" in message
        assert took < 10
        assert count == outcomes[0][2], "after the same batch"
        assert state == outcomes[0][3]
        assert not processes, "no worker is left"


def heal(kills: int) -> Any:
    """Kill each rank's workers in turn, each again as soon as it was restarted."""
    built = make(rows(3000, longest=600), max_seq_len=1200, epochs=1)  # packs of 29 kB: few fit into a pipe
    logging.getLogger("streampack").setLevel(logging.ERROR)
    loader = loader_of(built, Topology(2, 2, 2), prefetch_factor=1, max_worker_restarts=99)
    batches = []
    iterator: Any = iter(loader)
    killed = [0, 0]
    for number, batch in enumerate(iterator):
        batches.append(packs_of(batch))
        turn = number % 2
        worker = iterator.rank_batches.streams[turn]
        if killed[turn] < kills and worker.restarts == killed[turn] and not worker.ended:
            os.kill(worker.process.pid, signal.SIGKILL)
            killed[turn] += 1
    return batches, [stream.restarts for stream in iterator.rank_batches.streams]


def test_killed_workers_are_restarted_on_every_rank() -> None:
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
                numbers = [str(stream.process.pid) for stream in iterator.rank_batches.streams if workers]
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


def leave_early() -> Any:
    """Stop every rank after the same batch, begin again, stop again; then leave the group."""
    before = held() | {"descriptors": None}
    loader = loader_of(make(rows(200)), Topology(2, 2, 2))
    found = []
    for stop in (3, 1, 7, 7):
        loader.dataset.set_epoch(0)
        found.append([packs_of(batch) for batch in islice(loader, stop)])
    return found, before == held() | {"descriptors": None}


def test_leaving_early_and_beginning_again() -> None:
    for found, clean in run_forked(leave_early, 2):
        assert found[3] == found[2]
        assert found[0] == found[2][:3]
        assert found[1] == found[2][:1]
        assert clean
