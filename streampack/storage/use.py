"""The limit of a process's waits for storage that does not answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StorageUse:
    """How long one process may wait for storage that does not answer.

    Attributes:
        limit: seconds for which reads that have used up their retries may be tried again, all reads together.
        spent: seconds of them that are used up.
    """

    limit: float = 0.0
    spent: float = 0.0

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
