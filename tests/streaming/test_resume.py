"""What a state holds and costs, which settings it decides, and which states are refused.

`tests.harness.chains` draws resumes, and checks that they are exact.
"""

from __future__ import annotations

import copy
import io
import itertools
import json
import pickle
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from streampack import IterableSource, JSONLSource, MapSource, PackedDataLoader, collate_packed
from streampack.streaming.run_state import state_of  # private: writes a state that no run makes
from tests.harness.conformance import content
from tests.harness.corpus import Numbers, all_of, make_source, rows, samples_in, write
from tests.harness.mixtures import make

ONCE, THRICE, ENDLESS = {"epochs": 1}, {"epochs": 3}, {"epochs": None}


@pytest.mark.parametrize("num_lanes", [1, 4])
@pytest.mark.parametrize("window", [0, 50])
def test_a_resume_reads_little_and_encodes_what_waits(tmp_path: Path, num_lanes: int, window: int) -> None:
    path = write(tmp_path / "a.jsonl", [{"i": i, "n": 1 + i * 7 % 11} for i in range(1000, 4000)])
    line = path.stat().st_size / 3000
    settings = {"shuffle": window or False, "num_lanes": num_lanes}
    dataset = make(path, **settings)
    for _ in range(10):
        list(islice(dataset, 37))
        source, encoder = JSONLSource(path), Numbers()
        resumed = make(source, encoder=encoder, **settings)
        resumed.load_state_dict(dataset.state_dict())
        looked, encoder.calls = source.bytes_read, 0  # at a few rows, to compare
        next(iter(resumed))
        # Rows that wait: up to the buffer; up to a window before them, and up to a window to have the last one whole.
        ahead = resumed.ledger().samples - dataset.ledger().samples
        assert (source.bytes_read - looked) / line <= 3 * (
            8 + 1
        ) * num_lanes + ahead + 2 * window * num_lanes + 1
        assert encoder.calls <= 9 * num_lanes + ahead, "what is gone is not tokenized again"


def test_a_state_within_a_long_sample_costs_no_more_the_longer_it_is() -> None:
    def calls_of_a_pack(tokens: int) -> float:
        count = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call"

        data = make(
            [{"input_ids": [1] * tokens}],
            encoder=None,
            epochs=1,
            num_lanes=1,
            overlong="split",
            max_seq_len=4,
        )
        iterator = iter(data)
        next(iterator)
        sys.setprofile(note)
        packs = sum(1 for _ in iterator)
        sys.setprofile(None)
        return count / packs

    assert calls_of_a_pack(8000) < 1.1 * calls_of_a_pack(800)


# What a state is.


@pytest.mark.parametrize(
    ("kind", "buffer_size", "most"), [("map", 8, 1300), ("jsonl", 8, 1300), ("map", 4000, 2800)]
)
def test_a_state_is_plain_small_and_loads_as_weights_only(
    tmp_path: Path, kind: str, buffer_size: int, most: int
) -> None:
    """torch's unpickler refuses integers of more than 2,040 bits."""
    source = make_source(kind, tmp_path, rows(12_000 if buffer_size > 8 else 400))
    dataset = make(source, num_lanes=2, shuffle=True, buffer_size=buffer_size)
    for _ in islice(dataset, 40):
        state = dataset.state_dict()
        assert len(pickle.dumps(state["lanes"])) < most
        check_plain(state)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == state


def check_plain(value: Any) -> None:
    if isinstance(value, dict):
        assert {type(key) for key in value} <= {str, int}
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            check_plain(item)
    else:
        assert type(value) in (str, int, bool, bytes, type(None))


def test_a_state_does_not_change_while_the_stream_goes_on() -> None:
    dataset = make(MapSource(rows(200)), num_lanes=3)
    iterator = iter(dataset)
    next(iterator)
    state, frozen = dataset.state_dict(), pickle.dumps(dataset.state_dict())
    list(iterator)
    assert pickle.dumps(state) == frozen
    state["lanes"].clear()
    state["identity"].clear()
    assert dataset.state_dict()["lanes"], "nor does the stream when the state is changed"
    assert dataset.state_dict()["identity"]


