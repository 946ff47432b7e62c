"""Interrupts at every place where Python can raise one, and a limit of time for what must not hang."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")


class Injector:
    """Raises at the ``at``-th place of a call where Python looks for signals: a call's beginning, a C call's end.

    Without ``at`` it only counts the places.
    """

    def __init__(self, at: int | None = None, *, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.at = at
        self.error = error
        self.places = 0
        self.raised = False
        self.home = os.getpid()  # and not its worker processes, which inherit the profiler

    def call(self, function: Callable[[], Result]) -> Result:
        """``function()``, which must be Python code; ``error`` is raised somewhere below it, once."""
        if self.raised:
            return function()
        sys.setprofile(self._look)
        try:
            return function()
        finally:
            sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_return") or frame.f_code.co_filename == __file__:
            return
        if os.getpid() != self.home:
            return
        self.places += 1
        if self.at is not None and self.places >= self.at and not self.raised and not _shielded(frame):
            self.raised = True
            raise self.error("injected")


def _shielded(frame: FrameType | None) -> bool:
    """Return whether an exception here would show nothing about streampack.

    Python only reports one in a finalizer. One within `logging` may leave the lock of all loggers held, on which every
    other thread would wait for ever. One in ``closed`` of a file, which `io` calls from C, becomes a SystemError. One
    before a `threading.Condition` has its lock again becomes a RuntimeError about that lock, in its own ``with``. One
    in what filelock does around a fork lets every later lock of this process wait for ever.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if (
            frame.f_code.co_name in ("__del__", "_remove", "closed", "_acquire_restore")
            or "weakref" in file
            or "filelock" in file
            or file == logging.__file__
        ):
            return True
        frame = frame.f_back
    return False


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Fail, instead of waiting without end. In the main thread only."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{what} took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again, should something swallow the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
