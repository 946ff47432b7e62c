"""`Storage`: how a source reads its files, and how long it tries; errors that say whether another try may help."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any, TypeVar

from streampack.validation import require_duration, wrong_arguments

log = logging.getLogger(__name__)
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds
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
class Storage:
    """How a source reads its files.

    >>> Storage(options={"anon": True}, max_outage=30)
    Storage(timeout=30.0, max_outage=30)

    Args:
        options: for the storage behind URLs, as fsspec takes them; may hold secrets, and is never shown.
        timeout: seconds that one request may take.
        max_outage: minutes for which a read that fails is tried again, with growing waits. A missing file and a missing
            permission are errors at once. Other ranks must wait as long (``timeout`` of a `PackedDataLoader`).
    """

    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    timeout: float = 30.0
    max_outage: float = 0.5

    def __post_init__(self) -> None:
        require_duration(self.timeout, "timeout", "seconds")
        require_duration(self.max_outage, "max_outage", "minutes")

    @classmethod
    def of(cls, given: Storage | Mapping[str, Any] | None) -> Storage:
        """Return a setting as `Storage`: one, a mapping of its arguments, or None for the defaults."""
        if isinstance(given, Storage):
            return given
        if not isinstance(given, Mapping | None):
            # It may be a secret, so it is not shown.
            raise ValueError(
                f"storage is a {type(given).__name__}; give a Storage, or a mapping of its arguments"
            )
        for problem in wrong_arguments(cls, given or {}):
            raise ValueError(f"storage {problem}")
        return cls(**(given or {}))

    def retry(self, read: Callable[[], Result], doing: str) -> Result:
        """Call ``read``, and call it again after an `OSError` that is not `PERMANENT`, for ``max_outage`` minutes.

        The waits double. Each is multiplied by a random number between 0.5 and 1, so that a thousand ranks do not
        return to a server at the same moment. A server may ask for a longer wait (`Busy`). The log says what is tried:
        ``doing`` "reading a.jsonl".
        """
        wait, begun = FIRST_WAIT, None
        while True:
            try:
                return read()
            except PERMANENT:
                raise
            except OSError as error:
                now = monotonic()
                begun = now if begun is None else begun
                if (left := begun + 60 * self.max_outage - now) <= 0:
                    error.add_note(
                        f"while {doing}; it was tried for the {self.max_outage:g} min of max_outage"
                    )
                    raise
                asked_for = getattr(error, "retry_after", 0.0)
                pause = min(left, max(wait * random.Random().uniform(0.5, 1), asked_for))
                log.warning(
                    "%s while %s; trying again in %.1f s, giving up in %.0f s", error, doing, pause, left
                )
            sleep(pause)
            wait = min(LONGEST_WAIT, 2 * wait)
