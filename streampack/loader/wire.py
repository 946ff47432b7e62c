"""Wire format: events as plain values, sent from a worker to the trainer's process.

Pickled as they are, a pack's arrays and fragments would name and call their classes, in Python, on both sides: a tenth
of a worker's time beside tokenizing.
"""

from __future__ import annotations

from pickle import PickleBuffer
from typing import Any

import numpy as np

from streampack.packing.samples import narrowed
from streampack.streaming.lane_state import LaneEvent
from streampack.types import Fragment, Pack

Folded = tuple[Any, ...]


def fold(event: LaneEvent) -> Folded:
    """Return numbers, bytes and tuples of them; buffers of the arrays, which pickle copies as they lie in memory."""
    pack, head = event.pack, (event.lane, event.epoch, event.state)
    if pack is None:
        return head
    arrays: list[Any] = []
    for ids in (pack.tokens, pack.labels):
        if ids.itemsize > 4:  # one wide sample makes its pack wide
            ids = narrowed(ids)
        arrays += [ids.dtype.char, PickleBuffer(ids.data)]
    return (*head, *arrays, pack.seq_lens, tuple(map(tuple, pack.fragments)), pack.number)


def unfold(folded: Folded) -> LaneEvent:
    """Return the event again. Its arrays are the bytes that arrived, and can be written to."""
    lane, epoch, state, *rest = folded
    if not rest:
        return LaneEvent(lane, epoch, None, state)
    first, tokens, second, labels, seq_lens, fragments, number = rest
    tokens, labels = np.frombuffer(tokens, np.dtype(first)), np.frombuffer(labels, np.dtype(second))
    pack = Pack(tokens, labels, seq_lens, tuple(map(Fragment._make, fragments)), epoch, number, lane)
    return LaneEvent(lane, epoch, pack, state)
