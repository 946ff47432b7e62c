"""Ranks as processes of this machine: they join as torchrun's do, or over gloo at once, and can be killed."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

# Importing torch and transformers takes seconds, so ranks are forked from a server that has them: see `start_server`.
_server = mp.get_context("forkserver")
_server.set_forkserver_preload([])
PR_SET_PDEATHSIG = 1  # prctl(2)
DUMP_AFTER = 30.0  # seconds; half the time after which the loaders of most jobs give up on a peer
GRACE = 20.0  # seconds that ranks have to end in after one has failed

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class RankError(AssertionError):
    """A rank raised, died or hung; its traceback, with the rank in front."""


@dataclass(frozen=True)
class ExitWith:
    """Return value of a job whose process is to exit at once, as after an uncaught error."""

    value: Any


def start_server() -> None:
    """Fork the server from this process, which has imported what tests use; torch must have no threads here yet."""

    def fork(_executable: str, arguments: list[str], files: list[int]) -> int:
        pid = os.fork()
        if pid == 0:
            for file in open_files() - before - {*files}:
                with suppress(OSError):
                    os.close(file)  # else it would not notice that this process ends
            for output in (1, 2):  # in which pytest would show what ranks print
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
            warnings.resetwarnings()  # pytest's make errors of them
            try:
                exec(arguments[-1])
            finally:
                os._exit(0)
        return pid

    def open_files() -> set[int]:
        return {int(path.name) for path in Path("/dev/fd").iterdir()}

    resource_tracker.ensure_running()
    before = open_files()
    # Where Python starts it by another function, it starts it its own way, and ranks import for themselves.
    with mock.patch("multiprocessing.util.spawnv_passfds", fork, create=True):
        forkserver.ensure_running()


def open_store() -> dist.TCPStore:
    """Where ranks meet; torchrun's agent has one, for all attempts of a run."""
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    store: dist.TCPStore | None = None,
    timeout: float = 120,
) -> list[Any]:
    """``function(*args)`` in ``size`` processes with the variables that torchrun sets; what each returned.

    Raises:
        RankError: with the tracebacks of all that failed.
    """
    store = store or open_store()  # so the port is ours before anyone needs it
    with Ranks(size, join=False, store=store, job=(function, args)) as ranks:
        return ranks.collect(timeout)


def run_forked(
    function: Callable[..., Any], size: int, *args: Any, dies: int | None = None, timeout: float = 60
) -> list[Any]:
    """``function(*args)`` in ``size`` ranks forked from this process that have joined over gloo; what each returned.

    The rank that ``dies`` must be killed, and the others must not fail.
    """
    with Ranks(size, job=(function, args)) as ranks:
        outcomes = ranks.collect(timeout, dead=() if dies is None else (dies,))
        if dies is not None:
            ranks.processes[dies].join(timeout)
            assert ranks.processes[dies].exitcode == -signal.SIGKILL
        return outcomes


def start_process(function: Callable[..., Any], *args: Any) -> mp.process.BaseProcess:
    """Start one process that has imported what this one had at its beginning, for a test to kill."""
    process = _server.Process(target=_call_alone, args=(function, args))
    process.start()
    return process


