"""Run the GPU tests and the benchmark in parts; each row is written as it ends, and a later call runs the open ones.

Run ``make gpu`` or ``python -m benchmarks.gpu``; README.md in the folder above explains the tables.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.gpu import tables
from benchmarks.gpu.journal import KEYS, Done, Journal
from benchmarks.gpu.machine import ROOT, Machine, ask
from benchmarks.gpu.run import code_digest, gpu_tests, run_row, run_tests
from benchmarks.gpu.settings import Settings, parts_of, rows_of

PART_SECONDS = 540
TESTS_SECONDS = 480
ROW_SECONDS = 240
LEAST_SECONDS = 15  # with less time left no row is started: importing torch takes seconds


class Job(NamedTuple):
    """A row of a part. The part that runs the tests has no settings; its rows are files of tests."""

    part: str
    settings: Settings | None
    row: str

    def key(self, machine: Machine) -> tuple[str, ...]:
        """Return the row's key in the journal."""
        settings = self.settings.key() if self.settings else code_digest()
        return machine["device"], machine["torch"], self.part, settings, self.row


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the open rows and format the tables; return 1 if a test or a row failed, else 0."""
    options = parse(arguments)
    ends = time.monotonic() + 60 * options.minutes
    parts = parts_of(options.device)
    if options.list:
        print("parts:", *parts, "\nrows:", *rows_of(options.device))
        return 0
    out = options.out or (ROOT / "outputs" / "gpu" if options.device == "cpu" else report.RESULTS)
    journal = Journal(out / "gpu.jsonl")
    machine = ask(options.device)
    call = {**machine, "call": datetime.now().isoformat(timespec="seconds")}
    files = gpu_tests()
    if options.device == "cpu":
        del files[1:]  # all tests are skipped there; one file shows that it runs
    jobs = [
        Job(part, settings, row)
        for part, settings in parts.items()
        for row in (files if settings is None else rows_of(options.device))
        if (not options.parts or part in options.parts)
        and (not options.rows or row in options.rows or settings is None)
    ]
    if options.fresh:
        journal.forget({job.key(machine) for job in jobs})

    def is_open(job: Job) -> bool:
        done = journal.rows.get(job.key(machine))
        return done is None or (options.retry and failed(done))

    def keep(job: Job, done: dict[str, Any]) -> None:
        journal.add({**call, **dict(zip(KEYS, job.key(machine), strict=True)), **done})
        print(f"{job.part:12} {job.row:10} {in_short(done)}", flush=True)
        tables.save(drawn(), machine["device"], out)  # the call may end before the next row

    def drawn() -> str:
        keys = {Job(part, settings, "").key(machine)[:-1] for part, settings in parts.items()}
        return tables.draw(parts, [row for key, row in journal.rows.items() if key[:-1] in keys])

    left = work([job for job in jobs if is_open(job)], device=options.device, ends=ends, keep=keep)
    done = [journal.rows[job.key(machine)] for job in jobs if job.key(machine) in journal.rows]
    if done:
        print(f"\n{drawn()}\n\nwritten to {tables.save(drawn(), machine['device'], out)}")
    if left:
        print(f"{len(left)} of {len(jobs)} rows are open; the same command runs them")
    return int(any(map(failed, done)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add(
        "--device",
        default="cuda",
        choices=["cuda", "cpu"],
        help="cpu: tiny sizes, a check that it runs (cuda)",
    )
    add("--parts", nargs="+", metavar="PART", help="only these parts")
    add("--rows", nargs="+", metavar="ROW", help="only these rows of the parts that have rows")
    add("--list", action="store_true", help="name the parts and rows, and stop")
    add("--minutes", type=float, default=math.inf, help="time limit; rows that do not fit stay open (none)")
    add("--fresh", action="store_true", help="drop this device's results, and measure again")
    add("--retry", action="store_true", help="run failed rows again")
    add(
        "--out", type=Path, help="folder of the rows and tables (benchmarks/results; for the CPU outputs/gpu)"
    )
    options = parser.parse_args(arguments)
    for name, chosen, known in (
        ("--parts", options.parts, tuple(parts_of(options.device))),
        ("--rows", options.rows, rows_of(options.device)),
    ):
        if unknown := [value for value in chosen or () if value not in known]:
            parser.error(f"{name}: {', '.join(unknown)} unknown; choose one of {', '.join(known)}")
    return options


def work(
    jobs: Iterable[Job], *, device: str, ends: float, keep: Callable[[Job, dict[str, Any]], None]
) -> list[Job]:
    """Run the jobs in the order of their parts, and keep each outcome; return those there was no time for."""
    left = []
    begun: dict[str, float] = {}
    for job in jobs:
        part_ends = begun.setdefault(job.part, time.monotonic()) + PART_SECONDS
        done = run_job(job, device=device, seconds=min(ends, part_ends) - time.monotonic())
        if done is None:
            left.append(job)
        else:
            keep(job, done)
    return left


def run_job(job: Job, *, device: str, seconds: float) -> dict[str, Any] | None:
    """Run a job; return its outcome, None if there was no time for it."""
    own = ROW_SECONDS if job.settings else TESTS_SECONDS
    limit = min(own, seconds)
    if limit < LEAST_SECONDS:
        return None
    if job.settings is None:
        done = run_tests(job.row, limit=limit)
    else:
        done = run_row(job.row, job.settings, device=device, limit=limit)
    if done is None and limit == own:
        return {"outcome": f"failed: still ran after {own} s"}
    return done


def failed(done: Done) -> bool:
    """Return whether a row failed. Running out of memory, and a package that is not installed, are no failures."""
    return str(done["outcome"]).startswith("failed")


def in_short(done: Done) -> str:
    """Format an outcome as one line."""
    if "tokens" in done:
        return f"{tables.rate(done):12,.0f} real tok/s"
    if "passed" in done:
        return f"{done['passed']} passed, {done['failed']} failed, {done['skipped']} skipped"
    return str(done["outcome"])


if __name__ == "__main__":
    sys.exit(main())
