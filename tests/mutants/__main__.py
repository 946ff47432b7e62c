"""Which mutants do the tests see? ``python -m tests.mutants``, or ``make mutants``.

It goes on where it was stopped: what it has found lies in ``build/mutants``, until streampack or the tests change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.mutants.registry import load

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "build" / "mutants"
MARKERS = "not slow and not gpu"
LIMIT = 120  # seconds for the tests of one mutant, and five times what they take without; one that hangs them is seen


@dataclass
class Outcome:
    """What became of one mutant.

    Attributes:
        seen_by: the tests that failed because of it, quickest first, up to ``--most`` of them.
        ran_in: how many tests run its seam.
        broken: why the outcome says nothing about the tests, if so.
        seconds: how long it took.
    """

    seen_by: list[str] = field(default_factory=list)
    ran_in: int = 0
    broken: str | None = None
    seconds: float = 0.0

    @property
    def survives(self) -> bool:
        """Whether no test has seen the mutant, or nothing was shown."""
        return bool(self.broken) or not self.seen_by


@dataclass(frozen=True)
class Suite:
    """The tests of an undisturbed run: which mutants they run, and how long they take in seconds."""

    runs: dict[str, list[str]]
    seconds: dict[str, float]


def main() -> None:
    """Run the mutants that have no outcome yet; exit with 1 if one survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("only", nargs="*", help="parts of mutants' names, such as `sources.`; all without")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that are tried at once")
    parser.add_argument(
        "--most", type=int, default=3, help="failing tests after which a mutant has been seen enough"
    )
    parser.add_argument(
        "--again", action="store_true", help="forget the outcomes of the mutants that are named"
    )
    parser.add_argument("--within", nargs="+", help="run these test files and no others; nothing is kept")
    parser.add_argument("--list", action="store_true", help="print the mutants and what is wrong with each")
    args = parser.parse_args()
    mutants = load()
    names = [name for name in mutants if not args.only or any(part in name for part in args.only)]
    if args.list:
        sys.stdout.writelines(f"{name}: {(mutants[name].__doc__ or '').strip()}\n" for name in names)
        return
    if args.within:
        for name in names:
            sys.stdout.write(f"{line(name, attempt(name, args.within, FOLDER.parent, most=args.most))}\n")
        return
    folder = FOLDER / digest(["streampack", "tests", "recipes", "configs"])
    for old in FOLDER.glob("*"):
        if old != folder:
            shutil.rmtree(old)
    folder.mkdir(parents=True, exist_ok=True)
    suite = learn(folder / "suite.json", jobs=args.jobs)
    outcomes = try_all(names, suite, folder, jobs=args.jobs, most=args.most, again=args.again)
    survivors = [name for name in names if outcomes[name].survives]
    sys.stdout.writelines(f"{line(name, outcomes[name])}\n" for name in survivors)
    sys.stdout.write(f"{len(names) - len(survivors)} of {len(names)} mutants seen\n")
    sys.exit(bool(survivors))


def digest(folders: Iterable[str]) -> str:
    """Digest the files of these folders, so that outcomes of other code and other tests are not taken for these."""
    found = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()):
        if "__pycache__" not in path.parts:
            found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def learn(path: Path, *, jobs: int) -> Suite:
    """Run the suite with all seams noted, or read what such a run has found."""
    if not path.exists():
        sys.stderr.write("an undisturbed run, to learn which tests run which mutants\n")
        trace = path.with_suffix(".trace")
        trace.unlink(missing_ok=True)
        code, output = pytest("all", trace, ["-n", str(jobs), "--dist", "worksteal", "-m", MARKERS, "tests"])
        if code != 0:
            raise SystemExit(f"the suite fails without a mutant:\n{output[-3000:]}")
        runs = defaultdict(set)
        seconds = {}
        for line in trace.read_text().splitlines():
            kind, _, rest = line.partition(" ")
            first, _, test = rest.partition(" ")
            if kind == "ran" and test:
                runs[first].add(test)
            elif kind == "passed":
                seconds[test] = float(first)
        tests = {name: sorted(ran & set(seconds), key=seconds.__getitem__) for name, ran in runs.items()}
        path.write_text(json.dumps({"runs": tests, "seconds": seconds}))
    return Suite(**json.loads(path.read_text()))


