"""`Batching`: how the packs of an optimizer step are divided into batches of several ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from streampack.validation import warn_user

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Batching:
    """A step of ``packs_per_step`` packs over all ranks, in batches of at most ``batch_size`` on each.

    >>> batching = Batching(batch_size=4, packs_per_step=10, world_size=2)
    >>> batching.batches_per_step, batching.packs_per_batch
    (2, 3)
    """

    batch_size: int
    packs_per_step: int
    world_size: int

    @property
    def packs_per_rank(self) -> int:
        """Packs of a step that a rank has, at most."""
        return -(-self.packs_per_step // self.world_size)

    @property
    def batches_per_step(self) -> int:
        """Batches that every rank contributes to a step."""
        return -(-self.packs_per_rank // self.batch_size)

    @property
    def packs_per_batch(self) -> int:
        """Packs in a batch: a rank's part of a step, in batches as even as can be."""
        return -(-self.packs_per_rank // self.batches_per_step)

    def room(self, number: int, *, slot: int, rank: int) -> int:
        """Return how many packs of a rank fit into the epoch's batch ``number``, counted from its step at ``slot``.

        The packs of an epoch are numbered by slots, one pack of each lane in turn, and those of a rank are ``rank``
        modulo ``world_size``. A step takes ``packs_per_step`` slots. What of them is the rank's goes to its batches of
        the step, the first ones first.
        """
        step, batch_of_step = divmod(number, self.batches_per_step)
        begin = slot + step * self.packs_per_step
        end = begin + self.packs_per_step
        own_slots = (rank - begin) // self.world_size - (rank - end) // self.world_size
        return max(0, min(self.packs_per_batch, own_slots - batch_of_step * self.packs_per_batch))

    def warn(self, *, num_lanes: int, num_workers: int, rank: int) -> None:
        """Warn about workers without lanes, ranks without lanes or with fewer of them, and steps with null packs."""
        ranks, workers = self.world_size, -(-num_lanes // self.world_size)
        if workers < num_workers and rank == 0:
            log.warning(
                "num_workers=%d: %d of them has work, for there %s; a new run may set num_lanes",
                num_workers, workers, "is 1 lane" if num_lanes == 1 else f"are {num_lanes} lanes",
            )  # fmt: skip
        # Workers do not matter: their packs are merged in the order of the slots.
        if num_lanes < ranks:
            warn_user(
                f"{num_lanes} lanes are too few for {ranks} ranks: {ranks - num_lanes} "
                "of them hand out null packs only, and a step trains fewer packs than it did; use fewer ranks, or "
                "start a new run with more num_lanes",
            )
        elif num_lanes % ranks:
            warn_user(
                f"{num_lanes} lanes do not divide evenly among {ranks} ranks: every sample still comes "
                "exactly once, but steps hold other packs than on another number of ranks, and at an epoch's end the "
                "ranks with fewer lanes hand out null packs; use a number of ranks that divides the lanes, or in a new "
                "run a num_lanes that the ranks divide",
            )
        whole = self.batches_per_step * ranks * self.packs_per_batch
        if whole != self.packs_per_step and rank == 0:
            log.warning(
                "packs_per_step=%d cannot be shared out evenly over %d rank(s) in batches of %d: every step holds %d "
                "null packs, which cost time and train nothing; a multiple of %d holds none",
                self.packs_per_step, ranks, self.batch_size, whole - self.packs_per_step, ranks * self.batch_size,
            )  # fmt: skip
