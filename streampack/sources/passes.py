"""Which lane of a source is read in which pass: a mixture moves its lanes on, so that each comes by all rows."""

from __future__ import annotations

GOLDEN = 0x9E3779B97F4A7C15
"""The golden ratio less 1, times 2^64. Its multiples, modulo 2^64, are spread evenly however many are taken."""


def lane_in_pass(lane: int, num_lanes: int, number: int) -> int:
    """Return which lane of a source a lane of a mixture reads in pass ``number``.

    In each pass all lanes move on by the same distance. So together they still read every row once, and a source with
    fewer rows than lanes gives its rows to other lanes each time.

    >>> [[lane_in_pass(lane, 4, number) for lane in range(4)] for number in range(4)]
    [[0, 1, 2, 3], [2, 3, 0, 1], [0, 1, 2, 3], [3, 0, 1, 2]]
    """
    return (lane + (number * GOLDEN % 2**64 * num_lanes >> 64)) % num_lanes


def passes_by_all(num_lanes: int) -> int:
    """Return a number of passes in a row in which each lane surely reads every lane of a source.

    2 x ``num_lanes`` are enough (three-distance theorem: n multiples of the golden ratio leave no gap above 1.9 / n).
    """
    return 2 * num_lanes
