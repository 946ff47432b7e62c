"""Run the jobs one after another, each in processes of its own and with a time limit: ``python -m stress``.

Results are written after each job, to results.json in this folder and as a table to docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

from stress.job import JOBS, NotRun, Run, load_jobs
from stress.report import RESULTS, machine_info, read, render, write
from tests.harness.processes import processes

VERDICTS = {True: "holds", False: "FAILED", None: "not run"}
ROOT = Path(__file__).resolve().parent.parent


def print_line(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0 if every promise holds that can be checked here."""
    parser = argparse.ArgumentParser(prog="python -m stress", description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the jobs and stop")
    parser.add_argument("--only", action="append", metavar="NAME", help="this job; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small counts; writes no results")
    parser.add_argument(
        "--continue",
        dest="resume",
        action="store_true",
        help="run only the jobs that the last call did not finish, or that failed",
    )
    parser.add_argument("--child", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    jobs = load_jobs()
    if unknown := [name for name in options.only or [] if name not in jobs]:
        parser.error(f"no job is called {', '.join(unknown)}; choose one of {', '.join(jobs)}")
    if options.list:
        for known in jobs.values():
            print_line(f"{known.name:20} {known.shows}")
        return 0
    if options.child:
        return run_child(options.only[0], Path(options.child), quick=options.quick)

    results = read() if options.only or options.resume else {}
    names = options.only or [
        name for name in jobs if not (options.resume and results.get(name, {}).get("holds"))
    ]
    found: dict[str, list[str]] = {verdict: [] for verdict in VERDICTS.values()}
    begun = time.monotonic()
    for number, name in enumerate(names, start=1):
        result = run_job(name, quick=options.quick)
        verdict = VERDICTS[result["holds"]]
        found[verdict].append(name)
        print_line(
            f"[{number}/{len(names)}] {name:20} {verdict:7} {result['seconds']:7.1f} s  {result['counts']}"
        )
        if not options.quick:
            results[name] = result
            results = {known: results[known] for known in jobs if known in results}
            write(results)
            render(results, jobs)
    holding = len(found.pop("holds"))
    others = "".join(f"; {verdict}: {', '.join(of)}" for verdict, of in found.items() if of)
    print_line(f"{holding} of {len(names)} jobs hold, in {time.monotonic() - begun:.0f} s{others}")
    if not options.quick:
        print_line(f"written to {RESULTS.relative_to(ROOT)} and docs/reliability.md")
    return 1 if found["FAILED"] else 0


def run_job(name: str, *, quick: bool) -> dict[str, Any]:
    """Run a job in a session of its own, and kill the processes that outlive it."""
    limit = JOBS[name].limit
    with tempfile.TemporaryDirectory(prefix="stress-") as folder:
        outcome = Path(folder) / "outcome.json"
        command = [sys.executable, "-m", "stress", "--only", name, "--child", str(outcome)]
        # One thread in each process: the thread pools of several processes slow one another down on few cores.
        env = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TMPDIR": folder}
        begun = time.monotonic()
        process = subprocess.Popen(
            command + ["--quick"] * quick, cwd=ROOT, env=env, start_new_session=True, text=True
        )
        try:
            process.wait(limit)
            counts = f"ended with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            counts = f"still ran after {limit} s"
        except BaseException:  # Ctrl-C goes to this process only
            end_session(process.pid)
            process.wait()
            raise
        seconds = time.monotonic() - begun
        left = end_session(process.pid)
        process.wait()
        holds: bool | None = False
        if outcome.exists():
            written = json.loads(outcome.read_text())
            holds, counts = written["holds"], written["counts"]
            if holds and left:
                holds, counts = False, f"{counts}; left {left} process(es) running"
    return {
        "holds": holds,
        "counts": counts,
        "seconds": round(seconds, 1),
        "date": str(date.today()),
        **machine_info(),
    }


def run_child(name: str, outcome: Path, *, quick: bool) -> int:
    """Run a job in this process, and write its outcome to a file."""
    try:
        holds: bool | None = True
        counts = JOBS[name].body(Run(quick))
    except NotRun as missing:
        counts, holds = str(missing), None
    except BaseException as error:
        traceback.print_exc()
        lines = f"{type(error).__name__}: {error}".strip().splitlines()
        counts, holds = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}", False
    outcome.write_text(json.dumps({"holds": holds, "counts": counts}))
    return 1 if holds is False else 0


def end_session(session: int) -> int:
    """Kill the living processes of a session and all their descendants; return how many there were."""
    ended: set[int] = set()
    for _ in range(50):
        found = processes()
        ours = [pid for pid, process in found.items() if process.session == session or pid in ended]
        for above in ours:  # torchrun starts its ranks in sessions of their own
            ours += [pid for pid, process in found.items() if process.parent == above and pid not in ours]
        living = [pid for pid in ours if found[pid].alive]
        if not living:
            break
        for pid in living:
            ended.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    return len(ended)


if __name__ == "__main__":
    sys.exit(main())
