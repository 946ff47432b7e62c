"""The lanes of a folder of token shards as tasks of a Ray cluster, whose nodes have the folder in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streampack.tokenize.lane_shards import Job, Progress, Report, write_lane

RETRIES = 100
"""How often Ray starts a task again whose process or node died. A task goes on behind its last complete shard."""

PATIENCE = 120.0
"""Seconds that a task waits for the process of an earlier attempt, which may outlive its node's death for a while."""

POLL = 0.5
"""Seconds between two looks at the counter."""


class Counter:
    """An actor that adds up the tokens that all tasks have written."""

    def __init__(self) -> None:
        self.tokens = 0

    def add(self, tokens: int) -> None:
        """Count tokens."""
        self.tokens += tokens

    def read(self) -> int:
        """Return how many were counted."""
        return self.tokens


def write_on_ray(job: Job, lanes: Sequence[int], report: Report, *, address: str | None) -> list[Progress]:
    """Write lanes as Ray tasks, one for each free CPU at a time; return their progress in the same order.

    Args:
        job: on a folder that all nodes have in common.
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
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError as error:
        raise ImportError("engine='ray' needs Ray: pip install 'streampack[ray]'") from error
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", include_dashboard=None)
    try:
        # On the node of this process: the counter is lost only if all is.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        counter = ray.remote(num_cpus=0, scheduling_strategy=here)(Counter).remote()
        shared = ray.put(job)
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_write)
        pending = [task.remote(shared, lane, counter) for lane in lanes]
        done: dict[Any, Progress] = {}
        counted = 0
        running = pending
        try:
            while running:
                ready, running = ray.wait(running, num_returns=len(running), timeout=POLL)
                done |= {each: ray.get(each) for each in ready}
                now = ray.get(counter.read.remote())
                report(now - counted)
                counted = now
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


def _write(job: Job, lane: int, counter: Any) -> Progress:
    """Write a lane; the body of a task."""
    return write_lane(
        job, lane, lambda tokens: counter.add.remote(tokens) if tokens else None, patience=PATIENCE
    )
