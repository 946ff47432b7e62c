"""The epoch that each iteration begins with: iterating again is the next epoch, in torch's worker processes too."""

from __future__ import annotations

import multiprocessing as mp
import os
from dataclasses import astuple, dataclass
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any

from torch.utils.data import get_worker_info

ENTRIES = 1024
FIELDS = 6  # of an `_Entry`
OWNER = -1  # in the place of a worker's number: the entry of the loader's process

WAITING, BEGUN, ENDED = 0, 1, 2
"""Phases of an iteration that resumes from a loaded state: it has yielded nothing, something, or everything.
Any other iteration counts as `ENDED`."""


@dataclass
class _Entry:
    """One process's row of the table that a dataset and its worker processes share."""

    process: int  # of the loader
    worker: int
    version: int = 0  # how often that process has set an epoch
    epoch: int = 0  # of the next iteration
    # A number that the workers of one iteration share; of the owner: whether it loaded a state.
    iteration: int = 0
    # Of this worker's iteration; of the owner: whether its workers iterate, and not itself.
    phase: int = ENDED


class EpochCounter:
    """Count the iterations of a dataset, each from the epoch behind the one before.

    A torch DataLoader tells a dataset of a new iteration only in its worker processes, which it makes anew for each
    (or keeps). So a worker leaves the number of the next epoch in memory that it shares with its successor, under the
    number of its parent process and its own. A process that is no worker counts for itself, after a fork too.

    >>> counter = EpochCounter(3)
    >>> counter.upcoming(), counter.begin(5), counter.upcoming()
    (3, None, 5)
    """

    def __init__(self, epoch: int = 0) -> None:
        self.next = epoch  # of an iteration in this process
        self.known = 0  # the version when this was set, or sent to a worker process
        self.copied_from_workers = False  # the original's newest iteration was theirs
        self._shared = RawArray("q", ENTRIES * FIELDS)

    def upcoming(self) -> int:
        """Return the epoch that an iteration would begin with."""
        owner, worker = self._owner(), get_worker_info()
        own = [entry.epoch for entry in self._workers() if worker is not None and entry.worker == worker.id]
        before = own or [entry.epoch for entry in self._workers(before=True)]
        return max([owner.epoch if owner.version and worker is not None else self.next, *before])

    def begin(self, following: int, *, phase: int = ENDED) -> None:
        """Count an iteration; the next one begins with the epoch ``following``."""
        self._write(following, phase)
        owner = self._owner()
        owner.phase = BEGUN if get_worker_info() is not None else ENDED
        self._store(owner)

    def set(self, epoch: int, *, loaded: bool = False) -> None:
        """Let the next iteration begin with this epoch, in workers that are kept, too."""
        self.copied_from_workers = False
        if get_worker_info() is None:
            version = max(self._owner().version, self.known) + 1
            self._store(_Entry(os.getpid(), OWNER, version, epoch, iteration=int(loaded)))
        self.known = self._owner().version
        self._write(epoch, WAITING)

    def reach(self, phase: int) -> None:
        """Publish the phase of this worker's iteration from the loaded state."""
        if get_worker_info() is not None:
            self._write(self.next, phase)

    def phase(self) -> int:
        """Return the phase of the workers of an earlier iteration since the epoch was last set."""
        phases = {entry.phase for entry in self._workers(before=True)}
        return next(iter(phases)) if len(phases) == 1 else BEGUN if phases else WAITING

    @property
    def in_workers(self) -> bool:
        """Whether worker processes run the newest iteration, and this is not one of them."""
        return get_worker_info() is None and (self._owner().phase == BEGUN or self.copied_from_workers)

    def renew(self) -> bool:
        """Return whether the epoch was set after this worker process began; raise if a state was loaded after that."""
        owner = self._owner()
        if get_worker_info() is None or owner.version in (0, self.known):
            return False
        if owner.iteration:
            raise ValueError(
                "a state was loaded into the dataset after this worker process had been started, which does not know "
                "it; make a new DataLoader after load_state_dict, or use persistent_workers=False"
            )
        self.known = owner.version
        return True

    def _write(self, epoch: int, phase: int) -> None:
        self.next = epoch
        if (worker := get_worker_info()) is not None:
            self._store(_Entry(_parent(), worker.id, self._owner().version, epoch, _iteration(worker), phase))
        elif (owner := self._owner()).version:
            owner.epoch = epoch
            self._store(owner)

    def _owner(self) -> _Entry:
        """Return the entry of the process that makes the workers: this one, or this one's parent."""
        process = os.getpid() if get_worker_info() is None else _parent()
        at = _place(process, OWNER)
        entry = _Entry(*self._shared[at : at + FIELDS])
        return entry if (entry.process, entry.worker) == (process, OWNER) else _Entry(process, OWNER)

    def _workers(self, *, before: bool = False) -> list[_Entry]:
        """Return the entries of the workers since the epoch was set; ``before``: of other iterations than this."""
        owner, worker = self._owner(), get_worker_info()
        numbers = self._shared[:]
        entries = [_Entry(*numbers[at : at + FIELDS]) for at in range(0, len(numbers), FIELDS) if numbers[at]]
        return [
            entry
            for entry in entries
            if entry.process == owner.process
            and entry.worker != OWNER
            and entry.version == owner.version
            and not (before and worker is not None and entry.iteration == _iteration(worker))
        ]

    def _store(self, entry: _Entry) -> None:
        at = _place(entry.process, entry.worker)
        self._shared[at : at + FIELDS] = astuple(entry)

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:  # on the way to a worker
            return self.__dict__
        return {"next": self.upcoming(), "known": 0, "copied_from_workers": self.in_workers}  # a copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"_shared": None, **state})
        if self._shared is None:
            self._shared = RawArray("q", ENTRIES * FIELDS)


def _iteration(worker: Any) -> int:
    """Return a number that the workers of one iteration share; torch draws their seeds for each, unless they stay."""
    return int(worker.seed - worker.id)


def _parent() -> int:
    parent = mp.parent_process()
    return os.getppid() if parent is None or parent.pid is None else parent.pid


def _place(process: int, worker: int) -> int:
    # Should two share a place, each overwrites the other, and begins where its process stands.
    return (31 * process + worker) % ENTRIES * FIELDS
