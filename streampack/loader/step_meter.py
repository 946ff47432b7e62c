"""`StepMeter`: how evenly the ranks share the work of a step, and how long a step waits for data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums over some steps."""

    steps: int = 0
    imbalance: float = 0.0
    waited: float = 0.0  # seconds


class StepMeter:
    """Adds up the attention costs of the ranks' batches, and the seconds that the trainer waited for batches.

    >>> meter = StepMeter()
    >>> for costs in ([4, 2], [0, 2]):
    ...     meter.add(costs, waited=0.5, ends_step=True)
    >>> meter.metrics()["cost_imbalance"], meter.metrics()["data_wait"]
    (1.6666666666666665, 0.5)
    """

    def __init__(self) -> None:
        self.waited = 0.0  # seconds, in all batches
        self.total = StepTotals()
        self.reported = StepTotals()  # as of the last call of `metrics` after which there were steps
        self.before = StepTotals()  # as of the one before that
        self.several_ranks = False
        self._step: tuple[Sequence[int], float] = (
            (),
            0.0,
        )  # costs of the ranks, and seconds, in this step so far

    def add(self, costs: Sequence[int], *, waited: float, ends_step: bool) -> None:
        """Count a batch.

        Args:
            costs: attention costs of the batch on each rank, as `AttentionCost.of`; empty for a single rank.
            waited: seconds that the trainer waited for it.
            ends_step: whether it is the last batch of its step.
        """
        before, seconds = self._step
        if before and costs:
            costs = [a + b for a, b in zip(before, costs, strict=True)]
        costs, seconds = costs or before, seconds + waited
        self.waited += waited
        self.several_ranks = self.several_ranks or bool(costs)
        if not ends_step:
            self._step = costs, seconds
            return
        whole = sum(costs)
        imbalance = max(costs) * len(costs) / whole if whole else 1.0
        total = self.total
        self.total = StepTotals(total.steps + 1, total.imbalance + imbalance, total.waited + seconds)
        self._step = (), 0.0

    def metrics(self) -> dict[str, float]:
        """Return means over the steps since the last call, and since the beginning (``*_mean``); nothing before a step.

        ``cost_imbalance`` is the attention cost of the dearest rank's part of a step over the mean of the ranks'
        parts: 1 if all are equal. A single rank has none. ``data_wait`` are seconds.
        """
        total = self.total
        if total.steps > self.reported.steps:
            self.before, self.reported = self.reported, total
        metrics = {}
        for suffix, since in (("", self.before), ("_mean", StepTotals())):
            if steps := total.steps - since.steps:
                metrics[f"data_wait{suffix}"] = (total.waited - since.waited) / steps
                if self.several_ranks:
                    metrics[f"cost_imbalance{suffix}"] = (total.imbalance - since.imbalance) / steps
        return metrics
