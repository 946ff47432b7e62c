"""One iteration of an `IterablePackedDataset`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from streampack.packing.batch import to_torchtune
from streampack.streaming.lane_state import LaneEvent
from streampack.streaming.ledger_messages import UntrainedWarning
from streampack.streaming.loaded_state import RunState
from streampack.streaming.round_robin import ANEW, PackStream
from streampack.types import Pack

Start = Callable[["PackDicts"], tuple[RunState, PackStream, int]]


class PackDicts:
    """Iterate over the packs of a stream as dicts in torchtune's format. A failed conversion consumes no pack.

    Args:
        start: is called for the first pack, so that an iterator that gives nothing changes nothing. It returns where
            the iteration begins, the stream that begins there, and the epoch of the next iteration.
        untrained: looks at each ledger.
    """

    def __init__(self, start: Start, *, untrained: UntrainedWarning) -> None:
        self._start: Start | None = start
        self._untrained = untrained
        self._empty = True
        self.begin = RunState()
        self.stream: PackStream | None = None
        self.following = 0
        self.process = os.getpid()
        self.given = False  # whether it, or one that it goes on behind, has given a pack
        self.over = False  # whether it has come to its end

    def __iter__(self) -> PackDicts:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.stream is None:
            start, self._start = self._start, None
            if start is None:
                raise RuntimeError(ANEW)
            self.begin, self.stream, self.following = start(self)
            self.given = self.begin.left
        try:
            return self.stream.next_converted(self._give)
        except StopIteration:
            if self._empty:
                self.begin.warn_if_left()
            self.over = True
            raise

    def _give(self, event: LaneEvent, pack: Pack) -> dict[str, Any]:
        self._untrained.look_at(event.state.ledger)
        given = to_torchtune(pack)
        self.given, self._empty = True, False
        return given

    def position(self) -> RunState:
        """Return the state after the last pack that was given."""
        assert self.stream is not None
        return replace(self.begin, lane_states=self.stream.lane_states())

    def left(self) -> RunState:
        """Return where an iteration goes on behind this one."""
        return replace(self.position(), left=self.given)