class Ranks:
    """Processes that are ranks of one another; each has a Unix process group, in which its workers are.

    Args:
        size: number of ranks.
        join: initialise torch's process group (gloo). False: set the environment variables that torchrun would set.
        store: of ranks that do not join. With it, they are forked from a server that has run nothing.
            None: they are forked from this process, which is fast; it must have no threads that ranks wait for.
        job: a function and its arguments, which each rank calls at once, and exits if it raises.
    """

    def __init__(
        self, size: int, *, join: bool = True, store: dist.TCPStore | None = None, job: Call | None = None
    ) -> None:
        context: Any = mp.get_context("fork") if store is None else _server
        self.size, self.once = size, job is not None
        self.folder = tempfile.TemporaryDirectory()
        # The server does not know which test is running.
        env = {"PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST", "")}
        if not join:
            port = free_port() if store is None else store.port
            env |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        if store is not None:
            env["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            # A forked child closes the ends of the others' pipes that it inherits: otherwise the death of a rank would
            # not close its pipe.
            inherited = [*self.pipes, ours] if store is None else None
            arguments = (rank, size, self.folder.name, env, theirs, inherited, job)
            process = context.Process(target=_serve, args=arguments)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

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
            RankError: if a job raised, or is not done in ``timeout`` seconds. Of jobs that were sent and took
                `DUMP_AFTER` seconds it shows what every rank and worker was doing then.
        """
        begin = time.monotonic()
        deadline, dump_at = begin + timeout, begin + (timeout if self.once else min(timeout, DUMP_AFTER))
        results: list[Any] = [None] * self.size
        waiting: dict[Any, int] = {self.pipes[rank]: rank for rank in range(self.size) if rank not in dead}
        failures, stacks, dumped = [], "", False
        while waiting:
            until = deadline if dumped else min(dump_at, deadline)
            ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            if not ready and not dumped:
                stacks, dumped = self.dump_stacks(), True
                continue
            if not ready:
                failures.append(
                    f"ranks {sorted(waiting.values())} of {self.size} still ran after {timeout} s"
                )
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                succeeded, results[rank] = self._outcome(rank)
                if not succeeded:
                    failures.append(f"rank {rank}: {results[rank]}")
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            raise RankError("\n".join(failures) + stacks)
        return results

    def _outcome(self, rank: int) -> tuple[bool, Any]:
        try:
            outcome: tuple[bool, Any] = pickle.loads(self.pipes[rank].recv_bytes())
            return outcome
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(5)
            return False, f"ended with exit code {self.processes[rank].exitcode}"

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
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # it may not have made its group yet
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
        groups = {process.pid for process in self.processes}
        return [pid for pid, found in processes().items() if found.group in groups and found.alive]


class RankPools(dict[int, Ranks]):
    """`Ranks` of each size, started when first needed and used again; a context manager that kills them."""

    def __missing__(self, size: int) -> Ranks:
        self[size] = Ranks(size)
        return self[size]

    def __enter__(self) -> RankPools:
        return self

    def __exit__(self, *error: object) -> None:
        for ranks in self.values():
            ranks.kill()


class ProcessInfo(NamedTuple):
    """A process as /proc shows it."""

    parent: int
    group: int
    session: int
    alive: bool  # False: a zombie


def processes() -> dict[int, ProcessInfo]:
    """Return all processes of this machine, by pid; none where there is no /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            state, parent, group, session = (
                (folder / "stat").read_text().rpartition(")")[2].split(maxsplit=4)[:4]
            )
            found[int(folder.name)] = ProcessInfo(int(parent), int(group), int(session), state != "Z")
    return found


def kill_tree(root: int) -> None:
    """Send SIGKILL to a process and all its descendants, whatever group or session they are in."""
    parents = {pid: process.parent for pid, process in processes().items()}
    found = [root]
    for above in found:
        found += [pid for pid, parent in parents.items() if parent == above]
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port: int = listener.getsockname()[1]
        return port


def _serve(
    rank: int,
    size: int,
    folder: str,
    env: dict[str, str],
    pipe: Connection,
    inherited: list[Connection] | None,
    job: Call | None,
) -> None:
    """Call one job after another, in a rank; ``inherited`` is None in those that come from the server."""
    with suppress(OSError, AttributeError):  # where there is prctl, a killed run leaves no ranks behind
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)
    gc.freeze()  # a collection would copy all that was imported
    for connection in inherited or ():
        connection.close()
    stacks = Path(folder, f"rank-{rank}").open("w")  # noqa: SIM115 - workers inherit it, and the handler
    faulthandler.register(signal.SIGUSR1, file=stacks)
    if inherited is None:
        _be_like_any_process()
    else:
        torch.set_num_threads(1)  # the threads of the process that forked are not here: ranks would wait
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(env)
    if "WORLD_SIZE" in env:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    else:
        store, limit = dist.FileStore(f"{folder}/store", size), timedelta(minutes=10)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    # A rank like torchrun's ends with its job: its peers notice. Forked ones wait, as one that ends early resets the
    # connections of those that still read.
    going_on = job is None or (_answer(pipe, *job) and inherited is not None)
    with suppress(EOFError, OSError):  # the pipe is closed
        while going_on:
            function, args = pipe.recv()
            going_on = _answer(pipe, function, args) or job is None
    sys.stdout.flush()
    os._exit(0)


def _answer(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Call a function and send what it returned, or its traceback; return whether it returned."""
    try:
        value = function(*args)
        if isinstance(value, ExitWith):
            pipe.send_bytes(pickle.dumps((True, value.value)))
            os._exit(0)
        outcome, succeeded = pickle.dumps((True, value)), True
    except BaseException:
        outcome, succeeded = pickle.dumps((False, traceback.format_exc())), False
    pipe.send_bytes(outcome)
    return succeeded


def _call_alone(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _be_like_any_process()
    function(*args)


def _be_like_any_process() -> None:
    """In a process that comes from the server."""
    mp.set_start_method("fork", force=True)  # else loaders' workers would import all anew
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - progress bars
