"""Retries with backoff, for storage that fails for a moment."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Busy(OSError):
    """A server that is overloaded, and may name a wait."""

    retry_after = 0.0  # seconds


class Refused(OSError):
    """A server that refuses a request, and would refuse it again."""


PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, Refused)
"""Errors that are not retried."""


@dataclass(frozen=True, slots=True)
class Retries:
    """Retries with waits that double from ``first`` seconds up to ``longest``, each times a random 0.5 to 1.

    The jitter keeps a thousand ranks from returning to a server in the same moment. A wait that a server names
    (`Busy`) is kept, as long as all waits together stay within the budget.

    >>> Retries(attempts=3, first=1.0).budget
    7.0
    """

    attempts: int = 5
    first: float = 0.5
    longest: float = 30.0

    @property
    def budget(self) -> float:
        """Seconds that all waits together take at most."""
        return sum(self._waits())

    def _waits(self) -> Iterator[float]:
        return (min(self.longest, self.first * 2**attempt) for attempt in range(self.attempts))

    def call(self, read: Callable[[], Result], *, doing: str = "") -> Result:
        """Call ``read``, and again after each `OSError` that may pass; raise the last one."""
        left = self.budget
        for wait in self._waits():
            try:
                return read()
            except PERMANENT:
                raise
            except OSError as error:
                pause = wait * random.Random().uniform(0.5, 1)
                pause = min(left, max(pause, getattr(error, "retry_after", 0.0)))
                left -= pause
                log.warning("%s%s; trying again in %.1f s", error, f" while {doing}" if doing else "", pause)
                time.sleep(pause)
                if left <= 0:  # a server's own time used it up: one last try
                    break
        return read()
