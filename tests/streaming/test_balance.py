"""Windows of packs: the same packs, handed out by cost in an order that all lanes share.

`tests.harness.chains` draws windows for its runs and resumes, and `test_resume.py` stops in them at every pack.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import IterablePackedDataset, IterableSource, JSONLSource, MapSource, Mix
from streampack.packing.attention_cost import AttentionCost
from streampack.sources.base import permutation
from streampack.streaming.balance import BALANCE_KEY
from tests.harness.corpus import Numbers, all_of, rows, samples_in, write
from tests.harness.strategies import WAYS, settings_of
from tests.harness.threads import Topology, make, run, steps_of_run

BUFFER = 6


def dataset(source: Any, **changes: Any) -> IterablePackedDataset:
    given: dict[str, Any] = {"max_seq_len": 24, "buffer_size": BUFFER, "num_lanes": 3, "untrained": "keep"}
    return IterablePackedDataset(source, **{"encoder": Numbers(), **given, **changes})


def content(pack: Mapping[str, Any]) -> tuple[Any, ...]:
    return pack["tokens"].tolist(), pack["labels"].tolist(), pack["seq_lens"].tolist(), pack["fragments"]


def reordered(packs: list[Any], window: int, seed: int, number: int) -> list[Any]:
    """The packs of one window by cost, in the slots of the permutation that all lanes share."""
    slots = permutation(window, BALANCE_KEY, seed, 0, number).tolist()[: len(packs)]
    costs = [AttentionCost().of(pack["seq_lens"][: pack["num_seqs"]].tolist()) for pack in packs]
    dearer = sorted(range(len(packs)), key=lambda i: (costs[i], i))
    return [packs[dearer[sorted(slots).index(slot)]] for slot in slots]


@pytest.mark.parametrize("way", WAYS)
@given(
    window=st.integers(1, 9),
    changes=st.fixed_dictionaries(
        {
            "overlong": st.sampled_from(["split", "drop", "truncate"]),
            "seed": st.integers(0, 3),
            "shuffle_window": st.sampled_from([1, 5]),
            "shuffle": st.booleans(),
            "epochs": st.sampled_from([1, None]),
        }
    ),
)
@settings(max_examples=15)
def test_the_planned_packs_are_handed_out_by_cost(way: str, window: int, changes: dict[str, Any]) -> None:
    """The packs of each window are those that the planner makes one by one; in each slot, lanes have equal ranks."""
    source = MapSource(rows(90, overlong=60, seed=changes["seed"]))
    changes = {**changes, **settings_of(way), "num_lanes": 1}
    limit = None if changes["epochs"] else 10 * window
    plain = list(islice(dataset(source, balance_window=0, **changes), limit))
    made = list(islice(dataset(source, balance_window=window, **changes), limit))
    expected = [
        pack
        for first in range(0, len(plain), window)
        for pack in reordered(plain[first : first + window], window, changes["seed"], first // window)
    ]
    assert [content(pack) for pack in made] == [content(pack) for pack in expected]


def test_each_epoch_has_permutations_of_its_own_and_its_windows_begin_anew() -> None:
    found = list(dataset(MapSource(rows(90)), balance_window=8, epochs=2, num_lanes=1))
    first, second = ([content(pack) for pack in found if pack["epoch"] == epoch] for epoch in (0, 1))
    assert sorted(first) == sorted(second)
    assert first != second


@pytest.mark.parametrize("way", WAYS)
@given(st.integers(1, 12), st.integers(0, 5))
@settings(max_examples=10)
def test_a_piece_waits_for_a_bounded_number_of_packs(way: str, window: int, seed: int) -> None:
    """From when it is read, at most ``buffer_size + 2 * balance_window`` packs are handed out before its own."""
    encode = Numbers()
    read: dict[int, int] = {}  # by sample, the packs that were handed out when it was read
    handed = 0

    def encoded(row: Mapping[str, Any]) -> Any:
        read.setdefault(row["i"], handed)
        return encode(row)

    source = MapSource(rows(150, seed=seed))
    changes = {"balance_window": window, "num_lanes": 1, "encoder": encoded, **settings_of(way)}
    for pack in dataset(source, **changes):
        for i in samples_in([pack]):
            assert handed - read[i] <= BUFFER + 2 * window
        handed += 1
    assert handed > 20


def test_an_encoder_that_makes_other_lengths_is_refused() -> None:
    """Then the packs that were handed out cannot be found again. Of an iterable, no sample that is read tells."""
    data = [{"i": i, "n": 5 + i % 4} for i in range(80)]
    before = dataset(IterableSource(data), balance_window=6, num_lanes=1)
    list(islice(before, 9))

    def longer(row: Mapping[str, Any]) -> Any:
        return Numbers()({**row, "n": 13 - row["n"]} if row["i"] > 20 else row)

    after = dataset(IterableSource(data), balance_window=6, num_lanes=1, encoder=longer)
    after.load_state_dict(_unnamed(before, after))
    with pytest.raises(ValueError, match="the data or the encoder changed"):
        list(after)


def _unnamed(before: IterablePackedDataset, after: IterablePackedDataset) -> dict[str, Any]:
    """A state that says it was made with the other's encoder."""
    state, ours = before.state_dict(), after.state_dict()["identity"]["encoder"]
    return {**state, "identity": {**state["identity"], "encoder": ours}}


