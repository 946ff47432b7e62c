"""Worker processes that write the lanes of a folder of token shards, one lane at a time each."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from streampack.distributed.parent import end_with_parent
from streampack.tokenize.lane_shards import Job, Progress, Report, write_lane


class Stopped(Exception):
    """Raised in a worker process to stop it, because another one failed."""


@dataclass
class Worker:
    """The job of a worker process, and two variables that it shares with the others."""

    job: Job
    counted: Any  # how many tokens all workers have written
    stop: Any  # 1 once a worker failed, otherwise 0

    def report(self, tokens: int) -> None:
        """Count tokens, and raise `Stopped` if another worker failed."""
        with self.counted.get_lock():
            self.counted.value += tokens
        if self.stop.value:
            raise Stopped


_worker: Worker | None = None


def _start_worker(job: Job, counted: Any, stop: Any) -> None:
    global _worker
    _worker = Worker(job, counted, stop)
    end_with_parent()  # a worker that waits for its next lane would not notice that the main process was killed


def _write_lane_in_worker(lane: int) -> Progress:
    assert _worker is not None
    return write_lane(_worker.job, lane, _worker.report)


def write_here(job: Job, lanes: Sequence[int], report: Report, *, workers: int) -> list[Progress]:
    """Write lanes on this machine, in ``workers`` processes or in this one; return their progress in the same order.

    Raises:
        ValueError: as `write_lane`; the other processes are stopped then.
        RuntimeError: if a process was killed.
    """
    if workers == 1 or len(lanes) < 2:
        return [write_lane(job, lane, report) for lane in lanes]
    return _write_in_processes(job, lanes, min(workers, len(lanes)), report)


def _write_in_processes(job: Job, lanes: Sequence[int], workers: int, report: Report) -> list[Progress]:
    counted, stop, reported = mp.Value("q", 0), mp.RawValue("b", 0), 0
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(job, counted, stop)) as pool:
        futures = [pool.submit(_write_lane_in_worker, lane) for lane in lanes]
        try:
            running = set(futures)
            while running:
                done, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
                now = counted.value  # read once: workers keep counting
                report(now - reported)
                reported = now
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process was killed, perhaps for want of memory; the same call again goes on where it stopped"
            ) from None
        finally:
            stop.value = 1
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]
