"""Ranks end with the process that launched them."""

from __future__ import annotations

import os
import threading
import time
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
