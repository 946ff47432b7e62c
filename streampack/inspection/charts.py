"""Metrics over the steps of a run as polylines of a picture of 420 by 210."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]  # (step, value)

LEFT, RIGHT, TOP, BOTTOM = 66, 402, 12, 176
BUCKETS = 250
"""A line of more than twice as many points is drawn as the means of so many parts of it."""
MOST_MARKS = 40
"""Values that are no numbers are marked, at most so many."""


@dataclass(frozen=True)
class Line:
    """A metric, drawn."""

    name: str
    points: str
    band: str  # of many points: the lowest and the highest of each part
    gaps: list[str]  # places of values that are no numbers


@dataclass(frozen=True)
class Chart:
    """A picture of one or two metrics."""

    title: str
    unit: str
    lines: list[Line]
    ticks: list[tuple[int, str]]
    first: str
    last: str


def draw(
    title: str,
    unit: str,
    metrics: dict[str, list[Point]],
    *,
    least: float | None,
    show: Callable[[float], str],
) -> Chart | None:
    """Draw metrics by their names; None if they have no finite value.

    Args:
        title: of the picture.
        unit: of the values.
        metrics: by name, in order of their steps; values may be NaN or infinite.
        least: the axis begins here, or below if a value is lower; None: at the lowest value.
        show: formats a value.
    """
    values = [value for points in metrics.values() for _, value in points if math.isfinite(value)]
    if not values:
        return None
    steps = [step for points in metrics.values() for step, _ in points]
    first, last = min(steps), max(steps)
    low, high = min(values if least is None else [least, *values]), max(values)

    def x(step: float) -> str:
        return f"{LEFT + (RIGHT - LEFT) * (step - first) / ((last - first) or 1):.1f}"

    def path(points: Iterable[Point]) -> str:
        return " ".join(
            f"{x(step)},{BOTTOM - (BOTTOM - TOP) * (value - low) / ((high - low) or 1):.1f}"
            for step, value in points
        )

    lines = []
    for name, points in metrics.items():
        finite = [point for point in points if math.isfinite(point[1])]
        many = len(finite) > 2 * BUCKETS
        lines.append(
            Line(
                name,
                path(means(finite) if many else finite),
                path(thin(finite)) if many else "",
                [x(step) for step, value in points if not math.isfinite(value)][:MOST_MARKS],
            )
        )
    ticks = [(BOTTOM, low), ((TOP + BOTTOM) // 2, (low + high) / 2), (TOP, high)]
    marks = [(place, show(value)) for place, value in (ticks if high > low else ticks[:1])]
    return Chart(title, unit, lines, marks, f"{first:,.0f}", f"{last:,.0f}")


def _buckets(points: Sequence[Point], number: int) -> list[Sequence[Point]]:
    bounds = [at * len(points) // number for at in range(number + 1)]
    return [points[start:stop] for start, stop in pairwise(bounds)]


def thin(points: Sequence[Point], *, buckets: int = BUCKETS) -> list[Point]:
    """Return the lowest and the highest point of each part, so that spikes stay.

    >>> points = [(float(step), 9.0 if step == 501 else 1.0) for step in range(1000)]
    >>> kept = thin(points, buckets=10)
    >>> len(kept) <= 20, (501.0, 9.0) in kept
    (True, True)
    """
    kept: set[Point] = set()
    for part in _buckets(points, buckets):
        kept |= {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
    return sorted(kept)


def means(points: Sequence[Point], *, buckets: int = BUCKETS) -> list[Point]:
    """Return the mean step and the mean value of each part.

    >>> means([(1, 2.0), (2, 4.0), (3, 6.0), (4, 6.0)], buckets=2)
    [(1.5, 3.0), (3.5, 6.0)]
    """
    parts = _buckets(points, buckets)
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]
