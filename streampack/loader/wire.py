"""Events as plain values, for the way from a worker: pickled as objects, they took a tenth of its time."""

from __future__ import annotations

from pickle import PickleBuffer
from typing import Any

import numpy as np

from streampack.packing.columns import narrowed
from streampack.streaming.lane_state import LaneEvent
from streampack.types import Fragment, Pack, PackGroups

Folded = tuple[Any, ...]


def fold(event: LaneEvent) -> Folded:
    """Return an event as numbers, tuples and buffers; pickle copies the arrays' memory without calling their class."""
    pack, head = event.pack, (event.lane, event.epoch, event.state)
    if pack is None:
        return head
    arrays: list[Any] = []
    for ids in (pack.tokens, pack.labels):
        if ids.itemsize > 4:  # a pack is int64 if one of its samples was
            ids = narrowed(ids)
        arrays += [ids.dtype.char, PickleBuffer(ids.data)]
    groups = None
    if pack.groups is not None:
        groups = tuple(getattr(pack.groups, name) for name in PackGroups.__slots__)
    return (*head, *arrays, pack.seq_lens, tuple(map(tuple, pack.fragments)), pack.number, groups)


def unfold(folded: Folded) -> LaneEvent:
    """Invert `fold`. The arrays use the memory of the bytes that arrived, and are writable."""
    lane, epoch, state, *rest = folded
    if not rest:
        return LaneEvent(lane, epoch, None, state)
    first, tokens, second, labels, seq_lens, fragments, number, groups = rest
    tokens, labels = np.frombuffer(tokens, np.dtype(first)), np.frombuffer(labels, np.dtype(second))
    pack = Pack(tokens, labels, seq_lens, tuple(map(Fragment._make, fragments)), epoch, number, lane)
    if groups is not None:
        pack.groups = PackGroups(*groups)
    return LaneEvent(lane, epoch, pack, state)
