"""Batches of several ranks: how a step is divided into them, and a rank's packs of each, in step with the others."""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from streampack.distributed.rank_sync import Exchange, RankSync
from streampack.lanes.lane_state import LaneEvent
from streampack.packing.assemble import trains
from streampack.packing.groups import attention_cost
from streampack.types import Pack
from streampack.validation import warn_user

log = logging.getLogger(__name__)

ROUND = 8
"""Batches in one exchange between the ranks, and how many are made in advance.

One for each batch was tried. It costs two ranks 0.2 ms of CPU, more than making a pack of rows that are tokens already,
and a thousand ranks 73 to 282 ms (benchmarks/results/scale-*.md).
"""

FULL = 1 << 20
"""Units in which the ranks tell how full packs are. Tokens would not do: padded batches differ in length by rank."""


@dataclass(frozen=True)
class Batching:
    """A step of ``packs_per_step`` packs over all ranks, in batches of at most ``batch_size`` on each.

    The packs of an epoch are numbered by slots, one pack of each lane in turn. A step takes ``packs_per_step`` slots,
    whatever the ranks, and each rank has those of its lanes: the lanes whose number is ``rank`` modulo ``world_size``.

    >>> batching = Batching(batch_size=4, packs_per_step=10, world_size=2, num_lanes=4)
    >>> batching.batches_per_step, batching.packs_per_batch
    (2, 3)
    """

    batch_size: int
    packs_per_step: int
    world_size: int
    num_lanes: int

    @cached_property
    def packs_per_rank(self) -> int:
        """Packs of a step that a rank has, at most."""
        if self.num_lanes % self.world_size == 0:
            return -(-self.packs_per_step // self.world_size)
        ranks = range(min(self.world_size, self.num_lanes))
        begins = range(self.num_lanes)
        return max(self._own_slots(begin, rank) for rank in ranks for begin in begins)

    @cached_property
    def batches_per_step(self) -> int:
        """Batches that every rank contributes to a step."""
        return -(-self.packs_per_rank // self.batch_size)

    @cached_property
    def packs_per_batch(self) -> int:
        """Packs in a batch: a rank's part of a step, in batches as even as can be."""
        return -(-self.packs_per_rank // self.batches_per_step)

    def room(self, number: int, *, slot: int, rank: int) -> int:
        """Return how many packs of a rank fit into the epoch's batch ``number``, counted from its step at ``slot``.

        What of a step's slots is the rank's goes to its batches of the step, the first ones first.
        """
        step, batch_of_step = divmod(number, self.batches_per_step)
        own_slots = self._own_slots(slot + step * self.packs_per_step, rank)
        return max(0, min(self.packs_per_batch, own_slots - batch_of_step * self.packs_per_batch))

    def _own_slots(self, begin: int, rank: int) -> int:
        """Return how many slots of the step that begins at slot ``begin`` are those of a rank's lanes."""

        def lanes_below(lane: int) -> int:
            return max(0, -((rank - lane) // self.world_size))

        def slots_below(slot: int) -> int:
            rounds, lane = divmod(slot, self.num_lanes)
            return rounds * lanes_below(self.num_lanes) + lanes_below(lane)

        return slots_below(begin + self.packs_per_step) - slots_below(begin)

    def steps(self, packs: Sequence[int]) -> int:
        """Return the steps of an epoch in which each rank has this many packs.

        >>> Batching(batch_size=1, packs_per_step=4, world_size=1, num_lanes=2).steps([9])
        3
        >>> Batching(batch_size=1, packs_per_step=2, world_size=2, num_lanes=2).steps([5, 4])
        5
        """
        last_slot = -1
        for rank, count in enumerate(packs):
            if count:
                rounds, lane = divmod(count - 1, len(range(rank, self.num_lanes, self.world_size)))
                last_slot = max(last_slot, rounds * self.num_lanes + rank + lane * self.world_size)
        return last_slot // self.packs_per_step + 1

    def workers(self, num_workers: int) -> int:
        """Return how many of ``num_workers`` processes the rank with the most lanes has a lane for."""
        return min(num_workers, -(-self.num_lanes // self.world_size))

    def warn(self, *, num_workers: int, rank: int) -> None:
        """Warn of workers without lanes, of ranks with fewer lanes than others, and of steps with null packs."""
        ranks, num_lanes = self.world_size, self.num_lanes
        if (workers := self.workers(num_workers)) < num_workers and rank == 0:
            log.warning(
                "num_workers=%d: %d started on each rank, one for each of its lanes, for the run has %d in all; to use "
                "more, set num_lanes in a new run",
                num_workers, workers, num_lanes,
            )  # fmt: skip
        if num_lanes % ranks:
            idle = (
                f"{ranks - num_lanes} of them yield null packs only"
                if num_lanes < ranks
                else "some have fewer"
            )
            warn_user(
                f"{ranks} ranks do not divide {num_lanes} lane{'s' * (num_lanes > 1)} evenly: {idle}. A step trains "
                f"the same packs as on other ranks, but takes {self.batches_per_step} batch(es) of "
                f"{self.packs_per_batch} on each, filled up with null packs; use a number of ranks that divides the "
                "lanes, or in a new run a num_lanes that the ranks divide",
            )
        whole = self.batches_per_step * ranks * self.packs_per_batch
        if whole != self.packs_per_step and num_lanes % ranks == 0 and rank == 0:
            log.warning(
                "packs_per_step=%d cannot be shared out evenly over %d rank(s) in batches of %d: every step holds %d "
                "null packs, which cost time and train nothing; a multiple of %d holds none",
                self.packs_per_step, ranks, self.batch_size, whole - self.packs_per_step, ranks * self.batch_size,
            )  # fmt: skip


@dataclass(slots=True)
class BatchShard:
    """One rank's part of a batch, or of the end of an epoch, where ``exists`` is False."""

    events: list[LaneEvent] = field(default_factory=list)  # packs, and ends of lanes before or among them
    packs: list[Pack] = field(default_factory=list)
    # Whether this rank's epoch reaches the batch; once the ranks have agreed, whether there is one.
    exists: bool = False
    epoch: int = 0
    number: int = 0  # batches of the epoch up to this one, from where the iteration began
    slot: int = 0  # where the next step begins
    costs: Sequence[int] = ()  # attention costs on each rank
    trained: int = 0  # packs that train something, on all ranks
    filled: int = 0  # on all ranks, of packs in units of 1 / `FULL`: all but the padding at their ends
    untrained: Sequence[int] = ()  # whether each rank has read samples that train nothing


class RankPacks:
    """The packs of one rank's streams in the order of a single process, whichever worker was quicker."""

    def __init__(self, streams: Sequence[Generator[LaneEvent]]) -> None:
        self.streams = streams
        self._merged = streams[0] if len(streams) == 1 else heapq.merge(*streams, key=_order_of)
        self._next: LaneEvent | None = None  # looked at, and not taken

    def next_shard(self, room: int, epoch: int) -> BatchShard:
        """Return this rank's part of the next batch: at most ``room`` packs, fewer at the epoch's end.

        With a ``room`` of 0 (the step has no slot left for this rank), it takes ends of lanes only, and finds out
        whether a pack follows.
        """
        shard, packs = BatchShard(), 0
        while not room or packs < room:
            event = self._next or next(self._merged, None)
            self._next = event
            if event is None or event.epoch != epoch:
                break
            if event.pack is not None:
                shard.exists = True
                if not room:
                    break
                shard.packs.append(event.pack)
                packs += 1
            shard.events.append(event)
            self._next = None
        return shard

    def close(self) -> None:
        """End the workers, or drop the lanes."""
        for stream in self.streams:
            stream.close()  # explicitly, because the traceback of an error may keep the stream alive


def agreed_shards(
    packs: RankPacks, batching: Batching, rank_sync: RankSync, *, slot: int, epochs: Iterable[int]
) -> Iterator[BatchShard]:
    """Collective: yield this rank's shards of the batches that all ranks make, and of the end of each epoch.

    A batch exists if any rank has packs for it, or if it completes a step. When an exchange begins follows from the
    number of batches taken, so all ranks begin the same ones. A single rank makes each shard when it is asked for. If a
    rank fails, all raise after the same batch.

    A function, not a method of the object that holds the iterator: such a cycle would keep the workers of an
    abandoned iteration alive.
    """
    error: Exception | None = None  # of this rank
    for epoch in epochs:
        made: deque[BatchShard] = deque()  # and not taken
        untold: list[tuple[int, ...]] = []  # what the other ranks must know of the newest of them
        exchanges: deque[Exchange] = deque()  # under way
        told: deque[tuple[Sequence[int], ...]] = deque()  # what each rank has told of the oldest
        exists, number = True, 0
        while exists:
            # The first rounds are short, so that the first batch comes at once.
            in_advance = 0 if rank_sync.alone else min(number + 1, ROUND)
            while len(made) <= in_advance:
                shard = None
                if error is None:
                    room = batching.room(number + len(made), slot=slot, rank=rank_sync.data_rank)
                    try:
                        shard = packs.next_shard(room, epoch)
                    except Exception as raised:
                        if rank_sync.alone:
                            raise
                        error = raised  # raised on all ranks, when they have taken the batches before it
                made.append(shard := shard or BatchShard())
                costs = () if rank_sync.alone else map(_cost_of, shard.packs)
                filled = sum([FULL * sum(pack.seq_lens) // pack.tokens.size for pack in shard.packs])
                trained = sum(map(trains, shard.packs))
                untrained = any(event.example != "" for event in shard.events)
                untold.append((shard.exists, error is not None, sum(costs), trained, filled, untrained))
                if len(untold) >= in_advance:
                    exchanges.append(rank_sync.exchange(untold))
                    untold = []
            if not told:
                told += zip(*exchanges.popleft()(), strict=True)
            shard = made.popleft()
            exist, failed, shard.costs, trains_of, filled_of, shard.untrained = zip(
                *told.popleft(), strict=True
            )
            exists = shard.exists = any(exist) or number % batching.batches_per_step > 0
            shard.epoch, shard.trained, shard.filled = epoch, sum(trains_of), sum(filled_of)
            if any(failed):
                try:
                    rank_sync.raise_on_all(error, doing="making packs")
                finally:
                    del error  # its traceback refers to this frame
            number += exists
            steps = number // batching.batches_per_step
            shard.number, shard.slot = number, slot + steps * batching.packs_per_step
            yield shard
        slot = 0


def _order_of(event: LaneEvent) -> tuple[int, int, int]:
    """Return the place of an event in the order of a single process; an end of a lane comes once it is reached."""
    return (event.epoch, -1 if event.pack is None else event.pack.number, event.lane)


def _cost_of(pack: Pack) -> int:
    return attention_cost(pack.seq_lens, None if pack.groups is None else pack.groups.parents)
