"""Train an epoch by every method of batching, on every data set, for several seeds; each row is written as it ends.

Run ``make paper`` or ``python -m benchmarks.paper``. A later call runs the open rows. A call for some of the rows
prints their table and does not write it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu.journal import KEYS, Journal
from benchmarks.gpu.machine import ROOT, ask
from benchmarks.paper import tables
from benchmarks.paper.run import Job, work
from benchmarks.paper.settings import ROWS, SMOKE, data_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the open rows and format the tables; return 1 if a row failed, else 0."""
    options = parse(arguments)
    data = {"flan": SMOKE} if options.smoke else data_of(options.device)
    jobs = [
        Job(ROWS[row], replace(settings, seed=seed))
        # The outer loop: a call that is ended early has all rows of some seeds.
        for seed in range(options.seeds)
        for name, settings in data.items()
        for row in options.rows or ROWS
        if not options.data or name in options.data
    ]
    journal = Journal(options.out / "paper.jsonl")
    machine = ask(options.device)
    call = {**machine, "call": datetime.now().isoformat(timespec="seconds")}
    if options.fresh:
        journal.forget({job.key(machine) for job in jobs})
    found = [job for job in jobs if job.key(machine) in journal.rows]
    if found:
        print(f"{len(found)} of {len(jobs)} rows are in {journal.path}; --fresh measures them again")

    def keep(job: Job, done: dict[str, Any]) -> None:
        seed = {"seed": job.settings.seed}
        journal.add({**call, **dict(zip(KEYS, job.key(machine), strict=True)), **seed, **done})

    work([job for job in jobs if job not in found], device=options.device, at_once=options.jobs, keep=keep)
    rows = [journal.rows[job.key(machine)] for job in jobs]
    text = tables.draw(data, rows)
    print(text)
    if not (
        options.smoke or options.data or options.rows
    ):  # the table of some rows would replace that of all
        print(f"\nwritten to {tables.save(text, options.device, machine['device'])}")
    return int(any(row["outcome"].startswith("failed") for row in rows))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper", description=__doc__)
    add = parser.add_argument
    add("--device", default="cpu", choices=["cpu", "cuda"], help="cuda: the paper's sizes (cpu)")
    add("--data", nargs="+", choices=list(data_of("cpu")), help="only these data sets")
    add("--rows", nargs="+", choices=list(ROWS), metavar="ROW", help=f"only these: {', '.join(ROWS)}")
    add("--seeds", type=int, default=3, help="how many, from 0 (%(default)s)")
    add("--jobs", type=int, help="rows at a time (a CPU's cores; 1 on CUDA)")
    add("--fresh", action="store_true", help="measure again what was measured")
    add("--smoke", action="store_true", help="a quick check that it runs: 48 samples, no table is written")
    add("--out", type=Path, default=ROOT / "outputs" / "paper", help="folder of the rows (outputs/paper)")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}; it must be at least 1")
    options.jobs = options.jobs or (report.cpu_count() if options.device == "cpu" else 1)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; it must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
