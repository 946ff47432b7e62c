"""Which epoch an iteration begins with: iterating again is the next one, in the worker processes of torch too."""

from __future__ import annotations

import multiprocessing as mp
import os
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any

from torch.utils.data import get_worker_info

ENTRIES = 1024
FIELDS = 4  # of an entry: process, worker, version, epoch
OWNER = -1  # in the place of a worker's number: the entry of what the loader's process has set


class EpochCounter:
    """Count the iterations of a dataset, each from the epoch behind the one before.

    A torch DataLoader tells a dataset of a new iteration only in its worker processes, which it makes anew for each
    (or keeps). So a worker leaves the number of the next epoch in memory that it shares with its successor, under the
    number of its parent process and its own. A process that is no worker counts for itself, after a fork too.

    >>> counter = EpochCounter(3)
    >>> counter.upcoming(), counter.begin(epochs=2), counter.upcoming()
    (3, None, 5)
    """

    def __init__(self, epoch: int = 0) -> None:
        self.next = epoch  # of an iteration in this process
        self._shared = RawArray("q", ENTRIES * FIELDS)

    def upcoming(self) -> int:
        """Return the epoch that an iteration would begin with."""
        if (worker := get_worker_info()) is None:
            return self.next
        version, epoch = self._set_by(_parent())
        entry = self._entry(_parent(), worker.id)
        if entry[:3] == [_parent(), worker.id, version]:
            return entry[3]
        return epoch if version else self.next

    def begin(self, *, epochs: int) -> None:
        """Count an iteration of so many epochs; the next begins behind them."""
        self._write(self.upcoming() + epochs)

    def set(self, epoch: int) -> None:
        """Let the next iteration begin with this epoch, in workers that are kept, too."""
        self._write(epoch)
        if get_worker_info() is None:
            version, _ = self._set_by(os.getpid())
            self._store(os.getpid(), OWNER, version + 1, epoch)

    def _write(self, epoch: int) -> None:
        self.next = epoch
        if (worker := get_worker_info()) is not None:
            version, _ = self._set_by(_parent())
            self._store(_parent(), worker.id, version, epoch)

    def _set_by(self, process: int) -> tuple[int, int]:
        """How often that process has set an epoch, and which."""
        owner, number, version, epoch = self._entry(process, OWNER)
        return (version, epoch) if (owner, number) == (process, OWNER) else (0, 0)

    def _entry(self, process: int, worker: int) -> list[int]:
        at = _place(process, worker)
        return list(self._shared[at : at + FIELDS])

    def _store(self, process: int, worker: int, version: int, epoch: int) -> None:
        at = _place(process, worker)
        self._shared[at : at + FIELDS] = [process, worker, version, epoch]

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:  # on the way to a worker
            return self.__dict__
        return {"next": self.next}  # a copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"_shared": None, **state})
        if self._shared is None:
            self._shared = RawArray("q", ENTRIES * FIELDS)


def _parent() -> int:
    parent = mp.parent_process()
    return os.getppid() if parent is None or parent.pid is None else parent.pid


def _place(process: int, worker: int) -> int:
    # Should two share a place, each overwrites the other, and begins where its process stands.
    return (31 * process + worker) % ENTRIES * FIELDS
