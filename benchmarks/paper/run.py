"""Rows in processes of their own, several in parallel."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.gpu.machine import Machine
from benchmarks.paper.settings import Row, Settings


class Job(NamedTuple):
    """A row and its settings, the seed among them."""

    row: Row
    settings: Settings

    def key(self, machine: Machine) -> tuple[str, ...]:
        """Return the row's key in the journal."""
        return machine["device"], machine["torch"], self.settings.data, self.settings.key(), self.row.name


def work(
    jobs: Sequence[Job], *, device: str, at_once: int, keep: Callable[[Job, dict[str, Any]], None]
) -> None:
    """Run each job in a process of its own, and keep its outcome.

    The processes are forked from one that has imported torch and torchtune and nothing else: the imports take as long
    as a small row.
    """
    if not jobs:
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.paper.train", "torchtune.models.llama3_2"])
    step = report.progress(len(jobs))
    step("the first rows")
    with ProcessPoolExecutor(at_once, mp_context=context, max_tasks_per_child=1) as pool:
        pending = {pool.submit(outcome_of, job, device): job for job in jobs}
        for future in as_completed(pending):
            job = pending[future]
            try:
                keep(job, future.result())
            except BrokenProcessPool:
                raise SystemExit(
                    "a row's process was killed, perhaps for its memory; the same command runs the open rows, with "
                    "--jobs 1 one at a time"
                ) from None
            step(f"{job.settings.data} {job.row.name} seed {job.settings.seed}")


def outcome_of(job: Job, device: str) -> dict[str, Any]:
    """Measure a row; return its figures, or why there are none."""
    import torch

    from benchmarks.paper.train import measure

    try:
        return measure(job.row, job.settings, device=device)
    except torch.OutOfMemoryError:
        return {"outcome": "out of memory"}
    except Exception as error:
        return {"outcome": f"failed: {type(error).__name__}: {error}".splitlines()[0]}
