"""The long lines of `make stress` run, resume and report: some of them, with small counts."""

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
from stress.line import LINES, Line, Run, load_lines
from stress.planted import BUGS
from stress.ranks import RankError, Ranks, processes

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def stress(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stress", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


def test_some_lines_with_small_counts() -> None:
    before = report.PAGE.read_text(), report.read()
    done = stress("--quick", "--only", "kill-all", "--only", "uneven", "--only", "hostile")
    assert done.returncode == 0, done.stderr
    assert "[1/3] kill-all" in done.stdout
    assert "3 of 3 lines hold" in done.stdout
    assert (report.PAGE.read_text(), report.read()) == before, "--quick writes nothing"


def test_a_line_that_cannot_be_run_here_says_so(
    lines: dict[str, Line],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load_lines()
    monkeypatch.setenv("PATH", str(tmp_path))
    lines |= {"nginx": LINES["nginx"]}
    monkeypatch.setattr(command, "render", lambda results, known: report.render(results, lines))
    assert command.main(["--only", "nginx"]) == 0
    assert "0 of 1 lines hold" in (said := capsys.readouterr().out)
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
    assert "1 of 1 lines hold" in done.stdout, done.stderr
    assert "Task exception" not in done.stderr, "what a fork brought along is left alone"


def test_lines_are_listed_and_unknown_ones_named() -> None:
    listed = stress("--list")
    assert set(load_lines()) <= set(listed.stdout.split())
    assert "no line is called nonsense; choose of kill-all" in stress("--only", "nonsense").stderr


def test_there_are_twenty_bugs() -> None:
    assert len(BUGS) == 20
    assert all(plant.__doc__ for plant in BUGS.values())


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Line]:
    """Three lines instead of all, and files of their own."""
    known = {name: Line(name, f"shows {name}", 5, lambda run: "") for name in ("one", "two", "three")}
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for name, value in (("PAGE", page), ("RESULTS", tmp_path / "results.json")):
        monkeypatch.setattr(report, name, value)
    monkeypatch.setattr(command, "RESULTS", ROOT / "stress" / "results.json")
    monkeypatch.setattr(command, "load_lines", lambda: known)
    return known


def test_it_goes_on_where_it_stopped(lines: dict[str, Line], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    holds = {"one": True, "two": False}

    def run_line(name: str, *, quick: bool) -> dict[str, object]:
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

    monkeypatch.setattr(command, "run_line", run_line)
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


def test_a_line_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    load_lines()
    monkeypatch.setitem(LINES, "uneven", Line("uneven", "", 1, LINES["uneven"].body))
    result = command.run_line("uneven", quick=False)
    assert not result["holds"]
    assert result["counts"] == "still ran after 1 s"


def test_ranks_that_die_or_hang_are_seen() -> None:
    with Ranks(2) as ranks:
        group = ranks.group
        ranks.start(time.sleep, 60)
        with pytest.raises(RankError, match=r"ranks \[0, 1\] of 2 still ran after 0.2 s"):
            ranks.collect(0.2)
        ranks.processes[1].kill()
        with pytest.raises(RankError, match="rank 1 of 2 died"):
            ranks.collect(10)
    assert not [pid for pid, (_, theirs, *_) in processes().items() if theirs == group]
    with Ranks(1) as alone, pytest.raises(RankError, match="ZeroDivisionError"):
        alone.run(divmod, 1, 0)


def test_progress_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run("name", quick=True)
    assert (run.count(50, 3), Run("name", quick=False).count(50, 3)) == (3, 50)
    run.said = -100.0
    run.tell(1, 3, "kills")
    assert "name: 1 of 3 kills" in capsys.readouterr().err
