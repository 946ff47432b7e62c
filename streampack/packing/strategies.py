"""Strategies: pure functions that choose which waiting pieces join the oldest one in a pack.

Such a function is called as ``choose(lengths, room, pull) -> taken``. ``lengths`` are those of the waiting pieces in
arrival order, and ``room`` is the number of tokens still free in the pack. ``pull()`` appends one more length to
``lengths``, or returns False when the buffer is full or the stream has ended. ``taken`` are ascending indices into
``lengths``. The `Planner` itself takes the oldest piece first, so that no strategy can let a piece wait for ever.

The result must not depend on how much was pulled before the call. Then a planner that was interrupted by an error in
``pull`` makes the same pack when it is called again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Strategy(NamedTuple):
    """How pieces are chosen for a pack, and chosen anew when they are more sequences than it may hold."""

    choose: Callable[[list[int], int, Callable[[], bool]], list[int]]
    """``choose(lengths, room, pull) -> taken``, as described above; it knows of no limit of sequences."""

    choose_at_most: Callable[[list[int], list[int], int, int], list[int]]
    """``choose_at_most(taken, lengths, room, limit) -> taken``: called when ``choose`` took more than ``limit``."""


def next_fit(lengths: list[int], room: int, pull: Callable[[], bool]) -> list[int]:
    """Close the pack when the next piece does not fit: torchtune's greedy ``PackedDataset``."""
    count = 0
    while (count < len(lengths) or pull()) and lengths[count] <= room:
        room -= lengths[count]
        count += 1
    return list(range(count))


def first_fit(lengths: list[int], room: int, pull: Callable[[], bool]) -> list[int]:
    """Go through the waiting pieces in arrival order and take each that fits."""
    taken = []
    i = 0
    while room and (i < len(lengths) or pull()):
        if lengths[i] <= room:
            taken.append(i)
            room -= lengths[i]
        i += 1
    return taken


def best_fit(lengths: list[int], room: int, pull: Callable[[], bool]) -> list[int]:
    """Fill the buffer, then take the longest piece that still fits, again and again; the earlier of equals."""
    while pull():
        pass
    return _longest_first(lengths, room, limit=len(lengths))


def exact_fit(lengths: list[int], room: int, pull: Callable[[], bool]) -> list[int]:
    """Take the earliest arrivals whose lengths sum exactly to ``room``; if there are none, the fullest sum.

    This solves subset sum by dynamic programming on one Python integer: bit r of ``reach`` says that some subset of
    the lengths seen so far leaves r tokens of room. Adding a length is one shift and one OR over
    ``room`` bits, which takes about 0.2 us at 4,096. The search stops at the first arrival with which some subset
    leaves no room, so it pulls more pieces into the buffer only while no exact sum exists.
    """
    # As long as all pieces together fit, no other subset is fuller. In a pack of a million tokens a whole buffer
    # often does, and `reach` would have a million bits.
    total = seen = 0
    while total < room and (seen < len(lengths) or pull()):
        total += lengths[seen]
        seen += 1
    if total <= room:
        return list(range(seen))
    reach = 1 << room
    before: list[int] = []  # before[i] is the reach of lengths[:i]; the members of the sum are found from it
    seen = 0
    while not reach & 1 and (seen < len(lengths) or pull()):
        before.append(reach)
        reach |= reach >> lengths[seen]
        seen += 1
    left = (reach & -reach).bit_length() - 1  # the lowest bit: the least room that any subset leaves
    taken = []
    for i in range(seen - 1, -1, -1):
        if (
            not (before[i] >> left) & 1
        ):  # no subset of lengths[:i] leaves so much, so lengths[i] is in the sum
            taken.append(i)
            left += lengths[i]
    taken.reverse()
    return taken


def keep_first(taken: list[int], lengths: list[int], room: int, limit: int) -> list[int]:
    """Keep the first ``limit`` of the pieces taken: what a strategy that goes by arrival order takes first."""
    return taken[:limit]


def take_longest(taken: list[int], lengths: list[int], room: int, limit: int) -> list[int]:
    """Take ``limit`` pieces, longest first, instead of those taken: so few pieces fill most of the pack."""
    return _longest_first(lengths, room, limit=limit)


def _longest_first(lengths: list[int], room: int, *, limit: int) -> list[int]:
    """Take the longest piece that still fits, again and again, but at most ``limit`` pieces."""
    taken: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] <= room and len(taken) < limit:
            taken.append(i)
            room -= lengths[i]
    return sorted(taken)


STRATEGIES = {
    "next_fit": Strategy(next_fit, keep_first),
    "first_fit": Strategy(first_fit, keep_first),
    "best_fit": Strategy(best_fit, take_longest),
    "exact_fit": Strategy(
        exact_fit, take_longest
    ),  # so a pack with the most sequences may not be filled exactly
}
"""Strategies by the name that users give."""
