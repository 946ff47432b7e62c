"""The lanes of a folder of token shards as tasks of a Ray cluster, whose nodes all reach the folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from streampack.tokenize.lane_shards import Job, Report, write_lane

RETRIES = 100
"""How often Ray starts a task again whose process or node died. A task goes on behind its last complete shard."""

PATIENCE = 120.0
"""Seconds that a task waits for the process of an earlier attempt, which may outlive its node's death for a while."""

_jobs: dict[str, Job] = {}
"""The job of a worker process by its name; a source knows from the first lane what it reads for the next ones."""


def write_on_ray(job: Job, lanes: Sequence[int], report: Report, *, address: str | None) -> None:
    """Write lanes as Ray tasks, one for each free CPU at a time.

    Args:
        job: with a folder that all nodes have in common, or one behind a URL.
        lanes: to write.
        report: called with the number of tokens of each lane that is done.
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
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_write)
        # In a list, Ray passes the reference and not the job, which a process reads once for all its tasks.
        name, shared = uuid4().hex, [ray.put(job)]
        running = [task.remote(name, shared, lane) for lane in lanes]
        while running:
            [done], running = ray.wait(running)
            report(ray.get(done))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise RuntimeError(
            f"Ray gave up a task ({type(error).__name__}): {error}; the same call again goes on where it stopped"
        ) from None
    finally:
        for each in running:
            ray.cancel(each, force=True)
        if started:
            ray.shutdown()


def _write(name: str, shared: list[Any], lane: int) -> int:
    """Write a lane and return its new tokens; the body of a task."""
    import ray

    if name not in _jobs:
        _jobs.clear()
        _jobs[name] = ray.get(shared[0])
    written: list[int] = []
    write_lane(_jobs[name], lane, written.append, patience=PATIENCE)
    return sum(written)
