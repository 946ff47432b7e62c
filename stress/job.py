"""The registry of jobs: what each shows, its function and its time limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

MODULES = ("kills", "topology", "files", "states", "growth", "network", "training")
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


@dataclass(frozen=True)
class Run:
    """Argument of a job's function."""

    quick: bool

    def count(self, full: int, quick: int) -> int:
        """Return ``full``, or ``quick`` in a quick run."""
        return quick if self.quick else full
