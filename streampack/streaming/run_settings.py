"""The settings that a run keeps from its beginning on: its lanes, and the packs that each of them plans ahead."""

from __future__ import annotations

import logging

from streampack.packing.settings import Packing
from streampack.sources.source import Source
from streampack.streaming.balance import default_window, require_window
from streampack.streaming.lane_config import DEFAULT_LANES, count_lanes
from streampack.streaming.loaded_state import RunState
from streampack.validation import require_positive, warn_user

log = logging.getLogger(__name__)


class RunSettings:
    """``num_lanes`` and ``balance_window``: as the user set them, as a state has them, or as the run began with them.

    Until then they are None.

    Raises:
        ValueError: for a number that cannot be.
    """

    def __init__(self, *, num_lanes: int | None, balance_window: int | None) -> None:
        self.num_lanes = None if num_lanes is None else require_positive(num_lanes, "num_lanes")
        self.balance_window = None if balance_window is None else require_window(balance_window)
        # What the user set, and no state has replaced.
        asked_for = {"num_lanes": num_lanes, "balance_window": balance_window}
        self.asked_for = {name: value for name, value in asked_for.items() if value is not None}

    def lanes_for(self, source: Source, consumers: int) -> int:
        """Return the number of lanes: a multiple of ``consumers``, unless it is chosen already.

        A run that goes on may have fewer lanes than consumers: some then have nothing to do.

        Raises:
            ValueError: if fewer were asked for.
        """
        return count_lanes(source, consumers, wanted=self.num_lanes, fixed="num_lanes" in self.asked_for)

    def few_lanes(self, num_lanes: int) -> str:
        """Return what follows from a default of few lanes; an empty text for 8 or more, and where it was asked for."""
        if num_lanes >= DEFAULT_LANES or "num_lanes" in self.asked_for:
            return ""
        return (
            "few, as the data are small; to go on with more ranks or workers, begin with as large a num_lanes"
        )

    def window_for(self, packing: Packing, ranks: int) -> int:
        """Return ``balance_window``: the default for this many ranks, unless it is chosen already."""
        if self.balance_window is not None:
            return self.balance_window
        return default_window(packing.max_seq_len, ranks=ranks)

    def choose_window(self, packing: Packing, ranks: int) -> None:
        """Choose ``balance_window`` for this many ranks, unless it is, and log a default other than 0."""
        window, chosen = self.window_for(packing, ranks), self.balance_window is None
        self.balance_window = window
        if chosen and window:
            log.info(
                "balance_window=%d: packs are handed out by attention cost, so that %d ranks wait less for each other; "
                "0 switches it off", window, ranks,
            )  # fmt: skip

    def keep(self, loaded: RunState) -> None:
        """Take what a loaded state has; warn if the user asked for something else."""
        for name in ("num_lanes", "balance_window"):
            before, asked = getattr(loaded, name), self.asked_for.get(name)
            if None not in (before, asked) and before != asked:
                warn_user(
                    f"{name}={asked} is not heeded: the state was made with {name}={before}, which a run keeps; start "
                    "a new run for another number"
                )
            if before is not None:
                self.asked_for.pop(name, None)
                asked = before
            setattr(self, name, asked)
