"""Who writes the lanes of a folder of token shards: processes of this machine, or tasks of a Ray cluster."""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any
from uuid import uuid4

from streampack.distributed.parent import end_with_parent
from streampack.tokenize.lane_shards import Job, write_lane

RETRIES = 100
"""How often Ray starts a task again whose process or node died. A task continues after its last complete shard."""

_jobs: dict[str, Job] = {}
"""The job of a worker process by its name; a source knows from the first lane what it reads for the next ones."""

# Of a worker process on this machine:
_job: Job
_stop: Any  # its value is 1 once the others need not continue


class Stopped(Exception):
    """Raised in a worker process to stop it, because another one failed."""


def write_here(job: Job, lanes: Sequence[int], *, workers: int) -> Generator[int, None, None]:
    """Write lanes on this machine, in ``workers`` processes or in this one. Yields each that is done.

    Raises:
        ValueError: as `write_lane`; the other processes are stopped then.
        RuntimeError: if a process was killed.
    """
    if workers == 1 or len(lanes) < 2:
        for lane in lanes:
            write_lane(job, lane)
            yield lane
        return
    stop = mp.RawValue("b", 0)
    with ProcessPoolExecutor(min(workers, len(lanes)), None, _start, (job, stop)) as pool:
        try:
            for done in as_completed([pool.submit(_write, lane) for lane in lanes]):
                yield done.result()
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process was killed, perhaps for want of memory; the same call again continues from there"
            ) from None
        finally:
            stop.value = 1
            pool.shutdown(cancel_futures=True)


def _start(job: Job, stop: Any) -> None:
    global _job, _stop
    _job, _stop = job, stop
    end_with_parent()  # a worker that waits for its next lane would not notice that the main process was killed


def _write(lane: int) -> int:
    write_lane(_job, lane, between_rows=_require_running)
    return lane


def _require_running() -> None:
    if _stop.value:
        raise Stopped


def write_on_ray(job: Job, lanes: Sequence[int], *, address: str | None) -> Generator[int, None, None]:
    """Write lanes as Ray tasks, one for each free CPU at a time. Yields each that is done.

    Args:
        job: with a folder that all nodes have in common, or one behind a URL.
        lanes: to write.
        address: of a cluster, such as ``"auto"``; None: that of ``RAY_ADDRESS``, otherwise a new one on this machine.

    Raises:
        ImportError: without Ray.
        ValueError: as `write_lane`; the other tasks are stopped then.
        RuntimeError: if a task's process or node died too often.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("engine='ray' needs Ray: pip install 'streampack[ray]'") from error
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=None)
    running: list[Any] = []
    try:
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_write_task)
        # In a list, Ray passes the reference and not the job, which a process reads once for all its tasks.
        name, shared = uuid4().hex, [ray.put(job)]
        running = [task.remote(name, shared, lane) for lane in lanes]
        while running:
            [done], running = ray.wait(running)
            yield ray.get(done)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise RuntimeError(
            f"Ray gave up a task ({type(error).__name__}): {error}; the same call again continues where it stopped"
        ) from None
    finally:
        for each in running:
            ray.cancel(each, force=True)
        if started:
            ray.shutdown()


def _write_task(name: str, shared: list[Any], lane: int) -> int:
    """Write a lane; the body of a task."""
    import ray

    if name not in _jobs:
        _jobs.clear()
        _jobs[name] = ray.get(shared[0])
    write_lane(_jobs[name], lane)
    return lane
