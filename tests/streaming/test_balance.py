"""Windows of packs: the same packs, handed out by cost in an order that all lanes share, and resumed exactly."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import IterablePackedDataset, JSONLSource, MapSource, Mix, Pack
from streampack.packing.attention_cost import AttentionCost
from streampack.packing.settings import Packing
from streampack.sources.base import permutation
from streampack.streaming.balance import BALANCE_KEY, hand_out_order
from streampack.streaming.lane import Lane
from streampack.streaming.lane_config import LaneConfig
from streampack.streaming.lane_state import LaneEvent, LaneState
from tests.support.corpus import STRIDE, Numbers, all_of, make_source, rows, samples_in, write
from tests.support.strategies import WAYS, settings_of
from tests.support.thread_ranks import Topology, make, run, steps_of_run

BUFFER = 6


def lane_of(
    source: Any,
    *,
    window: int,
    way: str = "exact_fit",
    overlong: str = "split",
    state: LaneState | None = None,
    encode: Any = None,
    **changes: Any,
) -> Lane:
    packing = Packing(24, buffer_size=BUFFER, overlong=overlong, **settings_of(way))
    config = LaneConfig(source, encode or Numbers(), packing, balance_window=window, **changes)
    lane = Lane(config, state=state)
    lane.restore()
    return lane


def events_of(lane: Lane, limit: int = 500) -> list[LaneEvent]:
    events: list[LaneEvent] = []
    while len(events) < limit and (event := lane.next_event()).pack is not None:
        events.append(event)
    return events


def packs_of(lane: Lane, limit: int = 500) -> list[Pack]:
    return [event.pack for event in events_of(lane, limit) if event.pack is not None]


def content(pack: Pack) -> tuple[Any, ...]:
    return pack.tokens.tolist(), pack.labels.tolist(), pack.seq_lens, pack.fragments


# The order.


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=12, max_size=12), min_size=2, max_size=4),
    st.integers(0, 99),
)
def test_all_lanes_hand_out_packs_of_the_same_rank(lanes: list[list[int]], number: int) -> None:
    """In every slot, each lane's pack has the same rank among the costs of its lane's window."""
    orders = [hand_out_order(costs, slot=0, window=12, key=(0, 0, number)) for costs in lanes]
    for costs, order in zip(lanes, orders, strict=True):
        assert sorted(order) == list(range(12))
        ranks = [sorted(range(12), key=lambda i, of=costs: (of[i], i)).index(i) for i in order]
        assert ranks == permutation(12, BALANCE_KEY, 0, 0, number).tolist()


@given(st.integers(1, 12), st.integers(0, 11), st.integers(0, 99))
def test_a_part_of_a_window_keeps_the_order_of_its_slots(count: int, slot: int, number: int) -> None:
    """Where a window has fewer packs, dearer ones still come in the slots in which other lanes have dearer ones."""
    count = min(count, 12 - slot)
    order = hand_out_order(range(count), slot=slot, window=12, key=(0, 0, number))
    slots = permutation(12, BALANCE_KEY, 0, 0, number).tolist()[slot : slot + count]
    assert sorted(order) == list(range(count))
    assert sorted(range(count), key=slots.__getitem__) == sorted(range(count), key=order.__getitem__)


@pytest.mark.parametrize("way", WAYS)
@given(
    st.integers(1, 9),
    st.sampled_from(["split", "drop", "truncate"]),
    st.integers(0, 3),
    st.sampled_from([0, 5]),
    st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_the_planned_packs_are_handed_out_by_cost(
    way: str, window: int, overlong: str, seed: int, shuffle_window: int, endless: bool
) -> None:
    """The packs of each window are those that the planner makes one by one, in the order of `hand_out_order`."""
    source = MapSource(rows(90, overlong=60, seed=seed))
    changes: dict[str, Any] = {"way": way, "overlong": overlong, "shuffle_window": shuffle_window}
    changes |= {"seed": seed, "endless": endless}
    limit = 10 * window
    plain = packs_of(lane_of(source, window=0, **changes), limit if endless else 500)
    made = packs_of(lane_of(source, window=window, **changes), limit if endless else 500)
    expected: list[Pack] = []
    for first in range(0, len(plain), window):
        packs = plain[first : first + window]
        costs = [AttentionCost().of(pack.seq_lens) for pack in packs]
        order = hand_out_order(costs, slot=0, window=window, key=(seed, 0, first // window))
        expected += [packs[i] for i in order]
    assert [content(pack) for pack in made] == [content(pack) for pack in expected]
    assert [pack.number for pack in made] == list(range(len(plain)))


def test_each_epoch_has_permutations_of_its_own_and_its_windows_begin_anew() -> None:
    lane = lane_of(MapSource(rows(90)), window=8)
    first = [content(pack) for pack in packs_of(lane)]
    lane.start_epoch(1)
    second = [content(pack) for pack in packs_of(lane)]
    assert sorted(first) == sorted(second)
    assert first != second


# States.


@pytest.mark.parametrize("kind", ["map", "jsonl", "iterable"])
@pytest.mark.parametrize("way", WAYS)
def test_a_lane_resumes_at_every_pack_of_a_window(tmp_path: Path, kind: str, way: str) -> None:
    """It has the same state, hands out the same packs, and its later states are the same, too."""
    data = rows(100, overlong=60, empty=True)
    for overlong in ("split", "drop", "truncate") if kind == "jsonl" else ("split",):
        changes: dict[str, Any] = {"way": way, "overlong": overlong, "shuffle_window": 5, "empty": "drop"}
        events = events_of(lane_of(make_source(kind, tmp_path, data), window=5, **changes))
        assert len(events) > 12
        for i, event in enumerate(events):
            state = LaneState.from_dict(json.loads(json.dumps(event.state.as_dict())))
            again = lane_of(make_source(kind, tmp_path, data), window=5, state=state, **changes)
            assert again.state() == event.state
            rest = events_of(again, 7)
            assert [content(e.pack) for e in rest if e.pack] == [
                content(e.pack) for e in events[i + 1 : i + 8] if e.pack
            ]
            assert [e.state for e in rest] == [e.state for e in events[i + 1 : i + 8]]


@pytest.mark.parametrize("way", WAYS)
def test_the_ledger_adds_up_at_every_pack(way: str) -> None:
    handed = 0
    lane = lane_of(MapSource(rows(100, overlong=60)), window=7, way=way, overlong="truncate")
    while (event := lane.next_event()).pack is not None:
        ledger = event.state.ledger
        handed += sum(event.pack.seq_lens)
        assert ledger.packed == handed
        window = lane.windows.tokens
        assert ledger.tokens_in == handed + sum(ledger.dropped.values()) + lane.planner.buffered + window
    assert lane.ledger.buffered == 0


@pytest.mark.parametrize("way", WAYS)
@given(st.integers(1, 12), st.integers(0, 5))
@settings(max_examples=10, deadline=None)
def test_a_piece_waits_for_a_bounded_number_of_packs(way: str, window: int, seed: int) -> None:
    """From when it is read, at most ``buffer_size + 2 * balance_window`` packs are handed out before its own."""
    encode = Numbers()
    read: dict[int, int] = {}  # by sample, the packs that were handed out when it was read
    lane: Lane | None = None

    def encoded(row: Mapping[str, Any]) -> Any:
        read[row["i"]] = lane.packs if lane else 0
        return encode(row)

    lane = lane_of(MapSource(rows(150, seed=seed)), window=window, way=way, encode=encoded)
    for number, pack in enumerate(packs_of(lane)):
        for token in pack.tokens[: sum(pack.seq_lens)].tolist():
            assert number - read[token // STRIDE] <= BUFFER + 2 * window


def test_an_error_in_a_window_consumes_nothing() -> None:
    """A row that cannot be encoded is an error until it can be; then the lane goes on as if it always could."""
    encode = Numbers()
    source = MapSource(rows(80))
    expected = [content(pack) for pack in packs_of(lane_of(source, window=6))]
    lane = lane_of(source, window=6, encode=encode)
    encode.bad = 60
    made: list[Pack] = []
    for _ in range(2):
        with pytest.raises(ValueError, match="sample 60"):
            while pack := lane.next_pack():
                made.append(pack)
    assert len(made) % 6 == 0
    assert made
    encode.bad = None
    made += packs_of(lane)
    assert [content(pack) for pack in made] == expected


def test_an_encoder_that_makes_other_lengths_is_refused() -> None:
    """Then the packs that were handed out cannot be found again."""
    source = MapSource([{"i": i, "n": 5 + i % 4} for i in range(80)])
    event = events_of(lane_of(source, window=6))[8]
    assert event.state.open_window is not None

    def longer(row: Mapping[str, Any]) -> Any:
        return Numbers()({**row, "n": 13 - row["n"]})

    with pytest.raises(ValueError, match="the data or the encoder changed"):
        lane_of(source, window=6, state=event.state, encode=longer)


def test_hostile_windows_are_refused() -> None:
    event = events_of(lane_of(MapSource(rows(80)), window=6))[8]
    good = event.state.as_dict()
    packs, number, consumed = good["open_window"]
    for bad in (
        None,
        [packs, number],
        [packs, number, consumed, 0],
        [good["packs"], number, consumed],
        [packs, good["next_piece"] + 1, consumed],
        [packs, good["first"] - 1, consumed],
        [packs, number, "f" * 200],
        [packs, number, "-1"],
        [packs, number, 5],
        [-1, number, consumed],
        [packs, 2.5, consumed],
        "",
        {},
    ):
        with pytest.raises(ValueError, match="damaged"):
            LaneState.from_dict({**good, "open_window": bad})
    with pytest.raises(ValueError, match="open window and balance_window is 0"):
        lane_of(MapSource(rows(80)), window=0, state=event.state)


# The dataset.


def dataset(source: Any, **changes: Any) -> IterablePackedDataset:
    given: dict[str, Any] = {"max_seq_len": 24, "buffer_size": BUFFER, "num_lanes": 3, "untrained": "keep"}
    return IterablePackedDataset(source, encoder=Numbers(), **{**given, **changes})


def keys(packs: list[dict[str, Any]]) -> list[str]:
    return [str((pack["tokens"].tolist(), pack["fragments"])) for pack in packs]


def test_the_default_depends_on_ranks_and_length(caplog: pytest.LogCaptureFixture) -> None:
    for length, ranks, expected in ((24, 8, 0), (8_191, 8, 0), (8_192, 1, 0), (8_192, 2, 64)):
        data = dataset(rows(20), max_seq_len=length, balance_window=None)
        with caplog.at_level(logging.INFO):
            caplog.clear()
            data.settings.choose_window(data.lane_config.packing, ranks)
        assert data.balance_window == expected
        assert len(caplog.records) == (expected > 0)
        data.settings.choose_window(data.lane_config.packing, 9)  # it stays
        assert data.balance_window == expected


@pytest.mark.parametrize("window", [-1, 5000, 1.5])
def test_windows_that_cannot_be_are_refused(window: Any) -> None:
    with pytest.raises(ValueError, match="balance_window="):
        dataset(rows(5), balance_window=window)


def test_a_run_keeps_its_window() -> None:
    """A resume heeds the state's window, and says so if it was given another."""
    data = dataset(rows(100), balance_window=4)
    iterator = iter(data)
    made = [next(iterator) for _ in range(7)]
    state = copy.deepcopy(data.state_dict())
    rest = keys(list(iterator))
    for window in (None, 4, 0, 9):
        again = dataset(rows(100), balance_window=window)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            again.load_state_dict(state)
        said = [str(each.message) for each in caught]
        assert len(said) == (window in (0, 9))
        assert all(f"balance_window={window} is not heeded" in each for each in said)
        assert keys(list(again)) == rest
    assert len(made) == 7
    for bad in (-1, 10**9, "4", True):
        with pytest.raises(ValueError, match="damaged"):
            dataset(rows(100)).load_state_dict({**state, "balance_window": bad})
    with pytest.raises(ValueError, match=r"balance_cost\.sliding_window"):
        dataset(rows(100), balance_cost={"sliding_window": 8}).load_state_dict(state)


