"""Several processes that train as one: joining and leaving, and the few words they exchange besides gradients."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from streampack.distributed.launcher import end_with_launcher
from streampack.validation import warn_user

T = TypeVar("T")

GROUPS = 3
"""In which each rank is connected to every other: all of torch's collectives, `World.background`, and the loader's."""
OTHER_FILES = 256
"""That a process may have open besides: shards, pipes of workers, libraries."""


class OtherRankFailed(RuntimeError):
    """Another rank raised; its message is in this one's. The other's traceback says where."""


@dataclass(frozen=True)
class World:
    """Which process this is, of how many. On its own, every method works and exchanges nothing.

    >>> alone = World()
    >>> alone.is_main, alone.gather("x"), alone.from_main(3)
    (True, ['x'], 3)

    All methods but `is_main` are collectives: every rank calls them, in the same order. They speak through
    gloo, on a GPU machine too, unless they are given tensors that lie on the GPU.
    """

    rank: int = 0
    size: int = 1
    background: dist.ProcessGroup | None = None
    """For what goes on in a thread beside the training loop, whose collectives must not mix with the loop's."""

    @property
    def is_main(self) -> bool:
        """Whether this rank is the one that prints, logs and writes."""
        return self.rank == 0

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """What every rank gave, by rank; for small things that can be pickled."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return cast("list[T]", values)

    def from_main(self, value: T) -> T:
        """What rank 0 gave."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def once(self, work: Callable[[], T], /, *, of: str) -> T:
        """What ``work`` gives on rank 0, on all ranks; if it fails there, all raise.

        Raises:
            ValueError: on all ranks, if one asks for something else.
        """
        for rank, wanted in enumerate(asked := self.gather(of)):
            if wanted != asked[0]:
                raise ValueError(
                    f"rank {rank} reads {wanted}, and rank 0 {asked[0]}; all ranks must read the same corpus"
                )
        result: T | None = None
        with self.together():
            if self.is_main:
                result = work()
        return cast("T", self.from_main(result))

    @contextmanager
    def together(self) -> Iterator[None]:
        """All ranks leave the block, or all raise. For what one rank does on behalf of all.

        Raises:
            OtherRankFailed: where the block itself went well.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as mine:
            error = mine
        errors = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(errors):
            if message is not None:
                raise OtherRankFailed(f"rank {rank} failed: {message}")

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Rank 0 goes through the block before the others, so that what it downloads or caches is there."""
        if self.is_main:
            yield
        self.gather(None)
        if not self.is_main:
            yield


@contextmanager
def join_world(device: torch.device, *, timeout: float = 600) -> Iterator[World]:
    """The processes that torchrun started, as one `World`; without torchrun, this process alone.

    Ranks that torchrun started end when it does, see `end_with_launcher`.
    Tensors on the CPU travel through gloo, those on a GPU through NCCL. However the block is left, this
    process leaves the group; after an error at once, so that ranks that wait for this one fail too
    rather than wait for the timeout.

    Args:
        device: what this process trains on.
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
        store = _meet(rank, size, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    else:
        dist.init_process_group(backend, timeout=limit)
    try:
        yield World(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
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
    """Raise this process's limit of open files to what its connections to so many ranks need.

    Most systems begin with 1,024, which is enough for 256 ranks, and let a process raise it up to a hard limit.
    Where that one is too low, this warns.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    needed = GROUPS * (size - 1) + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    enough = hard >= needed or hard == resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed if enough else hard, hard))
    if not enough:
        warn_user(
            f"{size:,} ranks need about {needed:,} open files each and the system allows {hard:,}: ranks will fail to "
            'connect ("Too many open files"); raise the hard limit on every machine (limits.conf, LimitNOFILE of '
            "systemd, --ulimit of a container)",
        )


def _meet(rank: int, size: int, *, timeout: float) -> Store:
    """What the ranks of this attempt write to find one another, and no earlier attempt has written to.

    When torchrun restarts ranks it hands them the store of those that died, in which torch would find the
    addresses of the dead (https://github.com/pytorch/pytorch/issues/135712; with 2.13, a restart hangs). Nor
    does torchrun tell them anything that is new and the same for all. So rank 0 thinks of a name, and every
    other rank asks for it under a name of its own: only what answers a fresh question is believed.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    _require_store(address, port)
    store = TCPStore(address, port, size, False, timedelta(seconds=timeout))
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"streampack/question/{rank}", name)
        answer: str = store.get(f"streampack/answer/{name}").decode()  # waits
        store.set(f"streampack/{answer}/{rank}", "here")
        return PrefixStore(answer, store)
    missing = set(range(1, size))
    deadline = time.monotonic() + timeout
    while missing:
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} of {size} did not join within {timeout:.0f} s")
        for other in sorted(missing):
            if store.check(
                [f"streampack/question/{other}"]
            ):  # a dead rank's, perhaps, until it is asked anew
                store.set(f"streampack/answer/{store.get(f'streampack/question/{other}').decode()}", name)
            if store.check([f"streampack/{name}/{other}"]):
                missing.remove(other)
        time.sleep(0.01)
    return PrefixStore(name, store)


def _require_store(address: str, port: int) -> None:
    """Fail at once where torch would try for ``timeout`` seconds to reach a store that is gone with its torchrun.

    torchrun opens it before it starts ranks.
    """
    try:
        socket.create_connection((address, port), timeout=10).close()
    except ConnectionRefusedError:
        raise ConnectionRefusedError(
            f"the torchrun that keeps the ranks' store at {address}:{port} has ended, and this rank ends with it"
        ) from None
    except OSError:  # something that may pass, for which torch waits
        return
