"""`TrainedSteps`: the check that each step trains something."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


class TrainedSteps:
    """Counts the steps that train nothing on any rank, and warns of the first; `require` makes it an error.

    ``untrained="keep"`` switches both off. A step that is more than half padding may train nothing if an earlier step
    trained something, because little data may be left at an epoch's end.

    Args:
        untrained: the dataset's.
        warns: whether this process warns: one of all ranks.
    """

    def __init__(self, untrained: str | None, *, warns: bool) -> None:
        self.enabled = untrained != "keep"
        self.warns = warns
        self.steps = self.empty = 0  # steps so far, and those that trained nothing
        self.any_trained = False  # whether a step trained something
        self.current = (0, 0, 0)  # trained, tokens, and those that fit, of the step that has begun

    def add(self, trained: int, tokens: int, capacity: int, *, ends_step: bool) -> None:
        """Count a batch of all ranks: what of it is trained (packs or tokens), its tokens, and all that fit."""
        before, counts = self.current, (trained, tokens, capacity)
        trained, tokens, capacity = (a + b for a, b in zip(before, counts, strict=True))
        self.current = (0, 0, 0) if ends_step else (trained, tokens, capacity)
        if not ends_step:
            return
        self.steps += 1
        if not trained and tokens and (2 * tokens >= capacity or not self.any_trained):
            self.empty += 1
            if self.empty == 1 and self.enabled and self.warns:
                log.warning("%s", self._text())
        self.any_trained |= trained > 0

    def require(self) -> None:
        """Check that each step so far trained something.

        Raises:
            ValueError: if one did not, with the number of such steps.
        """
        if self.enabled and self.empty:
            raise ValueError(self._text())

    def _text(self) -> str:
        return (
            f"{self.empty} of {self.steps} step(s) trained nothing: no label of their tokens is trained. Look at the "
            "labels, at the roles of messages (only the assistant's are trained), and whether overlong='truncate' cuts "
            "answers off; untrained='drop' leaves such samples out, untrained='keep' lets such steps be"
        )
