"""One iteration of an `IterablePackedDataset`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from streampack.packing.batch import to_torchtune
from streampack.streaming.lane_state import LaneState
from streampack.streaming.ledger_messages import UntrainedWarning
from streampack.streaming.loaded_state import RunState
from streampack.streaming.round_robin import ANEW, PackStream

Start = Callable[[], tuple[RunState, PackStream, int]]


class PackDicts:
    """Iterate over the packs of a stream as dicts in torchtune's format. A failed conversion consumes no pack.

    Args:
        start: is called for the first pack, so that an iterator that gives nothing changes nothing. It returns where
            the iteration begins, the stream that begins there, and the epoch of the next iteration.
        began: is told when it has begun.
        untrained: looks at each ledger.
    """

    def __init__(
        self, start: Start, began: Callable[[PackDicts], None], *, untrained: UntrainedWarning
    ) -> None:
        self._start = start
        self._began = began
        self._untrained = untrained
        self._empty = True
        self._broken = False  # whether the newest call raised, or is under way
        self._lane_states: dict[int, LaneState] = {}
        self.begin = RunState()
        self.stream: PackStream | None = None
        self.following = 0
        self.process = os.getpid()
        self.given = False  # whether it, or one that it goes on behind, has given a pack
        self.over = False  # whether it has come to its end

    def __iter__(self) -> PackDicts:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._broken:
            raise RuntimeError(ANEW)
        self._broken = True
        if self.stream is None:
            self.begin, self.stream, self.following = self._start()
            self.given, self._lane_states = self.begin.left, dict(self.begin.lane_states)
            self._began(self)
        try:
            while (pack := (event := self.stream.event()).pack) is None:
                self._lane_states[event.lane] = event.state
        except StopIteration:
            if self._empty:
                self.begin.warn_if_left()
            self.over, self._broken = True, False
            raise
        self._untrained.look_at(event.state.ledger)
        given = to_torchtune(pack)
        self._empty = False
        # No signal is looked at between here and the return, see `PackStream`.
        self._lane_states[event.lane], self.given, self._broken = event.state, True, False
        return given

    def position(self) -> RunState:
        """Return the state after the last pack that was given."""
        return replace(self.begin, lane_states=dict(self._lane_states))

    def left(self) -> RunState:
        """Return where an iteration goes on behind this one."""
        return replace(self.position(), left=self.given)
