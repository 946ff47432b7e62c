"""`World`: the processes of a run, their device and collectives, how they find each other, and how they end."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streampack.distributed.rank_sync import RankSync
from streampack.training.config import DEVICES, require_device

T = TypeVar("T")

CONNECTED_GROUPS = 3
"""Process groups that connect each rank to every other one: torch's default, `World.background` and the loader's."""
OTHER_FILES = 256
"""File descriptors that a process may need besides connections: for shards, pipes of workers, libraries."""
POLL_SECONDS = 0.5
"""Seconds between two checks of the launcher. A rank outlives it by about this time."""


def pick_device(name: str) -> torch.device:
    """Return this rank's device; ``auto`` is a GPU if there is one.

    Raises:
        ValueError: if this machine does not have the device, or it is another rank's.
    """
    require_device(name)
    kind, _, index = name.partition(":")
    # torch loads an installed torch_npu by itself, which defines torch.npu.
    here = {each: found for each in DEVICES if (found := getattr(torch, each, None)) and found.is_available()}
    if kind == "auto":
        kind = next((each for each in here if each != "cpu"), "cpu")
    if kind not in here:
        raise ValueError(
            f"device={name!r}: torch {torch.__version__} finds no {kind} device on this machine; check the driver and "
            "that torch was built for it, or set device=cpu or device=auto"
        )
    if kind == "cpu":
        return torch.device("cpu")
    rank, count = os.environ.get("LOCAL_RANK"), here[kind].device_count()
    number = int(index or rank or 0)
    if number >= count or (rank is not None and number != int(rank)):
        raise ValueError(
            f"device={name!r}, local rank {rank or 0}: this machine has {count} {kind} device(s), one for each rank; "
            f"start at most {count} ranks, and set device={kind} without a number"
        )
    here[kind].set_device(number)
    return torch.device(kind, number)


def pick_dtype(device: torch.device) -> str:
    """Return the default ``dtype`` of a config: bf16 on a device other than a CPU that supports it, else fp32."""
    kind = getattr(torch, device.type)
    return "bf16" if device.type != "cpu" and kind.is_bf16_supported() else "fp32"


@dataclass(frozen=True)
class World:
    """The rank of this process in a training run, and its collectives. A single process exchanges nothing.

    All methods are collectives: every rank calls them, in the same order. They use gloo, on a machine with GPUs too;
    only `all_reduce` of a tensor on a GPU uses NCCL.

    >>> alone = World()
    >>> alone.is_main, alone.gather("x"), alone.broadcast(3)
    (True, ['x'], 3)
    """

    rank: int = 0
    size: int = 1
    sync: RankSync | None = None
    background: dist.ProcessGroup | None = None
    """The process group for a thread that runs beside the training loop."""
    device_type: str = "cpu"
    replicas: int = 1
    """Copies of the model; each is sharded over some of the ranks (HSDP)."""
    tensor_parallel: int = 1
    """Number of ranks that compute each layer together. They have consecutive numbers and read the same batches."""

    @property
    def is_main(self) -> bool:
        """Whether this rank is the one that prints, logs and writes."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """Number of data ranks, which read different batches."""
        return self.size // self.tensor_parallel

    @property
    def data_rank(self) -> int:
        """Number of this rank among the data ranks. Ranks of a tensor-parallel group have the same one."""
        return self.rank // self.tensor_parallel

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Ranks by the dimensions along which the model is split, as torchtune's recipes order them.

        ``dp_replicate`` and ``tp`` are dimensions only if they have more than one rank.
        """
        shards = self.data_size // self.replicas
        sizes = {"dp_replicate": self.replicas, "dp_shard": shards, "tp": self.tensor_parallel}
        kept = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
        return init_device_mesh(self.device_type, tuple(kept.values()), mesh_dim_names=tuple(kept))

    @property
    def data_mesh(self) -> DeviceMesh:
        """`mesh` without its dimension ``tp``."""
        return self.mesh["dp_replicate", "dp_shard"] if self.replicas > 1 else self.mesh["dp_shard"]

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the data ranks, in place."""
        if self.rank % self.tensor_parallel:
            values.zero_()  # the ranks of a tensor-parallel group have equal values, and only the first one adds them
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank; for small values that can be pickled."""
        return [value] if self.sync is None else self.sync.gather(value)

    def gather_data(self, value: T) -> list[T]:
        """Return every data rank's value, by data rank."""
        return self.gather(value)[:: self.tensor_parallel]

    def broadcast(self, value: T) -> T:
        """Return rank 0's value."""
        return value if self.sync is None else cast("T", self.sync.gather(value if self.is_main else None)[0])

    def max(self, count: int) -> int:
        """Return the largest of the ranks' counts, with a single message between any two ranks."""
        return count if self.sync is None else max(self.sync.exchange([count])())[0]

    def run_on_main(self, work: Callable[[], T], /, *, of: str) -> T:
        """Run ``work`` on rank 0 and return its result on all ranks; if it fails there, all raise."""
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
        """Raise on all ranks if the block raises on one. Ranks where it succeeded raise `OtherRankFailed`."""
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
        """Let rank 0 run the block first, so that the others find its downloads; errors as in `raise_on_all`."""
        if not self.is_main:
            with self.raise_on_all():
                pass
        with self.raise_on_all():
            yield
        if self.is_main:
            with self.raise_on_all():
                pass


