import pytest

from tests.mutants.__main__ import judge
from tests.mutants.__main__ import pytest as run_pytest
from tests.mutants.registry import load

NAME = "losses.samples_weighed_by_pack"
PASSES = "passed 0.1 t.py::a"
FAILS = "failed 0.1 t.py::a"
RAN = f"ran {NAME} t.py::a"


def test_every_mutant_says_what_is_wrong() -> None:
    assert all(plant.__doc__ for plant in load().values())


@pytest.mark.parametrize(
    ("trace", "code", "seen", "broken"),
    [
        (["planted", RAN, FAILS], 1, ["t.py::a"], None),
        (["planted", RAN, PASSES], 0, [], None),
        (["planted", RAN], None, ["t.py::a"], None),  # hung
        (["cannot be planted: x", FAILS], 1, [], "cannot be planted"),
        (["planted", RAN, FAILS, "broke by itself: x"], 1, ["t.py::a"], "broke by itself"),
        ([FAILS], 1, [], "was not planted"),
        (["planted", PASSES], 0, [], "never ran"),
        (["planted", RAN, "failed 0.1 t.py::b"], 1, [], "did not run in what failed"),
        (["planted", RAN], 3, [], "pytest ended with 3"),
        (["planted", RAN], -9, [], "pytest ended with -9"),
        (["planted"], 5, [], "pytest ended with 5"),
    ],
)
def test_only_a_failure_because_of_a_mutant_counts_as_seen(trace, code, seen, broken) -> None:
    outcome = judge(NAME, trace, code, "", ran_in=1)
    assert outcome.seen_by == seen
    assert (outcome.broken or "").startswith(broken or "")
    assert outcome.survives == (not seen or broken is not None)


FAULTS = """
from streampack import losses
from streampack.losses import label_weights
from tests.mutants.registry import replaces

@replaces(losses, "no_such_function")
def absent(good):
    return good()

@replaces(label_weights)
def breaks(good, batch, *, loss_norm):
    return batch.no_such_attribute

@replaces(label_weights)
def wrong_arguments(good, batch):
    return good(batch)
"""
TEST = """
import pytest
from streampack.losses import label_weights

def test_refusal():
    with pytest.raises((ValueError, AttributeError)):
        label_weights(None, loss_norm="median")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("faults.absent", "cannot be planted"),
        ("faults.breaks", "broke by itself"),
        ("faults.wrong_arguments", "broke by itself"),
    ],
)
def test_a_mutant_that_does_not_fit_proves_nothing(name, broken, tmp_path, monkeypatch) -> None:
    (tmp_path / "faults.py").write_text(FAULTS)
    test = tmp_path / "test_it.py"
    test.write_text(TEST)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    trace = tmp_path / "trace"
    code, output = run_pytest(name, trace, ["-p", "faults", "--rootdir", str(tmp_path), str(test)])
    outcome = judge(name, trace.read_text().splitlines(), code, output, ran_in=1)
    assert outcome.survives
    assert (outcome.broken or "").startswith(broken), output
