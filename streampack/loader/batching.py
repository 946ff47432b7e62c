"""`Batching`: how the packs of an optimizer step are divided into batches of several ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property

from streampack.validation import warn_user

log = logging.getLogger(__name__)


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

    def warn(self, *, num_workers: int, rank: int) -> None:
        """Warn of workers without lanes, of ranks with fewer lanes than others, and of steps with null packs."""
        ranks, num_lanes = self.world_size, self.num_lanes
        workers = -(-num_lanes // ranks)
        if workers < num_workers and rank == 0:
            log.warning(
                "num_workers=%d: %d of them has work, for there %s; a new run may set num_lanes",
                num_workers, workers, "is 1 lane" if num_lanes == 1 else f"are {num_lanes} lanes",
            )  # fmt: skip
        if num_lanes % ranks:
            idle = (
                f"{ranks - num_lanes} of them hand out null packs only"
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
        if whole != self.packs_per_step and rank == 0:
            log.warning(
                "packs_per_step=%d cannot be shared out evenly over %d rank(s) in batches of %d: every step holds %d "
                "null packs, which cost time and train nothing; a multiple of %d holds none",
                self.packs_per_step, ranks, self.batch_size, whole - self.packs_per_step, ranks * self.batch_size,
            )  # fmt: skip
