"""`RankBatches`: one rank's part of every batch, the packs of its worker processes in the order of a single process."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from streampack.loader.workers import Worker
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.lane_state import LaneEvent, LaneState
from streampack.streaming.round_robin import PackStream
from streampack.types import Pack

_Turn = tuple[int, int, int]  # epoch, number in the lane, lane: unique for each event


@dataclass
class RankBatch:
    """One rank's part of one batch, on its way from the workers to the trainer."""

    events: list[LaneEvent] = field(default_factory=list)  # packs, and ends of lanes before or among them
    more: bool = False  # no room for a pack here, but there is one for a later batch of this epoch
    failed: bool = False

    @property
    def packs(self) -> list[Pack]:
        """The packs of the batch."""
        return [event.pack for event in self.events if event.pack is not None]

    @property
    def exists(self) -> bool:
        """Whether this rank's epoch reaches this batch."""
        return bool(self.packs) or self.more


class RankBatches:
    """Merge the events of this rank's worker processes by (epoch, number in the lane, lane).

    Args:
        dataset: what workers iterate.
        lane_states: of all lanes, where to begin.
        epoch: where to begin, for lanes without a state too; ``None`` if epochs roll on.
        rank: of ``world_size``, whose lanes these are.
        workers: processes; 0 does their work in this one.
        prefetch: packs that each makes ahead.
        max_restarts: deaths of each to survive.
    """

    def __init__(
        self,
        dataset: IterablePackedDataset,
        *,
        lane_states: Mapping[int, LaneState],
        epoch: int | None,
        rank: int,
        world_size: int,
        workers: int,
        prefetch: int,
        max_restarts: int,
    ) -> None:
        consumers = world_size * max(1, workers)
        self.streams: list[Worker | _InProcess] = []
        for consumer in range(rank, consumers, world_size):
            own = {lane: state for lane, state in lane_states.items() if lane % consumers == consumer}
            if workers:
                self.streams.append(
                    Worker(
                        dataset,
                        consumer=consumer,
                        consumers=consumers,
                        lane_states=own,
                        first_epoch=epoch,
                        prefetch=prefetch,
                        max_restarts=max_restarts,
                    )
                )
            else:
                begin = partial(dataset.stream, consumer, consumers, lane_states=own, first_epoch=epoch)
                self.streams.append(_InProcess(begin))
        self.epoch = epoch or 0
        self.unasked = [*reversed(range(len(self.streams)))]  # streams whose next event is not known
        self.heads: list[tuple[_Turn, int, LaneEvent]] = []  # the others' next events, a heap
        self.open = RankBatch()  # in the making; an error leaves it as it is

    def make(self, room: int) -> RankBatch:
        """Make this rank's part of one more batch: at most ``room`` packs, fewer at the epoch's end.

        Raises:
            Exception: whatever failed where packs are made. After an error of a stream or a worker the next call goes
                on from there; after any other, such as an interrupt, start anew.
        """
        rank_batch = self.open
        left = room - len(rank_batch.packs)
        while not room or left:
            event = self._first()
            if event is None:
                break
            if event.pack is not None and not room:
                rank_batch.more = True
                break
            rank_batch.events.append(event)
            left -= event.pack is not None
            self.unasked.append(heapq.heappop(self.heads)[1])
        self.open = RankBatch()
        return rank_batch

    def _first(self) -> LaneEvent | None:
        """Return the next event of this epoch, in the order of a single process; None if no stream has any."""
        while self.unasked:
            i = self.unasked[-1]
            if (event := next(self.streams[i], None)) is not None:
                heapq.heappush(self.heads, (_turn(event), i, event))
            self.unasked.pop()  # not before: after an error the stream is asked again
        if self.heads and (first := self.heads[0][2]).epoch == self.epoch:
            return first
        return None

    def close(self) -> None:
        """End the workers."""
        for stream in self.streams:
            stream.close()  # even if the traceback of an error still holds it


class _InProcess:
    """The events of this process in place of a `Worker`; it begins, and fails, at the first event."""

    def __init__(self, begin: Callable[[], PackStream]) -> None:
        self.begin = begin
        self.stream: PackStream | None = None

    def __iter__(self) -> _InProcess:
        return self

    def __next__(self) -> LaneEvent:
        if self.stream is None:
            self.stream = self.begin()
        return self.stream.next_event()

    def close(self) -> None:
        """Let go of the lanes and their files."""
        self.stream = None


def _turn(event: LaneEvent) -> _Turn:
    # A lane's end comes after all its packs, and may come as soon as it is known.
    return (event.epoch, -1 if event.pack is None else event.pack.number, event.lane)
