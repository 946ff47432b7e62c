"""Charts against an oracle: points lie where their values say, spikes and gaps stay."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

from hypothesis import example, given
from hypothesis import strategies as st

from streampack.inspection.charts import (
    BOTTOM,
    BUCKETS,
    HEIGHT,
    LEFT,
    MOST_MARKS,
    RIGHT,
    TOP,
    WIDTH,
    Line,
    line_chart,
    means,
    thin,
    ticks,
)

values = st.floats(-1e6, 1e6)


def picture(*lines: Line, least: float | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(line_chart("it", lines, title="a < b", unit="nats", least=least))


def of_class(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in svg.iter() if name in element.get("class", "").split()]


def places(path: ElementTree.Element) -> list[tuple[str, float, float]]:
    found = re.findall(r"([ML])(-?[\d.]+) (-?[\d.]+)", path.get("d", ""))
    return [(letter, float(x), float(y)) for letter, x, y in found]


@given(st.lists(values, min_size=2, max_size=50, unique=True), st.integers(1, 1000))
def test_points_lie_where_their_values_say(heights: list[float], every: int) -> None:
    points = [(every * (number + 1), height) for number, height in enumerate(heights)]
    [path] = of_class(picture(Line("loss", points)), "line")
    low, high = min(heights), max(heights)
    for (_, x, y), (step, height) in zip(places(path), points, strict=True):
        along = (step - every) / (points[-1][0] - every)
        assert abs(x - (LEFT + along * (WIDTH - RIGHT - LEFT))) < 0.06
        up = height / (high - low) - low / (high - low)
        assert abs(y - (HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP))) < 0.06


@example(heights=[0.0, 5e-324], least=0.0)
@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=20), st.floats(0, 1))
def test_the_axis_begins_at_the_least_value_asked_for(heights: list[float], least: float) -> None:
    [path] = of_class(picture(Line("wait", list(enumerate(heights))), least=least), "line")
    low, high = min(least, *heights), max(heights)
    if high > low:
        tall = HEIGHT - BOTTOM - TOP
        assert abs(places(path)[0][2] - (HEIGHT - BOTTOM - (heights[0] - low) / (high - low) * tall)) < 0.06


def test_values_that_are_all_the_least_one_lie_on_the_axis() -> None:
    """Padding that is 0 throughout has no ticks below 0."""
    svg = picture(Line("padding", [(1, 0.0), (2, 0.0)]), least=0.0)
    [path] = of_class(svg, "line")
    assert {y for _, _, y in places(path)} == {float(HEIGHT - BOTTOM)}
    assert not [element for element in svg.iter() if (element.text or "").startswith("-")]


@given(st.lists(values, min_size=1, max_size=2000), st.integers(1, 40))
def test_thinning_keeps_the_ends_and_the_extremes_of_every_bucket(heights: list[float], buckets: int) -> None:
    points = list(enumerate(heights))
    kept = thin(points, buckets=buckets)
    assert len(kept) <= 2 * buckets + 2
    assert kept == sorted(set(kept) & set(points))
    assert {points[0], points[-1]} <= set(kept)
    for number in range(buckets):
        bucket = heights[number * len(points) // buckets : (number + 1) * len(points) // buckets]
        if bucket:
            assert {min(bucket), max(bucket)} <= {height for _, height in kept}


def test_a_spike_of_one_step_in_a_hundred_thousand_stays_in_the_picture() -> None:
    points = [(step, 9.0 if step == 61_803 else 2.0 + step % 7 / 10) for step in range(100_000)]
    svg = picture(Line("loss", points))
    [band] = of_class(svg, "band")
    tops = [x for _, x, y in places(band) if abs(y - TOP) < 0.1]
    assert tops == [round(LEFT + 61_803 / 99_999 * (WIDTH - RIGHT - LEFT), 1)]
    [line] = of_class(svg, "line")
    assert len(places(line)) == BUCKETS
    assert len(ElementTree.tostring(svg)) < 40_000


@given(st.lists(values, min_size=40, max_size=400))
def test_means_are_those_of_buckets(heights: list[float]) -> None:
    found = means(list(enumerate(heights)), buckets=40)
    for number, (step, value) in enumerate(found):
        start, stop = number * len(heights) // 40, (number + 1) * len(heights) // 40
        assert math.isclose(step, (start + stop - 1) / 2)
        assert math.isclose(value, sum(heights[start:stop]) / (stop - start), abs_tol=1e-6)


def test_values_that_are_not_finite_break_the_line_and_are_marked() -> None:
    points = [(1, 3.0), (2, 2.5), (3, math.nan), (4, math.inf), (5, 2.0), (6, 1.5)]
    svg = picture(Line("loss", points))
    [path] = of_class(svg, "line")
    assert [letter for letter, _, _ in places(path)] == ["M", "L", "M", "L"]
    assert len(of_class(svg, "gap")) == 2
    [described] = [element.text for element in svg.iter() if element.tag.endswith("desc")]
    assert described is not None
    assert "2 value(s) are not finite, the first at step 3" in described
    assert "nan" not in ElementTree.tostring(svg).decode().lower()
    many = picture(Line("loss", [*enumerate([1.0, 2.0]), *((step, math.nan) for step in range(2, 500))]))
    assert len(of_class(many, "gap")) == MOST_MARKS


def test_no_finite_value_is_no_picture() -> None:
    assert line_chart("it", [Line("loss", [(1, math.nan)])], title="", unit="") == ""
    assert line_chart("it", [], title="", unit="") == ""


def test_one_value_is_a_dot() -> None:
    for value in (0.0, 2.5, -3.0):
        svg = picture(Line("loss", [(7, value)]))
        [dot] = of_class(svg, "dot-0")
        assert float(dot.get("cx", 0)) == (LEFT + WIDTH - RIGHT) / 2


def test_a_second_line_has_the_axes_of_the_first() -> None:
    svg = picture(Line("training", [(0, 1.0), (10, 3.0)]), Line("validation", [(5, 2.0), (10, 5.0)]))
    first, second = of_class(svg, "line-0"), of_class(svg, "line-1")
    assert places(first[0])[1][1] == places(second[0])[1][1] == WIDTH - RIGHT
    assert places(second[0])[1][2] == TOP
    assert len(of_class(svg, "dot-1")) == 2


def test_a_picture_says_in_words_what_it_shows() -> None:
    svg = picture(Line("loss", [(1, 4.0), (2, 9.5), (3, 2.0)]))
    texts = {element.tag: element.text for element in svg}
    assert texts["title"] == "a < b"
    assert texts["desc"] == "loss: 4 at step 1, 2 at step 3; lowest 2 at step 3, highest 9.5 at step 2."
    assert svg.get("aria-labelledby") == "it-t it-d"


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 8))
def test_ticks_are_round_and_within_the_axis(low: float, width: float, most: int) -> None:
    high = low + width
    if high - low < abs(low) * 1e-6:
        return  # closer than the digits that a tick has
    found = ticks(low, high, most=most)
    assert len(found) <= most
    slack = (high - low) * 1e-6 + abs(low) * 1e-9
    assert all(low - slack <= value <= high + slack for value in found)
    steps = {round((b - a) / (high - low), 5) for a, b in pairwise(found)}
    assert len(steps) <= 1
