"""SIGTERM and SIGINT: a run stops after its running step, on all ranks, and a second signal ends it at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from streampack.training.world import World

SIGNALS = (signal.SIGTERM, signal.SIGINT)
END = b"\0"
TOGETHER = 1.0
"""Seconds within which several signals count as one: what signals all processes of a job at once (systemd, some Slurm
sites) reaches a rank directly and again through torchrun."""


class Stop:
    """The signal that this process was sent, 0 if none; see `stop_on_signals`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.received = 0

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        self.received = max(self.received, number)

    def agree(self) -> int:
        """Return the signal that any rank was sent, 0 if none; a collective, called after each step.

        It is one small message from each rank to each other over gloo, so it does not wait for a GPU.
        """
        return self.world.max(self.received)


@contextmanager
def stop_on_signals(world: World) -> Iterator[Stop]:
    """Note SIGTERM and SIGINT while the block runs, instead of ending the process.

    A second signal ends it at once, with exit status 128 + signal. A thread sees to that, because Python runs no
    handler while the main thread waits in a collective. Outside the main thread, which alone can handle signals, the
    block runs without handlers.
    """
    stop = Stop(world)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    watcher = threading.Thread(target=_end_at_second, args=(reader, world.is_main), daemon=True)
    watcher.start()
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, stop.note) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.write(writer, END)  # closing would not do: processes forked in the block have the pipe open
        watcher.join()
        os.close(writer)
        os.close(reader)


def _end_at_second(reader: int, prints: bool) -> None:
    """Read the numbers of signals as they arrive, until `END`; leave at the second."""
    first = None
    while (number := os.read(reader, 1)) != END:
        if number[0] not in SIGNALS:  # torch's DataLoader handles SIGCHLD, for one
            continue
        if first is None:
            first = time.monotonic()
            if prints:
                name = signal.Signals(number[0]).name
                text = f"\n{name}: stopping after this step; a second signal ends the run at once"
                print(text, file=sys.stderr, flush=True)  # noqa: T201
        elif time.monotonic() - first > TOGETHER:
            os._exit(128 + number[0])


def _leave_to_parent() -> None:
    """Let a forked process, such as a worker of torch's DataLoader, end by SIGTERM, and ignore Ctrl-C."""
    for number, handler in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.SIG_IGN)):
        if isinstance(getattr(signal.getsignal(number), "__self__", None), Stop):
            signal.signal(number, handler)
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_to_parent)
