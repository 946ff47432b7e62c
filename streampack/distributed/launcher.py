"""Ranks and the process that launches them: they end with it, and it leaves the word to them."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

INTERVAL = 0.5
"""Seconds between two looks at the launcher: for about so long a rank may outlive it."""


def end_with_launcher() -> None:
    """Let this process end when torchrun does, even if torchrun is killed with SIGKILL.

    torchrun starts every rank in a session of its own, so a signal to the process group of ``tune run`` or
    ``torchrun`` does not reach it, and ranks of a killed launcher would train on and write checkpoints beside the run
    that takes their place. A thread looks at the parent's process id: the kernel's PR_SET_PDEATHSIG would also fire
    when only the thread ends that started this process. Processes that torchrun did not start are left alone, since
    what started them may be meant to end first: a shell, or ssh.

    Raises:
        ProcessLookupError: if the launcher is gone already.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    if _adopted(launcher):
        raise ProcessLookupError("the torchrun that launched this rank was killed, and the rank ends with it")
    threading.Thread(target=_watch, args=(launcher,), name="end-with-launcher", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(INTERVAL)
    os._exit(1)


def _adopted(parent: int) -> bool:
    """Whether ``parent`` collects processes whose own parent died: the system's first process, or a user's systemd.

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
    """Run torchrun in this process; its exit status, without torchrun's own account of errors that ranks have told.

    torchrun shows its traceback, in which nothing is wrong, and a table of exit codes after what a rank printed. Its
    log goes on where it is needed: with several machines or restarts.

    Args:
        run: calls torchrun.
        tracebacks: let it show them.
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
        if not Path(failure.error_file).is_file():  # it had no time to say why: the system killed it, perhaps
            print(f"rank {rank} ended with exit code {failure.exitcode}: {failure.message}", file=sys.stderr)  # noqa: T201
        return 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def silence_torchrun() -> None:
    """Take torchrun's warnings and errors out of its log: that it ends ranks, for one."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
