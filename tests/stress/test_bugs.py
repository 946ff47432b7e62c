"""The gate of planted bugs: only a bug that was planted, ran, and made a check fail counts as seen."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stress import bugs, planted
from stress.bugs import Outcome, check_outcome, judge, suite_outcome, try_bugs
from stress.job import Run

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


class Target:
    """Something to plant bugs in."""

    def answer(self) -> int:
        return 42

    @property
    def size(self) -> int:
        return 3

    def unused(self) -> int:
        return 0

    def early(self) -> int:
        return 0


def absent_attribute() -> None:
    planted._set(Target, "no_such_name", lambda self: 0)


def absent_module() -> None:
    import streampack.no_such_module  # type: ignore[import-not-found]  # noqa: F401


def never_runs() -> None:
    planted._set(Target, "unused", lambda self: 1)


def runs_before_what_fails() -> None:
    """Not the bug makes the check fail: a stray change does."""
    planted._set(Target, "early", lambda self: 1)
    Target.answer = lambda self: 43  # type: ignore[method-assign]


def misfit() -> None:
    planted._set(Target, "answer", lambda self: self.no_such_field)


def outdated() -> None:
    """Reads what the state that it changes has no more."""
    planted._set(Target, "answer", lambda self: {}["lanes"])


def hanging() -> None:
    def answer(self: Target) -> int:
        import time

        time.sleep(600)
        return 0

    planted._set(Target, "answer", answer)


def wrong_arguments() -> None:
    good = Target.answer
    planted._set(Target, "answer", lambda self: good(self, 1))


def unnoticed() -> None:
    planted._set(Target, "answer", lambda self: 42)


def noticed() -> None:
    planted._set(Target, "answer", lambda self: 43)


def noticed_property() -> None:
    planted._set(Target, "size", property(lambda self: 4))


def killed() -> None:
    def answer(self: Target) -> int:
        import os
        import signal

        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    planted._set(Target, "answer", answer)


def before() -> None:
    """A check that runs `Target.early`, and passes whatever it says."""
    Target().early()


def check() -> None:
    target = Target()
    assert target.answer() == 42
    assert target.size == 3, f"size {target.size}"


CASES: dict[Callable[[], None], str] = {
    absent_attribute: "cannot be planted: AttributeError: Target has no no_such_name",
    absent_module: "cannot be planted: ModuleNotFoundError: No module named 'streampack.no_such_module'",
    never_runs: "never ran",
    runs_before_what_fails: "did not run in what failed: check: AssertionError",
    misfit: "broke by itself: AttributeError: 'Target' object has no attribute 'no_such_field'",
    outdated: "broke by itself: KeyError: 'lanes'",
    wrong_arguments: "broke by itself: TypeError: ",
    unnoticed: "not seen",
    noticed: "seen",
    noticed_property: "seen",
    killed: "the checks died with exit code -9",
    hanging: "did not end in 1 s",
}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A job's run in whose place of checks stands one of `Target`, and whose bugs are those of this file."""
    monkeypatch.setattr(planted, "BUGS", {plant.__name__: plant for plant in CASES})
    for name in ("check_windows", "check_epochs", "check_resumes"):
        monkeypatch.setattr(bugs, name, lambda: None)
    monkeypatch.setattr(bugs, "check_equal_steps", before)
    monkeypatch.setattr(bugs, "check_worker_restart", check)
    return Run("bugs", quick=False)


def said(outcome: Outcome) -> str:
    return outcome.broken or ("seen" if outcome.seen else "not seen")


@pytest.mark.parametrize("plant", CASES, ids=lambda plant: plant.__name__)
def test_a_bug_is_seen_only_if_it_ran_and_a_check_failed(
    plant: Callable[[], None], run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plant is hanging:
        monkeypatch.setattr(bugs, "LIMIT", 1)
    assert said(check_outcome(plant.__name__)).startswith(CASES[plant])


def test_the_gate_fails_for_bugs_that_prove_nothing_and_for_bugs_not_seen(run: Any) -> None:
    assert check_outcome(None) == Outcome(None)
    assert try_bugs(run, ["noticed", "noticed_property"], check_outcome) == "2 of 2 seen"
    with pytest.raises(AssertionError, match="no bug to plant"):
        try_bugs(run, [], check_outcome)
    with pytest.raises(AssertionError, match="1 of 2 seen; not unnoticed"):
        try_bugs(run, ["noticed", "unnoticed"], check_outcome)
    with pytest.raises(AssertionError, match=r"1 of 2 seen; these prove nothing: absent_attribute \(cannot"):
        try_bugs(run, ["absent_attribute", "noticed"], check_outcome)


def test_what_a_trace_says() -> None:
    assert judge("a test", ["planted", "ran", "ran here"]).seen
    assert judge("a test", ["planted", "ran"]).broken == "did not run in what failed: a test"
    assert judge("a test", ["planted"]).broken == "never ran"
    assert judge("died with exit code 1", []).broken == "was not planted: died with exit code 1"
    assert judge(None, ["planted", "ran"]) == Outcome(None)


NULL_PACK = "from streampack.packing import batch\n\ndef test_null():\n    assert batch.null_pack(4).labels"
TESTS = {
    "failing": "def test_one():\n    assert False\n",
    "passing": f"{NULL_PACK}.size == 4\n",
    "noticing": f"{NULL_PACK}.tolist() == [-100] * 4\n",
    "unreadable": "import no_such_module\n",
    "empty": "",
    "killed": f"{NULL_PACK}.size\n    import os\n    os.kill(os.getpid(), 9)\n",
    "hanging": f"{NULL_PACK}.size\n    import time\n    time.sleep(600)\n",
}


@pytest.mark.parametrize(
    ("bug", "files", "says"),
    [
        (None, ["passing", "noticing"], "not seen"),
        ("null-packs-train", ["passing", "noticing"], "seen"),
        ("null-packs-train", ["failing"], "never ran"),
        ("null-packs-train", ["passing", "failing"], "did not run in what failed: "),
        ("null-packs-train", ["passing", "unreadable"], "pytest ended with 2"),
        ("null-packs-train", ["empty"], "pytest ended with 5"),
        ("null-packs-train", ["killed"], "pytest ended with -9"),
        ("null-packs-train", ["hanging"], "did not end in 3 s"),
        # The plugin itself ends in an error: pytest ends with neither 0 nor 1.
        ("no-such-bug", ["passing"], "cannot be planted: KeyError"),
    ],
)
def test_a_suite_sees_a_bug_only_in_a_test_that_runs_it(
    bug: str | None, files: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if "hanging" in files:
        monkeypatch.setattr(bugs, "SUITE_LIMIT", 3)
    paths = [tmp_path / f"test_{file}.py" for file in files]
    for file, path in zip(files, paths, strict=True):
        path.write_text(TESTS[file])
    assert said(suite_outcome(bug, paths)).startswith(says)
