"""How long a process may wait for storage that does not answer, in all of its run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Outages:
    """Counts of the waits of one process for storage that does not answer, and how long they may be together.

    Attributes:
        limit: seconds for which reads that have used up their retries may be tried again, all reads together.
        spent: seconds of them that are used up.
        retries: how often any read was tried again.
        waited: seconds between the first failure of a read and its end, over all reads.
    """

    limit: float = 0.0
    spent: float = 0.0
    retries: int = 0
    waited: float = 0.0

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(0.0, self.limit - self.spent)


def duration(seconds: float) -> str:
    """Format a time for a message.

    >>> duration(90), duration(600)
    ('90 s', '10 min')
    """
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
