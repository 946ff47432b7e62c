"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import multiprocessing as mp
import os
import signal
import sys
import threading
from multiprocessing.connection import wait

PR_SET_PDEATHSIG = 1
GLANCE = 0.5  # seconds between two looks at who the parent is


def on_main_thread() -> bool:
    """Whether this is the main thread: what it starts may ask the kernel to be killed at its end."""
    return threading.current_thread() is threading.main_thread()


def end_with_parent(*, by_kernel: bool) -> None:
    """End this process of `multiprocessing` as soon as the process that started it has ended, however it did.

    A thread watches for that. It cannot run while this process is stopped (SIGSTOP), so on Linux the kernel is asked,
    too; its signal comes when the *thread* ends that started this process, and must be the main one.

    Args:
        by_kernel: that `on_main_thread` was true where this process was started.
    """
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if by_kernel and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)


def _watch(parent: int) -> None:
    started_by = mp.parent_process()
    assert started_by is not None
    # The sentinel tells at once. But processes that were forked later hold its other end, too, and may be stopped.
    while os.getppid() == parent and not wait([started_by.sentinel], GLANCE):
        pass
    os._exit(1)
