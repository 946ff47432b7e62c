"""`StepMeter`: what each step waited for, cost on each rank, and trained."""

from __future__ import annotations

import logging
from collections.abc import Sequence

log = logging.getLogger(__name__)


class StepMeter:
    """Means over steps of how long they waited for data and how evenly ranks shared their work; steps without training.

    The first step that trains nothing is warned of, and `require_trained` makes it an error; ``untrained="keep"``
    switches both off. A step that is more than half padding may train nothing if an earlier one trained something,
    because little data may be left at an epoch's end.

    >>> meter = StepMeter(untrained=None, warns=True)
    >>> for costs in ([4, 2], [0, 2]):
    ...     meter.add(1, 7, 8, 0.5, costs, ends_step=True)
    >>> meter.metrics()["cost_imbalance"], meter.metrics()["data_wait_mean"]
    (1.6666666666666665, 0.5)
    """

    def __init__(self, untrained: str | None, *, warns: bool) -> None:
        self.judges = untrained != "keep"
        self.warns = warns
        self.empty = 0  # steps that trained nothing
        self.any_trained = False  # whether a step trained something
        # Of the step that has begun: what is trained, how much of what capacity is filled, seconds, the ranks' costs.
        self.step: Sequence[float] = ()
        # Sums over steps by metric, and the number of ``steps``: since the last call of `metrics`, between the last two
        # calls that had steps between them, and since the beginning.
        self.recent: dict[str, float] = {}
        self.told: dict[str, float] = {}
        self.total: dict[str, float] = {"steps": 0.0}

    def add(
        self,
        trained: int,
        filled: int,
        capacity: int,
        waited: float,
        costs: Sequence[int],
        *,
        ends_step: bool,
    ) -> None:
        """Count a batch of all ranks: what is trained, how much of the capacity is filled, seconds, ranks' costs."""
        batch = (trained, filled, capacity, waited, *costs)
        step = [a + b for a, b in zip(self.step, batch, strict=True)] if self.step else batch
        self.step = () if ends_step else step
        if not ends_step:
            return
        trains, full, room, seconds, *shares = step
        found = {"steps": 1.0, "data_wait": seconds}
        if len(shares) > 1:
            found["cost_imbalance"] = max(shares) * len(shares) / sum(shares) if any(shares) else 1.0
        for sums in (self.recent, self.total):
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + value
        if not trains and full and (2 * full >= room or not self.any_trained):
            self.empty += 1
            if self.empty == 1 and self.judges and self.warns:
                log.warning("%s", self._text())
        self.any_trained |= trains > 0

    def metrics(self) -> dict[str, float]:
        """Return means over the steps since the last call, and since the beginning (``*_mean``); none without a step.

        Called again without a step between, it returns the same: a trainer may write two logs after one step.
        """
        if self.recent:
            self.told, self.recent = self.recent, {}
        return {
            f"{name}{suffix}": value / sums["steps"]
            for suffix, sums in (("", self.told), ("_mean", self.total))
            for name, value in sums.items()
            if name != "steps"
        }

    def require_trained(self) -> None:
        """Raise ValueError if a step so far trained nothing, with the number of such steps."""
        if self.judges and self.empty:
            raise ValueError(self._text())

    def _text(self) -> str:
        return (
            f"{self.empty} of {self.total['steps']:.0f} step(s) trained nothing: no label of their tokens is trained. "
            "Look at the labels, at the roles of messages (only the assistant's are trained), and whether "
            "overlong='truncate' cuts answers off; untrained='drop' leaves such samples out, untrained='keep' lets "
            "such steps be"
        )
