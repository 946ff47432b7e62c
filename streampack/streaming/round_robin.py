"""The packs of several lanes, as one consumer takes them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import TypeVar

from streampack.accounting import Ledger, SourceStats
from streampack.streaming.empty_runs import nothing_to_pack
from streampack.streaming.lane import Lane
from streampack.streaming.lane_state import Receipt
from streampack.types import LaneEnd, Pack, ReceiptNumbers

Event = Pack | LaneEnd
OpenLane = Callable[[int, ReceiptNumbers | None], Lane]
Form = TypeVar("Form")


class PackStream:
    """The packs of some lanes, one of each lane in turn, epoch after epoch.

    Whose turn it is follows from the lanes alone (the fewest packs in this epoch, then the lowest number),
    so it needs no state of its own. Any exception, a `KeyboardInterrupt` among them, may strike a lane between two
    statements, so the next call opens that lane again from its last receipt.

    Args:
        lanes: the numbers of the lanes.
        open_lane: makes a lane of its number and its receipt, ``None`` at the beginning.
        receipts: of the lanes that do not begin.
        last_epoch: the epoch after which the stream ends; ``None`` if it never does.
        alone: these are all the lanes there are.
    """

    def __init__(
        self,
        lanes: Iterable[int],
        open_lane: OpenLane,
        *,
        receipts: Mapping[int, ReceiptNumbers],
        last_epoch: int | None,
        alone: bool = False,
    ) -> None:
        self.open_lane = open_lane
        self.lanes = [open_lane(lane, receipts.get(lane)) for lane in lanes]
        self.alone = alone
        self.last_epoch = last_epoch
        self._receipts = {lane.lane: receipts[lane.lane] for lane in self.lanes if lane.lane in receipts}
        self._midway: int | None = None  # the lane that was asked and has not answered yet
        # The smallest is next: within an epoch, the lanes that are done come last; then the epoch is over.
        turn = ("done", "packs", "lane")
        self._turn = attrgetter(*turn) if last_epoch is None else attrgetter("epoch", *turn)
        self.others: Callable[[], Iterable[Lane]] | None = (
            None  # makes those of the other consumers, to look at
        )
        self._turns = self._in_turn()  # a heap

    def __iter__(self) -> PackStream:
        return self

    def __next__(self) -> Pack:
        return self.next_as(_as_it_is)

    def next_as(self, form: Callable[[Pack], Form]) -> Form:
        """``form`` of the next pack. The pack counts as handed out when ``form`` has returned, not before."""
        while True:
            event = self._event()
            if isinstance(event, Pack):
                formed = form(event)
                self._receipts[event.lane], self._midway = event.receipt, None
                return formed
            self._receipts[event.lane], self._midway = event.receipt, None

    def next_event(self) -> Event:
        """The next pack, or the end of a lane's epoch, whose receipt books what was dropped after its last pack."""
        event = self._event()
        # Two stores and the return: Python raises an interrupt at calls and loops only.
        self._receipts[event.lane], self._midway = event.receipt, None
        return event

    def _event(self) -> Event:
        """The next event. The lane that gave it is opened again unless the caller files the receipt."""
        if self._midway is not None:
            self._open_again(self._midway)
        while True:
            if not self._turns:  # this consumer has no lane
                raise StopIteration
            lane = self._turns[0][1]
            if lane.done:
                if not any(lane.ledger.packs for lane in self.lanes):
                    self._require_packs()
                epoch = lane.epoch
                if self.last_epoch is None or epoch >= self.last_epoch:
                    raise StopIteration
                for ended in self.lanes:
                    if ended.epoch == epoch:
                        self._midway = ended.lane
                        ended.start_epoch(epoch + 1)
                self._turns = self._in_turn()
                self._midway = None
                continue
            self._midway = lane.lane
            event: Event | None = lane.next_pack()
            if event is None:
                event = LaneEnd(lane.lane, 0 if self.last_epoch is None else lane.epoch, lane.receipt())
            heapq.heapreplace(self._turns, (self._turn(lane), lane))
            return event

    def _require_packs(self) -> None:
        """Raise if the other lanes have no pack either, as far as this stream may know of them."""
        ledgers = [lane.ledger for lane in self.lanes]
        for other in [] if self.others is None else self.others():
            if other.next_pack() is not None:
                self.others = None
                return
            ledgers.append(other.ledger)
        if self.alone or self.others is not None:
            raise nothing_to_pack(Ledger.total(ledgers))

    def _open_again(self, number: int) -> None:
        i = next(i for i, lane in enumerate(self.lanes) if lane.lane == number)
        self.lanes[i] = self.open_lane(number, self._receipts.get(number))
        self._turns = self._in_turn()
        self._midway = None

    def _in_turn(self) -> list[tuple[tuple[int, ...], Lane]]:
        return sorted((self._turn(lane), lane) for lane in self.lanes)  # no two lanes have the same turn

    def receipts(self) -> dict[int, ReceiptNumbers]:
        """Of every lane that has yielded a pack or ended an epoch; a fresh dict of what nothing changes."""
        return dict(self._receipts)


def ledger_of(receipts: Mapping[int, ReceiptNumbers]) -> Ledger:
    """The ledgers of all lanes, added up."""
    return Ledger.total(Receipt.from_numbers(receipt).ledger for receipt in receipts.values())


def tallies_of(receipts: Mapping[int, ReceiptNumbers]) -> list[SourceStats]:
    """What each source of a mixture gave in all lanes; ``epochs`` are those of all lanes, added up."""
    lanes = [Receipt.from_numbers(receipt).source_stats for receipt in receipts.values()]
    return [SourceStats.total(source_stats) for source_stats in zip(*lanes, strict=True)]


def _as_it_is(pack: Pack) -> Pack:
    return pack
