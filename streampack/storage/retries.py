"""Retries with growing waits, for storage that fails temporarily."""

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
    """The error for a server that is overloaded."""

    retry_after = 0.0
    """Seconds that the server asks to wait; 0 if it does not say."""


class Refused(OSError):
    """The error for a request that a server refuses, and would refuse again."""


PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, Refused)
"""Errors that are not retried."""


@dataclass(frozen=True, slots=True)
class Retries:
    """Up to ``attempts`` retries. The waits before them double, from ``first`` seconds up to ``longest``.

    Each wait is multiplied by a random number between 0.5 and 1, so that a thousand ranks do not return to a server at
    the same moment. If a server asks for a longer wait (`Busy`), it gets that, as long as all waits together stay
    within the budget.

    >>> Retries(attempts=3, first=1.0).budget
    7.0
    """

    attempts: int = 5
    first: float = 0.5
    longest: float = 30.0

    @property
    def budget(self) -> float:
        """The most seconds that all waits together may take."""
        return sum(self._waits())

    def _waits(self) -> Iterator[float]:
        return (min(self.longest, self.first * 2**attempt) for attempt in range(self.attempts))

    def call(self, read: Callable[[], Result], *, doing: str = "") -> Result:
        """Call ``read``, and call it again after an `OSError` that is not `PERMANENT`. Raise the last error.

        ``doing`` says for the log what is tried: "reading a.jsonl".
        """
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
                if left <= 0:  # the waits that the server asked for used up the budget: try one last time
                    break
        return read()
