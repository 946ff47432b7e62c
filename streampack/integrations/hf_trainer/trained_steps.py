"""The check that each training step trains something."""

from __future__ import annotations

from collections.abc import Sequence

from streampack.packing.batch import Batch
from streampack.streaming.lane_config import LaneConfig


class TrainedSteps:
    """Count what each training step of this rank trains; a step that trains nothing on any rank is an error.

    ``untrained="keep"`` switches the error off. A step that is more than half padding may train nothing if an earlier
    step trained something, because little data may be left at an epoch's end.
    """

    def __init__(self, config: LaneConfig) -> None:
        self.enabled = config.untrained != "keep"
        # This rank's (trained tokens, tokens, capacity in tokens) of each step since the last check.
        self.counts: list[tuple[int, int, int]] = []
        self.current = (0, 0, 0)  # the same of the step that has begun
        self.checked = 0  # steps that were checked
        self.any_trained = False  # whether a step that was checked trained something

    def add(self, batch: Batch, *, ends: bool) -> None:
        """Count a batch, which must be on the CPU; ``ends`` says whether it is the last of its step."""
        if not self.enabled:
            return
        trained, tokens, capacity = self.current
        self.current = (
            trained + int(batch.num_trained),
            tokens + batch.num_tokens,
            capacity + batch.tokens.numel(),
        )
        if ends:
            self.counts.append(self.current)
            self.current = (0, 0, 0)

    def take_counts(self) -> list[tuple[int, int, int]]:
        """Return the counts of the steps since the last call, and forget them."""
        counts, self.counts = self.counts, []
        return counts

    def check(self, ranks: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        """Check that each step trained something, given the counts of all ranks.

        Raises:
            ValueError: if a step trained nothing.
        """
        for step in zip(*ranks, strict=True):
            trained, tokens, capacity = (sum(counts) for counts in zip(*step, strict=True))
            self.checked += 1
            if not trained and tokens and (2 * tokens >= capacity or not self.any_trained):
                raise ValueError(
                    f"step {self.checked} of this training trained nothing: no label of its {tokens} tokens is "
                    "trained; look at the labels, and whether overlong='truncate' cuts answers off; untrained='drop' "
                    "leaves such samples out, untrained='keep' lets such steps be"
                )
            self.any_trained |= trained > 0
