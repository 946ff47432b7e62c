"""Ranks on this machine that can be given work, one job after another, and killed."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from streampack.distributed.rank_sync import Agreement, verdict

PR_SET_PDEATHSIG = 1


class RankError(AssertionError):
    """A rank raised, died or hung."""


@dataclass(frozen=True)
class Leaving:
    """What a job returns that is its process's last: the process ends at once, as by an error that nobody catches."""

    value: Any


class Ranks:
    """Processes that are ranks of one another over gloo, and with their workers one process group of the system.

    They are forked, so that starting 50 times costs seconds: whoever makes them must have no threads.

    Args:
        size: how many.
        join: make the process group of torch. Without, they find in their environment what torchrun would say.
    """

    def __init__(self, size: int, *, join: bool = True) -> None:
        context = mp.get_context("fork")
        self.folder = tempfile.TemporaryDirectory()
        store = Path(self.folder.name) / "store"
        self.size = size
        port = None if join else free_port()
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            # The ends that this process keeps of the others' pipes are closed in the child: a rank that dies must
            # be seen as dead.
            arguments = (rank, size, str(store), port, theirs, [*self.pipes, ours])
            process = context.Process(target=_serve, args=arguments)
            process.start()
            theirs.close()
            leader = self.processes[0].pid if self.processes else process.pid
            with suppress(PermissionError, ProcessLookupError):
                os.setpgid(process.pid, leader)
            self.pipes.append(ours)
            self.processes.append(process)
        self.group = self.processes[0].pid

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self, job: Callable[..., Any], *arguments: Any) -> None:
        """Every rank begins ``job(*arguments)``."""
        for pipe in self.pipes:
            with suppress(BrokenPipeError):
                pipe.send((job, arguments))

    def collect(self, timeout: float = 120, *, dead: tuple[int, ...] = ()) -> list[Any]:
        """What the ranks' jobs returned, by rank; None for ``dead`` ones.

        Raises:
            RankError: if a job raised, or is not done in ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * self.size
        waiting = {self.pipes[rank]: rank for rank in range(self.size) if rank not in dead}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(
                    f"ranks {sorted(waiting.values())} of {self.size} still ran after {timeout} s"
                )
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    well, results[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    raise RankError(f"rank {rank} of {self.size} died") from None
                if not well:
                    raise RankError(f"rank {rank} of {self.size}:\n{results[rank]}")
        return results

    def run(self, job: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        """`start` and `collect`."""
        self.start(job, *arguments)
        return self.collect(timeout)

    def kill(self) -> None:
        """SIGKILL to all at once, workers included."""
        with suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.wait_until_gone(time.monotonic() + 10)
        self.folder.cleanup()

    def wait_until_gone(self, deadline: float) -> None:
        """Until no process of the group lives, ranks and workers.

        Raises:
            RankError: if some do at the deadline.
        """
        while left := self.members():
            if time.monotonic() > deadline:
                raise RankError(f"{len(left)} processes of {self.size} ranks still live")
            time.sleep(0.005)

    def members(self) -> list[int]:
        """The processes that live in the group."""
        return [
            pid for pid, (_, group, _, state) in processes().items() if group == self.group and state != "Z"
        ]


class OwnAgreement(Agreement):
    """An agreement without the other ranks."""

    def __init__(self, count: int, *, failed: bool = False) -> None:
        self.number = ~count if failed else count

    def wait(self) -> tuple[int, bool]:
        """Return what follows from this rank's number."""
        return verdict([self.number])


class Pools:
    """`Ranks` by their number, kept for the next job; a context manager that ends them all."""

    def __init__(self) -> None:
        self.of: dict[int, Ranks] = {}

    def __getitem__(self, size: int) -> Ranks:
        if size not in self.of:
            self.of[size] = Ranks(size)
        return self.of[size]

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *error: object) -> None:
        for ranks in self.of.values():
            ranks.kill()


def processes() -> dict[int, tuple[int, int, int, str]]:
    """Of every process: its parent, process group, session and state, as /proc tells."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            found[int(place.name)] = (int(fields[1]), int(fields[2]), int(fields[3]), fields[0])
    return found


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as ears:
        ears.bind(("localhost", 0))
        port: int = ears.getsockname()[1]
        return port


def _serve(
    rank: int, size: int, store: str, port: int | None, pipe: Connection, others: list[Connection]
) -> None:
    with suppress(OSError):  # a stress run that is killed leaves no ranks behind
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for other in others:
        other.close()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if port is not None:
        known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({"MASTER_ADDR": "localhost"} | {name: str(value) for name, value in known.items()})
    elif size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(minutes=10)
        )
    while True:
        try:
            job, arguments = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            outcome = (True, job(*arguments))
        except BaseException:
            outcome = (False, traceback.format_exc())
        if isinstance(outcome[1], Leaving):
            pipe.send((True, outcome[1].value))
            break
        pipe.send(outcome)
    sys.stdout.flush()
    os._exit(0)