@pytest.mark.parametrize(("workers", "every"), [(0, 1), (2, 17)])
def test_stateful_dataloader_of_torchdata_resumes(workers: int, every: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        dataset = make(MapSource(rows(200)), num_lanes=4, shuffle=True)
        return torchdata.StatefulDataLoader(
            dataset, batch_size=2, num_workers=workers, collate_fn=collate_packed
        )

    def said(batch: Any) -> tuple[Any, ...]:
        return batch.tokens.tolist(), batch.labels.tolist(), batch.seq_lens.tolist(), batch.fragments

    whole = [said(batch) for batch in loader()]
    assert len(whole) > 20
    for step in range(0, len(whole) + 1, every):
        first, second = loader(), loader()
        got = [said(batch) for batch in islice(first, step)]
        second.load_state_dict(first.state_dict())
        assert got + [said(batch) for batch in second] == whole, f"after {step} batches"


# Settings of the run that made the state.

BASE: dict[str, Any] = {"overlong": "truncate", "shuffle": 9}


@pytest.mark.parametrize(
    ("name", "theirs", "ours", "change"),
    [
        ("max_seq_len", "24", "32", {"max_seq_len": 32}),
        ("strategy", "'exact_fit'", "'best_fit'", {"strategy": "best_fit"}),
        ("split_across_pack", "False", "True", {"split_across_pack": True}),
        ("buffer_size", "8", "9", {"buffer_size": 9}),
        ("overlong", "'truncate'", "'drop'", {"overlong": "drop"}),
        ("overlong", "'truncate'", "'truncate_left'", {"overlong": "truncate_left"}),
        ("untrained", "'keep'", "'drop'", {"untrained": "drop"}),
        ("shuffle", "9", "10", {"shuffle": 10}),
        ("shuffle", "9", "False", {"shuffle": False}),
        ("seed", "0", "1", {"seed": 1}),
    ],
)
def test_a_state_of_another_config_is_refused(
    name: str, theirs: str, ours: str, change: dict[str, Any]
) -> None:
    source = MapSource(rows(50))
    before, after = make(source, **BASE), make(source, **{**BASE, **change})
    next(iter(before))
    with pytest.raises(ValueError) as error:
        after.load_state_dict(before.state_dict())
    assert str(error.value) == (
        f"the state was made with {name}={theirs} and this dataset has {name}={ours}; "
        "resume with what the run began with, or start a new run"
    )


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, {"padding_idx": 5, "vocab_size": 10**6}),
        ({"untrained": "error"}, {"untrained": "keep"}),
    ],
)
def test_settings_that_change_no_pack_may_differ_from_the_states(first: Any, then: Any) -> None:
    source = MapSource([{"i": 3 * i, "n": 5} for i in range(50)])
    before, after = make(source, num_lanes=2, **first), make(source, **then)
    iterator = iter(before)
    list(islice(iterator, 3))
    after.load_state_dict(before.state_dict())
    assert [pack["fragments"] for pack in after] == [pack["fragments"] for pack in iterator]


@pytest.mark.parametrize("name", ["num_lanes", "balance_window"])
@pytest.mark.parametrize("ours", [None, 4, 2, 9])
def test_a_run_keeps_its_lanes_and_its_window(name: str, ours: int | None) -> None:
    """A resume heeds the state's, and says so if it was given another."""
    before = make(MapSource(rows(100)), **{"num_lanes": 3, name: 4})
    iterator = iter(before)
    list(islice(iterator, 9))
    after = make(MapSource(rows(100)), **{name: ours})
    named = rf"{name}={ours} is not used: the state was made with {name}=4, which a run keeps"
    with nullcontext() if ours in (None, 4) else pytest.warns(UserWarning, match=named):
        after.load_state_dict(before.state_dict())
    assert getattr(after, name) == 4
    assert [content(pack) for pack in after] == [content(pack) for pack in iterator]


@pytest.mark.parametrize("name", ["num_lanes", "balance_window"])
def test_what_a_user_set_outlives_a_state_that_had_its_own(name: str) -> None:
    """A second state, of a run that has not begun, leaves it open again."""
    begun = make(MapSource(rows(40))).state_dict()
    data = make(MapSource(rows(40)), **{name: 3})
    whole = [content(pack) for pack in data]
    data.load_state_dict(data.state_dict())
    data.load_state_dict(begun)
    assert getattr(data, name) == 3
    assert [content(pack) for pack in data] == whole


def test_a_state_from_before_the_first_pack_leaves_the_number_of_lanes_open() -> None:
    begun = make(MapSource(rows(40))).state_dict()
    assert begun["num_lanes"] is None
    data = make(MapSource(rows(40)), num_lanes=3)
    data.load_state_dict(begun)
    assert len({pack["lane"] for pack in data}) == data.num_lanes == 3
    other = make(MapSource(rows(40)))
    list(other)
    assert other.num_lanes == 1
    other.load_state_dict(begun)
    assert other.num_lanes is None, "what an iteration of this process began with is not of the state"


