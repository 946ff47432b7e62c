"""Worker processes that end when the process ends that started them."""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
from multiprocessing.connection import wait

POLL_SECONDS = 0.5
"""Seconds between two checks of the parent. A process outlives its parent by about this time."""


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
