from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import Ledger
from streampack.accounting import DROP_REASONS, SourceStats
from streampack.streaming.lane_state import LaneState, OpenWindow

counts = st.integers(0, 2**62)


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    return Ledger(
        *(draw(counts) for _ in range(7)),
        {reason: draw(counts) for reason in DROP_REASONS},
        {reason: draw(counts) for reason in DROP_REASONS},
    )


@st.composite
def states(draw: st.DrawFn) -> LaneState:
    first, span = draw(counts), draw(st.integers(0, 300))
    packs, planned = draw(counts), draw(st.integers(0, span))
    window = OpenWindow(packs - 1, first + planned, draw(st.integers(0, 2**planned - 1))) if packs else None
    return LaneState(
        packs=packs,
        done=draw(st.booleans()),
        epoch=draw(counts),
        cursor=tuple(draw(st.lists(counts, max_size=6))),
        first=first,
        offset=draw(counts),
        next_piece=first + span,
        consumed=draw(st.integers(0, 2**span - 1)),
        ledger=draw(ledgers()),
        rows=draw(st.integers(0, 2**300 - 1)),
        epochs=tuple(draw(st.lists(st.tuples(counts, counts), max_size=2))),
        windows=tuple(
            draw(
                st.lists(
                    st.tuples(counts, counts, st.lists(counts, min_size=2, max_size=5).map(tuple)), max_size=3
                )
            )
        ),
        front=tuple(draw(st.lists(counts, max_size=4))),
        source_stats=tuple(
            SourceStats(*numbers) for numbers in draw(st.lists(st.tuples(*[counts] * 5), max_size=4))
        ),
        reached=draw(st.integers(0, 2**32 - 1)),
        bad_shards=tuple(draw(st.lists(counts, max_size=3))),
        open_window=draw(st.sampled_from([None, window])),
        anew=draw(st.booleans()),
    )


def typical() -> LaneState:
    """With 1,234 packs, 90 pieces in flight, shuffled files of a gigabyte."""
    return LaneState(
        packs=1234,
        done=False,
        epoch=1,
        cursor=(12, 734_003_200, 1999),
        first=1_250_000,
        offset=0,
        next_piece=1_250_090,
        consumed=(1 << 88) - 5,
        ledger=Ledger(
            samples=1_250_090, tokens_in=543_789_150, packs=1234, capacity=5_054_464, packed=5_054_000
        ),
        reached=2_596_996_162,
        windows=((0, 0, (1, 12, 734_003_200, 1500, 548)),),
    )


@settings(max_examples=30)
@given(states())
def test_round_trip_through_a_checkpoint(state: LaneState) -> None:
    buffer = io.BytesIO()
    torch.save(state.as_dict(), buffer)
    buffer.seek(0)
    assert LaneState.from_dict(torch.load(buffer, weights_only=True)) == state


def test_a_bitmap_of_any_length_loads_as_weights_only() -> None:
    """torch's unpickler refuses integers of more than 2,040 bits."""
    state = typical()
    state.consumed, state.next_piece = 1 << 20_000, state.first + 30_000
    buffer = io.BytesIO()
    torch.save(state.as_dict(), buffer)
    buffer.seek(0)
    assert LaneState.from_dict(torch.load(buffer, weights_only=True)) == state


def test_a_lane_state_dict_has_these_fields() -> None:
    """Checkpoints hold it."""
    assert typical().as_dict() == {
        "packs": 1234,
        "done": False,
        "epoch": 1,
        "cursor": [12, 734003200, 1999],
        "first": 1250000,
        "offset": 0,
        "next_piece": 1250090,
        "consumed": "fffffffffffffffffffffb",
        "ledger": [1250090, 543789150, 1234, 5054464, 5054000, 0, 0, *[0] * 12],
        "rows": "0",
        "epochs": [],
        "windows": [[0, 0, 1, 12, 734003200, 1500, 548]],
        "front": [],
        "source_stats": [],
        "reached": 2596996162,
        "bad_shards": [],
        "open_window": [],
        "checksum": 533312321,
    }


@settings(max_examples=20)
@given(states(), st.data())
def test_the_checksum_detects_every_changed_value(state: LaneState, data: st.DataObject) -> None:
    found = state.as_dict()
    for name, value in found.items():
        if isinstance(value, list):
            changed: Any = [*value, data.draw(counts)]
        elif isinstance(value, str):
            changed = f"{value}1"
        else:
            changed = not value if name in ("done", "anew") else value + 1
        with pytest.raises(
            ValueError, match="the state of this lane is damaged, resume from another checkpoint"
        ):
            LaneState.from_dict({**found, name: changed})
        with pytest.raises(ValueError, match="a lane's state is a dict of|the checksum is wrong"):
            LaneState.from_dict({key: item for key, item in found.items() if key != name})


ODD = [None, True, -1, 2**63, 1.0, "", "x", b"", [], [[]], [None], {}, (), {"a": 1}, torch.zeros(3)]


@pytest.mark.parametrize("name", [*typical().as_dict()])
def test_other_kinds_of_values_are_refused(name: str) -> None:
    for value in ODD:
        if value == [] and name in ("source_stats", "epochs", "front", "bad_shards", "open_window"):
            continue  # as it is
        with pytest.raises(ValueError, match="damaged"):
            LaneState.from_dict({**typical().as_dict(), name: value})


@pytest.mark.parametrize("value", [None, 3, "text", b"", [], {}, {1: 2}])
def test_what_is_not_a_state_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="a lane's state is a dict of"):
        LaneState.from_dict(value)


def test_a_bitmap_longer_than_the_pieces_is_named() -> None:
    state = typical()
    state.consumed = 1 << 103
    with pytest.raises(
        ValueError, match="consumed marks 104 pieces of 90; the state of this lane is damaged"
    ):
        LaneState.from_dict(state.as_dict())


def test_size_is_some_hundred_bytes() -> None:
    assert len(pickle.dumps(typical().as_dict())) <= 360
    assert len(pickle.dumps(LaneState(0, False, 0, (0,), 0, 0, 0, 0, Ledger()).as_dict())) <= 280
