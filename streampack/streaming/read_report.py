"""`ReadReport`: what one process has read, sent to the trainer beside its packs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from streampack.storage.use import StorageUse

REPORT_EVERY = 1.0
"""Seconds between two reports of a process. To ask 240 lanes of ten sources takes a millisecond."""


class ReadReport(NamedTuple):
    """Counts of what one process has read, or several have together.

    >>> one = ReadReport(bytes=10, consumed=((0.5, 1), (0.0, 0)))
    >>> ReadReport.total([one, ReadReport(bytes=5, consumed=((1.0, 1), (0.25, 1)))]).consumed
    ((1.5, 2), (0.25, 1))

    Attributes:
        bytes: read from storage, as they are stored. Of token shards that are mapped into memory nothing is counted.
        seconds: that readers waited for storage, retries included.
        retries: how often a read was tried again.
        outage_seconds: between the first failure of a read and its end.
        consumed: for each source the fractions of the current pass that lanes have read, added up, and the number of
            lanes of which it is known.
    """

    bytes: int = 0
    seconds: float = 0.0
    retries: int = 0
    outage_seconds: float = 0.0
    consumed: tuple[tuple[float, int], ...] = ()

    @classmethod
    def of(cls, use: StorageUse) -> ReadReport:
        """Return what this process has read, without the fractions."""
        return cls(use.bytes, use.seconds, use.retries, use.waited)

    @classmethod
    def total(cls, reports: Iterable[ReadReport]) -> ReadReport:
        """Return the sum over processes."""
        given = list(reports)
        consumed = zip(*(report.consumed for report in given if report.consumed), strict=True)
        return cls(
            sum(report.bytes for report in given),
            sum(report.seconds for report in given),
            sum(report.retries for report in given),
            sum(report.outage_seconds for report in given),
            tuple(_added(each) for each in consumed),
        )

    def since(self, begun: ReadReport) -> ReadReport:
        """Return what was read since the report ``begun``."""
        return ReadReport(
            self.bytes - begun.bytes,
            self.seconds - begun.seconds,
            self.retries - begun.retries,
            self.outage_seconds - begun.outage_seconds,
            self.consumed,
        )

    def fractions(self) -> list[float | None]:
        """Return the mean of each source over the lanes of which it is known; None if it is known of none."""
        return [fraction / lanes if lanes else None for fraction, lanes in self.consumed]


def consumed_by_lanes(lanes: Iterable[tuple[float | None, ...]]) -> tuple[tuple[float, int], ...]:
    """Add up the fractions of each source, as ``consumed`` of a `ReadReport` has them."""
    columns = zip(*lanes, strict=True)
    return tuple(_added([(f, 1) for f in column if f is not None]) for column in columns)


def _added(pairs: Iterable[tuple[float, int]]) -> tuple[float, int]:
    given = list(pairs)
    return sum(fraction for fraction, _ in given), sum(lanes for _, lanes in given)
