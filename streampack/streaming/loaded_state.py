"""A dataset's loaded state, and the one iteration that resumes from it, in whichever process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch.utils.data import get_worker_info

from streampack.streaming.checksum import sealed, unsealed
from streampack.streaming.epochs import BEGUN, ENDED, WAITING, EpochCounter
from streampack.streaming.lane_state import LaneState, from_dicts

log = logging.getLogger(__name__)

STATE_VERSION = 3

UNFINISHED = (
    "an iteration began from the loaded state and stopped before its end, so another one would begin elsewhere than "
    "the state says. To begin from the state again, load it again; to go on behind what that iteration gave, call "
    "load_state_dict(state_dict()) first; to read an epoch from its beginning, call set_epoch(epoch) of the dataset"
)


@dataclass
class LoadedState:
    """Where an iteration begins: at a loaded state, or at the beginning of an epoch."""

    lane_states: Mapping[int, LaneState] = field(default_factory=dict)  # a lane without a state begins
    slot: int = 0  # the slot at which the next step begins
    epoch: int = 0  # in which the iteration that made the state began
    num_lanes: int | None = None
    balance_window: int | None = None
    packs_per_step: int | None = None  # of the loader that made the state
    partial: bool = False  # made by one of several consumers, whose lanes are not those of the others
    phase: int = WAITING  # how far the iteration that resumes from it is, in this process; see `epochs`
    in_worker: bool = False  # loaded in a worker process, so that only an iteration there resumes from it
    left: bool = False  # of an iteration in this process that was left before its end

    def behind(self, *, same_tokens: bool) -> LoadedState:
        """Return the state of a run that reads on behind this one with other settings; see `LaneState.behind`."""
        states = {lane: state.behind(same_tokens=same_tokens) for lane, state in self.lane_states.items()}
        return replace(self, lane_states=states, slot=0, balance_window=None, packs_per_step=None)

    @property
    def nothing_read(self) -> bool:
        """Whether the run has not given a pack yet, as far as the consumer that made this knows of all lanes."""
        return not self.lane_states and not self.partial

    def warn_if_empty(self) -> None:
        """Warn at the end of an iteration that gave nothing, if a loop over as many batches as an epoch has is why."""
        if self.left and self.phase == WAITING:
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


def state_of(head: Mapping[str, Any], lanes: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a run: what holds for all lanes, with a checksum, and the lanes, each with its own.

    So states of several consumers are merged by merging ``lanes``.
    """
    return {**sealed({"version": STATE_VERSION, **head}, of="the run"), "lanes": dict(lanes)}


def checked_state(state: Any) -> LoadedState:
    """Parse a state, all but its identity.

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
    head = unsealed({name: value for name, value in state.items() if name != "lanes"}, of="the run")
    lanes, num_lanes = state.get("lanes"), head["num_lanes"]
    # Numbers that went through JSON are text; taken for missing lanes, they would begin again in silence.
    if not isinstance(lanes, Mapping) or any(
        type(lane) is not int or lane >= (num_lanes or 0) for lane in lanes
    ):
        raise ValueError(
            f"the state is damaged or was edited: lanes does not map numbers below {num_lanes} to the states of lanes; "
            "resume from another checkpoint"
        )
    return LoadedState(
        from_dicts(lanes),
        head.get("slot", 0),
        head["epoch"],
        num_lanes,
        head["balance_window"],
        head.get("packs_per_step"),
        head.get("partial", False),
    )


class Resume:
    """Keep a loaded state until the iteration that resumes from it has ended.

    That may be an iteration of the dataset, of a `PackedDataLoader`, or of the worker processes of torch's DataLoader.
    Worker processes tell the process that started them through the memory that an `EpochCounter` shares.
    """

    def __init__(self, counter: EpochCounter) -> None:
        self.counter = counter
        self.loaded: LoadedState | None = None
        self.by_loader = False  # whether the newest iteration is a `PackedDataLoader`'s

    def load(self, loaded: LoadedState) -> None:
        """Keep a state for the next iteration."""
        self.counter.set(loaded.epoch, loaded=True)
        loaded.in_worker = get_worker_info() is not None
        self.loaded, self.by_loader = loaded, False

    def mark_left(self) -> None:
        """Note that the loaded state is that of an iteration which is gone on with."""
        assert self.loaded is not None
        self.loaded.left = True

    def set_epoch(self, epoch: int, *, keep: bool) -> None:
        """Let the next iteration begin with this epoch.

        Args:
            epoch: from 0.
            keep: keep a loaded state, if no pack was handed out since it was loaded.
        """
        self.loaded = self.pending if keep else None
        self.counter.set(epoch, loaded=self.loaded is not None)

    @property
    def pending(self) -> LoadedState | None:
        """The loaded state, as long as no pack was handed out since; then None."""
        return self.loaded if self._phase() == WAITING else None

    def begin(self, *, by_loader: bool = False) -> LoadedState:
        """Return where a new iteration begins.

        Raises:
            ValueError: if one began from the loaded state and did not end, or the state was loaded after this worker
                process had been started.
        """
        if self.counter.renew():
            self.loaded = None
        if (phase := self._phase()) == BEGUN:
            raise ValueError(UNFINISHED)
        if phase == ENDED:
            self.loaded = None
        self.by_loader = by_loader
        return LoadedState(epoch=self.counter.upcoming(), phase=ENDED) if self.loaded is None else self.loaded

    def require_here(self) -> None:
        """Raise if a loader or worker processes iterate the dataset, because then only they know the state.

        Raises:
            ValueError: naming whose state_dict() to call.
        """
        if self.by_loader:
            raise ValueError(
                "a PackedDataLoader reads this dataset and knows what it has handed out: call its state_dict(), not "
                "the dataset's"
            )
        if self.counter.in_workers:
            raise ValueError(
                "worker processes of a DataLoader read this dataset, and what they have read is not known here; use "
                "PackedDataLoader(dataset, num_workers=...), whose state_dict() counts what it has handed out, or "
                "torchdata's StatefulDataLoader"
            )

    def _phase(self) -> int:
        """Return the phase of the iteration from the loaded state, in this process or in worker processes."""
        if self.loaded is None:
            return ENDED
        if self.loaded.phase != WAITING or self.loaded.in_worker:
            return self.loaded.phase
        return self.counter.phase()

    def __getstate__(self) -> dict[str, Any]:
        if self.loaded is None or get_spawning_popen() is not None:
            return self.__dict__  # pickled for a worker process, which asks the counter for the phase
        return {**self.__dict__, "loaded": replace(self.loaded, phase=self._phase())}
