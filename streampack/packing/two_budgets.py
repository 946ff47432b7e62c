"""Strategies for packs with two budgets: tokens, and what samples bring besides them, such as patches of images.

They choose as those of `streampack.packing.strategies` do, among pieces that both budgets have room for, and depend, as
those do, on what arrives and not on how much was pulled before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streampack.packing.strategies import Pull

WIDE = 7 / 8
"""If the part of ``max_media`` in use is below this times that of ``max_seq_len``, only tokens are scarce."""
RESERVE = 96
"""Pieces to look at before a pack is closed, if the buffer holds that many: where both budgets are scarce, a stretch
of text needs images that wait, and the other way round. Where only tokens are, half of them do."""
ENOUGH = 7 / 4
"""A pack is full if one budget is, to a 1,024th, and the other has this times its share of what was looked at."""
Room = tuple[int, int]
"""The free tokens and the free media of a pack."""


def choose_within(
    strategy: str, lengths: list[int], media: list[int], room: Room, limit: int, pull: Pull
) -> list[int]:
    """Return ascending indices of the buffered pieces that join a pack with this ``room``.

    ``lengths`` and ``media`` are what the buffered pieces take of each budget, in arrival order; ``pull`` appends to
    both.

    >>> choose_within("exact_fit", [4, 4, 3, 1], [9, 1, 1, 0], (4, 1), 9, lambda: False)
    [1]
    """
    if strategy == "exact_fit":
        taken = _fullest(lengths, media, room, pull)
        if len(taken) <= limit:
            return taken
        strategy = "best_fit"  # of few pieces the longest fill most
    if strategy == "best_fit":
        while pull():
            pass
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i]) if strategy == "best_fit" else None
    taken, (tokens, rest), number = [], room, 0
    while tokens and len(taken) < limit and (number < len(lengths) or (order is None and pull())):
        i = number if order is None else order[number]
        if lengths[i] <= tokens and media[i] <= rest:
            taken.append(i)
            tokens, rest = tokens - lengths[i], rest - media[i]
        elif strategy == "next_fit":
            break
        number += 1
    return sorted(taken)


def _fullest(lengths: list[int], media: list[int], room: Room, pull: Pull) -> list[int]:
    """Take the earliest arrivals that fill the ``room``; if there are none, those that fill most of it.

    It is subset sum over tokens, which carries for every number of free tokens the most media of a subset that
    leaves it. The scarcer budget must be full, and the other one have more than its share: with just its share, packs
    would follow every stretch of text and of images in the stream, and near equal budgets would both be wasted.
    When no more pieces may wait, the scarce budget counts most, and few large pieces are taken before many small ones,
    which find room later; where tokens are scarce, only among nearly equal sums, for many of those are exact.
    """
    tokens, most = room
    length = cost = count = 0
    while length < tokens and cost <= most and (count < len(lengths) or pull()):
        length, cost, count = length + lengths[count], cost + media[count], count + 1
    if length <= tokens and cost <= most:  # all fit, so no other subset is fuller
        return list(range(count))
    sums, seen, length, cost = _Sums(tokens, most), 0, 0, 0
    while seen < len(lengths) or pull():
        length, cost = length + lengths[seen], cost + media[seen]
        sums.add(lengths[seen], media[seen])
        seen += 1
        wide = cost * tokens < WIDE * length * most
        if seen >= (RESERVE // 2 if wide else RESERVE):
            enough = 1 if wide else ENOUGH
            least = min(tokens, int(enough * length * most / max(1, cost)))
            left = int(sums.media[: tokens - least + 1].argmax())
            if sums.media[left] >= min(most - most // 1024, int(enough * cost * tokens / length)):
                return sums.taken(left, lengths)
    return sums.taken(sums.fullest(length / seen, cost / seen), lengths)


class _Sums:
    """Subset sums of pieces: ``media[r]`` is the most of a subset that leaves r tokens of room, negative if none does.

    For each piece, one bit for every r says whether the subset of r took it when it came; from the last piece to the
    first, they lead to its members. Adding a piece takes about 20 us at 4,096 tokens.
    """

    def __init__(self, tokens: int, most: int) -> None:
        self.tokens, self.most = tokens, most
        self.media, self.pieces = np.full(tokens + 1, -1 << 62), np.zeros(tokens + 1, np.int32)
        self.media[tokens] = 0
        self.bits: list[np.ndarray[Any, np.dtype[np.uint8]]] = []

    def add(self, length: int, cost: int) -> None:
        """Add a piece."""
        if length > self.tokens or cost > self.most:
            self.bits.append(_NONE)
            return
        size = self.media.size - length
        now = self.media[length:] + cost
        better = (now > self.media[:size]) & (now <= self.most)
        np.copyto(self.media[:size], now, where=better)
        np.copyto(self.pieces[:size], self.pieces[length:] + np.int32(1), where=better)
        self.bits.append(np.packbits(better))

    def fullest(self, length: float, cost: float) -> int:
        """Return the tokens that the best subset leaves; pieces that wait take so much of each budget on average."""
        parts = length / max(1, self.tokens), cost / max(1, self.most)
        tokens, media = np.arange(self.tokens, -1, -1) / max(1, self.tokens), self.media / max(1, self.most)
        score = tokens + media / 16 - self.pieces * (parts[0] / 64)
        if parts[1] > parts[0]:
            score = media + tokens / 16 - self.pieces * (parts[1] / 8)
        return int(np.where(self.media < 0, -np.inf, score).argmax())

    def taken(self, left: int, lengths: list[int]) -> list[int]:
        """Return the ascending indices of the pieces in the subset that leaves ``left`` tokens."""
        found = []
        for i in range(len(self.bits) - 1, -1, -1):
            bits = self.bits[i]
            if left >> 3 < bits.size and bits[left >> 3] >> (7 - (left & 7)) & 1:
                found.append(i)
                left += lengths[i]
        return found[::-1]


_NONE = np.zeros(0, np.uint8)
