"""Where those begin who read a dataset: this process, a `PackedDataLoader`, or worker processes of torch."""

from __future__ import annotations

import os
from multiprocessing.context import get_spawning_popen
from typing import Any

import torch
from torch.utils.data import get_worker_info

from streampack.streaming.iteration import PackDicts
from streampack.streaming.loaded_state import RunState
from streampack.validation import warn_user

COMMANDS, EPOCH, LOADED, WORKER = range(4)

UNFINISHED = (
    "an iteration began from the loaded state and stopped before its end, so another one would begin elsewhere than "
    "the state says. To begin from the state again, load it again; to go on behind what that iteration gave, call "
    "load_state_dict(state_dict()) first; to read an epoch from its beginning, call set_epoch(epoch) of the dataset"
)


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
        """Return where a loader begins that has not read since the newest command.

        Raises:
            ValueError: if another iteration has begun from a loaded state and has not come to its end.
        """
        begin = self.following()
        if begin.loaded and self._taken:
            raise ValueError(UNFINISHED)
        return begin

    def of_this_process(self) -> RunState:
        """Return where an iteration of the dataset begins in this process: behind the newest, if it was left.

        Raises:
            ValueError: as `of_loader`.
        """
        newest = self.newest
        begin = self.of_loader() if newest is None or newest.over else newest.left()
        self._shared[WORKER], self.by_loader = 0, False
        return begin

    def of_worker(self, *, shuffled: bool) -> RunState:
        """Return where an iteration begins in this worker process of torch.

        Raises:
            ValueError: as `of_loader`, or if a state was loaded after this process began.
        """
        if self._shared[COMMANDS] != self.commands:
            if self._shared[LOADED]:
                raise ValueError(
                    "a state was loaded into the dataset after this worker process had been started, which does not "
                    "know it; make a new DataLoader after load_state_dict, or use persistent_workers=False"
                )
            self.commands = int(self._shared[COMMANDS])
            self.begin, self.newest = RunState(epoch=int(self._shared[EPOCH])), None
        newest = self.newest
        again = newest is not None and newest.process == os.getpid() and not newest.over
        worker = get_worker_info()
        # The first worker decides for all: the others may begin before it or after it.
        if worker is not None and worker.id == 0:
            again |= int(self._shared[WORKER]) not in (0, os.getpid())
            self._shared[WORKER] = os.getpid()
        begin = self.following()
        if begin.loaded and (again or self._taken):
            raise ValueError(UNFINISHED)
        if again and shuffled:
            warn_user(
                f"worker processes read epoch {begin.epoch} again, in the same order; call set_epoch(epoch) of the "
                "dataset before each iteration of the DataLoader"
            )
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
        return self.begun or self.in_workers or (self.newest is not None and self.newest.given)

    @property
    def in_workers(self) -> bool:
        """Whether worker processes read the dataset, and this is not one of them."""
        return get_worker_info() is None and bool(self._shared[WORKER])

    def position(self) -> RunState:
        """Return the state after the last pack that this process was given.

        Raises:
            ValueError: if a loader or worker processes iterate the dataset, because then only they know it.
        """
        if self.by_loader:
            raise ValueError(
                "a PackedDataLoader reads this dataset and knows what it has handed out: call its state_dict(), "
                "ledger() or source_stats(), not the dataset's"
            )
        if self.in_workers:
            raise ValueError(
                "worker processes of a DataLoader read this dataset, and what they have read is not known here; use "
                "PackedDataLoader(dataset, num_workers=...), whose state_dict() counts what it has handed out, or "
                "torchdata's StatefulDataLoader"
            )
        return self.begin if self.newest is None else self.newest.position()

    def __getstate__(self) -> dict[str, Any]:
        # An iteration has files open, so it stays in its process. A copy goes on behind it; workers begin where readers
        # begin.
        newest = self.newest
        if get_spawning_popen() is None and newest is not None and not newest.over:
            return {**self.__dict__, "newest": None, "begin": newest.position(), "begun": False}
        return {**self.__dict__, "newest": None, "begin": self.following(), "begun": self._taken}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # In a worker process that was spawned, nothing is left to do.
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
