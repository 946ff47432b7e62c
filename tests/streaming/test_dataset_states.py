"""States of a stream: what they hold, and which are refused."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from streampack import Ledger, MapSource
from streampack.streaming.lane_state import LaneState
from tests.support.conformance import content
from tests.support.corpus import all_of, rows, samples_in, write
from tests.support.streams import make


def test_a_state_is_plain_and_loads_as_weights_only() -> None:
    dataset = make(MapSource(rows(200)), num_lanes=3)
    for _ in islice(dataset, 20):
        pass
    state = dataset.state_dict()

    def check(value: Any) -> None:
        if isinstance(value, dict):
            assert {type(key) for key in value} <= {str, int}
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                check(item)
        else:
            assert type(value) in (str, int, bool, type(None))

    check(state)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True) == state
    assert len(buffer.getvalue()) < 4096


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


def test_lane_states_do_not_change_while_the_stream_goes_on() -> None:
    stream = make(MapSource(rows(200)), num_lanes=3).stream()
    next(stream)
    states = stream.lane_states()
    frozen = copy.deepcopy(states)
    list(stream)
    assert states == frozen
    states.clear()
    assert len(stream.lane_states()) == 3


def test_a_state_can_be_loaded_and_taken_without_a_pack() -> None:
    first = make(MapSource(rows(200)), num_lanes=3)
    assert first.state_dict()["lanes"] == {}
    iterator = iter(first)
    packs = [content(pack) for pack in iterator]
    again = make(MapSource(rows(200)), num_lanes=3)
    for _ in islice(again, 10):
        pass
    state = again.state_dict()
    for _ in range(3):  # through three datasets that never yield
        between = make(MapSource(rows(200)))
        between.load_state_dict(state)
        assert between.state_dict() == state
        assert between.ledger() == again.ledger()
        between.state_dict()["lanes"].clear()
        assert between.state_dict() == state
        iter(between)
        assert between.state_dict() == state
        state = between.state_dict()
    last = make(MapSource(rows(200)))
    last.load_state_dict(state)
    assert [content(pack) for pack in last] == packs[10:]


def test_a_state_is_of_the_newest_iteration() -> None:
    dataset = make(MapSource(rows(100)), num_lanes=1)
    packs = [content(pack) for pack in dataset]
    dataset.set_epoch(0)
    iterator = iter(dataset)
    assert dataset.state_dict()["lanes"] == {}
    assert content(next(iterator)) == packs[0]
    dataset.set_epoch(0)
    assert [content(pack) for pack in dataset] == packs, "an iteration without a state begins anew"


BASE: dict[str, Any] = {
    "max_seq_len": 24,
    "buffer_size": 8,
    "overlong": "truncate",
    "shuffle": True,
    "shuffle_window": 9,
}


@pytest.mark.parametrize(
    ("name", "theirs", "ours", "change"),
    [
        ("max_seq_len", "24", "32", {"max_seq_len": 32}),
        ("strategy", "'exact_fit'", "'best_fit'", {"strategy": "best_fit"}),
        ("split_across_pack", "False", "True", {"split_across_pack": True}),
        ("buffer_size", "8", "9", {"buffer_size": 9}),
        ("overlong", "'truncate'", "'drop'", {"overlong": "drop"}),
        ("truncate_side", "'right'", "'left'", {"truncate_side": "left"}),
        ("truncate_eos", "None", "2", {"truncate_eos": 2}),
        ("empty", "'error'", "'drop'", {"empty": "drop"}),
        ("shuffle_window", "9", "10", {"shuffle_window": 10}),
        ("shuffle_window", "9", "0", {"shuffle": False}),
        ("seed", "0", "1", {"seed": 1}),
    ],
)
def test_a_state_of_another_config_is_refused(
    name: str, theirs: str, ours: str, change: dict[str, Any]
) -> None:
    source = MapSource(rows(50))
    before = make(source, **BASE)
    next(iter(before))
    after = make(source, **{**BASE, **change})
    with pytest.raises(ValueError) as error:
        after.load_state_dict(before.state_dict())
    assert str(error.value) == (
        f"the state was made with {name}={theirs} and this dataset has {name}={ours}; "
        "resume with what the run began with, or start a new run"
    )
    assert samples_in(make(source, **BASE)) == all_of(rows(50)), "as it comes, it works"


def test_a_strategy_that_is_not_used_is_not_compared() -> None:
    before = make(MapSource(rows(50)), split_across_pack=True)
    rest = iter(before)
    next(rest)
    after = make(MapSource(rows(50)), split_across_pack=True, strategy="best_fit")
    after.load_state_dict(before.state_dict())
    assert [content(pack) for pack in after] == [content(pack) for pack in rest]


def test_a_state_of_another_corpus_is_refused(tmp_path: Path) -> None:
    before = make(MapSource(rows(50)))
    next(iter(before))
    state = before.state_dict()
    words = iter(
        [
            "corpus.rows=50 and this dataset has corpus.rows=51;",
            "another corpus: sample 0 is another row;",
            "corpus.source='MapSource' and this dataset has corpus.source='JSONLSource';",
        ]
    )
    for source in (MapSource(rows(51)), MapSource(rows(50, seed=1)), write(tmp_path / "a.jsonl", rows(50))):
        with pytest.raises(ValueError) as error:
            make(source).load_state_dict(state)
        assert str(error.value).startswith("the state was made with " + next(words))
    make(MapSource(rows(50))).load_state_dict(state)


def test_settings_that_change_no_pack_may_differ_from_the_states() -> None:
    source = MapSource(rows(50))
    before = make(source, num_lanes=2)
    list(islice(before, 3))
    after = make(source, padding_idx=5, vocab_size=10**6, epochs=4)
    after.load_state_dict(before.state_dict())
    assert len(list(after)) > 3


@pytest.mark.parametrize(
    "state",
    [
        None,
        3,
        b"bytes",
        {},
        {"version": 99},
        {"version": 1},
        {"version": 1, "identity": {}},
        {"version": 1, "identity": None, "num_lanes": 1, "lanes": {}},
        {"lanes": {}},
        {"lanes": {0: b"damaged"}},
        {"lanes": {0: "text"}},
        {"lanes": None},
        {"num_lanes": "two"},
    ],
)
def test_objects_that_are_no_state_are_refused(state: Any) -> None:
    dataset = make(MapSource(rows(50)), num_lanes=2)
    next(iter(dataset))
    if isinstance(state, dict) and "version" not in state and state:
        state = {**dataset.state_dict(), **state}
        if state["lanes"] == {}:
            del state["identity"]
    fresh = make(MapSource(rows(50)), num_lanes=2)
    with pytest.raises(ValueError, match="state"):
        fresh.load_state_dict(state)
    assert samples_in(fresh) == all_of(rows(50)), "and nothing of it stays"


def test_lanes_of_a_state_must_be_lanes_of_the_run() -> None:
    """Keys that went through JSON are text; taken for missing lanes, they would begin again in silence."""
    dataset = make(MapSource(rows(50)), num_lanes=2)
    list(islice(dataset, 5))
    state = dataset.state_dict()
    for lanes in ({str(lane): r for lane, r in state["lanes"].items()}, {7: state["lanes"][0]}):
        with pytest.raises(ValueError, match="lane"):
            make(MapSource(rows(50)), num_lanes=2).load_state_dict({**state, "lanes": lanes})


@pytest.mark.parametrize("ours", [None, 2, 9])
def test_the_number_of_lanes_comes_from_the_state(ours: int | None) -> None:
    before = make(MapSource(rows(100)), num_lanes=4)
    iterator = iter(before)
    first = list(islice(iterator, 9))
    after = make(MapSource(rows(100)), num_lanes=ours)
    named = rf"num_lanes={ours} is not heeded: the state was made with num_lanes=4, which a run keeps"
    with nullcontext() if ours is None else pytest.warns(UserWarning, match=named):
        after.load_state_dict(before.state_dict())
    rest = list(after)
    assert after.num_lanes == 4
    assert [content(pack) for pack in rest] == [content(pack) for pack in iterator]
    assert samples_in([*first, *rest]) == all_of(rows(100))


# The ledger of a whole run.


def test_the_ledger_adds_up_over_lanes_and_epochs() -> None:
    data = rows(200, overlong=70)
    tokens = sum(row["n"] for row in data)
    dataset = make(MapSource(data), overlong="drop", epochs=2, num_lanes=3)
    packed = 0
    for pack in dataset:
        packed += int(pack["seq_lens"][: pack["num_seqs"]].sum())
        ledger = dataset.ledger()
        assert ledger.packed == packed
        assert ledger.buffered >= 0
    ledger = dataset.ledger()
    too_long = [row["n"] for row in data if row["n"] > 24]
    assert ledger.samples == 400
    assert ledger.tokens_in == 2 * tokens
    assert ledger.dropped == {
        "overlong": 2 * sum(too_long),
        "truncated": 0,
        "empty": 0,
        "bad": 0,
        "untrained": 0,
        "removed": 0,
    }
    assert ledger.dropped_samples["overlong"] == 2 * len(too_long)
    assert ledger.buffered == 0
    assert whole(dataset.state_dict()) == ledger


def whole(state: dict[str, Any]) -> Ledger:
    """The ledger of all lanes of a state."""
    return Ledger.total(LaneState.from_dict(found).ledger for found in state["lanes"].values())


def test_a_state_knows_what_was_dropped_after_the_last_pack() -> None:
    dataset = make(MapSource([{"i": 0, "n": 24}, {"i": 1, "n": 30}]), overlong="drop", num_lanes=1)
    iterator = iter(dataset)
    next(iterator)  # full, so nothing beyond it was read
    assert whole(dataset.state_dict()).dropped["overlong"] == 0
    assert next(iterator, None) is None
    assert whole(dataset.state_dict()).dropped["overlong"] == 30
