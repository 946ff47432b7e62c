"""Counts of what one process reads from storage, and the limit of its waits for storage that does not answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StorageUse:
    """Counts of what one process has read from storage, and how long it may wait for storage that does not answer.

    Attributes:
        limit: seconds for which reads that have used up their retries may be tried again, all reads together.
        spent: seconds of them that are used up.
        retries: how often any read was tried again.
        waited: seconds between the first failure of a read and its end, over all reads.
        bytes: that were read, as they are stored.
        seconds: for which readers waited for those bytes, ``waited`` included.
    """

    limit: float = 0.0
    spent: float = 0.0
    retries: int = 0
    waited: float = 0.0
    bytes: int = 0
    seconds: float = 0.0

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
