"""Line charts over the steps of a run, as SVG without any library: for a page that makes no requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count, pairwise

Point = tuple[float, float]  # (step, value)

WIDTH, HEIGHT = 420, 210  # of the viewBox; a page shows it 340 to 560 pixels wide
LEFT, RIGHT, TOP, BOTTOM = 66, 18, 12, 34  # margins around the plot
BUCKETS = 250
"""A line is thinned out to twice as many points: the lowest and the highest of each bucket."""
MOST_MARKS = 40
"""Values that are no numbers are marked, at most so many."""


@dataclass(frozen=True)
class Line:
    """The values of one metric by step, in order; they may be NaN or infinite."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Scale:
    """Maps values to places of a picture.

    >>> scale = Scale(low=0.0, high=10.0, start=100.0, stop=200.0)
    >>> scale(2.5)
    125.0
    """

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def thin(points: Sequence[Point], *, buckets: int = BUCKETS) -> list[Point]:
    """Keep the first and the last point, and of each bucket of points the lowest and the highest, so that spikes stay.

    >>> points = [(float(step), 9.0 if step == 501 else 1.0) for step in range(1000)]
    >>> kept = thin(points, buckets=10)
    >>> len(kept) <= 22, (501.0, 9.0) in kept
    (True, True)

    Args:
        points: finite ones, in order of their steps.
        buckets: of about equally many points.
    """
    if len(points) <= 2 * buckets + 2:
        return list(points)
    bounds = [number * len(points) // buckets for number in range(buckets + 1)]
    kept = {0, len(points) - 1}
    for start, stop in pairwise(bounds):
        bucket = range(start, stop)
        kept |= {min(bucket, key=lambda i: points[i][1]), max(bucket, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def means(points: Sequence[Point], *, buckets: int = BUCKETS) -> list[Point]:
    """Return the mean step and the mean value of each bucket of points.

    >>> means([(1, 2.0), (2, 4.0), (3, 6.0), (4, 6.0)], buckets=2)
    [(1.5, 3.0), (3.5, 6.0)]
    """
    bounds = [number * len(points) // buckets for number in range(buckets + 1)]
    parts = [points[start:stop] for start, stop in pairwise(bounds)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def short(value: float) -> str:
    """Format a number so that it fits beside an axis.

    >>> short(950), short(12_500), short(3_200_000)
    ('950', '12.5k', '3.2M')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def ticks(low: float, high: float, *, most: int) -> list[float]:
    """Return round numbers from ``low`` to ``high``: multiples of 1, 2 or 5 times a power of 10, at most ``most``.

    >>> ticks(0, 97, most=5)
    [0.0, 20.0, 40.0, 60.0, 80.0]
    """
    exponent = math.floor(
        math.log10(high - low) - math.log10(most)
    )  # the quotient may be too small for a float
    for factor in (scale * 10.0**power for power in count(exponent) for scale in (1, 2, 5)):
        if not factor:
            continue
        first, last = math.ceil(low / factor - 1e-9), math.floor(high / factor + 1e-9)
        if last - first < most:
            return [float(f"{number * factor:.12g}") for number in range(first, last + 1)]
    raise AssertionError


def line_chart(
    name: str,
    lines: Sequence[Line],
    *,
    title: str,
    unit: str,
    least: float | None = None,
    show: Callable[[float], str] = "{:,.4g}".format,
) -> str:
    """Draw lines over the steps, with axes, as an SVG element; an empty text if no line has a finite value.

    Args:
        name: of the picture, unlike any other's on the page.
        lines: the first is drawn solid, the others dashed with a dot at each point.
        title: of the picture.
        unit: of the values, for the axis.
        least: the axis begins here, or below if a value is lower; None: near the lowest value.
        show: formats a value.
    """
    finite = [[point for point in line.points if math.isfinite(point[1])] for line in lines]
    values = [value for points in finite for _, value in points]
    if not values:
        return ""
    steps = [step for line in lines for step, _ in line.points]
    x = Scale(*_range(min(steps), max(steps)), LEFT, WIDTH - RIGHT)
    low, high = _range(min(values), max(values)) if least is None else (min(least, *values), max(values))
    y = Scale(low, high if high > low else low + 1, HEIGHT - BOTTOM, TOP)
    parts = [*_axes(x, y, unit, show)]
    for number, (line, points) in enumerate(zip(lines, finite, strict=True)):
        parts += _drawn(line, points, number, x, y)
    described = " ".join(_described(line, points, show) for line, points in zip(lines, finite, strict=True))
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(described)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def _range(low: float, high: float) -> tuple[float, float]:
    """Return bounds that differ, also for a single value."""
    if high > low:
        return low, high
    return (low - 0.5, high + 0.5) if low == 0 else (low - abs(low) / 10, high + abs(high) / 10)


def _axes(x: Scale, y: Scale, unit: str, show: Callable[[float], str]) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in ticks(y.low, y.high, most=5):
        place = f"{y(value):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {place}H{right}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{place}" dy=".32em">{escape(show(value))}</text>')
    for value in ticks(x.low, x.high, most=6):
        if value == int(value):  # there is no half step
            place = f"{x(value):.1f}"
            parts.append(f'<path class="grid" d="M{place} {bottom}v4"/>')
            parts.append(f'<text class="x" x="{place}" y="{bottom + 15}">{short(value)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>')
    parts.append(f'<text class="x" x="{(LEFT + right) / 2:.0f}" y="{HEIGHT - 4}">step</text>')
    middle = (TOP + bottom) / 2
    parts.append(f'<text class="x" transform="translate(13 {middle:.0f})rotate(-90)">{escape(unit)}</text>')
    return parts


def _drawn(line: Line, points: Sequence[Point], number: int, x: Scale, y: Scale) -> list[str]:
    """Draw a line, a dot for each of few points, and a mark where a value is no number.

    Of many points, the line goes through their means, and all of them together are a pale one behind it.
    """
    parts = []
    gaps = [step for step, value in line.points if not math.isfinite(value)]
    kept = thin(points)
    if len(kept) < len(points):
        parts.append(f'<path class="band line-{number}" d="{_path(kept, gaps, x, y)}"/>')
        kept = means(points)
    if kept:
        parts.append(f'<path class="line line-{number}" d="{_path(kept, gaps, x, y)}"/>')
    if number or len(kept) == 1:
        parts += [
            f'<circle class="dot dot-{number}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5"/>'
            for step, value in (kept if len(kept) <= 60 else ())
        ]
    parts += [f'<path class="gap" d="M{x(step) - 4:.1f} {TOP}l8 8m0 -8l-8 8"/>' for step in gaps[:MOST_MARKS]]
    return parts


def _path(points: Sequence[Point], gaps: Sequence[float], x: Scale, y: Scale) -> str:
    """Return the points as a path, interrupted between points with a gap between them."""
    parts, left, before = [], list(reversed(gaps)), -math.inf
    for step, value in points:
        broken = before == -math.inf
        while left and left[-1] < step:
            broken = left.pop() > before or broken
        parts.append(f"{'M' if broken else 'L'}{x(step):.1f} {y(value):.1f}")
        before = step
    return "".join(parts)


def _described(line: Line, points: Sequence[Point], show: Callable[[float], str]) -> str:
    """Say in words what a line shows."""
    if not points:
        return f"{line.name}: no finite value."
    (first_step, first), (last_step, last) = points[0], points[-1]
    low, high = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    text = (
        f"{line.name}: {show(first)} at step {first_step:,.0f}, {show(last)} at step {last_step:,.0f}; lowest "
        f"{show(low[1])} at step {low[0]:,.0f}, highest {show(high[1])} at step {high[0]:,.0f}."
    )
    gaps = [step for step, value in line.points if not math.isfinite(value)]
    if gaps:
        text += f" {len(gaps):,} value(s) are not finite, the first at step {gaps[0]:,.0f}."
    return text
