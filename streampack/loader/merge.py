"""`RankBatches`: one rank's part of every batch, the packs of its worker processes in the order of a single process."""

from __future__ import annotations

import heapq
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from streampack.loader.workers import Part, Worker
from streampack.packing.batch import trains
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.lane_state import LaneEvent
from streampack.streaming.loaded_state import RunState
from streampack.types import Pack

Order = tuple[int, int, int]
"""(epoch, number of the pack in its lane, lane) of an event; the end of a lane has the number -1.

No two events have the same. The events of one stream arrive in order, so the end of a lane is reached after all its
packs; it is returned as soon as it is reached.
"""


@dataclass
class RankBatch:
    """One rank's part of one batch, on its way from the workers to the trainer."""

    events: list[LaneEvent] = field(default_factory=list)
    """Packs, and ends of lanes before or among them."""
    more: bool = False
    """This batch has no room for a pack of this rank, and the rank has packs for later batches of the epoch."""
    exists_on_a_rank: bool = False
    """Whether any rank's epoch reaches this batch, once they have agreed on it."""
    costs: Sequence[int] = ()
    """Attention costs of the batch on each rank; empty for a single rank."""
    trained: int = 0
    """How many packs of the batch train something, on all ranks, once they have agreed on it."""
    tokens: int = 0
    """All tokens of the batch but the padding at packs' ends."""

    @property
    def packs(self) -> list[Pack]:
        """The packs of the batch."""
        return [event.pack for event in self.events if event.pack is not None]

    def count(self) -> tuple[int, int]:
        """Count the packs of this part that train something, and its tokens."""
        packs = self.packs
        return sum(map(trains, packs)), sum(sum(pack.seq_lens) for pack in packs)

    @property
    def exists(self) -> bool:
        """Whether this rank's epoch reaches this batch."""
        return bool(self.packs) or self.more


class RankBatches:
    """Merge the packs of this rank's worker processes into the order of a single process.

    That order is (epoch, number of the pack in its lane, lane). It does not depend on which worker was quicker.

    Args:
        dataset: what the workers iterate.
        begin: where the iteration begins, with the states of this rank's lanes; a lane without a state begins.
        epoch: the epoch to go on with, also for lanes without a state; None if epochs follow one another without an
            end (``epochs=None``).
        rank: this rank reads the lanes whose number is ``rank`` modulo ``world_size``.
        world_size: see ``rank``.
        workers: the number of processes; with 0, this process does their work.
    """

    def __init__(
        self,
        dataset: IterablePackedDataset,
        *,
        begin: RunState,
        epoch: int | None,
        rank: int,
        world_size: int,
        workers: int,
    ) -> None:
        consumers = world_size * max(1, workers)
        self.streams: list[Worker | Generator[LaneEvent]] = []
        for consumer in range(rank, consumers, world_size):
            own = {lane: state for lane, state in begin.lane_states.items() if lane % consumers == consumer}
            part = Part(consumer, consumers, own, begin.epoch, epoch)
            self.streams.append(Worker(dataset, part) if workers else _in_process(dataset, part))
        self.epoch = epoch or 0
        # The next event of each stream is in `heads`, a heap, or the stream's number is in `unasked`.
        self.heads: list[tuple[Order, int, LaneEvent]] = []
        self.unasked = [*reversed(range(len(self.streams)))]

    def next_batch(self, room: int) -> RankBatch:
        """Return this rank's part of the next batch: at most ``room`` packs, fewer at the epoch's end.

        With a ``room`` of 0 (the step has no slot left for this rank), it takes ends of lanes only, and finds out
        whether a pack follows: if so, the rank's epoch goes on (`RankBatch.more`).

        Raises:
            Exception: whatever failed where packs are made. Make a new `RankBatches` after it.
        """
        rank_batch, left = RankBatch(), room
        while not room or left:
            event = self._first()
            if event is None:
                break
            if event.pack is not None and not room:
                rank_batch.more = True
                break
            rank_batch.events.append(event)
            if event.pack is not None:
                left -= 1
            self.unasked.append(heapq.heappop(self.heads)[1])
        return rank_batch

    def _first(self) -> LaneEvent | None:
        """Return the next event of this epoch, in the order of a single process; None if no stream has any."""
        while self.unasked:
            i = self.unasked.pop()
            if (event := next(self.streams[i], None)) is not None:
                heapq.heappush(self.heads, (_order_of(event), i, event))
        if self.heads and (first := self.heads[0][2]).epoch == self.epoch:
            return first
        return None

    def close(self) -> None:
        """End the workers, or drop the lanes."""
        for stream in self.streams:
            stream.close()  # explicitly, because the traceback of an error may keep the stream alive


def _in_process(dataset: IterablePackedDataset, part: Part) -> Generator[LaneEvent]:
    """Make events in this process. The stream is opened for the first one; closing drops its lanes and their files."""
    stream = part.stream(dataset)
    with suppress(StopIteration):
        while True:
            yield stream.event()


def _order_of(event: LaneEvent) -> Order:
    return (event.epoch, -1 if event.pack is None else event.pack.number, event.lane)
