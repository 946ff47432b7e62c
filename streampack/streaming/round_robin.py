"""Round robin over the lanes of one consumer."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from operator import attrgetter

from streampack.accounting import Ledger, SourceStats
from streampack.storage.read_ahead import SOON
from streampack.streaming.lane import Lane
from streampack.streaming.lane_state import LaneEvent, LaneState
from streampack.streaming.ledger_messages import nothing_to_pack
from streampack.types import Pack

ANEW = "an exception has cut this iteration short; iterate anew, which goes on behind what it gave"


class PackStream:
    """Make the packs of some lanes, one of each lane in turn, epoch after epoch.

    The next lane is the one with the fewest packs in this epoch, of equals the one with the lowest number. So the order
    follows from the lanes, and a state needs nothing besides theirs.

    After an exception, such as a `KeyboardInterrupt`, a lane may be half changed, so the stream gives nothing more:
    what it has given is in `lane_states`, and another stream goes on from there.

    Args:
        lanes: the lanes, which are restored here.
        last_epoch: the epoch after which the stream ends; None if it never does.
        alone: whether these are all the lanes of the run; then a run without a pack is an error.
    """

    def __init__(self, lanes: Sequence[Lane], *, last_epoch: int | None, alone: bool = False) -> None:
        self.lanes = lanes
        self.fetches = any(not lane.config.source.local for lane in lanes[:1])
        self._place = {lane.lane: i for i, lane in enumerate(lanes)}
        resumed = [(lane, lane.resumes_from) for lane in lanes if lane.resumes_from is not None]
        # What lanes read next is fetched beside the rows that waited in all of them.
        for lane, _ in resumed[:SOON]:
            lane.prepare()
        _restore([lane for lane, _ in resumed])
        # Lanes that read on behind an earlier run may have nothing left of this epoch.
        self.alone = alone and not any(state.anew for _, state in resumed)
        self.last_epoch = last_epoch
        self._lane_states = {lane.lane: state for lane, state in resumed}
        self._broken = False  # whether the newest call raised, or is under way
        # The lane with the smallest key is next. Lanes that are done come last in their epoch: if one of them is next,
        # the epoch is over.
        key = ("done", "packs", "lane")
        self._order_key = attrgetter(*key) if last_epoch is None else attrgetter("epoch", *key)
        self._heap = self._build_heap()

    def __iter__(self) -> PackStream:
        return self

    def __next__(self) -> Pack:
        """Return the next pack.

        Raises:
            RuntimeError: after an exception.
        """
        if self._broken:
            raise RuntimeError(ANEW)
        self._broken = True
        while (pack := (event := self.event()).pack) is None:
            self._lane_states[event.lane] = event.state
        # CPython checks for signals at calls and loops. There are none between here and the return, so that no
        # KeyboardInterrupt can come between recording a pack and returning it (tests/loader/test_interrupts.py).
        self._lane_states[event.lane], self._broken = event.state, False
        return pack

    def event(self) -> LaneEvent:
        """Return the next pack, or the end of a lane's epoch; its state counts rows dropped since the last pack.

        It is not recorded in `lane_states`. After an exception, make another stream.
        """
        while True:
            lane = self._heap[0][1] if self._heap else None
            if lane is None or lane.done:
                if self.alone and not any(each.ledger.packs for each in self.lanes):
                    raise nothing_to_pack(Ledger.total(each.ledger for each in self.lanes))
                if lane is None or self.last_epoch is None or lane.epoch >= self.last_epoch:
                    self._broken = False
                    raise StopIteration
                epoch = lane.epoch
                for ended in self.lanes:
                    if ended.epoch == epoch:
                        ended.start_epoch(epoch + 1)
                self._heap = self._build_heap()
                continue
            if self.fetches:
                ahead = min(SOON, len(self.lanes) - 1)
                self.lanes[(self._place[lane.lane] + ahead) % len(self.lanes)].prepare()
            event = lane.next_event()
            heapq.heapreplace(self._heap, (self._order_key(lane), lane))
            return event

    def _build_heap(self) -> list[tuple[tuple[int, ...], Lane]]:
        # Keys differ, so lanes are not compared.
        heap: list[tuple[tuple[int, ...], Lane]] = sorted(
            (self._order_key(lane), lane) for lane in self.lanes
        )
        for _, lane in heap[:SOON]:
            lane.prepare()
        return heap

    def lane_states(self) -> dict[int, LaneState]:
        """Return the state of every lane that has yielded a pack or ended an epoch; a fresh dict."""
        return dict(self._lane_states)


def _restore(lanes: Sequence[Lane]) -> None:
    """Restore lanes from their states, with the rows that waited in all of them: those of one file are read at once.

    Raises:
        ValueError: if one cannot be read again.
    """
    ids = list(dict.fromkeys(row_id for lane in lanes for row_id in lane.waiting_rows()))
    try:
        config = lanes[0].config if ids else None
        rows = dict(zip(ids, config.source.fetch_many(ids, use=config.use), strict=True)) if config else {}
    except (ValueError, LookupError, StopIteration) as error:
        why = error if isinstance(error, ValueError) else "it is not there; the data changed"
        raise ValueError(
            f"a row that waited to be packed when the state was made cannot be read again: {why}"
        ) from error
    for lane in lanes:
        lane.restore(rows)


def total_ledger(lane_states: Mapping[int, LaneState]) -> Ledger:
    """Add up the ledgers of lanes."""
    return Ledger.total(state.ledger for state in lane_states.values())


def total_source_stats(lane_states: Mapping[int, LaneState]) -> list[SourceStats]:
    """Add up what each source of a mixture gave in all lanes; ``epochs`` too."""
    lanes = [state.source_stats for state in lane_states.values()]
    return [SourceStats.total(source_stats) for source_stats in zip(*lanes, strict=True)]
