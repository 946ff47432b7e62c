"""Where those begin who read a dataset: this process, by itself or by a loader, or worker processes of torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from streampack.accounting import Ledger
from streampack.packing.batch import to_torchtune
from streampack.streaming.lane_state import LaneEvent
from streampack.streaming.run_state import RunState
from streampack.validation import warn_user

COMMANDS, EPOCH, LOADED, WORKER, UNTRAINED = range(5)
ANEW = "an exception has cut this iteration short; iterate anew, which goes on behind what it gave"


class PackDicts:
    """Iterate over the packs of a dataset as dicts in torchtune's format. A failed conversion consumes no pack.

    Args:
        start: is called for the first pack, so that an iterator that gives nothing changes nothing. It returns where
            `Readers.start` lets it begin, and what the lanes give from there on.
        readers: are told what was handed out.
        look_at: is called with the ledger after each pack.
    """

    def __init__(
        self,
        start: Callable[[], tuple[RunState, Iterator[LaneEvent]]],
        *,
        readers: Readers,
        look_at: Callable[[Ledger], None],
    ) -> None:
        self._start, self._readers, self._look_at = start, readers, look_at
        self._empty = True
        self._broken = False  # whether the newest call raised, or is under way
        self._events: Iterator[LaneEvent] | None = None

    def __iter__(self) -> PackDicts:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._broken:
            raise RuntimeError(ANEW)
        self._broken = True
        readers = self._readers
        if self._events is None:
            begin, self._events = self._start()
            self._lane_states, self._turn = dict(begin.lane_states), readers.turn
            self._handed = replace(begin, lane_states=self._lane_states, given=True)
        for event in self._events:
            if event.pack is not None:
                self._look_at(event.state.ledger)
                given = to_torchtune(event.pack)
                self._empty = False
                # CPython checks for signals at calls and loops. There are none between here and the return, so no
                # KeyboardInterrupt can come between recording a pack and returning it (tests/loader/test_interrupts.py)
                self._lane_states[event.lane], self._broken = event.state, False
                if self._turn == readers.turn:
                    readers.state = self._handed
                return given
            self._lane_states[event.lane] = event.state
        if self._turn == readers.turn:
            if self._empty:
                readers.state.warn_if_left()
            readers.state = replace(self._handed, over=True)
        self._broken = False
        raise StopIteration


class Readers:
    """Where a dataset stands: at the newest command (``set_epoch``, ``load_state_dict``, ...), or behind what was read.

    Each iteration in this process, of the dataset or of a loader, goes on behind what the newest one has handed out.
    torch's DataLoader copies the dataset into its worker processes when it starts them, and they tell it nothing. So
    the command also lies in memory that they share: workers that are kept (``persistent_workers``) see there what was
    set since they began, and new ones that others have read before them.

    Args:
        epochs: of an iteration.
    """

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        # Behind what the newest iteration in this process has handed out, or of a newer command.
        self.state = RunState()
        # The number of commands and iterations: an iteration may set the state while this is what it was when it began.
        self.turn = 0
        self.begin, self.process = self.state, 0  # where the newest iteration began, and in which process
        self.commands = 0  # that this process knows
        # The number of commands; the epoch of the newest; whether it loaded a state; and the process id of the first
        # worker process that has read since, or 0; whether untrained samples were warned of.
        self._shared: torch.Tensor = torch.zeros(5, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]

    def command(self, begin: RunState) -> None:
        """Let whoever iterates next begin here."""
        self.state, self.process, self.turn = begin, 0, self.turn + 1
        worker = get_worker_info()
        if worker is None:
            self.commands = int(self._shared[COMMANDS]) + 1
            self._shared[:UNTRAINED] = torch.tensor([self.commands, begin.epoch, begin.loaded, 0])
        elif worker.id == 0:
            # torchdata's loader loads a state in each of its workers, which is for them alone.
            self._shared[WORKER] = os.getpid()

    def first_untrained(self) -> bool:
        """Return whether this is the first call in any process that reads the dataset; two at once may both be."""
        first = not self._shared[UNTRAINED]
        self._shared[UNTRAINED] = 1
        return first

    def set_epoch(self, epoch: int) -> None:
        """Let whoever iterates next begin with this epoch; a loaded state of the same, not begun yet, is kept."""
        state = self.state
        kept = state.loaded and not state.given and epoch == state.epoch and not self._in_workers
        self.command(state if kept else RunState(epoch=epoch))

    def following(self) -> RunState:
        """Return where the next iteration begins: at the state, or with the next epoch if the newest one has ended."""
        state = self.state
        return RunState(epoch=state.epoch + self.epochs) if state.over else state

    def start(self, *, shuffled: bool = False) -> RunState:
        """Let an iteration begin in this process, maybe a worker's; return where it does."""
        if (worker := get_worker_info()) is not None:
            begin = replace(self._of_worker(worker.id, shuffled), partial=worker.num_workers > 1)
        else:
            begin = self.following()
            if begin.loaded and self._in_workers:
                raise ValueError(_unfinished())
            self._shared[WORKER] = 0
        self.state = self.begin = replace(begin, lane_states=dict(begin.lane_states))
        self.process, self.turn = os.getpid(), self.turn + 1
        return begin

    def _of_worker(self, number: int, shuffled: bool) -> RunState:
        if self._shared[COMMANDS] != self.commands:
            if self._shared[LOADED]:
                raise ValueError(
                    "a state was loaded into the dataset after this worker process had been started, which does not "
                    "know it; make a new DataLoader after load_state_dict, or use persistent_workers=False"
                )
            self.commands = int(self._shared[COMMANDS])
            self.state, self.process = RunState(epoch=int(self._shared[EPOCH])), 0
        # What this process gave in another iteration may not have arrived.
        again = self.process == os.getpid() and not self.state.over
        begin = self.begin if again else self.following()
        if number == 0:  # it decides for all: the others may begin before it or after it
            again |= int(self._shared[WORKER]) not in (0, os.getpid())
            self._shared[WORKER] = os.getpid()
        if again and begin.loaded:
            raise ValueError(_unfinished())
        if again and shuffled:
            warn_user(
                f"worker processes read epoch {begin.epoch} again, in the same order; call set_epoch(epoch) of the "
                "dataset before each iteration of the DataLoader"
            )
        return begin

    @property
    def _in_workers(self) -> bool:
        """Whether worker processes read the dataset, and this is not one of them."""
        return get_worker_info() is None and bool(self._shared[WORKER])

    def whole_state(self) -> RunState:
        """Return the `state`; raise if others have read what this process knows nothing of."""
        if self._in_workers:
            raise ValueError(
                "worker processes of a DataLoader read this dataset, and what they have read is not known here; use "
                "PackedDataLoader(dataset, num_workers=...), whose state_dict() counts what it has handed out, or "
                "torchdata's StatefulDataLoader"
            )
        if self.state.partial and self.process and get_worker_info() is None:
            raise ValueError(
                "a PackedDataLoader reads this dataset on several ranks, each of which has some of the lanes: call its "
                "state_dict(), ledger() or source_stats(), not the dataset's"
            )
        # Of a worker that has given nothing, too: others may have.
        worker = get_worker_info()
        return replace(self.state, partial=True) if worker and worker.num_workers > 1 else self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # In a worker process that was spawned, nothing is left to do.
        self._shared.share_memory_()  # type: ignore[no-untyped-call]


def _unfinished() -> str:
    return (
        "worker processes began from the loaded state, and where they stopped is not known here, so another iteration "
        "would begin elsewhere than the state says; load the state again to begin from it again, or call "
        "set_epoch(epoch) of the dataset to read an epoch from its beginning"
    )
