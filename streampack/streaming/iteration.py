"""One iteration of an `IterablePackedDataset`."""

from __future__ import annotations

from typing import Any

from streampack.packing.batch import to_torchtune
from streampack.streaming.epochs import BEGUN, ENDED, WAITING, EpochCounter
from streampack.streaming.lane_state import LaneEvent
from streampack.streaming.ledger_messages import UntrainedWarning
from streampack.streaming.loaded_state import LoadedState
from streampack.streaming.round_robin import PackStream
from streampack.types import Pack


class PackDicts:
    """Iterate over the packs of a stream as dicts in torchtune's format. A failed conversion consumes no pack."""

    def __init__(
        self,
        stream: PackStream,
        begin: LoadedState,
        *,
        following: int,
        untrained: UntrainedWarning,
        counter: EpochCounter,
    ) -> None:
        self.stream = stream
        self.begin = begin
        self.following = following  # the epoch of the next iteration
        self.untrained = untrained
        self.counter = counter
        self.version = counter.version  # another one when an epoch is set later
        self.over = False

    def __iter__(self) -> PackDicts:
        return self

    def __next__(self) -> dict[str, Any]:
        try:
            return self.stream.next_converted(self._give)
        except StopIteration:
            if not self.over:
                self.counter.end(self.following, version=self.version)
            self.over = True
            self.begin.warn_if_empty()
            if self.begin.phase != ENDED:
                self._reach(ENDED)
            raise

    def _give(self, event: LaneEvent, pack: Pack) -> dict[str, Any]:
        self.untrained.look_at(event.state.ledger)
        given = to_torchtune(pack)
        if self.begin.phase == WAITING:
            self._reach(BEGUN)
        return given

    def _reach(self, phase: int) -> None:
        self.begin.phase = phase
        self.counter.reach(phase)


class RefusedIteration:
    """An iteration whose first ``next()`` raises an error that iter() found."""

    def __init__(self, error: ValueError) -> None:
        self.error = error

    def __iter__(self) -> RefusedIteration:
        return self

    def __next__(self) -> dict[str, Any]:
        raise self.error
