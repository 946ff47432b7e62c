"""Strategies: pure functions that choose which waiting pieces join the oldest one in a pack.

A strategy is ``choose(lengths, room, pull) -> taken``. ``lengths`` are the waiting pieces in arrival order, ``room``
the tokens still free in the pack, and ``pull()`` appends one more length to ``lengths``, or returns False when the
buffer is full or the stream has ended. ``taken`` are ascending indices into ``lengths``. The `Planner` itself takes the
oldest piece first, so that no strategy can starve one.

The result must not depend on how much was pulled before the call: a planner that was interrupted by an error in
``pull`` then reaches the same pack when it is called again.
"""

from __future__ import annotations

from collections.abc import Callable

Strategy = Callable[[list[int], int, Callable[[], bool]], list[int]]


def next_fit(lengths: list[int], room: int, pull: Callable[[], bool]) -> list[int]:
    """Close the pack when the next piece does not fit: torchtune's greedy ``PackedDataset``."""
    count = 0
    while (count < len(lengths) or pull()) and lengths[count] <= room:
        room -= lengths[count]
        count += 1
    return list(range(count))


def first_fit(lengths: list[int], room: int, pull: Callable[[], bool]) -> list[int]:
    """Scan the buffer in arrival order and take whatever fits."""
    taken = []
    i = 0
    while room and (i < len(lengths) or pull()):
        if lengths[i] <= room:
            taken.append(i)
            room -= lengths[i]
        i += 1
    return taken


def best_fit(lengths: list[int], room: int, pull: Callable[[], bool]) -> list[int]:
    """Fill the buffer, then take the longest that still fits, again and again; the earlier of equals."""
    while pull():
        pass
    taken = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] <= room:
            taken.append(i)
            room -= lengths[i]
    return sorted(taken)


def exact_fit(lengths: list[int], room: int, pull: Callable[[], bool]) -> list[int]:
    """Take the earliest arrivals whose lengths sum exactly to ``room``; if there are none, the fullest sum.

    Subset sum by dynamic programming on one Python integer: bit r of ``reach`` says that some subset of
    the lengths seen so far leaves r tokens of room. Adding a length is one shift and one OR over
    ``room`` bits, about 0.2 us at 4,096. It stops at the first arrival that makes bit 0 reachable, so it
    pulls more pieces into the buffer only while no exact sum exists.
    """
    reach = 1 << room
    before: list[int] = []  # before[i]: reach of lengths[:i], to walk back from the sum to its members
    seen = 0
    while not reach & 1 and (seen < len(lengths) or pull()):
        before.append(reach)
        reach |= reach >> lengths[seen]
        seen += 1
    left = (reach & -reach).bit_length() - 1  # the least room that any subset leaves
    taken = []
    for i in range(seen - 1, -1, -1):
        if not (before[i] >> left) & 1:  # not reachable with lengths[:i] alone, so length i is in the sum
            taken.append(i)
            left += lengths[i]
    taken.reverse()
    return taken


STRATEGIES: dict[str, Strategy] = {
    "next_fit": next_fit,
    "first_fit": first_fit,
    "best_fit": best_fit,
    "exact_fit": exact_fit,
}
