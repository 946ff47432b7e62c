"""`StepMeter`: how evenly the ranks share the work of a step, and how long a step waits for data."""

from __future__ import annotations

from collections.abc import Sequence


class StepMeter:
    """Adds up the attention costs of the ranks' batches, and the seconds that the trainer waited for batches.

    >>> meter = StepMeter()
    >>> for costs in ([4, 2], [0, 2]):
    ...     meter.add(costs, waited=0.5, ends_step=True)
    >>> meter.metrics()["cost_imbalance"], meter.metrics()["data_wait_mean"]
    (1.6666666666666665, 0.5)
    """

    def __init__(self) -> None:
        # Sums over steps by metric, and the number of ``steps``: since the last call of `metrics`, between the last two
        # calls that had steps between them, and since the beginning.
        self.recent: dict[str, float] = {}
        self.told: dict[str, float] = {}
        self.total: dict[str, float] = {}
        self.costs: Sequence[int] = ()  # of the ranks, in this step so far
        self.waited = 0.0  # in this step so far

    def add(self, costs: Sequence[int], *, waited: float, ends_step: bool) -> None:
        """Count a batch.

        Args:
            costs: attention costs of the batch on each rank, as `attention_cost`; empty for a single rank.
            waited: seconds that the trainer waited for it.
            ends_step: whether it is the last batch of its step.
        """
        if self.costs and costs:
            costs = [a + b for a, b in zip(self.costs, costs, strict=True)]
        self.costs, self.waited = costs or self.costs, self.waited + waited
        if not ends_step:
            return
        step = {"steps": 1.0, "data_wait": self.waited}
        if self.costs:
            whole = sum(self.costs)
            step["cost_imbalance"] = max(self.costs) * len(self.costs) / whole if whole else 1.0
        for sums in (self.recent, self.total):
            for name, value in step.items():
                sums[name] = sums.get(name, 0.0) + value
        self.costs, self.waited = (), 0.0

    def metrics(self) -> dict[str, float]:
        """Return means over the steps since the last call, and since the beginning (``*_mean``); none without a step.

        Called again without a step between, it returns the same: a trainer may write two logs behind one step.

        ``cost_imbalance`` is the attention cost of the dearest rank's part of a step over the mean of the ranks'
        parts: 1 if all are equal. A single rank has none. ``data_wait`` are seconds.
        """
        if self.recent:
            self.told, self.recent = self.recent, {}
        return {
            f"{name}{suffix}": value / sums["steps"]
            for suffix, sums in (("", self.told), ("_mean", self.total))
            for name, value in sums.items()
            if name != "steps"
        }
