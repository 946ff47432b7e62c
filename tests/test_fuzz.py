"""Runs that are drawn at random and compared with a reference.

The slow test takes another seed from ``STREAMPACK_FUZZ_SEED``. A failure says how to run its case alone.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.harness import chains as fuzz

pytestmark = [
    # Lanes and ranks are drawn at random, for a resume too.
    pytest.mark.filterwarnings("ignore:.*do not divide .* evenly"),
    pytest.mark.filterwarnings("ignore:num_lanes=.* is not heeded"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
SEED = int(os.environ.get("STREAMPACK_FUZZ_SEED", "0"))


def run(configurations: int, chains: int) -> Counter[str]:
    done: Counter[str] = Counter()
    for number in range(configurations):
        done += fuzz.configuration(SEED, number)
    for number in range(chains):
        done += fuzz.chain(SEED, number)
    print(f"seed {SEED}: {dict(done)}")
    assert (done["configurations"], done["chains"]) == (configurations, chains)
    assert done["refused"] + done["too_small"] < 0.2 * (configurations + chains), (
        "too few are run to their end"
    )
    return done


def test_some_configurations_and_chains_of_resumes() -> None:
    done = run(30, 20)
    assert done["packs"] > 500
    assert done["resumes"] >= 20


@pytest.mark.slow
def test_2000_configurations_and_200_chains_of_resumes() -> None:
    done = run(2000, 200)
    assert done["packs"] > 50_000
    assert done["resumes"] > 500


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
