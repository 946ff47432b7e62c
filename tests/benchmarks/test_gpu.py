"""`make gpu`: it resumes where it stopped, keeps each row as it ends, and its tables show what was measured."""

import doctest
import json
import sys
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import row as one_row
from benchmarks.gpu import run as processes
from benchmarks.gpu import tables
from benchmarks.gpu.journal import Journal, key_of
from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.run import count, gpu_tests, run, run_tests
from benchmarks.gpu.settings import CPU_PARTS, CPU_ROWS, ROWS, TESTS

PART = "flan-256"
FILE = "tests/test_kernels.py"  # stands for those that have tests marked gpu
TINY = CPU_PARTS[PART]
MACHINE = {"device": "NVIDIA H200", "torch": "2.11.0", "about": "140 GiB"}


# ---- the command


def result(**changes):
    return {
        "outcome": "measured", "steps": 4, "passes": 4, "tokens": 4000, "padding": 0.25, "seconds": 2.0,
        "step_median": 0.5, "step_p10_p90": [0.4, 0.75], "peak_bytes": 3 * 2**30, "mfu": 0.125, "compiled": 3,
        "compiled_late": 0, "loss": 10.4,
    } | changes  # fmt: skip


class Rows:
    """A stand-in for the processes of rows and tests: records which ran, and returns the outcomes that were set."""

    def __init__(self, monkeypatch):
        self.ran = []
        self.outcomes = {}
        monkeypatch.setattr(command, "run_row", self.run_row)
        monkeypatch.setattr(command, "run_tests", self.run_tests)
        monkeypatch.setattr(command, "gpu_tests", lambda: [FILE, "tests/test_more.py"])
        monkeypatch.setattr(command, "ask", lambda device: MACHINE)

    def run_row(self, name, settings, *, device, limit):
        self.ran.append(name)
        return self.outcomes.get(name, result())

    def run_tests(self, file, *, limit):
        self.ran.append(file)
        return {"outcome": "measured", "passed": 3, "failed": 0, "skipped": 1, "failures": [], "seconds": 9.0}


@pytest.fixture
def rows(monkeypatch):
    return Rows(monkeypatch)


