"""Where those begin who read a dataset: this process, a `PackedDataLoader`, or worker processes of torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch.utils.data import get_worker_info

from streampack.packing.batch import to_torchtune
from streampack.streaming.lane_state import LaneEvent, LaneState
from streampack.streaming.ledger_messages import UntrainedWarning
from streampack.streaming.run_state import RunState
from streampack.validation import warn_user

COMMANDS, EPOCH, LOADED, WORKER = range(4)
ANEW = "an exception has cut this iteration short; iterate anew, which goes on behind what it gave"
UNFINISHED = (
    "an iteration began from the loaded state and stopped before its end, so another one would begin elsewhere than "
    "the state says. To begin from the state again, load it again; to go on behind what that iteration gave, call "
    "load_state_dict(state_dict()) first; to read an epoch from its beginning, call set_epoch(epoch) of the dataset"
)


class PackDicts:
    """Iterate over the packs of a dataset as dicts in torchtune's format. A failed conversion consumes no pack.

    Args:
        start: is called for the first pack, so that an iterator that gives nothing changes nothing. It calls
            `Readers.start`, and returns what the lanes give from there on, and the epoch of the next iteration.
        untrained: looks at each ledger.
    """

    def __init__(
        self, start: Callable[[PackDicts], tuple[Iterator[LaneEvent], int]], *, untrained: UntrainedWarning
    ) -> None:
        self._start = start
        self._untrained = untrained
        self._empty = True
        self._broken = False  # whether the newest call raised, or is under way
        self._lane_states: dict[int, LaneState] = {}
        self.begin = RunState()
        self.events: Iterator[LaneEvent] | None = None
        self.following = 0
        self.process = os.getpid()
        self.given = False  # whether it, or one that it goes on behind, has given a pack
        self.over = False  # whether it has come to its end

    def __iter__(self) -> PackDicts:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._broken:
            raise RuntimeError(ANEW)
        self._broken = True
        if self.events is None:
            self.events, self.following = self._start(self)
        for event in self.events:
            if event.pack is not None:
                self._untrained.look_at(event.state.ledger)
                given = to_torchtune(event.pack)
                self._empty = False
                # CPython checks for signals at calls and loops. There are none between here and the return, so no
                # KeyboardInterrupt can come between recording a pack and returning it (tests/loader/test_interrupts.py)
                self._lane_states[event.lane], self.given, self._broken = event.state, True, False
                return given
            self._lane_states[event.lane] = event.state
        if self._empty:
            self.begin.warn_if_left()
        self.over, self._broken = True, False
        raise StopIteration

    def begin_at(self, begin: RunState) -> None:
        """Take over where another iteration, or the newest command, has come to."""
        self.begin, self.given, self._lane_states = begin, begin.left, dict(begin.lane_states)

    def position(self) -> RunState:
        """Return the state after the last pack that was given."""
        return replace(self.begin, lane_states=dict(self._lane_states))


class Readers:
    """The newest command of a dataset (``set_epoch``, ``load_state_dict``, ``continue_from``), and what was read since.

    torch's DataLoader copies the dataset into its worker processes when it starts them, and they tell it nothing. So
    the command also lies in memory that they share: workers that are kept (``persistent_workers``) see there what was
    set since they began, and new ones that others have read before them.
    """

    def __init__(self) -> None:
        self.begin = RunState()  # of the newest command
        self.begun = False  # whether a loader that began there has given something
        self.by_loader = False  # whether the newest iteration is a `PackedDataLoader`'s
        self.newest: PackDicts | None = None  # the dataset's own newest iteration since the command
        self.commands = 0  # that this process knows
        # The number of commands; the epoch of the newest; whether it loaded a state; and the process id of the first
        # worker process that has read since, or 0.
        self._shared: torch.Tensor = torch.zeros(4, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]

    def command(self, begin: RunState) -> None:
        """Let whoever iterates next begin here."""
        self.begin, self.begun, self.by_loader, self.newest = begin, False, False, None
        worker = get_worker_info()
        if worker is None:
            self.commands = int(self._shared[COMMANDS]) + 1
            self._shared[:] = torch.tensor([self.commands, begin.epoch, begin.loaded, 0])
        elif worker.id == 0:
            # torchdata's loader loads a state in each of its workers, which is for them alone.
            self._shared[WORKER] = os.getpid()

    def set_epoch(self, epoch: int) -> None:
        """Let whoever iterates next begin with this epoch; a loaded state of the same, not begun yet, is kept."""
        kept = self.begin.loaded and epoch == self.begin.epoch and not self._taken
        self.command(self.begin if kept else RunState(epoch=epoch))

    def following(self) -> RunState:
        """Return where the next iteration begins, of whoever has not read before."""
        newest = self.newest
        return self.begin if newest is None or not newest.over else RunState(epoch=newest.following)

    def of_loader(self) -> RunState:
        """Return where a loader begins that has not read since the newest command."""
        return self._not_begun(self._taken)

    def start(self, packs: PackDicts, *, shuffled: bool) -> RunState:
        """Let an iteration of the dataset begin in this process, maybe a worker's; return where it does."""
        before, worker = self.newest, get_worker_info()
        if worker is not None:
            begin = replace(self._of_worker(worker.id, shuffled), partial=worker.num_workers > 1)
        elif before is None or before.over:
            begin = replace(self.of_loader(), partial=False)
        else:
            begin = replace(before.position(), left=before.given)
        if worker is None:
            self._shared[WORKER], self.by_loader = 0, False
        packs.begin_at(begin)
        self.newest = packs
        return begin

    def _of_worker(self, number: int, shuffled: bool) -> RunState:
        if self._shared[COMMANDS] != self.commands:
            if self._shared[LOADED]:
                raise ValueError(
                    "a state was loaded into the dataset after this worker process had been started, which does not "
                    "know it; make a new DataLoader after load_state_dict, or use persistent_workers=False"
                )
            self.commands = int(self._shared[COMMANDS])
            self.begin, self.newest = RunState(epoch=int(self._shared[EPOCH])), None
        before = self.newest
        again = before is not None and before.process == os.getpid() and not before.over
        if number == 0:  # it decides for all: the others may begin before it or after it
            again |= int(self._shared[WORKER]) not in (0, os.getpid())
            self._shared[WORKER] = os.getpid()
        begin = self._not_begun(again or self._taken)
        if again and shuffled:
            warn_user(
                f"worker processes read epoch {begin.epoch} again, in the same order; call set_epoch(epoch) of the "
                "dataset before each iteration of the DataLoader"
            )
        return begin

    def _not_begun(self, taken: bool) -> RunState:
        begin = self.following()
        if begin.loaded and taken:
            raise ValueError(UNFINISHED)
        return begin

    def given_by_loader(self, commands: int) -> None:
        """Note that a loader's iteration, which began at that number of commands, hands out a batch."""
        if commands == self.commands:
            self.begun = self.by_loader = True

    def ended_loader(self, commands: int, *, following: int) -> None:
        """Note that a loader's iteration has come to its end, and which epoch follows."""
        if commands == self.commands:
            self.begin, self.begun, self.newest = RunState(epoch=following), False, None

    def loaded_since(self, commands: int) -> RunState | None:
        """Return a state that was loaded after that number of commands and from which nobody has begun."""
        return self.begin if commands != self.commands and self.begin.loaded and not self._taken else None

    @property
    def _taken(self) -> bool:
        """Whether something was given since the newest command."""
        return self.begun or self._in_workers or (self.newest is not None and self.newest.given)

    @property
    def _in_workers(self) -> bool:
        """Whether worker processes read the dataset, and this is not one of them."""
        return get_worker_info() is None and bool(self._shared[WORKER])

    def position(self) -> RunState:
        """Return the state after the last pack that this process was given."""
        if self.by_loader:
            raise ValueError(
                "a PackedDataLoader reads this dataset and knows what it has handed out: call its state_dict(), "
                "ledger() or source_stats(), not the dataset's"
            )
        if self._in_workers:
            raise ValueError(
                "worker processes of a DataLoader read this dataset, and what they have read is not known here; use "
                "PackedDataLoader(dataset, num_workers=...), whose state_dict() counts what it has handed out, or "
                "torchdata's StatefulDataLoader"
            )
        return self.begin if self.newest is None else self.newest.position()

    def __getstate__(self) -> dict[str, Any]:
        # An iteration has files open, so it stays in its process. A copy goes on behind it; workers begin where readers
        # begin.
        if get_spawning_popen() is None and self.newest is not None and not self.newest.over:
            begin, begun = self.newest.position(), False
        else:
            begin, begun = self.following(), self._taken
        return {**self.__dict__, "newest": None, "begin": begin, "begun": begun}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # In a worker process that was spawned, nothing is left to do.
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
