"""Retries with growing waits, for storage that fails temporarily."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from streampack.storage.use import StorageUse, duration

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

    def call(self, read: Callable[[], Result], *, doing: str = "", use: StorageUse | None = None) -> Result:
        """Call ``read``, and call it again after an `OSError` that is not `PERMANENT`. Raise the last error.

        When the retries are used up, it is called every ``longest`` seconds as long as the process has time left for
        ``use``.

        Args:
            read: what is tried.
            doing: says for the log what that is: "reading a.jsonl".
            use: of this process; by default there is no time for any.
        """
        use = StorageUse() if use is None else use
        waits, left = self._waits(), self.budget
        failed: float | None = None  # when the first try had failed
        outage: float | None = None  # when the retries were used up
        try:
            while True:
                try:
                    return read()
                except PERMANENT:
                    raise
                except OSError as error:
                    now = time.monotonic()
                    failed = now if failed is None else failed
                    while_doing = f" while {doing}" if doing else ""
                    asked_for = getattr(error, "retry_after", 0.0)
                    # If the waits that the server asked for have used up the budget, there is one last try.
                    if (wait := next(waits, None) if left > 0 else None) is not None:
                        pause = min(left, max(_jittered(wait), asked_for))
                        left -= pause
                        log.warning("%s%s; trying again in %.1f s", error, while_doing, pause)
                    else:
                        outage = now if outage is None else outage
                        if (rest := use.left - (now - outage)) < 0.01:
                            if use.limit:
                                error.add_note(
                                    f"the storage did not answer for {duration(now - failed)}, and the "
                                    f"{duration(use.limit)} of max_outage are used up"
                                )
                            raise
                        pause = min(rest, max(_jittered(self.longest), asked_for))
                        log.warning(
                            "%s%s; the storage has not answered for %s; trying again in %.1f s, giving up in %s",
                            error, while_doing, duration(now - failed), pause, duration(rest),
                        )  # fmt: skip
                time.sleep(pause)
        finally:
            if outage is not None:
                use.spent += time.monotonic() - outage


def _jittered(wait: float) -> float:
    return wait * random.Random().uniform(0.5, 1)
