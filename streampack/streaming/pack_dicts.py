"""`PackDicts`: iterates over the packs of a dataset without a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from streampack.lanes.lane_state import LaneEvent
from streampack.packing.batch import to_torchtune
from streampack.streaming.position import CUT_SHORT, Progress
from streampack.streaming.run_state import Phase


class PackDicts:
    """Iterator over the packs of a dataset as dicts in torchtune's format. A failed conversion consumes no pack.

    Args:
        start: called when the first pack is requested, so that creating an iterator changes nothing. It returns the
            progress that `Position.start` makes, and the lane events from there on.
        look_at: called with the event of each pack.
    """

    def __init__(
        self,
        start: Callable[[], tuple[Progress, Iterator[LaneEvent]]],
        *,
        look_at: Callable[[LaneEvent], None],
    ) -> None:
        self._start, self._look_at = start, look_at
        self._broken = False  # True during a call, and after a call that raised
        self._events: Iterator[LaneEvent] | None = None

    def __iter__(self) -> PackDicts:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._broken:
            raise RuntimeError(CUT_SHORT)
        self._broken = True
        if self._events is None:
            self._progress, self._events = self._start()
            begin = self._progress.begin
            self._lane_states = dict(begin.lane_states)
            self._read = replace(begin, lane_states=self._lane_states, phase=Phase.READ)
        progress = self._progress
        for event in self._events:
            if event.pack is not None:
                self._look_at(event)
                made = to_torchtune(event.pack)
                # CPython checks for signals at calls and loops. There are none between here and the return, so no
                # KeyboardInterrupt can come between recording a pack and returning it (tests/loader/test_interrupts.py)
                self._lane_states[event.lane], self._broken = event.state, False
                progress.state = self._read
                return made
            self._lane_states[event.lane] = event.state
        if progress.state is not self._read:
            progress.begin.warn_if_left()
        progress.state = replace(self._read, phase=Phase.ENDED)
        self._broken = False
        raise StopIteration