@pytest.mark.parametrize(("count", "lanes"), [
    (1, 1), (199, 1), (200, 2), (399, 2), (400, 4), (799, 4), (800, 8), (47_999, 8), (48_000, 24), (10**6, 48)
])  # fmt: skip
def test_the_default_number_of_lanes_follows_from_the_rows(count: int, lanes: int) -> None:
    """2,600 rows made 5 lanes, which 2 ranks do not divide. Ranks that divide no default get a multiple of theirs."""
    data = make([{"i": 0, "n": 4}] * count)
    for ranks in range(1, lanes + 2):
        assert data.lanes_for(ranks) == next(n for n in range(lanes, 2 * lanes + 2) if n % ranks == 0)
    assert all(lanes % ranks == 0 for ranks in (1, 2, 4, 8) if ranks <= lanes)


# What is refused.


def damaged(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """States of which one entry, of the state or of a lane, is missing or of another kind."""
    odd = [None, True, -1, 2**63, 1.5, "", "x", b"", [[]], [None], {"a": 1}, torch.zeros(3)]
    for key in ("version", "identity", "epoch", "num_lanes", "lanes"):
        yield {name: value for name, value in state.items() if name != key}
    for key in ("version", "epoch", "num_lanes", "balance_window", "lanes", "identity"):
        yield from ({**state, key: value} for value in odd[4:10])
    for key in ("num_lanes", "balance_window", "slot"):
        yield from ({**state, key: value} for value in (True, -1, 10**9))
    yield {**state, "lanes": {0: state["lanes"][1], 1: state["lanes"][0]}}
    lane = state["lanes"][1]
    for key, value in lane.items():
        changed = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else [value]
        for now in [{**lane, key: each} for each in [*odd, changed]] + [
            {k: lane[k] for k in lane if k != key}
        ]:
            if repr(now) != repr(lane):
                yield {**state, "lanes": {**state["lanes"], 1: now}}
    for now in (None, 3, "text", b"damaged", [], {}, {1: 2}):
        yield {**state, "lanes": {**state["lanes"], 1: now}}
    # A lane that is missing would begin again, and its rows would be trained twice.
    for lanes in ({}, {0: state["lanes"][0]}, {1: lane}, {7: lane}, {**state["lanes"], 7: lane}):
        yield {**state, "lanes": lanes}
    for odd_number in ("x", "01", "-1", "7", "", None, 1.5, 2**70, (1,)):
        yield {**state, "lanes": {0: state["lanes"][0], odd_number: lane}}


@pytest.mark.parametrize("window", [0, 6])
def test_damaged_states_are_refused(window: int) -> None:
    settings: dict[str, Any] = {"num_lanes": 2, "shuffle": True, "balance_window": window}
    dataset = make(MapSource(rows(120)), **settings)
    list(islice(dataset, 9))
    fresh = make(MapSource(rows(120)), **settings)
    states = list(damaged(dataset.state_dict()))
    for state in states:
        with pytest.raises(ValueError, match="state"):
            fresh.load_state_dict(state)
            pytest.fail(f"taken: {state}")
    assert len(states) > 140
    assert samples_in(fresh) == all_of(rows(120)), "and nothing of them stays"


@pytest.mark.parametrize(
    "state", [None, 3, b"bytes", {}, {"version": 99}, {"version": 1}, {"version": 1, "lanes": {}}]
)
def test_objects_that_are_no_state_are_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="state"):
        make(MapSource(rows(50))).load_state_dict(state)


def test_a_state_that_contains_itself_is_refused() -> None:
    """A changed byte of a pickled state may make a reference to the state itself."""
    loader = PackedDataLoader(make(MapSource(rows(50))))
    state = loader.state_dict()
    state["lanes"] = state
    with pytest.raises(ValueError, match="the state is damaged: it contains itself; resume from another"):
        loader.load_state_dict(state)


def test_a_lane_in_the_middle_of_an_older_epoch_is_an_error() -> None:
    """A state in which one lane lags by an epoch: the rest of its epoch must not be skipped silently."""
    data = [
        {"i": i, "n": 24} for i in range(24)
    ]  # packs of one sample each, so that nothing waits between them

    def state_after(packs: int) -> Mapping[str, Any]:
        dataset = make(MapSource(data), num_lanes=2, epochs=3)
        list(islice(dataset, packs))
        return copy.deepcopy(dataset.state_dict())

    late, early = state_after(30), state_after(6)
    loader = PackedDataLoader(make(MapSource(data), num_lanes=2, epochs=3))
    head = {name: value for name, value in late.items() if name not in ("lanes", "checksum")}
    loader.load_state_dict(state_of(head, {0: late["lanes"][0], 1: early["lanes"][1]}))
    with pytest.raises(ValueError, match="lane 1 cannot begin epoch 1: it is in the middle of epoch 0"):
        list(loader)


