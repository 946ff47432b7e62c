"""Check and measure on one GPU within nine minutes, in order of worth, and write one table: ``make gpu``.

README.md in the folder above explains the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil

from benchmarks import report
from benchmarks.gpu.settings import CPU_PARTS, PARTS, PROBE, ROWS, TESTS, plan_of

ROW_SECONDS = 240  # the most for one row
LEAST_SECONDS = 15  # with less time left no row is started: importing torch takes seconds
HEADER = (
    "lengths | what | outcome | real tok/s | x padding | of ceiling | step ms | peak GiB | waits | graphs | "
    "padding | seconds"
)
Done = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what fits into the time and write the table; return 1 if anything failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    add = parser.add_argument
    add("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: tiny sizes, to see that it runs")
    add("--only", nargs="+", metavar="NAME", help="only these parts (probe, tests, flan, orca) or rows")
    add("--minutes", type=float, default=9, help="time limit; the rest is skipped (%(default)s)")
    add("--out", type=Path, help="folder of the result (benchmarks/results; for the CPU outputs/gpu)")
    options = parser.parse_args(arguments)
    ends = time.monotonic() + 60 * options.minutes
    on_cpu = options.device == "cpu"
    plan = [
        job for job in plan_of(options.device, gpu_tests()) if not options.only or {*job} & {*options.only}
    ]
    about = described(options.device)
    out = options.out or (report.ROOT / "outputs" / "gpu" if on_cpu else report.RESULTS)
    page = out / f"gpu-{report.slug(about['device'])}.md"
    done: list[Done] = []
    for part, row in plan:
        limit = min(ROW_SECONDS, ends - time.monotonic())
        if limit < LEAST_SECONDS:
            done.append({"part": part, "row": row, "outcome": "not reached"})
            continue
        begun = time.monotonic()
        found = (
            run_tests(row, limit=limit) if part == TESTS else run_row(part, row, options.device, limit=limit)
        )
        seconds = time.monotonic() - begun
        done += [{"part": part, "row": row, "seconds": seconds, **each} for each in found]
        print(
            *(f"{part:6} {each['row']:12} {each['outcome']}" for each in done[-len(found) :]),
            sep="\n",
            flush=True,
        )
        report.write(page, draw(about, done))  # the call may end before the next row
    print(f"\n{draw(about, done)}\n\nwritten to {page}")
    return int(any(each["outcome"].startswith("failed") for each in done))


def gpu_tests() -> list[str]:
    """Return the files with a test marked gpu; others may import packages that the machine lacks."""
    files = sorted((report.ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(report.ROOT)) for path in files if "mark.gpu" in path.read_text("utf-8")]


def described(device: str) -> dict[str, str]:
    """Return the device's name and a line about the machine, from a process of its own."""
    code, output = run_python(["-m", "benchmarks.gpu.row", json.dumps({"device": device})], limit=120)
    if code != 0:
        raise SystemExit(f"torch sees no device {device}; set DEVICE=cpu, or find one")
    return dict(json.loads(output.splitlines()[-1]))


def run_row(part: str, row: str, device: str, *, limit: float) -> list[Done]:
    """Run a row of figures, or the probe of all backends, in a process of its own; return the outcomes."""
    settings = (CPU_PARTS if device == "cpu" else PARTS).get(part)
    job = {"device": device, "row": row, "settings": settings and asdict(settings)}
    code, output = run_python(["-m", "benchmarks.gpu.row", json.dumps(job)], limit=limit)
    if code is None:
        return [{"row": row, "outcome": f"failed: still ran after {limit:.0f} s"}]
    try:
        return list(json.loads(output.splitlines()[-1]))
    except (IndexError, json.JSONDecodeError):
        return [{"row": row, "outcome": f"failed: ended with exit code {code}"}]


def run_tests(file: str, *, limit: float) -> list[Done]:
    """Run a file's tests marked gpu; return how many passed and were skipped, and the names of those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "junit.xml"
        # Versions other than those of constraints.txt may warn of other things, which is no failure here.
        quiet = ["-q", "-W", "default", "-p", "no:cacheprovider", f"--junitxml={seen}"]
        code, output = run_python(["-m", "pytest", "-m", "gpu", *quiet, file], limit=limit)
        if code is None:
            return [{"row": file, "outcome": f"failed: still ran after {limit:.0f} s"}]
        if code not in (0, 1) or not seen.exists():
            lines = output.strip().splitlines() or ["no output"]
            return [{"row": file, "outcome": f"failed: pytest ended with exit code {code}: {lines[-1]}"}]
        cases = list(ElementTree.parse(seen).getroot().iter("testcase"))
    wrong = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    outcome = f"{len(cases) - len(wrong) - skipped} passed, {skipped} skipped"
    if wrong:
        outcome = f"failed: {', '.join(str(case.get('name')) for case in wrong)}; {outcome}"
    return [{"row": file, "outcome": outcome}]


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


def draw(about: Mapping[str, str], done: Sequence[Done]) -> str:
    """Format the page: the machine and the table."""
    rates = {
        (row["part"], row["row"]): row["tokens"] / row["train_seconds"] for row in done if "tokens" in row
    }
    sections = [f"# On {about['device']}", about["line"], "Explained in ../README.md."]
    return "\n\n".join([*sections, report.table(HEADER, [cells(row, rates) for row in done])])


def cells(row: Done, rates: Mapping[tuple[str, str], float]) -> list[str]:
    """Format one line of the table."""
    part, name = row["part"], row["row"]
    label = name if part in (PROBE, TESTS) else ROWS[name].label
    found = [part, label, row["outcome"]]
    if "tokens" in row:
        rate = rates[part, name]
        found += [
            f"{rate:,.0f}",
            *(
                format(rate / rates[part, other], form) if (part, other) in rates else report.NONE
                for other, form in (("padding", ".2f"), ("ceiling", ".1%"))
            ),
            f"{row['step_median'] * 1e3:,.0f}",
            *(report.NONE if row[key] is None else format(row[key], form) for key, form in MEASURED),
            f"{row['graphs']}" + f" ({row['graphs_late']} late)" * (row["graphs_late"] > 0),
            f"{row['padding']:.2%}",
        ]
    found += [report.NONE] * (HEADER.count("|") - len(found))
    return [*found, f"{row['seconds']:.0f}" if "seconds" in row else report.NONE]


MEASURED = (("peak_gib", ".1f"), ("waits", "d"))
"""What a CPU has none of, and how it is printed."""

if __name__ == "__main__":
    sys.exit(main())
