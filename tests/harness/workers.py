"""Worker processes for tests, and what /proc shows of them."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from streampack import IterablePackedDataset, Sample
from streampack.lanes.lane_state import LaneEvent
from streampack.loader.workers import start_worker  # private: processes that are killed at any moment
from tests.harness.corpus import Numbers, plain, rows

ROWS = rows(60)


def dataset(source: Any = ROWS, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(
        source,
        **{"max_seq_len": 24, "buffer_size": 6, "encoder": Numbers(), "num_lanes": 2, "shuffle": True}
        | settings,
    )


def worker(
    of: IterablePackedDataset, *, consumer: int = 0, consumers: int = 1, lane_states: Any = None
) -> Generator[LaneEvent]:
    stream = partial(of.events, consumer, consumers, epoch=of.epoch)
    return start_worker(stream, lane_states or {}, f"worker {consumer} of {consumers}")


def process_of(number: int = 0, of: int = 1) -> Any:
    """The process of a worker. One that was interrupted while it was waited for stays in multiprocessing's list."""
    named = [each for each in mp.active_children() if each.name == f"worker {number} of {of}"]
    [process] = [each for each in named if state_of(each.pid or 0)]
    return process


def content(event: LaneEvent) -> tuple[Any, ...]:
    return event.lane, event.epoch, event.pack and plain(event.pack), event.state


def expected(of: IterablePackedDataset, consumer: int = 0, consumers: int = 1) -> list[tuple[Any, ...]]:
    """The same stream in this process."""
    return list(map(content, of.events(consumer, consumers)))


def state_of(pid: int) -> str | None:
    """What /proc says of a process; None if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def gone(pids: list[int], *, within: float) -> bool:
    """Whether all are dead by then; a zombie only waits for someone to ask for its exit code."""
    deadline = time.monotonic() + within
    while any(state_of(pid) not in (None, "Z", "X") for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


def held() -> dict[str, Any]:
    """All that a worker could leave behind."""
    return {
        "children": children(),
        "threads": {*threading.enumerate()},
        "descriptors": {
            entry.name: str(entry.readlink())
            for entry in Path("/proc/self/fd").iterdir()
            if entry.is_symlink() and "/proc/" not in str(entry.readlink())
        },
    }


class Deadly:
    """Rows, one of which kills the process that reads it, so many times."""

    def __init__(self, folder: Path, *, at: int, times: int = 1, by: Callable[[], Any] | None = None) -> None:
        self.folder, self.at, self.times, self.by = folder, at, times, by
        self.home = os.getpid()

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, i: int) -> dict[str, int]:
        if i == self.at and os.getpid() != self.home and (deaths := count_files(self.folder)) < self.times:
            (self.folder / str(deaths)).touch()
            (self.by or die)()
        return ROWS[i]


class DeadlyRow(Numbers):
    """An encoder that kills its process at one row, every time."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        if row["i"] == self.at:
            die()
        return super().__call__(row)


def count_files(folder: Path) -> int:
    return len(list(folder.iterdir()))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
