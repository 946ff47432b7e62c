"""Processes that end with the one that started them, and torchrun without its own account of reported errors."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

INTERVAL = 0.5
"""Seconds between two looks at the parent: a process outlives it by about so long."""


def end_with_launcher() -> None:
    """End this process when torchrun ends, even if torchrun is killed with SIGKILL.

    torchrun starts every rank in a session of its own, so a signal to the process group of ``tune run`` or
    ``torchrun`` does not reach it, and ranks of a killed launcher would train on and write checkpoints beside the run
    that replaces them. A thread polls the parent's process id: the kernel's PR_SET_PDEATHSIG would also fire when only
    the thread ends that started this process. Processes that torchrun did not start, but a shell or ssh, may outlive
    their parent.

    Raises:
        ProcessLookupError: if the launcher is gone already.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    if _adopted(launcher):
        raise ProcessLookupError("the torchrun that launched this rank was killed, and the rank ends with it")

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(INTERVAL)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-launcher", daemon=True).start()


def end_with_parent() -> None:
    """End this process of `multiprocessing` soon after the process that started it has ended, however it did.

    A thread watches the parent. The kernel's PR_SET_PDEATHSIG would fire when the *thread* ends that started this
    process.
    """
    parent, started_by = os.getppid(), mp.parent_process()
    assert started_by is not None

    def watch() -> None:
        # The sentinel is immediate. But processes forked later hold its other end, too, and may be stopped.
        while os.getppid() == parent and not wait([started_by.sentinel], INTERVAL):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _adopted(parent: int) -> bool:
    """Return whether ``parent`` collects orphans: the system's first process, or a user's systemd.

    In a container, torchrun itself may be the first process; it is Python then.
    """
    process = Path(f"/proc/{parent}")
    try:
        if parent != 1:
            return (process / "comm").read_text().strip() == "systemd"
        return "py" not in (process / "exe").readlink().name
    except OSError:  # no /proc, or another user's
        return parent == 1


def launch(run: Callable[[], None], *, tracebacks: bool) -> int:
    """Run torchrun in this process and return its exit status, without its report of errors that ranks have printed.

    That report is a traceback of torchrun itself and a table of exit codes. Its log stays, for several machines and
    restarts.

    Args:
        run: calls torchrun.
        tracebacks: let torchrun report.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if tracebacks:
        run()
        return 0
    try:
        run()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if not Path(failure.error_file).is_file():  # the rank printed nothing: the system killed it, perhaps
            print(f"rank {rank} ended with exit code {failure.exitcode}: {failure.message}", file=sys.stderr)  # noqa: T201
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def silence_torchrun() -> None:
    """Keep torchrun's warnings and errors, such as that it ends ranks, out of the log."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