def test_the_default_depends_on_ranks_and_length(caplog: pytest.LogCaptureFixture) -> None:
    data = [{"i": i, "n": 5} for i in range(40)]
    for length, ranks, expected in ((24, 4, 0), (8_191, 4, 0), (8_192, 1, 0), (8_192, 2, 64)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            made = run(make(data, max_seq_len=length, balance_window=None, epochs=1), Topology(ranks))
        assert {state["balance_window"] for state in made.states} == {expected}
        assert ("balance_window" in caplog.text) == (expected > 0)


def test_weights_may_change_within_a_window() -> None:
    """Packs that were planned stay: the rows that were read are read again from the sources they came from."""
    sources = {
        "a": MapSource(rows(120, seed=1)),
        "b": MapSource([{**row, "i": row["i"] + 500} for row in rows(120)]),
    }

    def mixed(weight: float) -> IterablePackedDataset:
        entries = [
            {"name": n, "source": s, "weight": w}
            for (n, s), w in zip(sources.items(), (1, weight), strict=True)
        ]
        return dataset(Mix(entries, stop="all_exhausted"), balance_window=6, epochs=2)

    whole = list(mixed(1))
    data, again = mixed(1), mixed(3)
    made = list(islice(data, 20))
    with pytest.warns(UserWarning, match="weights changed"):
        again.load_state_dict(data.state_dict())
    rest = list(again)
    for lane in range(3):
        theirs, ours = ([content(p) for p in packs if p["lane"] == lane] for packs in (rest, whole))
        begun = sum(pack["lane"] == lane for pack in made)
        left = -begun % 6  # of the open window
        assert theirs[:left] == ours[begun : begun + left]
    assert set(samples_in(made + rest)) == set(samples_in(whole))


@pytest.mark.parametrize("way", ["exact_fit", "wrap"])
@pytest.mark.parametrize("steps", [3, 8, 20])
def test_a_file_may_go_while_a_window_is_open(tmp_path: Path, way: str, steps: int) -> None:
    """Then the rest of the window is planned anew: no row twice, and none lost but those of the file."""
    data = rows(120)
    paths = [
        write(tmp_path / f"{number}.jsonl", data[first:stop])
        for number, (first, stop) in enumerate(pairwise(range(0, 121, 20)))
    ]
    changes: dict[str, Any] = {"balance_window": 6, "corpus_changes": "allow", **settings_of(way)}
    before = dataset(JSONLSource(tmp_path), corpus_lists=tmp_path / "lists", **changes)
    made = list(islice(before, steps))
    state = before.state_dict()
    paths[3].unlink()
    after = dataset(JSONLSource(tmp_path), corpus_lists=tmp_path / "lists", **changes)
    with pytest.warns(UserWarning, match="the corpus changed"):
        after.load_state_dict(state)
    packs = made + list(after)
    ledger = after.ledger()
    assert ledger.buffered == 0
    assert ledger.tokens_in == ledger.packed + sum(ledger.dropped.values())
    found, whole = samples_in(packs), all_of(data)
    assert all(len(set(places)) == len(places) for places in found.values()), "a token twice"
    lost = {i for i, places in whole.items() if found.get(i) != places and not 60 <= i < 80}
    # Of samples that are cut by packs' ends, those whose one part was handed out lose the other.
    assert len(lost) <= (3 * 2 * 6 if way == "wrap" else 0)
    if way != "wrap":
        assert sum(len(found.get(i, ())) for i in whole) + ledger.dropped["removed"] == ledger.tokens_in


@pytest.mark.parametrize(("ranks", "workers", "batch_size"), [(1, 0, 4), (2, 2, 2), (2, 0, 1)])
def test_the_packs_of_a_step_cost_alike(ranks: int, workers: int, batch_size: int) -> None:
    """On every topology, with gradient accumulation and without, if steps are whole rows of the lanes' packs."""
    topology = Topology(ranks, workers, batch_size, 4 // (ranks * batch_size))

    def steps(window: int) -> list[list[int]]:
        made = run(make(rows(1500), balance_window=window, num_lanes=4, max_seq_len=24, epochs=1), topology)
        return [
            [AttentionCost().of(stop - start for _, start, stop, *_ in fragments) for _, fragments in step]
            for step in steps_of_run(made, topology)
        ]

    def excess(steps: list[list[int]]) -> float:
        """Mean over the whole steps of the dearest pack above their mean."""
        return fmean(max(costs) / fmean(costs) - 1 for costs in steps if len(costs) == 4)

    with_window, without = steps(32), steps(0)
    assert excess(with_window) < 0.4 * excess(without)
    assert sorted(cost for step in with_window for cost in step) == sorted(
        cost for step in without for cost in step
    )