@contextmanager
def join_world(
    device: torch.device, *, timeout: float = 600, replicas: int = 1, tensor_parallel: int = 1
) -> Iterator[World]:
    """Join the processes that torchrun started as a `World`, and leave it after the block.

    A collective waits at most ``timeout`` seconds. After an error, this process leaves at once, so that the ranks
    waiting for it fail, too.

    Raises:
        ValueError: if ``replicas`` x ``tensor_parallel`` does not divide the number of ranks.
    """
    size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if size % (parts := replicas * tensor_parallel):
        raise ValueError(
            f"data_parallel_replicate_dim={replicas} and tensor_parallel_dim={tensor_parallel} need a multiple of "
            f"{parts} ranks, and there are {size}; start more (--nproc_per_node), or set both to 1"
        )
    end_with_launcher()
    if size == 1:
        yield World()
        return
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout)
    _allow_connections(size)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        rank = int(os.environ["RANK"])
        store = _open_store(rank, size, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    else:
        dist.init_process_group(backend, timeout=limit)
    try:
        yield World(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            sync=RankSync(timeout=limit, group=dist.group.WORLD, shared=True),
            background=dist.new_group(backend="gloo", timeout=limit),
            device_type=device.type,
            replicas=replicas,
            tensor_parallel=tensor_parallel,
        )
    except BaseException:
        # NCCL's orderly shutdown waits for collectives that will never end; gloo's does not.
        if device.type == "cuda":
            dist.distributed_c10d._abort_process_group()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _allow_connections(size: int) -> None:
    """Raise the limit on open files (1,024 on most systems) to fit connections to ``size`` ranks, as far as allowed."""
    needed = CONNECTED_GROUPS * (size - 1) + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        needed = min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def end_with_launcher() -> None:
    """End this process when the torchrun that started it ends, even if torchrun is killed with SIGKILL.

    torchrun starts every rank in a session of its own, so ranks of a killed torchrun would continue, and write
    checkpoints beside the run that replaces them. A thread polls the parent's process id, because the kernel's
    PR_SET_PDEATHSIG also fires when only the thread that started this process ends. A process that torchrun did not
    start may be meant to outlive its shell.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-launcher", daemon=True).start()


def _open_store(rank: int, size: int, *, timeout: float) -> Store:
    """Return torchrun's store, in which the ranks find one another, with keys that no earlier attempt has used.

    When torchrun restarts ranks, it gives them the store of the ranks that died, and torch would read the addresses of
    dead ranks from it (https://github.com/pytorch/pytorch/issues/135712; with torch 2.13 a restart hangs). torchrun
    gives the ranks of an attempt no common new value. So rank 0 draws a random prefix for the keys, and every other
    rank asks for it under a random name, to which no old answer can exist.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:  # torch would try to connect until its timeout
        socket.create_connection((address, port), timeout=10).close()
    except ConnectionRefusedError:  # torchrun opens the store before it starts ranks
        raise ConnectionRefusedError(
            f"the torchrun that keeps the ranks' store at {address}:{port} has ended, and this rank ends with it"
        ) from None
    except OSError:  # it may be transient; torch tries again below
        pass
    store = TCPStore(address, port, size, False, timedelta(seconds=timeout))
    name = uuid.uuid4().hex
    if rank > 0:
        store.set(f"streampack/question/{rank}", name)
        answer: str = store.get(f"streampack/answer/{name}").decode()  # waits for rank 0
        store.set(f"streampack/{answer}/{rank}", "here")
        return PrefixStore(answer, store)
    missing = set(range(1, size))
    deadline = time.monotonic() + timeout
    while missing:
        if time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} of {size} did not join within {timeout:.0f} s")
        for other in sorted(missing):
            # The question may come from a dead rank, until the rank of this attempt overwrites it.
            if store.check([f"streampack/question/{other}"]):
                store.set(f"streampack/answer/{store.get(f'streampack/question/{other}').decode()}", name)
            if store.check([f"streampack/{name}/{other}"]):
                missing.remove(other)
        time.sleep(0.01)
    return PrefixStore(name, store)
