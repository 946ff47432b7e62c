"""Messages and reads that ranks share, measured on processes of this machine that communicate over gloo."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch.distributed as dist

from benchmarks.scale.probes import read_so_far, write_shards
from streampack import IterablePackedDataset, JSONLSource, PackedDataLoader, ParquetSource
from streampack.accounting import Ledger
from streampack.distributed.corpus import divide_across_ranks, identify_across_ranks
from streampack.distributed.one_run import summarize_files
from streampack.distributed.rank_sync import RankSync
from streampack.sources.row_groups import Footers
from streampack.streaming.lane_state import LaneState
from tests.harness.processes import Ranks

ROUNDS = 200
LANES = 15  # of each rank
TCP_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in Linux's struct tcp_info


def agreement(size: int) -> dict[str, float]:
    """Measure agreements and a state among ``size`` ranks; return means over ranks."""
    return means_over_ranks(size, measure_agreement)


def fingerprint(shards: int, size: int) -> dict[str, float]:
    """Measure the fingerprint of so many files among ``size`` ranks; return means over ranks."""
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder), shards)
        return means_over_ranks(size, measure_fingerprint, f"{folder}/*.jsonl")


def footers(shards: int, size: int) -> dict[str, float]:
    """Measure the division of so many Parquet files, each larger than two parts, among ``size`` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / "0.parquet"
        with Ranks(1) as process:  # pyarrow leaves threads behind
            process.run(write_parquet, first)
        for number in range(1, shards):
            (Path(folder) / f"{number}.parquet").write_bytes(first.read_bytes())
        return means_over_ranks(size, measure_division, f"{folder}/*.parquet", shards // 6)


def write_parquet(path: Path) -> None:
    """Write a file of six row groups. Called in a process of its own."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["x" * 100] * 60}), path, row_group_size=10)


def means_over_ranks(
    size: int, measure: Callable[..., dict[str, float]], *arguments: Any
) -> dict[str, float]:
    """Run ``measure(*arguments)`` on every rank; return the means."""
    with Ranks(size) as ranks:
        results = ranks.run(measure, *arguments)
    return {key: fmean(result[key] for result in results) for key in results[0]}


def measure_fingerprint(pattern: str) -> dict[str, float]:
    """Measure the exchange of the files' fingerprint. Called in a rank."""
    source = JSONLSource(pattern)
    rank_sync = RankSync(timeout=timedelta(seconds=60))
    rank_sync.gather(summarize_files(source))  # the first exchange of a group does more
    dist.barrier()
    read, received, begin = read_so_far(), bytes_received(), time.process_time()
    identify_across_ranks(source, rank_sync)
    return {
        "read": read_so_far() - read,
        "seconds": time.process_time() - begin,
        "received": bytes_received() - received,
    }


def measure_division(pattern: str, lanes: int) -> dict[str, float]:
    """Measure the exchange of the files' row groups. Called in a rank."""
    source = ParquetSource(pattern)
    rank_sync = RankSync(timeout=timedelta(seconds=60))
    rank_sync.gather(summarize_files(source))  # the first exchange of a group does more
    dist.barrier()
    read, original = [], Footers._read
    Footers._read = lambda *args: read.append(original(*args)) or read[-1]
    received = bytes_received()
    divide_across_ranks(source, lanes, rank_sync)
    return {"read": len(read), "received": bytes_received() - received}


def measure_agreement() -> dict[str, float]:
    """Measure sockets, agreements, the merge of a state, and the batches made ahead. Called in a rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before = len(connections())
    rank_sync = RankSync(timeout=timedelta(seconds=60))
    sockets = len(connections()) - before
    rank_sync.agree(1).wait()  # the first exchange of a group does more
    dist.barrier()
    received, begin = bytes_received(), time.process_time()
    for _ in range(ROUNDS):
        rank_sync.agree(8).wait()
    seconds = time.process_time() - begin
    dist.barrier()
    agreed = bytes_received() - received
    received = bytes_received()
    state = LaneState(
        packs=1_000, done=False, epoch=0, cursor=(3, 10**8), first=10**5, offset=0, next_piece=10**5 + 100,
        consumed=2**99, ledger=Ledger(10**5, 10**8, 10**3, 10**8, 10**8),
    )  # fmt: skip
    rank_sync.merge_lanes({lane: state.as_dict() for lane in range(rank, LANES * size, size)})
    merged = bytes_received() - received
    rows = [{"tokens": [1], "labels": [1]}] * (100 * size)
    loader = PackedDataLoader(IterablePackedDataset(rows, max_seq_len=1, num_lanes=size, untrained="keep"))
    batches = iter(loader)
    for _ in range(40):
        next(batches)
    ahead = batches.agreed_batches.made - batches.batches
    return {
        "sockets": sockets,
        "received": agreed / ROUNDS,
        "seconds": seconds / ROUNDS,
        "merged": merged,
        "ahead": ahead,
    }


def connections() -> list[int]:
    """Return the descriptors of this process's TCP connections."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if str(entry.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                    connection.getpeername()  # raises if it only listens
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        found.append(int(entry.name))
    return found


def bytes_received() -> int:
    """Return the bytes that this process has received over its TCP connections."""
    total = 0
    for descriptor in connections():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            total += struct.unpack_from("=Q", info, TCP_BYTES_RECEIVED)[0]
    return total
