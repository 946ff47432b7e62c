"""Messages and reads that ranks share, measured on processes of this machine that communicate over gloo."""

from __future__ import annotations

import os
import shutil
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import torch.distributed as dist

from benchmarks import report
from benchmarks.scale.probes import WordTokenizer, write_rows
from streampack import IterablePackedDataset, JSONLSource, PackedDataLoader, TextEncoder

# private: an agreement by itself, without the work of making batches
from streampack.distributed.rank_sync import RankSync
from tests.harness.processes import run_ranks

ROUNDS = 200
AGREED = [0] * (8 * 5)  # what ranks tell of 8 batches
LANES = 15  # of each rank
TCP_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in Linux's struct tcp_info


def loaders(shards: int, size: int) -> dict[str, float]:
    """Measure loaders of JSONL files of 150 kB on ``size`` ranks, and their states; return means over ranks."""
    with TemporaryDirectory() as folder:
        first = Path(folder, "0.jsonl")
        write_rows(first, 150_000)
        for number in range(1, shards):
            shutil.copy(first, first.with_stem(str(number)))
        results = run_ranks(measure, size, f"{folder}/*.jsonl")
    return {key: fmean(result[key] for result in results) for key in results[0]}


def measure(pattern: str) -> dict[str, float]:
    """Measure connections, agreements, and the first and second state of a loader. Called in a rank."""
    dist.init_process_group("gloo")
    before = len(connections())
    rank_sync = RankSync(timeout=timedelta(seconds=60))
    sockets = len(connections()) - before
    rank_sync.exchange([1])()  # the first exchange of a group does more
    dist.barrier()
    received = bytes_received()
    cost, _ = report.timed(lambda: [rank_sync.exchange(AGREED)() for _ in range(ROUNDS)])
    dist.barrier()
    agreed = bytes_received() - received
    loader = PackedDataLoader(
        IterablePackedDataset(
            JSONLSource(pattern),
            encoder=TextEncoder(WordTokenizer()),
            max_seq_len=512,
            overlong="split",
            num_lanes=LANES * dist.get_world_size(),
        )
    )
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
    dist.destroy_process_group()
    return {
        "sockets": sockets,
        "agreement": agreed / ROUNDS,
        "seconds": cost.cpu / ROUNDS,
        "read": reads[0] - reads[1],
        "fingerprint": sizes[0] - sizes[1],
        "merged": sizes[1],
    }


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
