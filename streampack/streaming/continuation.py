"""Reading on behind a run with other settings: its open windows of packs, taken apart by its own settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streampack.packing.settings import Packing
from streampack.streaming.lane import Lane
from streampack.streaming.lane_config import LaneConfig
from streampack.streaming.loaded_state import RunState
from streampack.streaming.round_robin import restore

PACKING = (
    "max_seq_len", "buffer_size", "split_across_pack", "overlong", "max_seqs_per_pack", "pad_seqs_to"
)  # fmt: skip
"""Entries of a dataset's identity that are settings of its `Packing`, but for the strategy."""


def config_before(config: LaneConfig, identity: Mapping[str, Any]) -> LaneConfig:
    """Return a configuration with the settings of a run that had the same encoder, from the identity in its state."""
    settings: dict[str, Any] = {name: identity[name] for name in PACKING}
    strategy = identity["strategy"] or "exact_fit"  # None with split_across_pack
    return replace(
        config,
        packing=Packing(strategy=strategy, **settings),
        max_document_tokens=identity["max_document_tokens"],
        untrained=identity["untrained"],
    )


def unplanned(loaded: RunState, config: LaneConfig) -> RunState:
    """Return a state without open windows: the rows of packs that were planned and not handed out wait.

    Args:
        loaded: the state.
        config: of the run that made it; the windows' packs are planned once more.
    """
    num_lanes = loaded.num_lanes or 1
    config = replace(config, balance_window=loaded.balance_window or 0)
    opened = {
        number: Lane(config, lane=number, num_lanes=num_lanes, state=state)
        for number, state in loaded.lane_states.items()
        if state.window is not None
    }
    if opened:
        restore(list(opened.values()))
    states = {number: lane.state_without_window() for number, lane in opened.items()}
    return replace(loaded, lane_states={**loaded.lane_states, **states})