def test_weights_may_change_within_a_window() -> None:
    """Packs that were planned stay: the rows that were read are read again from the sources they came from."""
    sources = {
        "a": MapSource(rows(60, seed=1)),
        "b": MapSource([{**row, "i": row["i"] + 500} for row in rows(60)]),
    }

    def mixed(weight: float) -> IterablePackedDataset:
        entries = [
            {"name": n, "source": s, "weight": w}
            for (n, s), w in zip(sources.items(), (1, weight), strict=True)
        ]
        return dataset(Mix(entries, stop="all_exhausted"), balance_window=6, epochs=2)

    whole = list(mixed(1))
    data = mixed(1)
    iterator = iter(data)
    made = [next(iterator) for _ in range(20)]
    window = {lane.lane: lane.windows.open for lane in data._stream.lanes}  # type: ignore[union-attr]
    planned = Counter(lane for lane, each in window.items() if each for _ in each.packs)
    again = mixed(3)
    with pytest.warns(UserWarning, match="weights changed"):
        again.load_state_dict(copy.deepcopy(data.state_dict()))
    rest = list(again)
    for lane in range(3):
        theirs = [key for key, p in zip(keys(rest), rest, strict=True) if p["lane"] == lane][: planned[lane]]
        ours = [key for key, p in zip(keys(whole), whole, strict=True) if p["lane"] == lane]
        begun = sum(pack["lane"] == lane for pack in made)
        assert theirs == ours[begun : begun + planned[lane]]
    assert sum(planned.values()) > 3
    assert set(samples_in(made + rest)) == set(samples_in(whole))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [3, 8, 13, 20])
