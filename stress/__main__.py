"""``python -m stress``: one job after another, each in processes of its own and with a time limit.

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
from stress.report import RESULTS, read, render, where, write

ROOT = Path(__file__).resolve().parent.parent


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0 if every promise holds that can be checked here."""
    parser = argparse.ArgumentParser(prog="python -m stress", description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the jobs and stop")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="this job; may be given several times"
    )
    parser.add_argument("--quick", action="store_true", help="small counts; writes no results")
    parser.add_argument(
        "--continue",
        dest="go_on",
        action="store_true",
        help="run what the last call did not finish, or what failed",
    )
    parser.add_argument("--child", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    jobs = load_jobs()
    if unknown := [name for name in options.only or [] if name not in jobs]:
        parser.error(f"no job is called {', '.join(unknown)}; choose of {', '.join(jobs)}")
    if options.list:
        for known in jobs.values():
            say(f"{known.name:20} {known.shows}")
        return 0
    if options.child:
        return child(options.only[0], Path(options.child), quick=options.quick)

    results = read() if options.only or options.go_on else {}
    names = options.only or [
        name for name in jobs if not (options.go_on and results.get(name, {}).get("holds"))
    ]
    failed, not_run = [], []
    begun = time.monotonic()
    for number, name in enumerate(names, start=1):
        result = run_job(name, quick=options.quick)
        if not result["holds"]:
            (not_run if result["holds"] is None else failed).append(name)
        verdict = {True: "holds", False: "FAILED", None: "not run"}[result["holds"]]
        say(f"[{number}/{len(names)}] {name:20} {verdict:7} {result['seconds']:7.1f} s  {result['counts']}")
        if not options.quick:
            results[name] = result
            results = {known: results[known] for known in jobs if known in results}
            write(results)
            render(results, jobs)
    say(
        f"{len(names) - len(failed) - len(not_run)} of {len(names)} jobs hold, in {time.monotonic() - begun:.0f} s"
        + (f"; failed: {', '.join(failed)}" if failed else "")
        + (f"; not run: {', '.join(not_run)}" if not_run else "")
    )
    if not options.quick:
        say(f"written to {RESULTS.relative_to(ROOT)} and docs/reliability.md")
    return 1 if failed else 0


def run_job(name: str, *, quick: bool) -> dict[str, Any]:
    """Run a job in a session of its own, so that processes it leaves behind are found and ended."""
    limit = JOBS[name].limit
    with tempfile.TemporaryDirectory(prefix="stress-") as folder:
        outcome = Path(folder) / "outcome.json"
        command = [sys.executable, "-m", "stress", "--only", name, "--child", str(outcome)]
        # One thread each: thread pools on few cores only wait for one another.
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
            said = json.loads(outcome.read_text())
            holds, counts = said["holds"], said["counts"]
            if holds and left:
                holds, counts = False, f"{counts}; left {left} process(es) behind"
    return {
        "holds": holds,
        "counts": counts,
        "seconds": round(seconds, 1),
        "date": str(date.today()),
        **where(),
    }


def child(name: str, outcome: Path, *, quick: bool) -> int:
    """Run a job in this process, and write its outcome."""
    try:
        holds: bool | None = True
        counts = JOBS[name].body(Run(name, quick=quick))
    except NotRun as missing:
        counts, holds = str(missing), None
    except BaseException as error:
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}".strip().splitlines()
        counts, holds = said[0] if len(said) == 1 else f"{said[0]} … {said[-1]}", False
    outcome.write_text(json.dumps({"holds": holds, "counts": counts}))
    return 1 if holds is False else 0


def end_session(session: int) -> int:
    """Kill the living processes of a session; return how many there were."""
    from stress.ranks import processes

    ended = set()
    for _ in range(50):
        living = [
            pid for pid, (_, _, theirs, state) in processes().items() if theirs == session and state != "Z"
        ]
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
