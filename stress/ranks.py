"""Ranks on this machine that run one job after another and can be killed."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing as mp
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from streampack.distributed.rank_sync import Agreement, combine_counts

PR_SET_PDEATHSIG = 1  # prctl(2)
DUMP_AFTER = 30.0  # seconds; half the time after which the loaders of most jobs give up on a peer


class RankError(AssertionError):
    """A rank raised, died or hung."""


@dataclass(frozen=True)
class ExitWith:
    """Return value of a job whose process is to exit at once, as after an uncaught error."""

    value: Any


class Ranks:
    """Processes that are ranks of one torch process group (gloo); with their workers they share one Unix process group.

    They are forked, which is fast: 50 starts take seconds. The process that makes them must have no threads.

    Args:
        size: number of ranks.
        join: initialise torch's process group. False: set the environment variables that torchrun would set.
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
            # The child closes the ends of the others' pipes that it inherits: otherwise the death of a rank would not
            # close its pipe.
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
        """Start ``job(*arguments)`` on every rank."""
        for pipe in self.pipes:
            with suppress(BrokenPipeError):
                pipe.send((job, arguments))

    def collect(self, timeout: float = 120, *, dead: tuple[int, ...] = ()) -> list[Any]:
        """Return the results of the ranks' jobs, by rank; None for ``dead`` ranks.

        Raises:
            RankError: if a job raised, or is not done in ``timeout`` seconds. From jobs that took `DUMP_AFTER` seconds
                it shows what every rank and worker was doing then.
        """
        begin = time.monotonic()
        results: list[Any] = [None] * self.size
        waiting = {self.pipes[rank]: rank for rank in range(self.size) if rank not in dead}
        stacks, dumped = "", False
        while waiting:
            until = timeout if dumped else min(timeout, DUMP_AFTER)
            ready = wait(list(waiting), max(0.0, begin + until - time.monotonic()))
            if not ready and not dumped:
                stacks, dumped = self.dump_stacks(), True
                continue
            if not ready:
                raise RankError(
                    f"ranks {sorted(waiting.values())} of {self.size} still ran after {timeout} s{stacks}"
                )
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    succeeded, results[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise RankError(f"rank {rank} of {self.size} died{stacks}") from None
                if not succeeded:
                    raise RankError(f"rank {rank} of {self.size}:\n{results[rank]}{stacks}")
        return results

    def run(self, job: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
        """Run ``job(*arguments)`` on every rank and return the results, by rank; see `collect`."""
        self.start(job, *arguments)
        return self.collect(timeout)

    def dump_stacks(self) -> str:
        """Return the Python stacks of all threads of the ranks and workers that are alive."""
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
            time.sleep(0.05)  # they write to one file
        files = sorted(Path(self.folder.name).glob("rank-*"))
        return "".join(f"\nstacks of {file.name}:\n{file.read_text()}" for file in files)

    def kill(self) -> None:
        """Send SIGKILL to all ranks and workers, and wait until they have ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.wait_for_exit(time.monotonic() + 10)
        self.folder.cleanup()

    def wait_for_exit(self, deadline: float) -> None:
        """Wait until no rank and no worker is alive.

        Raises:
            RankError: if some are at the deadline.
        """
        while left := self.members():
            if time.monotonic() > deadline:
                raise RankError(f"{len(left)} processes of {self.size} ranks are still alive")
            time.sleep(0.005)

    def members(self) -> list[int]:
        """Return the pids of the ranks and workers that are alive."""
        return [pid for pid, process in processes().items() if process.group == self.group and process.alive]


class OwnAgreement(Agreement):
    """An agreement that a rank reaches from its own number, without the other ranks."""

    def __init__(self, count: int, *, failed: bool = False, notes: Sequence[int] = ()) -> None:
        self.number = ~count if failed else count
        self.noted = list(notes)

    def wait(self) -> tuple[int, bool]:
        """Return what follows from this rank's number."""
        return combine_counts([self.number])

    def notes(self) -> list[list[int]]:
        """Return this rank's notes."""
        return [self.noted]


class RankPools:
    """`Ranks` of each size, started when first needed and used again; a context manager that kills them."""

    def __init__(self) -> None:
        self.by_size: dict[int, Ranks] = {}

    def __getitem__(self, size: int) -> Ranks:
        if size not in self.by_size:
            self.by_size[size] = Ranks(size)
        return self.by_size[size]

    def __enter__(self) -> RankPools:
        return self

    def __exit__(self, *error: object) -> None:
        for ranks in self.by_size.values():
            ranks.kill()


class ProcessInfo(NamedTuple):
    """A process as /proc shows it."""

    parent: int
    group: int
    session: int
    alive: bool  # False: a zombie


def processes() -> dict[int, ProcessInfo]:
    """Return all processes of this machine, by pid."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            state, parent, group, session = (
                (folder / "stat").read_text().rpartition(")")[2].split(maxsplit=4)[:4]
            )
            found[int(folder.name)] = ProcessInfo(int(parent), int(group), int(session), state != "Z")
    return found


def descendants(root: int) -> list[int]:
    """Return the pids of a process's children, their children, and so on."""
    parents = {pid: process.parent for pid, process in processes().items()}
    found = [root]
    for above in found:
        found += [pid for pid, parent in parents.items() if parent == above]
    return found[1:]


def kill_tree(root: int) -> None:
    """Send SIGKILL to a process and all its descendants, whatever group or session they are in."""
    for pid in [root, *descendants(root)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


def _serve(
    rank: int, size: int, store: str, port: int | None, pipe: Connection, inherited: list[Connection]
) -> None:
    with suppress(OSError):  # ends with its parent, so that a killed stress run leaves no ranks behind
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for connection in inherited:
        connection.close()
    # Workers inherit the handler and the file.
    stacks = (Path(store).parent / f"rank-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if port is not None:
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in variables.items()})
        os.environ["MASTER_ADDR"] = "localhost"
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
        if isinstance(outcome[1], ExitWith):
            pipe.send((True, outcome[1].value))
            break
        pipe.send(outcome)
    sys.stdout.flush()
    os._exit(0)
