"""Jobs with small counts, and what becomes of those that fail, hang or cannot run: the table of docs/reliability.md."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from stress import __main__ as command
from stress import report
from stress.job import JOBS, Job, NotRun, load_jobs
from tests.harness.processes import RankError, Ranks

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@pytest.mark.slow
def test_jobs_with_small_counts_hold_and_write_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = report.PAGE.read_text(), report.read()
    assert command.main(["--quick", "--only", "kill-all", "--only", "generated"]) == 0
    assert "2 of 2 jobs hold" in capsys.readouterr().out
    assert (report.PAGE.read_text(), report.read()) == before


def test_jobs_that_hang_or_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_jobs()
    monkeypatch.setitem(JOBS, "uneven", Job("uneven", "", 1, JOBS["uneven"].body))
    result = command.run_job("uneven", quick=False)
    assert (result["holds"], result["counts"]) == (False, "still ran after 1 s")

    def without(run: object) -> str:
        raise NotRun("nginx is not installed")

    monkeypatch.setitem(JOBS, "nginx", Job("nginx", "", 1, without))
    assert command.run_child("nginx", tmp_path / "outcome", quick=True) == 0
    told = json.loads((tmp_path / "outcome").read_text())
    assert told == {"holds": None, "counts": "nginx is not installed"}


def test_a_job_is_ended_with_its_processes_in_other_sessions() -> None:
    """Ranks of torchrun have sessions of their own, and would write on to a folder that is being removed."""
    words = ["sh", "-c", "setsid sh -c 'echo here; exec sleep 60' & wait"]
    with subprocess.Popen(words, start_new_session=True, stdout=subprocess.PIPE) as job:
        assert job.stdout
        assert job.stdout.readline() == b"here\n"
        assert command.end_session(job.pid) == 2
        assert not job.stdout.read(), "a process still has it open"


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
