"""Processes that end when their parent ends, and torchrun without its report of errors that ranks have printed."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

POLL_SECONDS = 0.5
"""Seconds between two checks of the parent. A process outlives its parent by about this time."""


def end_with_launcher() -> None:
    """End this process when torchrun ends, even if torchrun is killed with SIGKILL.

    torchrun starts every rank in a session of its own, so a signal to the process group of ``tune run`` or
    ``torchrun`` does not reach the ranks. Ranks of a killed launcher would train on, and write checkpoints beside the
    run that replaces them. A thread polls the parent's process id, because the kernel's PR_SET_PDEATHSIG would also
    fire when only the thread ends that started this process. A process that torchrun did not start is left alone: it
    may be meant to outlive the shell that did.

    Raises:
        ProcessLookupError: if the launcher has ended before this call.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    if _collects_orphans(launcher):
        raise ProcessLookupError("the torchrun that launched this rank was killed, and the rank ends with it")

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-launcher", daemon=True).start()


def end_with_parent() -> None:
    """Make this process of `multiprocessing` end soon after its parent process, even if that is killed.

    A thread watches the parent, because the kernel's PR_SET_PDEATHSIG would fire when the *thread* ends that started
    this process.
    """
    parent, started_by = os.getppid(), mp.parent_process()
    assert started_by is not None

    def watch() -> None:
        # The sentinel tells at once that the parent has ended, unless another process holds its other end open: one
        # that the parent forked later, and that was stopped. So the parent's process id is polled too.
        while os.getppid() == parent and not wait([started_by.sentinel], POLL_SECONDS):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _collects_orphans(parent: int) -> bool:
    """Return whether ``parent`` collects orphans: the system's first process, or a user's systemd.

    In a container, torchrun itself may be the first process. It is told apart by its executable, Python.
    """
    process = Path(f"/proc/{parent}")
    try:
        if parent != 1:
            return (process / "comm").read_text().strip() == "systemd"
        return "py" not in (process / "exe").readlink().name
    except OSError:  # there is no /proc, or the process belongs to another user
        return parent == 1


def run_torchrun(run: Callable[[], None], *, tracebacks: bool) -> int:
    """Run torchrun in this process and return its exit status, without its report of errors that ranks have printed.

    That report is a traceback of torchrun itself and a table of exit codes. torchrun's log is kept, because it tells of
    several machines and of restarts.

    Args:
        run: calls torchrun.
        tracebacks: let torchrun print its report.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run()
    except ChildFailedError as error:
        if tracebacks:
            raise
        rank, failure = error.get_first_failure()
        if not Path(
            failure.error_file
        ).is_file():  # the rank has reported no error; perhaps the system killed it
            print(f"rank {rank} ended with exit code {failure.exitcode}: {failure.message}", file=sys.stderr)  # noqa: T201
        stopped = failure.exitcode in (128 + signal.SIGINT, 128 + signal.SIGTERM)  # by a signal to a rank
        return failure.exitcode if stopped else 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def silence_torchrun() -> None:
    """Keep torchrun's warnings and errors, such as that it terminates ranks, out of the log."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
