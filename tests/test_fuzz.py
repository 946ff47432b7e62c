"""Runs that are drawn at random and compared with a reference, and bugs that this comparison must find.

The slow test takes another seed from ``STREAMPACK_FUZZ_SEED``. A failure says how to run its case alone.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from streampack.accounting import Ledger
from streampack.packing.planner import Planner
from streampack.sources import map_style
from streampack.sources.mixture_scheduler import MixtureScheduler
from streampack.streaming import lane, piece_reader
from streampack.streaming.lane_config import LaneConfig
from stress import planted
from tests.support import fuzz

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
    done = run(30, 5)
    assert done["packs"] > 500
    assert done["resumes"] >= 5


@pytest.mark.slow
def test_2000_configurations_and_200_chains_of_resumes() -> None:
    done = run(2000, 200)
    assert done["packs"] > 50_000
    assert done["resumes"] > 500


def test_cases_are_drawn_reproducibly() -> None:
    assert fuzz.configuration(3, 2) == fuzz.configuration(3, 2) != fuzz.configuration(3, 4)


def test_a_failure_says_how_to_run_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shifted_labels(monkeypatch)
    with pytest.raises(
        AssertionError,
        match=r"wrong labels\nreplay: tests\.support\.fuzz\.configuration\(1, \d+\); \w+Source of",
    ):
        find(fuzz.configuration)


# Bugs are planted that the comparison must find: in packing by configurations, in resumes by chains.

Plant = Callable[[pytest.MonkeyPatch], None]
PACKING_BUGS: list[Plant] = []


def bug(plant: Plant) -> Plant:
    PACKING_BUGS.append(plant)
    return plant


def find(case: Callable[[int, int], Any], first: int = 0) -> None:
    for number in range(first, first + 40):
        case(1, number)


RESUME_BUGS = [
    "cursor-off-by-one", "lost-buffer", "bitmap-shifted-by-one", "offset-not-restored", "drop-counted-twice",
    "state-of-rank-0-only", "stale-lanes-win", "state-ahead-of-packs", "null-packs-train", "one-epoch-too-many",
    "ledger-not-restored", "one-piece-too-far",
]  # fmt: skip


@pytest.mark.parametrize("name", RESUME_BUGS)
def test_bugs_in_resumes_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "_set", partial(monkeypatch.setattr, raising=False))  # undone at the end
    {**planted.BUGS, "one-piece-too-far": lambda: one_piece_too_far(monkeypatch)}[name]()
    with pytest.raises(AssertionError, match="replay"):
        find(fuzz.chain)


def patched(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Make a function return ``change(result, *arguments)`` in place of its result."""
    good = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **named: change(good(*args, **named), *args))


@bug
def token_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(pieces: list[Any], *_: Any) -> list[Any]:
        return [(a, s.cut(0, s.tokens.size - 1)) if a else (a, s) for a, s in pieces]

    patched(monkeypatch, LaneConfig, "cut", short)


@bug
def piece_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    good, calls = map_style._Rows.__next__, count()

    def following(self: Any) -> Any:
        row = good(self)
        self.index -= next(calls) % 9 == 8
        return row

    monkeypatch.setattr(map_style._Rows, "__next__", following)


@bug
def row_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, map_style, "permutation", lambda order, *_: np.where(order == 3, 0, order))


@bug
def shifted_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, lane, "assemble", lambda made, *_: (made[0], np.roll(made[1], 1)))


@bug
def label_at_a_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(made: Any, sequences: Any) -> Any:
        made[1][0] = sequences[0].labels[0]
        return made

    patched(monkeypatch, lane, "assemble", change)


@bug
def padding_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(made: Any, sequences: Any) -> Any:
        made[1][sum(s.tokens.size for s in sequences) :] = 0
        return made

    patched(monkeypatch, lane, "assemble", change)


@bug
def padding_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    good = Planner.add

    def add(self: Any, piece: Any) -> None:
        good(self, piece)
        self.lengths[-1] = piece.length

    monkeypatch.setattr(Planner, "add", add)


@bug
def sequences_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    good = lane.assemble
    monkeypatch.setattr(lane, "assemble", lambda parts, pad_seqs_to, **sizes: good(parts, **sizes))


@bug
def padding_counted_as_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    good = lane.Fragment
    monkeypatch.setattr(
        lane,
        "Fragment",
        lambda row_id, start, stop, told, padding=0: good(row_id, start, stop + padding, told),
    )


@bug
def positions_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(made: Any, *_: Any) -> Any:
        return np.tile(np.arange(made.shape[1]), (len(made), 1))

    patched(monkeypatch, sys.modules["streampack.packing.batch"], "positions", change)


@bug
def mask_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(
        monkeypatch,
        sys.modules["streampack.attention.dense"],
        "document_ids",
        lambda ids, *_: ids.clamp(min=1),
    )


@bug
def cu_seqlens_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, fuzz.attention, "cu_seqlens_of", lambda made, *_: made[:-2])


@bug
def wrong_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    good = lane.Fragment
    monkeypatch.setattr(lane, "Fragment", lambda row_id, *rest: good((*row_id[:-1], row_id[-1] ^ 1), *rest))


@bug
def fragment_without_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    good = lane.Fragment
    monkeypatch.setattr(
        lane, "Fragment", lambda row_id, start, stop, *rest: good(row_id, 0, stop - start, *rest)
    )


@bug
def ledger_by_another_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    good = Ledger.drop
    swapped = {"truncated": "overlong", "overlong": "truncated"}
    monkeypatch.setattr(Ledger, "drop", lambda self, why, n: good(self, swapped.get(why, why), n))


@bug
def untrained_counted_as_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_reader, "trains_nothing", lambda sample: False)


@bug
def mixture_charged_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    good = MixtureScheduler.charge
    monkeypatch.setattr(
        MixtureScheduler, "charge", lambda self, n, *, pieces=1: good(self, min(n, 1), pieces=pieces)
    )


def one_piece_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume takes the newest waiting piece for one that is packed; the ledger is made to agree."""
    good = lane.Lane._restore

    def restore(self: Any, state: Any) -> None:
        good(self, state)
        planner: Planner[Any] = self.planner
        if len(planner.waiting) > 1:
            planner.lengths.pop()
            self.ledger.tokens_in -= planner.waiting.pop().length

    monkeypatch.setattr(lane.Lane, "_restore", restore)


@pytest.mark.parametrize("plant", PACKING_BUGS, ids=lambda plant: plant.__name__)
def test_bugs_in_packing_are_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="replay"):
        # The first mixture whose shares are far enough off.
        find(fuzz.configuration, 25 if plant is mixture_charged_by_rows else 0)
