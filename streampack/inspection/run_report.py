"""The report of a run: what was in effect, what it logged, where its tokens went, and its first packs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streampack.inspection.report import PackView


@dataclass(frozen=True)
class RunReport:
    """What a run came to. It holds everything that the page shows."""

    title: str
    ended: str  # how it ended
    in_effect: Mapping[str, str]  # what was printed at its start, by name
    config: str  # all settings, as YAML
    metrics: Mapping[int, Mapping[str, float]]  # by step and name
    ledger: Mapping[str, float]  # counts of `Ledger.as_dict`; empty if there are none
    sources: list[str]  # names of a mixture's sources
    packs: list[tuple[int, PackView]]  # with the step that trained each

    def series(self, name: str) -> list[tuple[float, float]]:
        """Return the steps that logged a metric, each with its value."""
        return [(step, values[name]) for step, values in self.metrics.items() if name in values]


def last_ledger(metrics: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the ledger that was logged last, by the names of `Ledger.as_dict`; empty if there is none.

    >>> last_ledger({1: {"ledger_packs": 4, "loss": 2.5}, 2: {"ledger_packs": 8}, 3: {"loss": 2.0}})
    {'packs': 8}
    """
    prefix = "ledger_"
    logged = (
        {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        for values in reversed(list(metrics.values()))
    )
    return next(filter(None, logged), {})
