"""`num_lanes` and `balance_window` of a run: who may set them, and when they stay."""

from __future__ import annotations

import logging
import warnings

import pytest

from streampack import IterablePackedDataset
from streampack.streaming.loaded_state import LoadedState
from streampack.streaming.run_settings import RunSettings

ROWS = [{"tokens": [i] * 4, "labels": [i] * 4} for i in range(40)]


def settings_after(asked: int | None, before: int | None) -> tuple[RunSettings, list[str]]:
    settings = RunSettings(num_lanes=asked, balance_window=asked)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        settings.keep(LoadedState(num_lanes=before, balance_window=before))
    return settings, [str(each.message).split(" ")[0] for each in caught]


@pytest.mark.parametrize(
    ("asked", "before", "kept", "said"),
    [(None, None, None, False), (None, 4, 4, False), (4, 4, 4, False), (5, 4, 4, True), (5, None, 5, False)],
)
def test_a_state_goes_before_what_was_asked_for(
    asked: int | None, before: int | None, kept: int | None, said: bool
) -> None:
    settings, warned = settings_after(asked, before)
    assert (settings.num_lanes, settings.balance_window) == (kept, kept)
    assert warned == (["num_lanes=5", "balance_window=5"] if said else [])
    if before is not None:
        settings.keep(LoadedState(num_lanes=7, balance_window=7))  # no warning: nothing is asked for any more
        assert (settings.num_lanes, settings.balance_window) == (7, 7)


def test_a_state_from_before_the_first_pack_leaves_the_number_of_lanes_open() -> None:
    begun = IterablePackedDataset(ROWS, max_seq_len=8).state_dict()
    assert begun["num_lanes"] is None
    data = IterablePackedDataset(ROWS, max_seq_len=8, num_lanes=3)
    data.load_state_dict(begun)
    assert len({pack["lane"] for pack in data}) == data.num_lanes == 3
    other = IterablePackedDataset(ROWS, max_seq_len=8)
    assert len(list(other)) == 20
    assert other.num_lanes == 1
    other.load_state_dict(begun)
    assert other.num_lanes is None, "what an iteration of this process began with is not of the state"


@pytest.mark.parametrize(
    ("rows", "ranks", "lanes"),
    [(40, 1, 1), (40, 3, 3), (2600, 1, 4), (2600, 3, 3), (3600, 2, 4), (5000, 1, 8)],
)
def test_a_default_of_few_lanes_divides_evenly_and_is_said(
    rows: int, ranks: int, lanes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """2,600 rows made 5 lanes, which 2 ranks do not divide."""
    data = IterablePackedDataset(ROWS[:1] * rows, max_seq_len=8)
    assert data.lanes_for(ranks) == lanes
    if ranks == 1:
        with caplog.at_level(logging.INFO, logger="streampack"):
            next(iter(data))
        assert (f"num_lanes={lanes}, few" in caplog.text) == (lanes < 8)
