"""The lanes of a folder of token shards as tasks of a Ray cluster, whose nodes all reach the folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import numpy as np

from streampack.sources.token_files import HEADER_BYTES
from streampack.tokenize.lane_shards import ENDING, Job, Progress, Report, write_lane

RETRIES = 100
"""How often Ray starts a task again whose process or node died. A task goes on behind its last complete shard."""

PATIENCE = 120.0
"""Seconds that a task waits for the process of an earlier attempt, which may outlive its node's death for a while."""


def write_on_ray(job: Job, lanes: Sequence[int], report: Report, *, address: str | None) -> list[Progress]:
    """Write lanes as Ray tasks, one for each free CPU at a time; return their progress in the same order.

    Args:
        job: with a folder that all nodes have in common, or one behind a URL.
        lanes: to write.
        report: called with the number of tokens written since its last call.
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
    try:
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_write)
        # In a list, Ray passes the reference and not the job, which a process reads once for all its tasks.
        name, shared = uuid4().hex, [ray.put(job)]
        pending = [task.remote(name, shared, lane) for lane in lanes]
        done: dict[Any, Progress] = {}
        seen = _tokens_written(job)
        running = pending
        try:
            while running:
                ready, running = ray.wait(running, num_returns=len(running), timeout=job.folder.poll)
                done |= {each: ray.get(each) for each in ready}
                now = max(seen, _tokens_written(job))  # less while a task writes a shard again
                report(now - seen)
                seen = now
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise RuntimeError(
                f"Ray gave up a task ({type(error).__name__}): {error}; the same call again goes on where it stopped"
            ) from None
        finally:
            for each in running:
                ray.cancel(each, force=True)
        return [done[each] for each in pending]
    finally:
        if started:
            ray.shutdown()


_jobs: dict[str, Job] = {}
"""The job of a worker process by its name; a source knows from the first lane what it reads for the next ones."""


def _write(name: str, shared: list[Any], lane: int) -> Progress:
    """Write a lane; the body of a task."""
    import ray

    if name not in _jobs:
        _jobs.clear()
        _jobs[name] = ray.get(shared[0])
    return write_lane(_jobs[name], lane, _silent, patience=PATIENCE)


def _silent(tokens: int) -> None:
    """Take a task's report of its progress, which the process that waits for all tasks sees in the folder."""


def _tokens_written(job: Job) -> int:
    """Return about how many tokens are in the folder, by the sizes of its shards, also of those not complete."""
    width = np.dtype(job.plan["dtype"]).itemsize
    return sum(max(0, size - HEADER_BYTES) // width for size in job.folder.written(ENDING))
