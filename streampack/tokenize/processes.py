"""Worker processes that write the lanes of a folder of token shards, one lane at a time each."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from streampack.distributed.parent import end_with_parent
from streampack.tokenize.lane_shards import Job, Report, write_lane

_job: Job
_counted: Any  # how many tokens all workers have written
_failed: Any  # 1 once a worker failed


class Stopped(Exception):
    """Raised in a worker process to stop it, because another one failed."""


def write_here(job: Job, lanes: Sequence[int], report: Report, *, workers: int) -> None:
    """Write lanes on this machine, in ``workers`` processes or in this one.

    Raises:
        ValueError: as `write_lane`; the other processes are stopped then.
        RuntimeError: if a process was killed.
    """
    if workers == 1 or len(lanes) < 2:
        for lane in lanes:
            write_lane(job, lane, report)
        return
    counted, failed, reported = mp.Value("q", 0), mp.RawValue("b", 0), 0
    with ProcessPoolExecutor(min(workers, len(lanes)), None, _start, (job, counted, failed)) as pool:
        running = {pool.submit(_write, lane) for lane in lanes}
        try:
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
            failed.value = 1
            pool.shutdown(cancel_futures=True)


def _start(job: Job, counted: Any, failed: Any) -> None:
    global _job, _counted, _failed
    _job, _counted, _failed = job, counted, failed
    end_with_parent()  # a worker that waits for its next lane would not notice that the main process was killed


def _write(lane: int) -> None:
    write_lane(_job, lane, _count)


def _count(tokens: int) -> None:
    with _counted.get_lock():
        _counted.value += tokens
    if _failed.value:
        raise Stopped
