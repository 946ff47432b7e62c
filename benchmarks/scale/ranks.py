"""What ranks say to one another, measured on processes of this machine that speak over gloo."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import struct
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean

ROUNDS = 200
LANES = 15  # of each rank
RECEIPT_BYTES = 40  # as large as most
TCP_BYTES_RECEIVED = 128  # where tcpi_bytes_received stands in Linux's struct tcp_info


def measure(size: int) -> dict[str, float]:
    """Means over ``size`` ranks."""
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_rank, args=(rank, size, f"{folder}/store", theirs)))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            found: list[dict[str, float]] = [pipe.recv() for pipe in pipes]
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    return {key: fmean(one[key] for one in found) for key in found[0]}


def _rank(rank: int, size: int, store: str, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch.distributed as dist

    from streampack import IterablePackedDataset, PackedDataLoader
    from streampack.lockstep import Lockstep

    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    before = len(_sockets())
    lockstep = Lockstep(timeout=timedelta(seconds=60))
    sockets = len(_sockets()) - before
    lockstep.say(1).wait()  # the first one may do more
    dist.barrier()
    heard, begin = _heard(), time.process_time()
    for _ in range(ROUNDS):
        lockstep.say(8).wait()
    spent = time.process_time() - begin
    dist.barrier()
    said = _heard() - heard
    heard = _heard()
    lockstep.merge({lane: lane.to_bytes(RECEIPT_BYTES, "little") for lane in range(rank, LANES * size, size)})
    gathered = _heard() - heard
    rows = [{"tokens": [1], "labels": [1]}] * (100 * size)
    loader = PackedDataLoader(IterablePackedDataset(rows, max_seq_len=1, num_lanes=size))
    batches = iter(loader)
    for _ in range(40):
        next(batches)
    ahead = batches.prepared - batches.batches
    pipe.send(
        {
            "sockets": sockets,
            "heard": said / ROUNDS,
            "seconds": spent / ROUNDS,
            "gathered": gathered,
            "ahead": ahead,
        }
    )
    dist.barrier()
    dist.destroy_process_group()


def _sockets() -> list[int]:
    """Descriptors of this process's TCP connections."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    connection.getpeername()  # raises if it only listens
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        found.append(int(entry.name))
    return found


def _heard() -> int:
    """Bytes that came in over all of them, so far."""
    total = 0
    for descriptor in _sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack_from("=Q", info, TCP_BYTES_RECEIVED)[0]
    return total
