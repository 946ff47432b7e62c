"""The settings that a run keeps from its beginning on: its lanes, and the packs that each of them plans ahead."""

from __future__ import annotations

from streampack.packing.settings import Packing
from streampack.sources.source import Source
from streampack.streaming.balance import default_window, require_window
from streampack.streaming.run_state import RunState
from streampack.validation import require_positive, warn_user

DEFAULT_LANES = 8


def default_lanes(source: Source, consumers: int) -> int:
    """Return a multiple of the consumers (ranks x workers), at least 8 unless data is small.

    On small data it is 1, 2 or 4 where it can be, because 5 lanes would not divide evenly among 2 ranks.
    """
    filled = source.natural_lanes()
    most = 1 << min(DEFAULT_LANES, filled).bit_length() - 1
    wanted = -(-most // consumers) * consumers
    # Of four compressed files three consumers read one lane each.
    return wanted if wanted <= filled else max(1, filled // consumers) * consumers


class RunSettings:
    """``num_lanes`` and ``balance_window``: as the user set them, as a state has them, or as the run began with them.

    Until then they are None.
    """

    def __init__(self, *, num_lanes: int | None, balance_window: int | None) -> None:
        self.num_lanes = None if num_lanes is None else require_positive(num_lanes, "num_lanes")
        self.balance_window = None if balance_window is None else require_window(balance_window)
        # What the user set, and no state has replaced.
        self.asked_for = {"num_lanes": self.num_lanes, "balance_window": self.balance_window}

    def lanes_for(self, source: Source, consumers: int) -> int:
        """Return the number of lanes that so many consumers would read; a run that goes on may have fewer."""
        lanes = self.num_lanes or default_lanes(source, consumers)
        if lanes < consumers and self.asked_for["num_lanes"]:
            raise ValueError(
                f"{lanes} lane{'s' * (lanes > 1)} cannot feed {consumers} consumers (ranks x workers): some would get "
                "nothing; use fewer workers, or start a new run with more num_lanes"
            )
        return lanes

    def window_for(self, packing: Packing, ranks: int) -> int:
        """Return ``balance_window``: the default for this many ranks, unless it is chosen already."""
        default = default_window(packing.max_seq_len, ranks=ranks)
        return default if self.balance_window is None else self.balance_window

    def choose_window(self, packing: Packing, ranks: int) -> int:
        """Choose ``balance_window`` for this many ranks, unless it is chosen, and return it."""
        self.balance_window = window = self.window_for(packing, ranks)
        return window

    def keep(self, loaded: RunState) -> None:
        """Take what a loaded state has; warn if the user asked for something else."""
        for name, asked in self.asked_for.items():
            before = getattr(loaded, name)
            if None not in (before, asked) and before != asked:
                warn_user(
                    f"{name}={asked} is not heeded: the state was made with {name}={before}, which a run keeps; start "
                    "a new run for another number"
                )
            if before is not None:
                self.asked_for[name] = None
            setattr(self, name, asked if before is None else before)
