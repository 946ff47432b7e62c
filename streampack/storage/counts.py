"""Counts of what was read from a source, in one process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ReadCounts:
    """Counts of what the readers of a source have read in this process."""

    bytes: int = 0  # as they are stored
    windowed: int = 0  # records that shuffle windows were filled with
