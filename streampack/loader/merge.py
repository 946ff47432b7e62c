"""One rank's share of every batch: the packs of its worker processes, in the order in which one process makes them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from streampack.loader.workers import Worker
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.round_robin import Event, PackStream
from streampack.types import LaneEnd, Pack, ReceiptNumbers

_Turn = tuple[int, int, int]  # epoch, number in the lane, lane: each event has its own


@dataclass
class Share:
    """What one rank puts into one batch, on its way from the workers to the trainer."""

    packs: list[Pack] = field(default_factory=list)
    ends: list[LaneEnd] = field(default_factory=list)  # of lanes that ran dry before or among the packs
    more: bool = False  # no room for a pack here, but there is one for a later batch of this epoch
    error: Exception | None = None

    @property
    def counts(self) -> bool:
        """Whether this rank's epoch reaches this batch."""
        return bool(self.packs) or self.more


class Shares:
    """Merges the events of this rank's worker processes by (epoch, number in the lane, lane).

    Args:
        dataset: what workers iterate.
        receipts: of all lanes, where to begin.
        epoch: where to begin, for lanes without a receipt too; ``None`` if epochs roll on.
        rank: of ``world_size``, whose lanes these are.
        workers: processes; 0 does their work in this one.
        prefetch: packs that each makes ahead.
        max_restarts: deaths of each to mend.
    """

    def __init__(
        self,
        dataset: IterablePackedDataset,
        *,
        receipts: Mapping[int, ReceiptNumbers],
        epoch: int | None,
        rank: int,
        world_size: int,
        workers: int,
        prefetch: int,
        max_restarts: int,
    ) -> None:
        consumers = world_size * max(1, workers)
        self.streams: list[Worker | _Here] = []
        for consumer in range(rank, consumers, world_size):
            own = {lane: receipt for lane, receipt in receipts.items() if lane % consumers == consumer}
            if workers:
                self.streams.append(
                    Worker(
                        dataset,
                        consumer=consumer,
                        consumers=consumers,
                        receipts=own,
                        first_epoch=epoch,
                        prefetch=prefetch,
                        max_restarts=max_restarts,
                    )
                )
            else:
                begin = partial(dataset.stream, consumer, consumers, receipts=own, first_epoch=epoch)
                self.streams.append(_Here(begin))
        self.epoch = epoch or 0
        self.unasked = [*reversed(range(len(self.streams)))]  # whose next event is not known
        self.heads: list[tuple[_Turn, int, Event]] = []  # the others' next events, a heap
        self.share = Share()  # in the making; an error in the middle leaves it as it is

    def make(self, room: int) -> Share:
        """Our share of one more batch of the epoch: at most ``room`` packs, fewer when it has no more.

        Raises:
            Exception: whatever went wrong where packs are made. Asked again, it goes on from there after an error
                that a stream or a worker raised; after any other, such as an interrupt, make new ones.
        """
        share = self.share
        while not room or len(share.packs) < room:
            event = self._first()
            if event is None:
                break
            if isinstance(event, LaneEnd):
                share.ends.append(event)
            elif room:
                share.packs.append(event)
            else:
                share.more = True
                break
            self.unasked.append(heapq.heappop(self.heads)[1])
        self.share = Share()
        return share

    def _first(self) -> Event | None:
        """The next event of this epoch, in the order of one process; None if no stream has any."""
        while self.unasked:
            i = self.unasked[-1]
            if (event := next(self.streams[i], None)) is not None:
                heapq.heappush(self.heads, (_turn(event), i, event))
            self.unasked.pop()  # not before: an error asks nothing
        if self.heads and (first := self.heads[0][2]).epoch == self.epoch:
            return first
        return None

    def close(self) -> None:
        """End the workers."""
        for stream in self.streams:
            stream.close()  # whatever holds them: the traceback of an error does


class _Here:
    """The events of this process, as `Worker` gives those of another: it begins, and fails, when it is asked."""

    def __init__(self, begin: Callable[[], PackStream]) -> None:
        self.begin = begin
        self.stream: PackStream | None = None

    def __iter__(self) -> _Here:
        return self

    def __next__(self) -> Event:
        if self.stream is None:
            self.stream = self.begin()
        return self.stream.next_event()

    def close(self) -> None:
        """Let go of the lanes and their files."""
        self.stream = None


def _turn(event: Event) -> _Turn:
    # A lane's end comes after all its packs, and may come as soon as it is known.
    return (event.epoch, event.number if isinstance(event, Pack) else -1, event.lane)
