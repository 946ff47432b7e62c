"""The registry of jobs: what each shows, its function and its time limit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

MODULES = (
    "kills",
    "topology",
    "files",
    "states",
    "growth",
    "network",
    "training",
)
"""Modules with jobs, in the order in which they run."""

Body = Callable[["Run"], str]


@dataclass(frozen=True)
class Job:
    """A row of the table; ``body(run)`` returns what was done, with counts, and raises if the promise is broken."""

    name: str
    shows: str
    limit: int  # seconds, after which all its processes are killed
    body: Body


class NotRun(Exception):
    """A job needs something that this machine lacks; the message names it."""


JOBS: dict[str, Job] = {}


def job(name: str, shows: str, *, limit: int) -> Callable[[Body], Body]:
    """Register a function in `JOBS`."""

    def register(body: Body) -> Body:
        JOBS[name] = Job(name, shows, limit, body)
        return body

    return register


def load_jobs() -> dict[str, Job]:
    """Import all modules with jobs, and return the jobs in their order."""
    for module in MODULES:
        import_module(f"stress.{module}")
    return JOBS


def require_failure(check: Callable[[], Any], message: str) -> None:
    """Require that a check fails with this message, because a bug is planted."""
    failure = None
    try:
        check()
    except AssertionError as error:
        failure = str(error)
    assert failure is not None, f"a planted bug passes the check for {message!r}"
    assert message in failure, f"a planted bug fails otherwise than by {message!r}: {failure}"


class Run:
    """Argument of a job's function: whether the run is quick, and a way to report progress."""

    def __init__(self, name: str, *, quick: bool) -> None:
        self.name = name
        self.quick = quick
        self.reported = 0.0

    def count(self, full: int, quick: int) -> int:
        """Return ``full``, or ``quick`` in a quick run."""
        return quick if self.quick else full

    def progress(self, done: int, total: int, what: str) -> None:
        """Report progress every half minute."""
        now = time.monotonic()
        if now - self.reported > 30:
            if self.reported:
                sys.stderr.write(f"  {self.name}: {done:,} of {total:,} {what}\n")
            self.reported = now
