"""Events as plain values, for the way from a worker to the trainer's process.

Pickled as they are, a pack's arrays and fragments name their classes and call them, in Python, on both sides: that took
a tenth of all that a worker does beside tokenizing.
"""

from __future__ import annotations

from pickle import PickleBuffer
from typing import Any

import numpy as np

from streampack.packing.assemble import narrowed
from streampack.streaming.round_robin import Event
from streampack.types import Fragment, LaneEnd, Pack, from_tuple

Folded = tuple[Any, ...]
_fragment = from_tuple(Fragment)


def fold(event: Event) -> Folded:
    """Numbers, bytes and tuples of them; buffers of the arrays, which pickle copies as they lie in memory."""
    if isinstance(event, LaneEnd):
        return tuple(event)
    tokens, labels, seq_lens, fragments, *rest = event
    arrays: list[Any] = []
    for ids in (tokens, labels):
        if ids.itemsize > 4:  # a wide sample makes its pack wide, and need not be in need of it
            ids = narrowed(ids)
        arrays += [ids.dtype.char, PickleBuffer(ids.data)]
    return (*arrays, seq_lens, tuple(map(tuple, fragments)), *rest)


def unfold(folded: Folded) -> Event:
    """The event again. Its arrays are the bytes that arrived, and can be written to."""
    if len(folded) == len(LaneEnd._fields):
        return LaneEnd(*folded)
    first, tokens, second, labels, seq_lens, fragments, *rest = folded
    ids = (np.frombuffer(tokens, first), np.frombuffer(labels, second))
    return Pack._make([*ids, seq_lens, tuple(map(_fragment, fragments)), *rest])
