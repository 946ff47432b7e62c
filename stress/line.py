"""A line of the table: what it shows, how to run it, and how long it may take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

MODULES = ("kills", "topology", "states", "growth", "waiting", "network", "training", "bugs")
"""Where lines live, in the order in which they run."""

Body = Callable[["Run"], str]


@dataclass(frozen=True)
class Line:
    """One line; ``body(run)`` returns what was done with its counts, and raises if it does not hold."""

    name: str
    shows: str
    limit: int  # seconds, after which all its processes are killed
    body: Body


class NotRun(Exception):
    """A line cannot be run here; the message says what is missing."""


LINES: dict[str, Line] = {}


def line(name: str, shows: str, *, limit: int) -> Callable[[Body], Body]:
    """Enter a function into `LINES`."""

    def enter(body: Body) -> Body:
        LINES[name] = Line(name, shows, limit, body)
        return body

    return enter


def load_lines() -> dict[str, Line]:
    """All of them, in order."""
    for module in MODULES:
        import_module(f"stress.{module}")
    return LINES


class Run:
    """What a line's body is given: how much to do, and where to say how far it is."""

    def __init__(self, name: str, *, quick: bool) -> None:
        self.name = name
        self.quick = quick
        self.said = 0.0

    def count(self, full: int, quick: int) -> int:
        """``full`` of something, or ``quick``."""
        return quick if self.quick else full

    def tell(self, done: int, total: int, what: str) -> None:
        """Say how far it is: at once on a terminal, every half minute elsewhere."""
        now = time.monotonic()
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K  {self.name}: {done:,} of {total:,} {what}")
            if done >= total:
                sys.stderr.write("\r\033[K")
        elif now - self.said > 30:
            if self.said:
                sys.stderr.write(f"  {self.name}: {done:,} of {total:,} {what}\n")
            self.said = now
        sys.stderr.flush()
