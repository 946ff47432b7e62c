"""Messages and reads that ranks share, measured on processes of this machine that communicate over gloo."""

from __future__ import annotations

import os
import shutil
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist

from benchmarks import report
from benchmarks.scale.probes import WordTokenizer, write_rows
from streampack import IterablePackedDataset, JSONLSource, PackedDataLoader, ParquetSource, TextEncoder

# private: an agreement by itself, without the work of making batches
from streampack.distributed.rank_sync import RankSync
from tests.harness.processes import run_ranks

ROUNDS = 200
LANES = 15  # of each rank
TCP_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in Linux's struct tcp_info


def jsonl(shards: int, size: int) -> dict[str, float]:
    """Measure a loader and its states over so many JSONL files of 150 kB; return means over ranks."""
    with TemporaryDirectory() as folder:
        first = Path(folder, "0.jsonl")
        write_rows(first, 150_000)
        for number in range(1, shards):
            shutil.copy(first, first.with_stem(str(number)))
        return means_over_ranks(size, measure_loader, f"{folder}/*.jsonl")


def parquet(shards: int, size: int) -> dict[str, float]:
    """Measure the division of so many Parquet files, each of six row groups and larger than two parts."""
    with TemporaryDirectory() as folder:
        first = Path(folder, "0.parquet")
        run_ranks(write_parquet, 1, first)  # pyarrow leaves threads behind
        for number in range(1, shards):
            shutil.copy(first, first.with_stem(str(number)))
        return means_over_ranks(size, measure_division, f"{folder}/*.parquet", shards // 6)


def means_over_ranks(
    size: int, measure: Callable[..., dict[str, float]], *arguments: Any
) -> dict[str, float]:
    """Run ``measure(*arguments)`` on every rank of a group; return the means."""
    results = run_ranks(in_a_group, size, measure, *arguments)
    return {key: fmean(result[key] for result in results) for key in results[0]}


def in_a_group(measure: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """Run in a rank what needs a group of ranks."""
    dist.init_process_group("gloo")
    try:
        return measure(*arguments)
    finally:
        dist.destroy_process_group()


def write_parquet(path: Path) -> None:
    """Write a file of six row groups. Called in a process of its own."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["x" * 100] * 60}), path, row_group_size=10)


def loader_of(source: Any, lanes: int) -> PackedDataLoader:
    """Return a loader of short packs."""
    encoder = TextEncoder(WordTokenizer())
    data = IterablePackedDataset(
        source, encoder=encoder, max_seq_len=512, overlong="split", num_lanes=lanes, epochs=None
    )
    return PackedDataLoader(data)


def measure_loader(pattern: str) -> dict[str, float]:
    """Measure connections, agreements, and the first and second state of a loader. Called in a rank."""
    before = len(connections())
    rank_sync = RankSync(timeout=timedelta(seconds=60))
    sockets = len(connections()) - before
    rank_sync.agree(1).wait()  # the first exchange of a group does more
    dist.barrier()
    received = bytes_received()
    cost, _ = report.timed(lambda: [rank_sync.agree(8).wait() for _ in range(ROUNDS)])
    dist.barrier()
    agreed = bytes_received() - received
    loader = loader_of(JSONLSource(pattern), LANES * dist.get_world_size())
    batches = iter(loader)
    for _ in range(4 * LANES):
        next(batches)
    sizes, reads = [], []
    for _ in range(2):  # the fingerprint is made for the first
        dist.barrier()
        received, read = bytes_received(), read_so_far()
        loader.state_dict()
        reads.append(read_so_far() - read)
        sizes.append(bytes_received() - received)
    return {
        "sockets": sockets,
        "agreement": agreed / ROUNDS,
        "seconds": cost.cpu / ROUNDS,
        "read": reads[0] - reads[1],
        "fingerprint": sizes[0] - sizes[1],
        "merged": sizes[1],
    }


def measure_division(pattern: str, lanes: int) -> dict[str, float]:
    """Measure the exchange of the files' row groups as a loader begins. Called in a rank."""
    loader = loader_of(ParquetSource(pattern), lanes)
    dist.barrier()
    received = bytes_received()
    next(iter(loader))
    return {"groups": bytes_received() - received}


def read_so_far() -> int:
    """Return the bytes that this process has read, from the cache or the disk."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


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
