"""Train an epoch by every method of batching, on every data set, for several seeds.

Run ``make paper`` or ``python -m benchmarks.paper``. A call for some of the data prints their table and does not write
it.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.paper import tables
from benchmarks.paper.settings import DATA, ROWS, SMOKE, Settings


class Job(NamedTuple):
    """A row and its settings, the seed among them."""

    row: str
    settings: Settings


def measured(jobs: Sequence[Job], *, at_once: int) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Measure each row in a process of its own, and yield it with its figures as it ends.

    The processes are forked from one that has imported torch and torchtune and nothing else: the imports take as long
    as a small row.
    """
    from benchmarks.paper.train import measure

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.paper.train", "torchtune.models.llama3_2"])
    step = report.progress(len(jobs))
    with ProcessPoolExecutor(at_once, mp_context=context, max_tasks_per_child=1) as pool:
        pending = {pool.submit(measure, ROWS[job.row], job.settings): job for job in jobs}
        for future in as_completed(pending):
            job = pending[future]
            step(f"{job.settings.data} {job.row} seed {job.settings.seed}")
            yield job, future.result()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the open rows and format the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__)
    add = parser.add_argument
    add("--data", nargs="+", choices=list(DATA), help="only these data sets")
    add("--seeds", type=int, default=3, help="how many, from 0 (%(default)s)")
    add("--jobs", type=int, default=report.cpu_count(), help="rows at a time (the machine's cores)")
    add("--smoke", action="store_true", help="a quick check that it runs: 48 samples, no table is written")
    add("--out", type=Path, help="folder of the result file (benchmarks/results)")
    options = parser.parse_args(arguments)
    data = {"flan": SMOKE} if options.smoke else DATA
    jobs = [
        Job(row, replace(settings, seed=seed))
        # The outer loop: a call that is ended early has all rows of some seeds.
        for seed in range(options.seeds)
        for name, settings in data.items()
        for row in ROWS
        if not options.data or name in options.data
    ]
    done = [
        {"part": job.settings.data, "row": job.row, "seed": job.settings.seed, **found}
        for job, found in measured(jobs, at_once=options.jobs)
    ]
    text = tables.draw(data, done)
    print(text)
    if options.out or not (options.smoke or options.data):  # the table of some data would replace that of all
        print(f"\nwritten to {report.write((options.out or report.RESULTS) / report.page_of('paper'), text)}")


if __name__ == "__main__":
    main()
