"""What ranks say to one another and read together, measured on processes of this machine that speak over gloo."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean

from benchmarks.scale.probes import read_so_far, write_shards

ROUNDS = 200
LANES = 15  # of each rank
RECEIPT_BYTES = 40  # as large as most
TCP_BYTES_RECEIVED = 128  # where tcpi_bytes_received stands in Linux's struct tcp_info


Rank = Callable[[int, int], dict[str, float]]  # what rank r of so many measures


def agreement(size: int) -> dict[str, float]:
    """Means over ``size`` ranks."""
    return _means(size, _agree)


def fingerprint(shards: int, size: int) -> dict[str, float]:
    """Means over ``size`` ranks, for so many files."""
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder), shards)
        return _means(size, partial(_identify, f"{folder}/*.jsonl"))


def footers(shards: int, size: int) -> dict[str, float]:
    """Means over ``size`` ranks, for so many Parquet files, each larger than two parts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "0.parquet"
        pq.write_table(pa.table({"text": ["x" * 100] * 60}), first, row_group_size=10)
        for number in range(1, shards):
            (Path(folder) / f"{number}.parquet").write_bytes(first.read_bytes())
        return _means(size, partial(_divide, f"{folder}/*.parquet", shards // 6))


def _means(size: int, measure: Rank) -> dict[str, float]:
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (measure, rank, size, f"{folder}/store", theirs)
            processes.append(context.Process(target=_run, args=arguments))
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


def _run(measure: Rank, rank: int, size: int, store: str, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    pipe.send(measure(rank, size))
    dist.barrier()
    dist.destroy_process_group()


def _identify(pattern: str, _rank: int, _size: int) -> dict[str, float]:
    import torch.distributed as dist

    from streampack import JSONLSource
    from streampack.distributed.corpus import gather_fingerprint
    from streampack.distributed.one_run import listing
    from streampack.distributed.rank_sync import RankSync

    source = JSONLSource(pattern)
    rank_sync = RankSync(timeout=timedelta(seconds=60))
    rank_sync.gather(listing(source))  # the first one may do more
    dist.barrier()
    read, heard, begin = read_so_far(), _heard(), time.process_time()
    gather_fingerprint(source, rank_sync)
    return {"read": read_so_far() - read, "seconds": time.process_time() - begin, "heard": _heard() - heard}


def _divide(pattern: str, lanes: int, _rank: int, _size: int) -> dict[str, float]:
    import torch.distributed as dist

    from streampack import ParquetSource
    from streampack.distributed.corpus import gather_division
    from streampack.distributed.one_run import listing
    from streampack.distributed.rank_sync import RankSync
    from streampack.sources.row_groups import Footers

    source = ParquetSource(pattern)
    rank_sync = RankSync(timeout=timedelta(seconds=60))
    rank_sync.gather(listing(source))  # the first one may do more
    dist.barrier()
    read, own = [], Footers._read
    Footers._read = lambda *args: read.append(own(*args)) or read[-1]  # type: ignore[method-assign, func-returns-value]
    heard = _heard()
    gather_division(source, lanes, rank_sync)
    return {"read": len(read), "heard": _heard() - heard}


def _agree(rank: int, size: int) -> dict[str, float]:
    import torch.distributed as dist

    from streampack import IterablePackedDataset, PackedDataLoader
    from streampack.distributed.rank_sync import RankSync

    before = len(connections())
    rank_sync = RankSync(timeout=timedelta(seconds=60))
    sockets = len(connections()) - before
    rank_sync.agree(1).wait()  # the first one may do more
    dist.barrier()
    heard, begin = _heard(), time.process_time()
    for _ in range(ROUNDS):
        rank_sync.agree(8).wait()
    spent = time.process_time() - begin
    dist.barrier()
    said = _heard() - heard
    heard = _heard()
    rank_sync.merge(
        {lane: lane.to_bytes(RECEIPT_BYTES, "little") for lane in range(rank, LANES * size, size)}
    )
    gathered = _heard() - heard
    rows = [{"tokens": [1], "labels": [1]}] * (100 * size)
    loader = PackedDataLoader(IterablePackedDataset(rows, max_seq_len=1, num_lanes=size))
    batches = iter(loader)
    for _ in range(40):
        next(batches)
    ahead = batches.made - batches.batches
    return {
        "sockets": sockets,
        "heard": said / ROUNDS,
        "seconds": spent / ROUNDS,
        "gathered": gathered,
        "ahead": ahead,
    }


def connections() -> list[int]:
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
    for descriptor in connections():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack_from("=Q", info, TCP_BYTES_RECEIVED)[0]
    return total
