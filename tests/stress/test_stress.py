"""Some jobs of `make stress` with small counts: they run, resume and report."""

import json
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from stress import __main__ as command
from stress import report
from stress.job import JOBS, Job, load_jobs
from tests.harness.processes import RankError, Ranks

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def stress(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stress", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


def test_a_table_keeps_the_rows_of_jobs_that_were_not_run_here() -> None:
    jobs = {name: Job(name, f"shows {name}", 1, lambda run: "") for name in ("one", "two", "three")}
    result = {
        "holds": True,
        "counts": "all",
        "seconds": 2.0,
        "date": "2026-01-02",
        "machine": "A",
        "versions": "B",
    }
    first = report.table({"one": result, "two": result}, jobs)
    later = report.table({"two": result | {"counts": "more", "date": "2026-01-03"}}, jobs, page=first)
    rows = [line for line in later.splitlines() if line.startswith("| shows")]
    assert rows == ["| shows one (`one`) | all | 2 s | holds |", "| shows two (`two`) | more | 2 s | holds |"]
    assert "2026-01-02 · A · B" in later
    assert "2026-01-03 · A · B" in later
    assert "Not run yet: `three`." in later


@pytest.mark.slow
def test_some_jobs_with_small_counts() -> None:
    before = report.PAGE.read_text(), report.read()
    done = stress("--quick", "--only", "kill-all", "--only", "uneven")
    assert done.returncode == 0, done.stderr
    assert "[1/2] kill-all" in done.stdout
    assert "2 of 2 jobs hold" in done.stdout
    assert (report.PAGE.read_text(), report.read()) == before, "--quick writes nothing"


def test_a_job_that_cannot_be_run_here_says_so(
    jobs: dict[str, Job],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load_jobs()
    monkeypatch.setenv("PATH", str(tmp_path))
    jobs |= {"nginx": JOBS["nginx"]}
    monkeypatch.setattr(command, "render", lambda results, known: report.render(results, jobs))
    assert command.main(["--only", "nginx"]) == 0
    assert "0 of 1 jobs hold" in (said := capsys.readouterr().out)
    assert said.count("not run") == 2
    assert "| nginx is not installed |" in (page := report.PAGE.read_text())
    assert "| **not run** |" in page
    assert "holds |" not in page


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nginx", "s3"])
def test_shards_behind_servers_that_are_not_ours(name: str) -> None:
    if shutil.which("nginx") is None or (name == "s3" and find_spec("moto") is None):
        pytest.skip("nginx or moto is not installed")
    done = stress("--quick", "--only", name)
    assert "1 of 1 jobs hold" in done.stdout, done.stderr
    assert "Task exception" not in done.stderr, "what a fork brought along is left alone"


def test_jobs_are_listed_and_unknown_ones_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    assert set(load_jobs()) <= set(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        command.main(["--only", "nonsense"])
    assert "no job is called nonsense; choose one of kill-all" in capsys.readouterr().err


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Job]:
    """Three jobs instead of all, with files of their own."""
    known = {name: Job(name, f"shows {name}", 5, lambda run: "") for name in ("one", "two", "three")}
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for name, value in (("PAGE", page), ("RESULTS", tmp_path / "results.json")):
        monkeypatch.setattr(report, name, value)
    monkeypatch.setattr(command, "RESULTS", ROOT / "stress" / "results.json")
    monkeypatch.setattr(command, "load_jobs", lambda: known)
    return known


def test_a_later_call_runs_what_is_missing(jobs: dict[str, Job], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    holds = {"one": True, "two": False}

    def run_job(name: str, *, quick: bool) -> dict[str, object]:
        ran.append(name)
        if name not in holds:
            raise KeyboardInterrupt
        return {
            "holds": holds[name],
            "counts": "7 | 7",
            "seconds": 1.0,
            "date": "today",
            "machine": "m",
            "versions": "v",
        }

    monkeypatch.setattr(command, "run_job", run_job)
    with pytest.raises(KeyboardInterrupt):
        command.main([])
    assert ran == ["one", "two", "three"]
    holds |= {"two": True, "three": True}
    ran.clear()
    assert command.main(["--continue"]) == 0
    assert ran == ["two", "three"]
    page = report.PAGE.read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "\nold\n" not in page
    assert page.count("| holds |") == 3
    assert "7 / 7" in page
    assert list(json.loads(report.RESULTS.read_text())) == ["one", "two", "three"]


def test_a_job_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    load_jobs()
    monkeypatch.setitem(JOBS, "uneven", Job("uneven", "", 1, JOBS["uneven"].body))
    result = command.run_job("uneven", quick=False)
    assert not result["holds"]
    assert result["counts"] == "still ran after 1 s"


def test_dead_and_hanging_ranks_are_reported() -> None:
    with Ranks(2) as ranks:
        ranks.start(time.sleep, 60)
        with pytest.raises(RankError, match=r"ranks \[0, 1\] of 2 still ran after 0.2 s"):
            ranks.collect(0.2)
        ranks.processes[1].kill()
        with pytest.raises(RankError, match="rank 1: ended with exit code -9"):
            ranks.collect(1)
    assert not ranks.members()
    with Ranks(1) as alone, pytest.raises(RankError, match="ZeroDivisionError"):
        alone.run(divmod, 1, 0)
