"""`RunShape`: what a dataset does not say of its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streampack.inspection.costs import ModelWork
from streampack.loader.batching import Batching

PADDED_BATCH = 8
"""Samples in a batch of padding where the run's batches hold one pack: alone, a sample would need no padding."""


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What a dataset does not say of its run.

    Args:
        ranks: of the run; numbers of ranks after the first are compared with it.
        workers: processes of each rank that make packs.
        batch_size: packs in a batch.
        packs_per_step: packs in an optimizer step over all ranks; None is one batch of each rank.
        max_steps: of the run, for the passes over a mixture's sources.
        model: counts the model's operations; None where there is no model.
    """

    ranks: Sequence[int] = (1, 8, 64)
    workers: int = 0
    batch_size: int = 1
    packs_per_step: int | None = None
    max_steps: int | None = None
    model: ModelWork | None = None

    def batching(self, ranks: int) -> Batching:
        """Return how the packs of a step are divided among so many ranks, of a lane each."""
        return Batching(self.batch_size, self.packs_per_step or ranks * self.batch_size, ranks, ranks)

    @property
    def padded_batch(self) -> int:
        """Samples in a batch of the padding that packing is compared with."""
        return self.batch_size if self.batch_size > 1 else PADDED_BATCH
