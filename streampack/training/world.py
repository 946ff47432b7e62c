"""`World`: the processes of one training run, how they join and leave, and their collectives besides gradients."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from streampack.distributed.rank_sync import RankSync
from streampack.training.launcher import end_with_launcher, open_store

T = TypeVar("T")

CONNECTED_GROUPS = 3
"""Process groups that connect each rank to every other one: torch's default, `World.background` and the loader's."""
OTHER_FILES = 256
"""File descriptors that a process may need besides connections: for shards, pipes of workers, libraries."""


@dataclass(frozen=True)
class World:
    """The rank of this process in a training run, and its collectives. A single process exchanges nothing.

    >>> alone = World()
    >>> alone.is_main, alone.gather("x"), alone.broadcast(3)
    (True, ['x'], 3)

    All methods are collectives: every rank calls them, in the same order. They use gloo, on a machine with GPUs too;
    only `all_reduce` of a tensor on a GPU uses NCCL.

    ``rank`` counts from 0 to ``size`` - 1; ``sync`` and ``background`` are None for a single process.
    """

    rank: int = 0
    size: int = 1
    sync: RankSync | None = None
    background: dist.ProcessGroup | None = None
    """The process group for a thread beside the training loop, so that its collectives do not mix with the loop's."""

    @property
    def is_main(self) -> bool:
        """Whether this rank is the one that prints, logs and writes."""
        return self.rank == 0

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: sum a tensor over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """Collective: return every rank's value, by rank; for small values that can be pickled."""
        return [value] if self.sync is None else self.sync.gather(value)

    def broadcast(self, value: T) -> T:
        """Collective: return rank 0's value."""
        return value if self.sync is None else cast("T", self.sync.gather(value if self.is_main else None)[0])

    def max(self, count: int) -> int:
        """Collective: return the largest of the ranks' counts, in a single message between any two of them."""
        return count if self.sync is None else max(self.sync.exchange([count])())[0]

    def run_on_main(self, work: Callable[[], T], /, *, of: str) -> T:
        """Collective: run ``work`` on rank 0 and return its result on all ranks; if it fails there, all raise.

        Raises:
            ValueError: on all ranks, if ``of``, which names what ``work`` reads, differs between ranks.
        """
        for rank, wanted in enumerate(asked := self.gather(of)):
            if wanted != asked[0]:
                raise ValueError(
                    f"rank {rank} reads {wanted}, and rank 0 {asked[0]}; all ranks must read the same corpus"
                )
        with self.raise_on_all():
            result = work() if self.is_main else None
        return cast("T", self.broadcast(result))

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Collective: make the block raise on all ranks if it raises on one.

        Raises:
            OtherRankFailed: on the ranks whose own block succeeded.
        """
        try:
            yield
        except Exception as error:
            if self.sync is not None:
                self.sync.raise_on_all(error)
            raise
        if self.sync is not None:
            self.sync.raise_on_all(None)

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Collective: let rank 0 run the block before the other ranks, which then find its downloads and caches."""
        if self.is_main:
            yield
        self.gather(None)
        if not self.is_main:
            yield


@contextmanager
def join_world(device: torch.device, *, timeout: float = 600) -> Iterator[World]:
    """Join the processes that torchrun started as a `World`, and leave it after the block.

    Yields the `World` of a single process without torchrun, or if torchrun started only one. Ranks that torchrun
    started end when it ends, see `end_with_launcher`. Collectives of tensors on the CPU use gloo, those on a GPU NCCL.
    After an error this process leaves at once, so that ranks that wait for it fail instead of waiting for the timeout.

    Args:
        device: the device that this process trains on.
        timeout: seconds that a collective may wait for the slowest rank.
    """
    end_with_launcher()
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        yield World()
        return
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout)
    allow_connections(int(os.environ["WORLD_SIZE"]))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = open_store(rank, size, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    else:
        dist.init_process_group(backend, timeout=limit)
    try:
        yield World(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            sync=RankSync(timeout=limit, group=dist.group.WORLD, shared=True),
            background=dist.new_group(backend="gloo", timeout=limit),
        )
    except BaseException:
        # NCCL's orderly shutdown waits for collectives that will never end; gloo's does not.
        if device.type == "cuda":
            dist.distributed_c10d._abort_process_group()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def allow_connections(size: int) -> None:
    """Raise this process's limit of open files to what connections to ``size`` ranks need, as far as the system allows.

    On most systems the limit is 1,024 at first, which is enough for 256 ranks, and a process may raise it up to a hard
    limit.
    """
    needed = CONNECTED_GROUPS * (size - 1) + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
