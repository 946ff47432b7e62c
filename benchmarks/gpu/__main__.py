"""Run the GPU tests and the benchmark, some minutes of them; a later call runs the rows that are still open.

Run ``make gpu`` or ``python -m benchmarks.gpu``; README.md in the folder above explains the tables.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import psutil

from benchmarks import report
from benchmarks.gpu import tables
from benchmarks.gpu.settings import TESTS, Settings, parts_of, rows_of
from benchmarks.journal import KEYS, Journal, failed, settings_key, this_call

TESTS_SECONDS, ROW_SECONDS = 480, 240
LEAST_SECONDS = 15  # with less time left no row is started: importing torch takes seconds


class Job(NamedTuple):
    """A row of a part. The part that runs the tests has no settings; its rows are files of tests."""

    part: str
    settings: Settings | None
    row: str

    @property
    def limit(self) -> float:
        """Seconds that it may take."""
        return ROW_SECONDS if self.settings else TESTS_SECONDS

    def key(self, call: dict[str, str]) -> tuple[str, ...]:
        """Return the row's key in the journal. Tests run again when the code has changed."""
        settings = settings_key(self.settings) if self.settings else code_digest()
        return call["device"], call["torch"], self.part, settings, self.row

    def run(self, device: str, *, limit: float) -> dict[str, Any] | None:
        """Run it in a process of its own; return the outcome, None if the time limit ended it."""
        if self.settings is None:
            return run_tests(self.row, limit=limit)
        job = json.dumps({"row": self.row, "device": device, "settings": asdict(self.settings)})
        code, output = run_python(["-m", "benchmarks.gpu.row", job], limit=limit)
        if code is None:
            return None
        try:
            return dict(json.loads(output.splitlines()[-1]))
        except (IndexError, json.JSONDecodeError):
            return {"outcome": f"failed: ended with exit code {code}"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the open rows and format the tables; return 1 if a test or a row failed, else 0."""
    ends = time.monotonic() + 60 * (options := parse(arguments)).minutes
    parts = parts_of(options.device)
    # All tests are skipped on a CPU; one file shows that it runs.
    files = gpu_tests()[: 1 if options.device == "cpu" else None]
    jobs = [
        Job(part, settings, row)
        for part, settings in parts.items()
        for row in (files if settings is None else rows_of(options.device))
        if not options.only or {part, row} & set(options.only)
    ]
    out = options.out or (report.ROOT / "outputs" / "gpu" if options.device == "cpu" else report.RESULTS)
    journal = Journal(out / "gpu.jsonl")
    call = this_call(options.device)
    page = out / f"gpu-{report.slug(call['device'])}.md"

    if options.fresh:
        journal.forget(job.key(call) for job in jobs)

    def drawn() -> str:
        keys = {Job(part, settings, "").key(call)[:-1] for part, settings in parts.items()}
        return tables.draw(parts, [row for key, row in journal.rows.items() if key[:-1] in keys])

    left = 0
    for job in jobs:
        before = journal.rows.get(job.key(call))
        if before and not (options.retry and failed(before)):
            continue
        limit = min(job.limit, ends - time.monotonic())
        done = job.run(options.device, limit=limit) if limit >= LEAST_SECONDS else None
        if done is None and limit == job.limit:
            done = {"outcome": f"failed: still ran after {limit} s"}
        if done is None:
            left += 1
            continue
        journal.add({**call, **dict(zip(KEYS, job.key(call), strict=True)), **done})
        print(f"{job.part:12} {job.row:10} {done['outcome']}", flush=True)
        report.write(page, drawn())  # the call may end before the next row
    found = [journal.rows[job.key(call)] for job in jobs if job.key(call) in journal.rows]
    if found:
        print(f"\n{drawn()}\n\nwritten to {page}")
    if left:
        print(f"{left} of {len(jobs)} rows are open; the same command runs them")
    return int(any(map(failed, found)))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: tiny sizes, to see that it runs")
    add("--only", nargs="+", metavar="NAME", help="only these parts, or these rows of all parts")
    add("--minutes", type=float, default=9, help="time limit; rows that do not fit stay open (%(default)s)")
    add("--fresh", action="store_true", help="measure again what was measured")
    add("--retry", action="store_true", help="run failed rows again")
    add("--out", type=Path, help="folder of the results (benchmarks/results; for the CPU outputs/gpu)")
    options = parser.parse_args(arguments)
    known = (*parts_of(options.device), *rows_of(options.device))
    if unknown := [name for name in options.only or () if name not in known]:
        parser.error(f"--only: {', '.join(unknown)} unknown; choose of {', '.join(known)}")
    return options


def gpu_tests() -> list[str]:
    """Return the files with a test marked gpu; others may import packages that the machine lacks."""
    files = sorted((report.ROOT / TESTS).rglob("test_*.py"))
    return [str(path.relative_to(report.ROOT)) for path in files if "mark.gpu" in path.read_text("utf-8")]


@cache
def code_digest() -> str:
    """Return a short hash of the code that the tests depend on."""
    digest = hashlib.sha256()
    for folder in ("streampack", TESTS):
        for path in sorted((report.ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(report.ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def run_tests(file: str, *, limit: float) -> dict[str, Any] | None:
    """Run a file's tests marked gpu; return how many passed, failed and were skipped, and the failed ones' names."""
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "junit.xml"
        # Versions other than those of constraints.txt may warn of other things, which is no failure here.
        quiet = ["-q", "-W", "default", "-p", "no:cacheprovider"]
        begun = time.perf_counter()
        code, output = run_python(
            ["-m", "pytest", "-m", "gpu", *quiet, f"--junitxml={seen}", file], limit=limit
        )
        seconds = time.perf_counter() - begun
        if code is None:
            return None
        if code not in (0, 1) or not seen.exists():
            lines = output.strip().splitlines() or ["no output"]
            return {"outcome": f"failed: pytest ended with exit code {code}: {lines[-1]}"}
        return {**count(seen.read_text("utf-8")), "seconds": seconds}


def count(junit: str) -> dict[str, Any]:
    """Count the tests of a JUnit report."""
    cases = list(ElementTree.fromstring(junit).iter("testcase"))
    bad = ("failure", "error", "skipped")
    ends = [next((tag for tag in bad if case.find(tag) is not None), "passed") for case in cases]
    wrong = [case for case, end in zip(cases, ends, strict=True) if end in ("failure", "error")]
    return {
        "outcome": f"failed: {len(wrong)} of {len(cases)} tests" if wrong else "measured",
        "passed": ends.count("passed"),
        "failed": len(wrong),
        "skipped": ends.count("skipped"),
        "failures": [f"{case.get('classname')}::{case.get('name')}" for case in wrong],
    }


def run_python(arguments: Sequence[str], *, limit: float) -> tuple[int | None, str]:
    """Run Python with these arguments; return the exit code (None if the limit ended it) and standard output.

    It stays in this process's group, so that a signal to the group ends it too, and nothing is left on the GPU.
    """
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, cwd=report.ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:  # the workers of torch.compile would keep the pipe open, and memory of the GPU
            with suppress(psutil.NoSuchProcess):
                for each in (*psutil.Process(process.pid).children(recursive=True), process):
                    each.kill()
    return process.returncode, output


if __name__ == "__main__":
    sys.exit(main())
