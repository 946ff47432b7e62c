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
FIELDS = 6
"""The shared table has `ENTRIES` entries, each of the `FIELDS` integers of an `_Entry`."""
OWNER = -1
"""Marks the entry of the process that makes the workers, in place of a worker's number."""

WAITING, BEGUN, ENDED = 0, 1, 2
"""Phases of an iteration that resumes from a loaded state: it has yielded nothing, something, or everything.
Any other iteration counts as `ENDED`."""


@dataclass
class _Entry:
    """The entry of one process in the table that a dataset and its worker processes share."""

    process: int  # the process that makes the workers
    worker: int  # the worker's number, or OWNER
    version: int = 0  # how often the owner had set an epoch when this was written
    epoch: int = 0  # with which the next iteration begins
    # In a worker's entry, a number that the workers of one iteration share; in the owner's, whether it loaded a state.
    iteration: int = 0
    # In a worker's entry, the phase of its iteration; in the owner's, BEGUN if its workers iterate, and not itself.
    phase: int = ENDED


class EpochCounter:
    """Count the finished iterations of a dataset; each begins with the epoch after the last one's.

    torch's DataLoader tells a dataset of a new iteration only in its worker processes, which it makes for each
    iteration (or keeps). So a worker writes the number of the next epoch to memory that it shares with the worker that
    follows it, under the numbers of its parent process and its own. A process that is no worker counts for itself.
    Worker processes read ahead, so what they begin counts, whether or not somebody takes it to its end.

    >>> counter = EpochCounter(3)
    >>> counter.begin(3, 5)
    >>> counter.upcoming(), counter.end(5, version=counter.version), counter.upcoming()
    (3, None, 5)
    """

    def __init__(self, epoch: int = 0) -> None:
        self.next = epoch  # the epoch with which an iteration in this process begins
        self.known = 0  # the owner's version when ``next`` was set, or when this was sent to a worker process
        # Whether this is a copy, made while worker processes iterated the original.
        self.copied_from_workers = False
        self._shared = RawArray("q", ENTRIES * FIELDS)

    @property
    def version(self) -> int:
        """How often an epoch was set in this process."""
        return self._owner().version

    def upcoming(self) -> int:
        """Return the epoch that an iteration would begin with."""
        owner, worker = self._owner(), get_worker_info()
        own = [entry.epoch for entry in self._workers() if worker is not None and entry.worker == worker.id]
        before = own or [entry.epoch for entry in self._workers(before=True)]
        return max([owner.epoch if owner.version and worker is not None else self.next, *before])

    def begin(self, epoch: int, following: int, *, phase: int = ENDED) -> None:
        """Begin an iteration with an epoch; ``following`` is that of the next one."""
        self._write(epoch if get_worker_info() is None else following, phase)
        owner = self._owner()
        owner.phase = BEGUN if get_worker_info() is not None else ENDED
        self._store(owner)

    def end(self, following: int, *, version: int) -> None:
        """Count an iteration of this process that began with this `version`, unless an epoch was set since."""
        if get_worker_info() is None and version == self.version:
            self._write(max(following, self.next), ENDED)

    def set(self, epoch: int, *, loaded: bool = False) -> None:
        """Let the next iteration begin with this epoch, also in worker processes that are kept."""
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
        """Return the phase of the last iteration in worker processes since the epoch was set; WAITING without one."""
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
        """Return the entries of workers since the epoch was set; with ``before``, only those of earlier iterations."""
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
        if get_spawning_popen() is not None:
            return self.__dict__  # pickled for a worker process, which shares the table
        return {"next": self.upcoming(), "known": 0, "copied_from_workers": self.in_workers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"_shared": None, **state})
        if self._shared is None:
            self._shared = RawArray("q", ENTRIES * FIELDS)


def _iteration(worker: Any) -> int:
    """Return a number that the workers of one iteration share: the seed that torch draws for each set of workers."""
    return int(worker.seed - worker.id)


def _parent() -> int:
    parent = mp.parent_process()
    return os.getppid() if parent is None or parent.pid is None else parent.pid


def _place(process: int, worker: int) -> int:
    # If two processes share a place, each overwrites the other's entry; both then count for themselves.
    return (31 * process + worker) % ENTRIES * FIELDS
