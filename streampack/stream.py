"""The packs of several lanes, as one consumer takes them."""

from __future__ import annotations

from collections.abc import Mapping

from streampack.lane import Lane
from streampack.metrics import Ledger, Tally
from streampack.receipt import Receipt
from streampack.types import LaneEnd, Pack

Event = Pack | LaneEnd


class PackStream:
    """The packs of some lanes, one of each lane in turn, epoch after epoch.

    Whose turn it is follows from the lanes alone (the fewest packs in this epoch, then the lowest number),
    so it needs no state of its own.
    """

    def __init__(
        self, lanes: list[Lane], receipts: dict[int, bytes], *, last_epoch: int | None, alone: bool = False
    ) -> None:
        self.lanes = lanes
        self.alone = alone  # these are all the lanes there are
        self.last_epoch = last_epoch
        self._receipts = receipts

    def __iter__(self) -> PackStream:
        return self

    def __next__(self) -> Pack:
        while not isinstance(event := self.next_event(), Pack):
            pass
        return event

    def next_event(self) -> Event:
        """The next pack, or the end of a lane's epoch, whose receipt books what was dropped after its last pack."""
        while True:
            epoch = min((lane.epoch for lane in self.lanes), default=0)
            endless = self.last_epoch is None
            ready = [lane for lane in self.lanes if not lane.done and (endless or lane.epoch == epoch)]
            if not ready:
                if self.alone and not any(lane.ledger.samples for lane in self.lanes):
                    raise ValueError("the source has no rows at all; check what it reads")
                if self.last_epoch is None or epoch >= self.last_epoch:
                    raise StopIteration
                for lane in self.lanes:
                    if lane.epoch == epoch:
                        lane.start_epoch(epoch + 1)
                continue
            lane = min(ready, key=lambda lane: (lane.packs, lane.lane))
            event = lane.next_pack() or LaneEnd(lane.lane, lane.epoch, lane.receipt())
            self._receipts[lane.lane] = event.receipt
            return event

    def receipts(self) -> dict[int, bytes]:
        """Of every lane that has yielded a pack or ended an epoch; a fresh dict of immutable bytes."""
        return dict(self._receipts)


def ledger_of(receipts: Mapping[int, bytes]) -> Ledger:
    """The ledgers of all lanes in a state, added up."""
    return Ledger.total(Receipt.from_bytes(receipt).ledger for receipt in receipts.values())


def tallies_of(receipts: Mapping[int, bytes]) -> list[Tally]:
    """What each source of a mixture gave in all lanes of a state; ``epochs`` are those of all lanes, added up."""
    lanes = [Receipt.from_bytes(receipt).tallies for receipt in receipts.values()]
    return [Tally.total(tallies) for tallies in zip(*lanes, strict=True)]
