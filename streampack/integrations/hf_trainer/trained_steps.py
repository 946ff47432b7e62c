"""The check that each training step trains something."""

from __future__ import annotations

from collections.abc import Sequence

from streampack.packing.batch import Batch
from streampack.streaming.lane_config import LaneConfig


class TrainedSteps:
    """Count what each training step of this rank trains; a step that trains nothing on any rank is an error.

    ``untrained="keep"`` switches the error off. A step that is mostly padding may train nothing if an earlier step
    trained something: at an epoch's end, little data may be left.
    """

    def __init__(self, config: LaneConfig) -> None:
        self.wanted = config.untrained != "keep"
        self.steps: list[tuple[int, int, int]] = []  # since the last check: trained tokens, tokens, capacity
        self.now = (0, 0, 0)  # of the current step
        self.made = 0
        self.any_trained = False

    def add(self, batch: Batch, *, ends: bool) -> None:
        """Count a batch on the CPU; the step may end with it."""
        if not self.wanted:
            return
        trained, tokens, capacity = self.now
        self.now = (
            trained + int(batch.num_trained),
            tokens + batch.num_tokens,
            capacity + batch.tokens.numel(),
        )
        if ends:
            self.steps.append(self.now)
            self.now = (0, 0, 0)

    def take(self) -> list[tuple[int, int, int]]:
        """Return the steps counted since the last call."""
        steps, self.steps = self.steps, []
        return steps

    def check(self, ranks: Sequence[Sequence[tuple[int, int, int]]]) -> None:
        """Check the steps that all ranks counted.

        Raises:
            ValueError: if a step trained nothing.
        """
        for step in zip(*ranks, strict=True):
            trained, tokens, capacity = (sum(counts) for counts in zip(*step, strict=True))
            self.made += 1
            if not trained and tokens and (2 * tokens >= capacity or not self.any_trained):
                raise ValueError(
                    f"step {self.made} of this training trained nothing: no label of its {tokens} tokens is trained; "
                    "look at the labels, and whether overlong='truncate' cuts answers off; untrained='drop' leaves "
                    "such samples out, untrained='keep' lets such steps be"
                )
            self.any_trained |= trained > 0