def test_a_file_may_go_while_a_window_is_open(tmp_path: Path, way: str, steps: int) -> None:
    """Then the rest of the window is planned anew: no row twice, and none lost but those of the file."""
    data = rows(120)
    paths = [
        write(tmp_path / f"{number}.jsonl", data[first:stop])
        for number, (first, stop) in enumerate(pairwise(range(0, 121, 20)))
    ]
    settings: dict[str, Any] = {"balance_window": 6, "corpus_changes": "allow", **settings_of(way)}

    def opened() -> IterablePackedDataset:
        return dataset(JSONLSource(tmp_path), corpus_lists=tmp_path / "lists", **settings)

    before = opened()
    iterator = iter(before)
    made = [next(iterator) for _ in range(steps)]
    state = copy.deepcopy(before.state_dict())
    paths[3].unlink()
    after = opened()
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


# Ranks.


@pytest.mark.parametrize(("ranks", "workers", "batch_size"), [(1, 0, 4), (2, 2, 2), (4, 0, 1), (2, 0, 1)])
def test_the_packs_of_a_step_cost_alike(ranks: int, workers: int, batch_size: int) -> None:
    """On every topology, with gradient accumulation and without, if steps are whole rows of the lanes' packs."""
    topology = Topology(ranks, workers, batch_size, 4 // (ranks * batch_size))

    def steps(window: int) -> list[list[int]]:
        made = run(make(rows(1500), balance_window=window, num_lanes=4, max_seq_len=24), topology)
        return [
            [AttentionCost().of(stop - start for _, start, stop, *_ in fragments) for _, fragments in step]
            for step in steps_of_run(made, topology)
        ]

    def excess(window: int) -> float:
        """Mean over the whole steps of the dearest pack above their mean."""
        return fmean(max(costs) / fmean(costs) - 1 for costs in steps(window) if len(costs) == 4)

    assert excess(32) < 0.4 * excess(0)
    assert sorted(cost for step in steps(32) for cost in step) == sorted(
        cost for step in steps(0) for cost in step
    )


def test_ranks_with_other_windows_are_refused() -> None:
    windows = iter([0, 4])
    with pytest.raises(AssertionError) as error:
        run(lambda: make(rows(50), balance_window=next(windows))(), Topology(2))
    assert "balance_window" in str(error.value.__cause__)


@pytest.mark.parametrize("way", WAYS)
def test_a_window_that_begins_at_the_end_of_an_epoch_is_resumed(way: str) -> None:
    """Nothing waits there, so the state's cursor is in the epoch before that of the first row."""
    for count in (1, 2, 3):
        source = MapSource([{"i": i, "n": 24} for i in range(count)])
        events = events_of(lane_of(source, window=5, way=way, endless=True), 24)
        expected = [content(event.pack) for event in events if event.pack is not None]
        for number, event in enumerate(events[:-4], 1):
            state = LaneState.from_dict(event.state.as_dict())
            again = lane_of(source, window=5, way=way, endless=True, state=state)
            assert [content(pack) for pack in packs_of(again, 4)] == expected[number : number + 4]
