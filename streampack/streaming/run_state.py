"""`RunState`: the position of a run, and its saved form, with checksums that reveal a damaged state."""

from __future__ import annotations

import json
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from streampack.accounting import Ledger
from streampack.lanes.lane_state import LaneState, Snapshot, saved

log = logging.getLogger(__name__)

STATE_VERSION = 7
LANE_VALUES = {each.name for each in fields(LaneState)} | {"of"}
"""Names of the values that the state of a lane may have."""


class Phase(Enum):
    """How a run came to its state."""

    NEW = "the beginning of an epoch"
    LOADED = "by load_state_dict or continue_from"
    READ = "by an iteration in this process"
    ENDED = "by an iteration in this process, to its end"


@dataclass(frozen=True)
class RunState:
    """Position of a run: the beginning of an epoch, or after the last pack or batch that was yielded."""

    lane_states: Mapping[int, Snapshot] = field(default_factory=dict)  # a lane without a state begins
    slot: int = 0  # the slot at which the next step begins
    epoch: int = 0  # in which the iteration that made the state began
    num_lanes: int | None = None
    balance_window: int | None = None
    packs_per_step: int | None = None  # of the loader that made the state
    partial: bool = False  # of one of several consumers, without the lanes of the others
    phase: Phase = Phase.NEW

    def restarted(self) -> RunState:
        """Return the state of a run that continues after this one with other settings; see `LaneState.restarted`."""
        return replace(self.with_lanes(LaneState.restarted), slot=0, balance_window=None, packs_per_step=None)

    def with_lanes(self, change: Callable[[LaneState], LaneState]) -> RunState:
        """Return the state with the states of all lanes changed."""
        parsed = {lane: LaneState.from_dict(state) for lane, state in self.lane_states.items()}
        return replace(self, lane_states={lane: change(state).as_dict() for lane, state in parsed.items()})

    @property
    def ledger(self) -> Ledger:
        """Where every token of these lanes went."""
        return Ledger.total(Ledger.from_numbers(state["ledger"]) for state in self.lane_states.values())

    @property
    def in_epoch(self) -> bool:
        """Whether it may be in the middle of an epoch."""
        return bool(self.lane_states) or self.phase is Phase.LOADED

    @property
    def nothing_read(self) -> bool:
        """Whether the run has not given a pack yet, as far as the consumer that made this knows of all lanes."""
        return not self.lane_states and not self.partial

    @property
    def epochs_read(self) -> int:
        """How many epochs all lanes have read to their end."""
        if not self.lane_states or len(self.lane_states) != self.num_lanes:
            return 0
        ended = (epoch_of(state) + bool(state["done"]) for state in self.lane_states.values())
        return min(ended) - self.epoch

    def warn_if_left(self) -> None:
        """Warn that an iteration from here gave nothing, if a loop over as many batches as an epoch has is why."""
        if self.phase is Phase.READ:
            log.warning(
                "this iteration gave nothing: the one before stopped after the last batch of its epoch, so this was "
                "the rest of that epoch, and the next iteration is another epoch. Read epochs to their end or call "
                "set_epoch(epoch) of the dataset before each"
            )