def try_all(
    names: Sequence[str], suite: Suite, folder: Path, *, jobs: int, most: int, again: bool
) -> dict[str, Outcome]:
    """Try the mutants side by side; each outcome is a file, so that a run that was stopped goes on."""

    def outcome_of(name: str) -> Outcome:
        path = folder / f"{name}.json"
        if path.exists() and not again:
            return Outcome(**json.loads(path.read_text()))
        tests = suite.runs.get(name, [])
        limit = LIMIT + 5 * sum(suite.seconds[test] for test in tests)
        outcome = attempt(name, tests, folder, most=most, limit=limit)
        path.write_text(json.dumps(asdict(outcome)))
        sys.stdout.write(f"{line(name, outcome)}\n")
        sys.stdout.flush()
        return outcome

    with ThreadPoolExecutor(jobs) as threads:
        return dict(zip(names, threads.map(outcome_of, names), strict=True))


def line(name: str, outcome: Outcome) -> str:
    """Say in one line what became of a mutant."""
    found = outcome.broken or ", ".join(outcome.seen_by) or "SURVIVES"
    return f"{name} ({outcome.ran_in} tests, {outcome.seconds:.0f} s): {found}"


def attempt(name: str, tests: Sequence[str], folder: Path, *, most: int, limit: float = 300) -> Outcome:
    """Plant a mutant, and run these tests until ``most`` have failed."""
    begun = time.monotonic()
    if not tests:
        return Outcome(broken="no test runs it")
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / f"{name}.trace"
    trace.unlink(missing_ok=True)
    chosen = folder / f"{name}.tests"
    chosen.write_text("\n".join(tests))
    code, output = pytest(name, trace, [f"--maxfail={most}", "-m", MARKERS, f"@{chosen}"], limit=limit)
    lines = trace.read_text().splitlines() if trace.exists() else []
    return judge(name, lines, code, output, ran_in=len(tests), seconds=time.monotonic() - begun)


def judge(
    name: str, trace: Sequence[str], code: int | None, output: str, *, ran_in: int, seconds: float = 0.0
) -> Outcome:
    """Return the outcome of a run of tests with a mutant planted.

    Args:
        name: the mutant.
        trace: the lines that the run has written.
        code: pytest's exit status; None if it hung.
        output: what pytest printed.
        ran_in: how many tests were run.
        seconds: how long it took.
    """
    outcome = Outcome(ran_in=ran_in, seconds=round(seconds, 1))
    ran = {line.removeprefix(f"ran {name} ") for line in trace if line.startswith(f"ran {name} ")}
    failed = [line.split(" ", 2)[2] for line in trace if line.startswith("failed ")]
    wrong = [line for line in trace if line.startswith(("cannot be planted", "broke by itself"))]
    outcome.seen_by = [test for test in dict.fromkeys(failed) if test in ran]
    if wrong:
        outcome.broken = wrong[0]
    elif "planted" not in trace:
        outcome.broken = f"was not planted: {output[-300:]}"
    elif code is None:
        # The test that hangs writes no line of its own; that the mutant ran in one that did not end says which it is.
        hanging = sorted(
            ran - {line.split(" ", 2)[2] for line in trace if re.match(r"(passed|failed|skipped) ", line)}
        )
        outcome.seen_by += hanging[:1]
    elif code not in (0, 1):
        outcome.broken = f"pytest ended with {code}: {output[-300:]}"
    elif not ran:
        outcome.broken = "never ran"
    elif failed and not outcome.seen_by:
        outcome.broken = f"did not run in what failed: {failed[0]}"
    return outcome


def pytest(
    name: str, trace: Path, arguments: Sequence[str], *, limit: float | None = None
) -> tuple[int | None, str]:
    """Run pytest with a mutant planted; return its exit status, None if it hung, and what it printed."""
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    env = os.environ | threads | {"STREAMPACK_MUTANT": name, "STREAMPACK_MUTANT_TRACE": str(trace)}
    command = [sys.executable, "-m", "pytest", "-q", *arguments, "-p", "tests.mutants.plugin"]
    process = subprocess.Popen(
        [*command, "-p", "no:cacheprovider", "--no-header", "--tb=short"],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that processes of a test that hangs can be ended with it
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output
    return process.returncode, output


if __name__ == "__main__":
    main()
