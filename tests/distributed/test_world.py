"""Ranks join and leave a `World`, and its collectives work, fail and time out on all of them."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.scale.ranks import connections
from streampack import IterablePackedDataset, PackedDataLoader
from streampack.distributed.rank_sync import OtherRankFailed
from streampack.distributed.world import CONNECTED_GROUPS, OTHER_FILES, World, allow_connections, join_world
from tests.harness.processes import RankError, open_store, run_ranks
from tests.harness.tiny import tiny_config

CPU = torch.device("cpu")


# Collectives.


def test_a_single_process_exchanges_nothing():
    with join_world(CPU) as world:
        assert world == World()
        assert not dist.is_initialized()
        with world.raise_on_all(), world.main_first():
            assert world.all_reduce(torch.ones(2)).tolist() == [1, 1]
            assert world.run_on_main(lambda: 3, of="numbers") == 3


def call_every_collective(folder):
    with join_world(CPU) as world:
        found = [world.gather(f"rank {world.rank}"), world.broadcast(world.rank)]
        found.append(world.all_reduce(torch.tensor([1.0, world.rank])).tolist())
        with world.main_first():
            found.append(sorted(path.name for path in Path(folder).iterdir()))
            (Path(folder) / f"{world.rank}").touch()
        try:
            with world.raise_on_all():
                if world.rank == 1:
                    raise OSError("disk full")
        except (OSError, OtherRankFailed) as error:
            found.append((type(error), str(error)))
        found.append(world.run_on_main(lambda: f"by rank {world.rank}", of="the same"))
        for of in ("the same", f"rank {world.rank}'s"):
            try:
                world.run_on_main(lambda: 1 // world.rank, of=of)
            except (ZeroDivisionError, ValueError, OtherRankFailed) as error:
                found.append((type(error), str(error)))
    assert not dist.is_initialized()
    return found


def test_every_collective_on_two_ranks(tmp_path):
    first, second = run_ranks(call_every_collective, 2, tmp_path)
    assert first[:3] == second[:3] == [["rank 0", "rank 1"], 0, [2.0, 1.0]]
    assert (first[3], second[3]) == ([], ["0"])
    assert first[4] == (OtherRankFailed, "rank 1 failed: OSError: disk full")
    assert second[4] == (OSError, "disk full")
    assert first[5] == second[5] == "by rank 0"
    assert first[6][0] is ZeroDivisionError
    assert second[6] == (OtherRankFailed, f"rank 0 failed: ZeroDivisionError: {first[6][1]}")
    refused = "rank 1 reads rank 1's, and rank 0 rank 0's; all ranks must read the same corpus"
    assert first[7] == second[7] == (ValueError, refused)


def fail_in_training(config):
    from streampack_recipes import full_finetune

    step = torch.optim.AdamW.step
    steps = []

    def breaks(optimizer, *args):
        steps.append(1)
        if os.environ["RANK"] == "1" and len(steps) == 3:
            raise ValueError("broken on purpose")
        return step(optimizer, *args)

    torch.optim.AdamW.step = breaks
    try:
        full_finetune.train(config)
    except Exception as error:
        return type(error).__name__, time.time(), dist.is_initialized()


def test_when_a_rank_fails_the_others_do_not_wait(tmp_path):
    (_, there, joined), (name, here, joined_too) = run_ranks(
        fail_in_training, 2, tiny_config(tmp_path, checkpoint_every=None)
    )
    assert name == "ValueError"
    assert there - here < 10, "the timeout is 600 s"
    assert not joined
    assert not joined_too


def die_after_joining(attempt):
    with join_world(CPU, timeout=20) as world:
        if attempt < 2:
            os._exit(9)
        return world.gather(world.rank)


def test_restarted_ranks_do_not_connect_to_dead_ones():
    """As under torchrun with --max-restarts, which keeps the store; also with fewer ranks than before."""
    store = open_store()
    for attempt, ranks in (0, 3), (1, 2):
        with pytest.raises(RankError, match="exit code 9"):
            run_ranks(die_after_joining, ranks, attempt, store=store)
    assert run_ranks(die_after_joining, 3, 2, store=store) == [[0, 1, 2]] * 3


def join_with_few_files():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    with join_world(CPU) as world:
        return world.gather(resource.getrlimit(resource.RLIMIT_NOFILE))


def test_ranks_may_open_as_many_files_as_their_connections_need():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert run_ranks(join_with_few_files, 2) == [[(3 + OTHER_FILES, hard)] * 2] * 2


def count_connections_of_a_recipe():
    with join_world(CPU) as world:
        loader = PackedDataLoader(IterablePackedDataset([{"tokens": [1], "labels": [1]}] * 40, max_seq_len=2))
        batches = list(loader)
        world.gather(len(batches))  # no rank leaves before all have counted
        found = len(connections())
        return world.gather(found)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts connections through /proc")
def test_a_recipe_connects_each_rank_to_every_other_once_a_group():
    """And once to the store."""
    size = 3
    assert (
        run_ranks(count_connections_of_a_recipe, size) == [[CONNECTED_GROUPS * (size - 1) + 1] * size] * size
    )


@pytest.mark.parametrize(
    ("soft", "hard", "size", "raised"),
    [
        (1024, 4096, 256, 1024),
        (1024, 4096, 1024, 3 * 1023 + 256),
        (1024, resource.RLIM_INFINITY, 1024, 3 * 1023 + 256),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 1024, resource.RLIM_INFINITY),
        (1024, 2048, 1024, 2048),
    ],
)
def test_the_limit_of_open_files(monkeypatch, soft, hard, size, raised):
    limits = {resource.RLIMIT_NOFILE: (soft, hard)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    allow_connections(size)
    assert limits == {resource.RLIMIT_NOFILE: (raised, hard)}


def join_without_the_last(size):
    if int(os.environ["RANK"]) < size - 1:
        with join_world(CPU, timeout=1):
            pass


def test_the_error_names_a_rank_that_does_not_join():
    with pytest.raises(RankError, match=r"TimeoutError: ranks \[2\] of 3 did not join within 1 s"):
        run_ranks(join_without_the_last, 3, 3)


def test_the_harness_reports_a_killed_rank():
    with pytest.raises(RankError, match="rank 0: ended with exit code 9"):
        run_ranks(os._exit, 1, 9)
