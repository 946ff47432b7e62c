"""Runs that are drawn at random and compared with a reference.

The slow test takes another seed from ``STREAMPACK_FUZZ_SEED``. A failure says how to run its case alone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.harness import chains as fuzz

pytestmark = [
    # Lanes and ranks are drawn at random, for a resume too.
    pytest.mark.filterwarnings("ignore:.*do not divide .* evenly"),
    pytest.mark.filterwarnings("ignore:num_lanes=.* is not used"),
    # An interrupt within a generator that is being closed: Python can only report it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
Check = Callable[[Any, Sequence[int]], Counter[str]]
SEED = int(os.environ.get("STREAMPACK_FUZZ_SEED", "0"))
# What is drawn, which cases of it are quick, how many slow ones there are, and what must be among the quick ones.
# Left out are those that take seconds: 10,000 packs of a mixture, and resumes of seven sources at every pack.
CASES: list[tuple[Callable[[int, int], Counter[str]], list[int], int, tuple[str, ...]]] = [
    (
        fuzz.configuration, [*range(19), *range(20, 30), 49], 2000,
        (
            "balance windows", "data groups", "mixtures", "padded", "remote sources", "set_epoch",
            "small sources of mixtures",
        ),
    ),
    (
        fuzz.chain, [0, 1, *range(3, 6), *range(7, 10), 11, 12, *range(14, 18), *range(19, 24)], 300,
        (
            "balance windows", "data groups", "endless", "interrupts", "mixtures", "peeks", "remote sources",
            "resumes at every pack", "set_epoch", "several epochs", "several ranks", "uneven lanes", "workers",
        ),
    ),
    (fuzz.groups, [*range(7)], 200, ("groups",)),
    (
        fuzz.changes, [0, 1, 3, 4, 7, 11], 200,
        ("changed jsonl files", "changed jsonl.gz files", "changed parquet files"),
    ),
]  # fmt: skip
NAMES = [draw.__name__ for draw, *_ in CASES]


@pytest.fixture
def check(record_property: Callable[[str, object], None]) -> Check:
    def check(draw: Callable[[int, int], Counter[str]], numbers: Sequence[int]) -> Counter[str]:
        done: Counter[str] = Counter()
        for number in numbers:
            done += draw(SEED, number)
        record_property("drew", f"{len(numbers)} cases, seed {SEED}: {dict(sorted(done.items()))}")
        assert done["refused"] + done["too_small"] < 0.2 * len(numbers), "too few are run to their end"
        assert done["packs"] > 10 * len(numbers)
        return done

    return check


@pytest.mark.parametrize(
    ("draw", "numbers", "drawn"), [(d, quick, names) for d, quick, _, names in CASES], ids=NAMES
)
def test_runs_agree_with_the_oracle(
    draw: Any, numbers: list[int], drawn: tuple[str, ...], check: Check
) -> None:
    done = check(draw, numbers)
    assert not [name for name in drawn if not done[name]], "nothing of that was drawn"


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "cases"), [(d, slow) for d, _, slow, _ in CASES], ids=NAMES)
def test_many_more_runs_agree_with_the_oracle(draw: Any, cases: int, check: Check) -> None:
    check(draw, range(cases))


def test_what_was_wrong_once_is_right() -> None:
    """Files went where the window of packs that had their rows ended as before; a pack came twice."""
    assert fuzz.changes(5, 189)["changes"]


def test_cases_are_drawn_reproducibly() -> None:
    assert fuzz.configuration(3, 2) == fuzz.configuration(3, 2) != fuzz.configuration(3, 4)


def test_a_failure_says_how_to_run_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    good = fuzz.Case.dataset
    monkeypatch.setattr(fuzz.Case, "dataset", lambda case: good(case) if case.mixed else None)
    with pytest.raises(
        AssertionError, match=r"\nreplay: tests\.harness\.chains\.configuration\(1, \d+\); \w+Source of"
    ):
        for number in range(10):
            fuzz.configuration(1, number)
