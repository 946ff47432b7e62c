"""The read position of a dataset, which all iterations over it share, in this process and in workers of torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from streampack.streaming.run_state import Phase, RunState
from streampack.validation import warn_user

COMMANDS, EPOCH, IN_EPOCH, WORKER, UNTRAINED = range(5)
UNFINISHED = (
    "worker processes began in the middle of an epoch, and where they stopped is not known here, so another iteration "
    "would begin elsewhere than the state says; load the state again to begin from it again, or call "
    "set_epoch(epoch) of the dataset to read an epoch from its beginning"
)
CUT_SHORT = (
    "an exception has cut this iteration short; iterate again to continue after the last pack it yielded"
)


@dataclass(slots=True)
class Progress:
    """How far an iteration has come. Only the iteration itself replaces ``state``."""

    begin: RunState
    state: RunState  # after the last pack or batch that it yielded
    process: int = 0  # that iterates; 0: no iteration has begun here yet


class Position:
    """Position at which the next iteration over a dataset begins: that of the newest iteration or command.

    Commands are ``set_epoch``, ``load_state_dict`` and ``continue_from``. The progress of older iterations is ignored.

    torch's DataLoader copies the dataset into its worker processes when it starts them, and they report nothing. So the
    newest command is also in memory that they share: workers that are kept (``persistent_workers``) see there what was
    set after they began, and new ones that others have read before them.

    Args:
        epochs: of an iteration.
    """

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.newest = Progress(RunState(), RunState())
        self.commands = 0  # that this process knows
        # The number of commands; the epoch of the newest; whether it is in the middle of an epoch; the process id of
        # the first worker process that has read since, or 0; whether untrained samples were warned of.
        self._shared: torch.Tensor = torch.zeros(5, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def state(self) -> RunState:
        """The state of the newest iteration or command."""
        return self.newest.state

    def command(self, begin: RunState) -> None:
        """Let the next iteration begin here."""
        self.newest = Progress(begin, begin)
        worker = get_worker_info()
        if worker is None:
            self.commands = int(self._shared[COMMANDS]) + 1
            self._shared[:UNTRAINED] = torch.tensor([self.commands, begin.epoch, begin.in_epoch, 0])
        elif worker.id == 0:
            # torchdata's loader loads a state in each of its workers, which is for them alone.
            self._shared[WORKER] = os.getpid()

    def first_untrained(self) -> bool:
        """Return whether this is the first call in any process that reads the dataset; two at once may both be."""
        first = not self._shared[UNTRAINED]
        self._shared[UNTRAINED] = 1
        return first

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin with this epoch; a loaded state of the same epoch, not begun yet, is kept."""
        kept = self.state.phase is Phase.LOADED and epoch == self.state.epoch and not self._in_workers
        self.command(self.state if kept else RunState(epoch=epoch))

    def following(self) -> RunState:
        """Return where the next iteration begins: at the state, or with the next epoch if the newest one has ended."""
        state = self.state
        return RunState(epoch=state.epoch + self.epochs) if state.phase is Phase.ENDED else state

    def start(self, *, shuffled: bool = False) -> Progress:
        """Let an iteration begin in this process, perhaps a worker's; return its progress."""
        if (worker := get_worker_info()) is not None:
            begin = replace(self._of_worker(worker.id, shuffled), partial=worker.num_workers > 1)
        else:
            begin = self.following()
            if begin.in_epoch and self._in_workers:
                raise ValueError(UNFINISHED)
            self._shared[WORKER] = 0
        begin = replace(begin, lane_states=dict(begin.lane_states))
        self.newest = Progress(begin, begin, os.getpid())
        return self.newest

    def _of_worker(self, number: int, shuffled: bool) -> RunState:
        if self._shared[COMMANDS] != self.commands:
            if self._shared[IN_EPOCH]:
                raise ValueError(
                    "a state was loaded into the dataset after this worker process had been started, which does not "
                    "know it; make a new DataLoader after load_state_dict, or use persistent_workers=False"
                )
            self.commands = int(self._shared[COMMANDS])
            begin = RunState(epoch=int(self._shared[EPOCH]))
            self.newest = Progress(begin, begin)
        # What this process gave in another iteration may not have arrived.
        again = self.newest.process == os.getpid() and self.state.phase is not Phase.ENDED
        begin = self.newest.begin if again else self.following()
        if number == 0:  # it decides for all: the others may begin before it or after it
            again |= int(self._shared[WORKER]) not in (0, os.getpid())
            self._shared[WORKER] = os.getpid()
        if again and begin.in_epoch:
            raise ValueError(UNFINISHED)
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

    def complete_state(self) -> RunState:
        """Return the `state`; raise if other processes have read what this one knows nothing of."""
        if self._in_workers:
            raise ValueError(
                "worker processes of a DataLoader read this dataset, and what they have read is not known here; use "
                "PackedDataLoader(dataset, num_workers=...), whose state_dict() counts what it has yielded, or "
                "torchdata's StatefulDataLoader"
            )
        worker = get_worker_info()
        if self.state.partial and self.newest.process and worker is None:
            raise ValueError(
                "a PackedDataLoader reads this dataset on several ranks, and each has some of the lanes: call its "
                "state_dict(), ledger() or source_stats(), not the dataset's"
            )
        # Of a worker that has given nothing, too: others may have.
        return replace(self.state, partial=True) if worker and worker.num_workers > 1 else self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # In a worker process that was spawned, nothing is left to do.
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
