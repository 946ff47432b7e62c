"""The packs of several lanes, as one consumer takes them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from operator import attrgetter

from streampack.lane import Lane
from streampack.metrics import Ledger, Tally
from streampack.receipt import Receipt
from streampack.types import LaneEnd, Pack, ReceiptNumbers

Event = Pack | LaneEnd


class PackStream:
    """The packs of some lanes, one of each lane in turn, epoch after epoch.

    Whose turn it is follows from the lanes alone (the fewest packs in this epoch, then the lowest number),
    so it needs no state of its own.
    """

    def __init__(
        self,
        lanes: list[Lane],
        receipts: dict[int, ReceiptNumbers],
        *,
        last_epoch: int | None,
        alone: bool = False,
    ) -> None:
        self.lanes = lanes
        self.alone = alone  # these are all the lanes there are
        self.last_epoch = last_epoch
        self._receipts = receipts
        # The smallest is next: within an epoch, the lanes that are done come last; then the epoch is over.
        turn = ("done", "packs", "lane")
        self._turn = attrgetter(*turn) if last_epoch is None else attrgetter("epoch", *turn)
        self._turns = self._in_turn()  # a heap

    def __iter__(self) -> PackStream:
        return self

    def __next__(self) -> Pack:
        while not isinstance(event := self.next_event(), Pack):
            pass
        return event

    def next_event(self) -> Event:
        """The next pack, or the end of a lane's epoch, whose receipt books what was dropped after its last pack."""
        while True:
            if not self._turns:  # this consumer has no lane
                raise StopIteration
            lane = self._turns[0][1]
            if lane.done:
                if self.alone and not any(lane.ledger.samples for lane in self.lanes):
                    raise ValueError("the source has no rows at all; check what it reads")
                if self.alone and self.last_epoch is None:
                    raise nothing_to_pack()
                epoch = lane.epoch
                if self.last_epoch is None or epoch >= self.last_epoch:
                    raise StopIteration
                try:
                    for ended in self.lanes:
                        if ended.epoch == epoch:
                            ended.start_epoch(epoch + 1)
                finally:
                    self._turns = self._in_turn()
                continue
            event: Event | None = lane.next_pack()
            if event is None:
                event = LaneEnd(lane.lane, 0 if self.last_epoch is None else lane.epoch, lane.receipt())
            heapq.heapreplace(self._turns, (self._turn(lane), lane))
            self._receipts[lane.lane] = event.receipt
            return event

    def _in_turn(self) -> list[tuple[tuple[int, ...], Lane]]:
        return sorted((self._turn(lane), lane) for lane in self.lanes)  # no two lanes have the same turn

    def receipts(self) -> dict[int, ReceiptNumbers]:
        """Of every lane that has yielded a pack or ended an epoch; a fresh dict of what nothing changes."""
        return dict(self._receipts)


def nothing_to_pack() -> ValueError:
    """Make the error for a stream without an end that has no pack."""
    return ValueError(
        "no lane has a row that makes a pack, and a stream without an end (epochs=None) would wait for one for ever; "
        "look at what is dropped: ledger() counts it by reason"
    )


def ledger_of(receipts: Mapping[int, ReceiptNumbers]) -> Ledger:
    """The ledgers of all lanes, added up."""
    return Ledger.total(Receipt.from_numbers(receipt).ledger for receipt in receipts.values())


def tallies_of(receipts: Mapping[int, ReceiptNumbers]) -> list[Tally]:
    """What each source of a mixture gave in all lanes; ``epochs`` are those of all lanes, added up."""
    lanes = [Receipt.from_numbers(receipt).tallies for receipt in receipts.values()]
    return [Tally.total(tallies) for tallies in zip(*lanes, strict=True)]