def test_a_state_whose_lanes_are_of_two_states_is_refused() -> None:
    """The rows that a lane has read between the two would be trained twice, or skipped."""
    states = []
    dataset = make(MapSource(rows(200)), num_lanes=2)
    for _ in islice(dataset, 20):
        states.append(dataset.state_dict())
    early, late = (state["lanes"] for state in states[8::11])
    for state, lanes in itertools.product(
        states[8::11], ({0: early[0], 1: late[1]}, {0: late[0], 1: early[1]})
    ):
        with pytest.raises(ValueError, match=r"damaged or was edited: .* lane [01] "):
            make(MapSource(rows(200)), num_lanes=2).load_state_dict({**state, "lanes": lanes})


@pytest.mark.parametrize("way", ["load_state_dict", "continue_from"])
def test_a_state_from_which_a_lane_was_taken_is_refused_at_each_door(way: str) -> None:
    """The lane would begin again, and its rows would be trained twice."""
    loader = PackedDataLoader(make(MapSource(rows(120)), num_lanes=4), batch_size=2)
    for _ in islice(loader, 5):
        state = loader.state_dict()
    for lane in (*state["lanes"], None):
        left = {number: each for number, each in state["lanes"].items() if lane not in (number, None)}
        for taker in (make(MapSource(rows(120))), PackedDataLoader(make(MapSource(rows(120))))):
            with pytest.raises(ValueError, match=f"damaged or was edited: .* lane {lane or 0} "):
                getattr(taker, way)({**state, "lanes": left})


# Consumers, whose states are merged.


class States(IterableDataset[tuple[str, dict[str, Any]]]):
    """Each pack's content, and the state after it, also in worker processes."""

    def __init__(self, **settings: Any) -> None:
        self.data = make(MapSource(rows(120)), **settings)

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((repr(content(pack)), self.data.state_dict()) for pack in self.data)


def merged(*states: Mapping[str, Any]) -> dict[str, Any]:
    return {**states[0], "lanes": {lane: each for state in states for lane, each in state["lanes"].items()}}


def test_states_of_single_consumers_are_merged_and_checked() -> None:
    """States of the workers of torch's DataLoader. Each worker has its own lanes."""
    given = list(DataLoader(States(num_lanes=6), batch_size=None, num_workers=2))
    states = [state for _, state in given[8:10]]  # behind five packs of each worker
    assert [len(state["lanes"]) for state in states] == [3, 3]
    for state in (*states, merged(*states), merged(*reversed(states))):
        for lane in state["lanes"]:
            left = {number: each for number, each in state["lanes"].items() if number != lane}
            with pytest.raises(ValueError, match=f"damaged or was edited: .* lane {lane} "):
                make(MapSource(rows(120))).load_state_dict({**state, "lanes": left})
    for state in states:
        with pytest.raises(ValueError, match="damaged or was edited"):
            make(MapSource(rows(120))).load_state_dict({**state, "lanes": {}})
    data = make(MapSource(rows(120)))
    data.load_state_dict(through_json(merged(*states)))
    rest = sorted(repr(content(pack)) for pack in data)
    assert rest == sorted(pack for pack, _ in given[10:])
    assert len(rest) > 10


# States that went through JSON.


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("kind", ["map", "jsonl"])
@pytest.mark.parametrize(
    "settings", [{}, {"balance_window": 4}, {"num_lanes": 11, "overlong": "split"}], ids=str
)
@pytest.mark.parametrize("way", ["load_state_dict", "continue_from"])
def test_a_state_that_went_through_json_is_the_same(
    tmp_path: Path, kind: str, settings: dict[str, Any], way: str
) -> None:
    """Integers that are keys become text there, and text sorts in another order from eleven lanes on."""
    given: dict[str, Any] = {"num_lanes": 3, "shuffle": 20, **settings}
    source = make_source(kind, tmp_path, rows(200))
    for doors in (lambda: make(source, **given), lambda: PackedDataLoader(make(source, **given))):
        first = doors()
        list(islice(first, 25))
        state = first.state_dict()
        plain, other = doors(), doors()
        getattr(plain, way)(state)
        getattr(other, way)(through_json(state))
        assert other.state_dict() == plain.state_dict()
        said = [[repr(pack) for pack in each] for each in (plain, other)]
        assert said[0] == said[1]
        assert len(said[0]) > 10


def test_iterables_need_one_consumer() -> None:
    with pytest.raises(ValueError, match=r"2 worker processes would take turns with the rows of an iterable"):
        list(DataLoader(make(IterableSource(rows(10))), batch_size=None, num_workers=2))
