"""Strategies: pure functions that choose which buffered pieces join the oldest one in a pack.

Such a function is called as ``choose(lengths, room, limit, pull) -> taken``. ``lengths`` are those of the buffered
pieces in arrival order, ``room`` is the number of tokens still free in the pack, and ``limit`` how many more pieces it
may hold. ``pull()`` appends one more length to ``lengths``, or returns False when the buffer is full or the stream has
ended. ``taken`` are ascending indices into ``lengths``. The `Planner` itself takes the oldest piece first, so that no
strategy can let a piece wait for ever.

The result must not depend on how much was pulled before the call, or a resume would not plan the same packs.
"""

from __future__ import annotations

from collections.abc import Callable

Pull = Callable[[], bool]


def next_fit(lengths: list[int], room: int, limit: int, pull: Pull) -> list[int]:
    """Close the pack when the next piece does not fit: torchtune's greedy ``PackedDataset``."""
    count = 0
    while count < limit and (count < len(lengths) or pull()) and lengths[count] <= room:
        room -= lengths[count]
        count += 1
    return list(range(count))


def first_fit(lengths: list[int], room: int, limit: int, pull: Pull) -> list[int]:
    """Go through the buffered pieces in arrival order and take each that fits."""
    taken: list[int] = []
    i = 0
    while room and len(taken) < limit and (i < len(lengths) or pull()):
        if lengths[i] <= room:
            taken.append(i)
            room -= lengths[i]
        i += 1
    return taken


def best_fit(lengths: list[int], room: int, limit: int, pull: Pull) -> list[int]:
    """Fill the buffer, then take the longest piece that still fits, again and again; the earlier of equals."""
    while pull():
        pass
    taken: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] <= room and len(taken) < limit:
            taken.append(i)
            room -= lengths[i]
    return sorted(taken)


def exact_fit(lengths: list[int], room: int, limit: int, pull: Pull) -> list[int]:
    """Take the earliest arrivals whose lengths sum exactly to ``room``; if there are none, the fullest sum.

    This solves subset sum by dynamic programming on one Python integer: bit r of ``reach`` says that some subset of
    the lengths seen so far leaves r tokens of room. Adding a length is one shift and one OR over
    ``room`` bits, which takes about 0.2 us at 4,096. The search stops at the first arrival with which some subset
    leaves no room, so it pulls more pieces into the buffer only while no exact sum exists.

    If the sum is of more than ``limit`` pieces, the longest up to the last of them are taken instead: so few fill most
    of the pack. Later pieces do not count, because after a resume they may not be pulled yet.
    """
    # As long as all pieces together fit, no other subset is fuller. In a pack of a million tokens a whole buffer
    # often does, and `reach` would have a million bits.
    total = seen = 0
    while total < room and (seen < len(lengths) or pull()):
        total += lengths[seen]
        seen += 1
    taken = list(range(seen)) if total <= room else _fullest(lengths, room, pull, seen - 1)
    return taken if len(taken) <= limit else best_fit(lengths[: taken[-1] + 1], room, limit, lambda: False)


def _fullest(lengths: list[int], room: int, pull: Pull, seen: int) -> list[int]:
    """Return the fullest sum, given that all of the first ``seen`` pieces together leave room."""
    reach = 1 << room
    before: list[int] = []  # before[i] is the reach of lengths[:i]; the members of the sum are found from it
    for length in lengths[:seen]:
        before.append(reach)
        reach |= reach >> length
    while not reach & 1 and (seen < len(lengths) or pull()):
        before.append(reach)
        reach |= reach >> lengths[seen]
        seen += 1
    left = (reach & -reach).bit_length() - 1  # the lowest bit: the least room that any subset leaves
    taken = []
    for i in range(seen - 1, -1, -1):
        if not (before[i] >> left) & 1:
            # No subset of lengths[:i] leaves so much, so lengths[i] is in the sum.
            taken.append(i)
            left += lengths[i]
    taken.reverse()
    return taken


STRATEGIES: dict[str, Callable[[list[int], int, int, Pull], list[int]]] = {
    "next_fit": next_fit,
    "first_fit": first_fit,
    "best_fit": best_fit,
    "exact_fit": exact_fit,
}
"""Strategies by the name that users give."""

PADDED = "padded"
"""One piece a pack, in the order of arrival, and each batch padded to its longest: nothing is chosen."""
