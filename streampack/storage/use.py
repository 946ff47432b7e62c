"""`Storage`: the memory that a process may take to read ahead, and the time it waits for storage that is down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streampack.storage.read_ahead import READ_AHEAD
from streampack.validation import require_duration, require_positive, unknown_arguments


@dataclass(frozen=True, slots=True)
class Storage:
    """How each process which reads (a worker, or the rank itself) uses storage: its memory, and its patience.

    >>> Storage(read_ahead=64 << 20, max_outage=30)
    Storage(read_ahead=67108864, max_outage=30)

    Args:
        read_ahead: of files behind URLs, the most bytes that the process holds for all of its lanes together: fetched
            ahead of need, and in shuffle windows.
        max_outage: minutes that the process may wait for files, in all of its run, after the ``retries`` of a read are
            used up. Other ranks must wait as long (``timeout`` of a `PackedDataLoader`).
    """

    read_ahead: int = READ_AHEAD
    max_outage: float = 0.0

    def __post_init__(self) -> None:
        require_positive(self.read_ahead, "read_ahead", least=0)
        require_duration(self.max_outage, "max_outage", "minutes")

    @classmethod
    def of(cls, given: Storage | Mapping[str, Any] | None) -> Storage:
        """Return a setting as `Storage`: one, a mapping of its arguments, or None for the defaults."""
        if isinstance(given, Storage):
            return given
        if not isinstance(given, Mapping | None):
            raise ValueError(f"storage={given!r} is no Storage; give one, or a mapping of its arguments")
        for problem in unknown_arguments(cls, given or {}):
            raise ValueError(f"storage {problem}")
        return cls(**(given or {}))


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