def state_of(head: Mapping[str, Any], lanes: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is saved: what holds for all lanes, the checksums of ``lanes`` among it, and the lanes."""
    sums = [[lane, lanes[lane]["checksum"]] for lane in sorted(lanes)]
    return {**sealed({"version": STATE_VERSION, **head, "sums": sums}, of="the run"), "lanes": dict(lanes)}


def epoch_of(state: Snapshot) -> int:
    """Return the epoch that a lane reads."""
    epoch: int = state["reader"][0]
    return epoch


def as_dicts(states: Mapping[int, Snapshot]) -> dict[int, dict[str, Any]]:
    """Return what is saved of lanes."""
    return {lane: sealed(saved(state), of=f"lane {lane}") for lane, state in states.items()}


def part_of(states: Mapping[int, Snapshot], own: range) -> dict[int, dict[str, Any]]:
    """Return what is saved of the lanes of one of several consumers, also of those that have not begun.

    Each has ``of``: the number of consumers, and the packs that this one has yielded. Merged lanes keep the head of
    one consumer, so only this tells a lane that is missing, or of another step.
    """
    begun = {lane: states[lane] for lane in own if lane in states}
    of = [own.step, RunState(begun).ledger.packs]
    return {
        lane: sealed({**(saved(begun[lane]) if lane in begun else {}), "of": of}, of=f"lane {lane}")
        for lane in own
    }


def checked_state(state: Any) -> RunState:
    """Parse a state, all but its identity; refuse what is none, or damaged."""
    found = state if isinstance(state, Mapping) else {}
    version = found.get("version")
    if type(version) is int and version != STATE_VERSION and "lanes" in found:
        raise ValueError(
            f"this state has format {version}, of another release of streampack; this one "
            f"reads format {STATE_VERSION}: continue with the release that wrote it (CHANGELOG.md says which)"
        )
    if type(version) is not int or version != STATE_VERSION:
        method = found.get("method")
        other = f"; it was made with method={method!r}, whose batches no stream makes" if method else ""
        kind = "None" if state is None else f"this {type(state).__name__}"
        raise ValueError(
            f"{kind} is no state of an IterablePackedDataset (format {STATE_VERSION}){other}; give what "
            "loader.state_dict() returned during the run to continue"
        )
    head = unsealed({name: value for name, value in found.items() if name != "lanes"}, of="the run")
    num_lanes, lanes = head["num_lanes"], _numbered(found.get("lanes"), head["num_lanes"])
    states = {lane: unsealed(each, of=f"lane {lane}") for lane, each in lanes.items()}
    # Without this, a lane whose values have other names would look as if it had not begun, and begin again.
    if unknown := {name for each in states.values() for name in each} - LANE_VALUES:
        raise ValueError(
            f"a lane of this state has {min(unknown)!r}, which this version of streampack does not read; continue with "
            "the version that wrote it (CHANGELOG.md says which)"
        )
    # A lane that is missing would begin again, and one of another state repeat or skip rows.
    saved = dict(head["sums"]).items()
    sums = {lane: each["checksum"] for lane, each in lanes.items()}.items()
    wrong = {lane for lane, _ in (saved - sums if head["partial"] else saved ^ sums)}
    wrong |= _astray(states, num_lanes) if head["partial"] else set()
    if wrong:
        raise _damaged(f"its lane {min(wrong)} is missing, or of another state")
    return RunState(
        {lane: LaneState.from_dict(each).as_dict() for lane, each in states.items() if "reader" in each},
        head["slot"],
        head["epoch"],
        num_lanes,
        head["balance_window"],
        head["packs_per_step"],
        head["partial"] and len(lanes) < (num_lanes or 0),
        phase=Phase.LOADED,
    )


def sealed(values: Mapping[str, Any], *, of: str) -> dict[str, Any]:
    """Return plain values with a checksum of them and of what they are of.

    The order of names and the kind of a sequence do not count, which a checkpoint format may change.

    >>> state = sealed({"packs": 3, "cursor": [0, 7]}, of="lane 2")
    >>> unsealed({**state, "cursor": (0, 7)}, of="lane 2")
    {'packs': 3, 'cursor': (0, 7)}
    """
    return {**values, "checksum": zlib.crc32(json.dumps([of, values], sort_keys=True).encode())}


def unsealed(found: Any, *, of: str) -> dict[str, Any]:
    """Return the values without their checksum; raise if it is not theirs."""
    try:
        values = dict(found)
        checksum = values.pop("checksum")
        if type(checksum) is int and checksum == sealed(values, of=of)["checksum"]:
            return values
    except (TypeError, KeyError, ValueError, RecursionError):  # it is no mapping, or not of plain values
        pass
    raise _damaged(f"the checksum of {of} is wrong")


def _numbered(lanes: Any, num_lanes: int | None) -> dict[int, Any]:
    """Return the lanes by number, which is text after a way through JSON."""
    numbers = {name: lane for lane in range(num_lanes or 0) for name in (lane, str(lane))}
    given: Mapping[Any, Any] = lanes if isinstance(lanes, Mapping) else {None: lanes}
    found = {numbers.get(lane, -1): each for lane, each in given.items()}
    if -1 in found or len(found) != len(given):
        raise _damaged(f"lanes does not map numbers below {num_lanes} to the states of lanes")
    return found


def _astray(states: Mapping[int, Mapping[str, Any]], num_lanes: int) -> set[int]:
    """Return the lanes that are missing, or of another step, where others of their consumer are there."""
    of = {lane: tuple(each.get("of", ())) for lane, each in states.items()}
    numbers = {each[:1] for each in of.values()}
    if len(numbers) != 1 or () in numbers:
        return set(of)
    [[consumers]] = numbers
    wrong: set[int] = set()
    for first in range(min(consumers, num_lanes)):
        own = range(first, num_lanes, consumers)
        found = Counter(of.get(lane) for lane in own)
        odd = None if None in found else min(found, key=found.__getitem__)
        wrong.update(lane for lane in own if len(found) > 1 and of.get(lane) == odd)
    return wrong


def _damaged(what: str) -> ValueError:
    return ValueError(f"the state is damaged or was edited: {what}; resume from another checkpoint")