def test_tests_run_first_and_nothing_runs_twice(rows, tmp_path, capsys):
    arguments = ["--device", "cpu", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    assert rows.ran == [FILE, *CPU_ROWS]
    assert command.main(arguments) == 0
    assert rows.ran == [FILE, *CPU_ROWS]
    assert (tmp_path / "gpu-nvidia-h200.md").read_text() in capsys.readouterr().out


def test_a_failed_row_stops_no_other_and_is_retried_on_request(rows, tmp_path):
    rows.outcomes = {
        "padding": {"outcome": "out of memory"},
        "varlen": {"outcome": "failed: ended with exit code -9"},
    }
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--parts", PART]
    assert command.main(arguments) == 1
    assert rows.ran == list(CPU_ROWS)
    assert command.main(arguments) == 1  # settled, and still a failure
    assert rows.ran == list(CPU_ROWS)
    rows.outcomes = {}
    assert command.main([*arguments, "--retry", "--minutes", "0"]) == 1  # no time to mend it
    assert command.main([*arguments, "--retry"]) == 0
    assert rows.ran == [*CPU_ROWS, "varlen"]  # out of memory is a result


def test_tests_run_again_when_the_code_has_changed(rows, tmp_path, monkeypatch):
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--parts", TESTS]
    command.main(arguments)
    command.main(arguments)
    assert rows.ran == [FILE]
    monkeypatch.setattr(command, "code_digest", lambda: "changed")
    command.main(arguments)
    assert rows.ran == [FILE, FILE]


def test_rows_and_tables_survive_an_interrupt(rows, tmp_path, monkeypatch):
    def run_row(name, settings, *, device, limit):
        if name == "ceiling":
            raise KeyboardInterrupt
        return result()

    monkeypatch.setattr(command, "run_row", run_row)
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--parts", PART]
    with pytest.raises(KeyboardInterrupt):
        command.main(arguments)
    table = (tmp_path / "gpu-nvidia-h200.md").read_text()
    assert ROWS["varlen"].label in table
    assert ROWS["ceiling"].label not in table
    assert len(Journal(tmp_path / "gpu.jsonl").rows) == 2


def test_without_time_rows_stay_open(rows, tmp_path, capsys):
    arguments = ["--device", "cpu", "--out", str(tmp_path)]
    assert command.main([*arguments, "--minutes", "0"]) == 0
    assert rows.ran == []
    assert f"{1 + len(CPU_ROWS)} of {1 + len(CPU_ROWS)} rows are open" in capsys.readouterr().out


def test_each_part_has_time_of_its_own(rows, monkeypatch):
    """And all stay under ten minutes: when a part's time is up, the next one begins."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def run_row(name, settings, *, device, limit):
        now[0] += min(200, limit)
        return result() if limit >= 200 else None

    monkeypatch.setattr(command, "run_row", run_row)
    jobs = [command.Job(part, TINY, row) for part in ("a", "b") for row in ("1", "2", "3", "4")]
    kept = []
    left = command.work(jobs, device="cpu", ends=1e9, keep=lambda job, done: kept.append(job[::2]))
    assert kept == [("a", "1"), ("a", "2"), ("b", "1"), ("b", "2")]
    assert [job[::2] for job in left] == [("a", "3"), ("a", "4"), ("b", "3"), ("b", "4")]
    assert now[0] <= 2 * 600


def test_the_error_names_an_unknown_part_or_row(capsys):
    with pytest.raises(SystemExit):
        command.main(["--device", "cpu", "--parts", "flan-4096"])
    assert "--parts: flan-4096 unknown; choose one of tests, flan-256" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["--rows", "dense"])  # needs no GPU
    assert "--rows: dense unknown; choose one of padding, varlen" in capsys.readouterr().err


# ---- the journal


def line(row, **changes):
    return {
        "part": PART,
        "settings": "abc",
        "row": row,
        "call": "2026-11-20T09:00:00",
        **MACHINE,
        **result(**changes),
    }


def test_the_journal_keeps_the_last_row_of_a_key(tmp_path):
    journal = Journal(tmp_path / "new" / "gpu.jsonl")
    for row in (line("padding"), line("varlen"), line("padding", tokens=5000)):
        journal.add(row)
    again = Journal(journal.path)
    assert again.rows == journal.rows
    assert [row["tokens"] for row in again.rows.values()] == [5000, 4000]
    again.forget({key_of(line("padding"))})
    assert [row["row"] for row in Journal(journal.path).rows.values()] == ["varlen"]


def test_a_torn_last_line_is_measured_again(tmp_path):
    journal = Journal(tmp_path / "gpu.jsonl")
    journal.add(line("padding"))
    with journal.path.open("a") as file:
        file.write(json.dumps(line("varlen"))[:40])
    journal = Journal(journal.path)
    assert [row["row"] for row in journal.rows.values()] == ["padding"]
    journal.add(line("ceiling"))
    assert [row["row"] for row in Journal(journal.path).rows.values()] == ["padding", "ceiling"]


# ---- the processes


@pytest.mark.slow
def test_a_row_end_to_end(tmp_path, capsys):
    """A row in a process of its own, and a second call that starts none."""
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--parts", PART, "--rows", "varlen"]
    assert command.main(arguments) == 0
    written = (tmp_path / "gpu.jsonl").read_bytes()
    row = json.loads(written)
    assert (row["row"], row["outcome"], row["compiled"]) == ("varlen", "measured", 0)
    assert row["steps"] >= TINY.steps - 1
    assert row["seconds"] > 0
    assert row["padding"] < 0.2
    assert 10 < row["loss"] < 11  # ln(32,000) is 10.4
    assert command.main(arguments) == 0
    assert (tmp_path / "gpu.jsonl").read_bytes() == written
    assert "| packed, varlen" in capsys.readouterr().out


@pytest.mark.slow
def test_tests_marked_gpu_are_found_and_counted(monkeypatch):
    file = "tests/attention/test_flash.py"
    assert file in gpu_tests()
    assert str(Path(__file__).relative_to(ROOT)) not in gpu_tests()
    done = run_tests(file, limit=120)
    assert done["outcome"] == "measured"
    assert done["failed"] == 0
    assert done["passed"] + done["skipped"] > 0
    assert done["skipped" if not torch.cuda.is_available() else "passed"] > 0
    monkeypatch.setattr(processes, "run", lambda *_, limit: (4, "no such file\n"))
    assert run_tests(file, limit=9)["outcome"] == "failed: pytest ended with exit code 4: no such file"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (ValueError("one\ntwo"), "failed: ValueError: one"),
        (ImportError("no such thing"), "failed: ImportError: no such thing"),
    ],
)
def test_errors_of_a_row(error, outcome, monkeypatch, capsys):
    def measure(*_, device):
        raise error

    monkeypatch.setattr(one_row, "measure", measure)
    monkeypatch.setattr(
        sys, "argv", ["row", json.dumps({"row": "padding", "device": "cpu", "settings": asdict(TINY)})]
    )
    one_row.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"outcome": outcome}


@pytest.mark.slow
def test_children_end_at_the_limit(tmp_path):
    started = tmp_path / "child"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(started)!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    assert run(["-c", code], limit=3) == (None, "")
    child = int(started.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


# ---- tables


def test_a_table_shows_what_was_and_was_not_measured():
    done = [
        line("padding", passes=7),
        line("varlen", seconds=1.0, compiled=4, compiled_late=1),
        line("ceiling", seconds=0.8, mfu=None, peak_bytes=None),
        line("flash") | {"outcome": "not installed (flash_attn)"},
    ]
    text = tables.draw({TESTS: None, PART: TINY}, done)
    body = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("|")
    ]
    assert body[0] == list(tables.HEADER)
    none = ["-"] * (len(tables.HEADER) - 1)
    assert body[2:] == [
        ["padding to the longest", "2,000", "1.00", "40.0%", "500", "400 to 750", "3.0", "12.5%", "3", "25.00%"],
        ["packed, varlen", "4,000", "2.00", "80.0%", "500", "400 to 750", "3.0", "12.5%", "4 (1 late)", "25.00%"],
        ["packed, flash: not installed (flash_attn)", *none],
        ["ceiling: no boundaries", "5,000", "2.50", "100.0%", "500", "400 to 750", "-", "-", "3", "25.00%"],
    ]  # fmt: skip
    assert text.startswith("# Training on NVIDIA H200\n\n2026-11-20 · NVIDIA H200 · 140 GiB")
    assert "padding to the longest: 7 passes for 4 steps." in text
    assert "calls" not in text
    assert "activation checkpointing on, layers compiled off" in text


def test_tests_have_a_section_of_their_own():
    seen = count(
        '<testsuites><testsuite><testcase classname="tests.test_a" name="test_b"><failure/></testcase>'
        '<testcase name="c"><skipped/></testcase><testcase name="d"><error/></testcase><testcase name="e"/>'
        "</testsuite></testsuites>"
    )
    assert (seen["passed"], seen["failed"], seen["skipped"]) == (1, 2, 1)
    assert command.failed(seen)
    row = {"part": TESTS, "settings": "", "row": FILE, "call": "2026-11-20T09:00:00", **MACHINE, **seen}
    broken = {key: row[key] for key in ("part", "call", *MACHINE)} | {
        "row": "tests/b.py",
        "outcome": "failed: 4",
    }
    text = tables.draw({TESTS: None}, [row | {"seconds": 61.0}, broken])
    assert "| tests/test_kernels.py |      1 |      2 |       1 |      61 |" in text
    assert "| tests/b.py: failed: 4 |      - |" in text
    assert "- **failed**: `tests.test_a::test_b`" in text


# ---- the examples in the docstrings, which pytest collects from streampack only


@pytest.mark.parametrize("name", ["settings", "model", "batches", "run"])
def test_doctests(name):
    found = doctest.testmod(import_module(f"benchmarks.gpu.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
