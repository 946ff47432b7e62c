"""`RunState`: where a run stands, and the check of one that is loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from streampack.streaming.balance import MOST_WINDOW
from streampack.streaming.lane_state import LaneState

log = logging.getLogger(__name__)

STATE_VERSION = 2
MAX_LANES = 1 << 16
"""The most lanes that a state may have. A lane takes kilobytes, and a damaged state may hold any number."""


@dataclass(frozen=True)
class RunState:
    """Where a run stands: at the beginning of an epoch, or behind the last pack or batch that was handed out."""

    lane_states: Mapping[int, LaneState] = field(default_factory=dict)  # a lane without a state begins
    slot: int = 0  # the slot at which the next step begins
    epoch: int = 0  # in which the iteration that made the state began
    num_lanes: int | None = None
    balance_window: int | None = None
    packs_per_step: int | None = None  # of the loader that made the state
    partial: bool = False  # made by one of several consumers, whose lanes are not those of the others
    loaded: bool = False  # from `load_state_dict` or `continue_from`
    left: bool = False  # of an iteration in this process that was left before its end

    def behind(self, *, same_tokens: bool) -> RunState:
        """Return the state of a run that reads on behind this one with other settings; see `LaneState.behind`."""
        states = {lane: state.behind(same_tokens=same_tokens) for lane, state in self.lane_states.items()}
        return replace(self, lane_states=states, slot=0, balance_window=None, packs_per_step=None)

    @property
    def nothing_read(self) -> bool:
        """Whether the run has not given a pack yet, as far as the consumer that made this knows of all lanes."""
        return not self.lane_states and not self.partial

    def warn_if_left(self) -> None:
        """Warn that an iteration from here gave nothing, if a loop over as many batches as an epoch has is why."""
        if self.left:
            log.warning(
                "this iteration gave nothing: the one before was left behind the last batch of its epoch, so this "
                "was the rest of that epoch, and the next iteration is another epoch. Read epochs to their end or call "
                "set_epoch(epoch) of the dataset before each"
            )

    @property
    def epochs_read(self) -> int:
        """How many epochs all lanes have read to their end."""
        if not self.lane_states or len(self.lane_states) != self.num_lanes:
            return 0
        return min(state.epoch + state.done for state in self.lane_states.values()) - self.epoch


def checked_state(state: Any) -> RunState:
    """Parse a state, all but its identity, and check its types and ranges.

    Raises:
        ValueError: if it is no state, or damaged.
    """
    version = state.get("version") if isinstance(state, Mapping) else None
    if type(version) is not int or version != STATE_VERSION:
        method = state.get("method") if isinstance(state, Mapping) else None
        other = f"; it was made with method={method!r}, whose batches no stream makes" if method else ""
        kind = "None" if state is None else f"this {type(state).__name__}"
        raise ValueError(
            f"{kind} is no state of an IterablePackedDataset (version {STATE_VERSION}){other}; give what "
            "loader.state_dict() returned during the run to go on with"
        )
    identity, num_lanes, lanes = state.get("identity"), state.get("num_lanes"), state.get("lanes")
    counts = type(state.get("epoch")) is int and (num_lanes is None or type(num_lanes) is int)
    if not (isinstance(identity, Mapping) and isinstance(lanes, Mapping) and counts):
        raise ValueError("the state is damaged: it lacks identity, epoch, num_lanes or lanes")
    if num_lanes is not None and not 0 < num_lanes <= MAX_LANES:
        raise ValueError(f"the state is damaged: it has {num_lanes} lanes, and 1 to {MAX_LANES} are possible")
    balance_window = state.get("balance_window")
    if balance_window is not None and not (
        type(balance_window) is int and 0 <= balance_window <= MOST_WINDOW
    ):
        raise ValueError(f"the state is damaged: its balance_window is {balance_window!r}")
    packs_per_step = state.get("packs_per_step")
    if packs_per_step is not None and not (type(packs_per_step) is int and 0 < packs_per_step < 2**31):
        raise ValueError(f"the state is damaged: its packs_per_step is {packs_per_step!r}")
    for lane in lanes:
        if type(lane) is not int or not 0 <= lane < (num_lanes or 0):
            raise ValueError(f"the state is damaged: lane {lane!r} is none of its {num_lanes} lanes")
    slot = state.get("slot", 0)
    if type(slot) is not int or not 0 <= slot < 2**63:
        raise ValueError(f"the state is damaged: slot {slot!r} is no number of packs")
    return RunState(
        {lane: LaneState.from_dict(found) for lane, found in lanes.items()},
        slot,
        state["epoch"],
        num_lanes,
        balance_window,
        packs_per_step,
        state.get("partial") is True,
        loaded=True,
    )
