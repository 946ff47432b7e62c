"""A stream resumes exactly at every step."""

from __future__ import annotations

import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from streampack import JSONLSource, MapSource
from streampack.streaming.lane_state import LaneState
from tests.support.conformance import check_resume_everywhere
from tests.support.corpus import Numbers, all_of, make_source, rows, samples_in, write
from tests.support.strategies import WAYS, settings_of
from tests.support.streams import make

# Resume, everywhere.

ONCE, THRICE, ENDLESS = {"epochs": 1}, {"epochs": 3}, {"epochs": None}
SHUFFLED = {"shuffle": True, "shuffle_window": 7, "seed": 3}
FOUR = {"num_lanes": 4}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *((f"{s}-once", "map", {**settings_of(s), **ONCE, "num_lanes": 1}) for s in WAYS),
    *((f"{s}-thrice", "jsonl", {**settings_of(s), **THRICE, **SHUFFLED, **FOUR}) for s in WAYS),
    *((f"{s}-endless", "iterable", {**settings_of(s), **ENDLESS, **SHUFFLED}) for s in WAYS),
    *(
        (f"{s}-split", "map", {**settings_of(s), "overlong": "split", **THRICE, **SHUFFLED, **FOUR})
        for s in WAYS
    ),
    *(
        (f"{s}-drop", "jsonl", {**settings_of(s), "overlong": "drop", **ENDLESS, "num_lanes": 1})
        for s in WAYS
    ),
    *(
        (f"{s}-truncate", "iterable", {**settings_of(s), "overlong": "truncate", **ONCE, **FOUR})
        for s in WAYS
    ),
    ("split-endless", "jsonl", {"overlong": "split", **ENDLESS, **SHUFFLED, **FOUR}),
    ("wrap-endless", "map", {"split_across_pack": True, **ENDLESS, **SHUFFLED, **FOUR}),
    ("left", "map", {"overlong": "truncate", "truncate_side": "left", **THRICE, **SHUFFLED}),
    ("eos", "iterable", {"overlong": "truncate", "truncate_eos": 2, **THRICE, **SHUFFLED}),
    ("buffer-of-one", "map", {"buffer_size": 1, **THRICE, **FOUR}),
    ("buffer-of-many", "jsonl", {"buffer_size": 1000, **THRICE, **SHUFFLED, "num_lanes": 1}),
    ("window-of-all", "jsonl", {**THRICE, "shuffle": True, "shuffle_window": 10_000, "num_lanes": 2}),
    *(
        (
            f"empty-{policy}",
            "map",
            {"empty": "drop", "overlong": policy, **THRICE, **SHUFFLED, "num_lanes": 2},
        )
        for policy in ("split", "drop")
    ),
    ("empty-wrap", "jsonl", {"empty": "drop", "split_across_pack": True, **ENDLESS, **SHUFFLED}),
    ("gz", "gz", {**THRICE, **SHUFFLED, "num_lanes": 2}),
    ("zst", "zst", {**THRICE, **SHUFFLED, "num_lanes": 2}),
    ("more-lanes-than-files", "gz", {**ONCE, **SHUFFLED, "num_lanes": 5}),
    (
        "buffer-of-epochs",
        "map",
        {"buffer_size": 64, "strategy": "best_fit", **ENDLESS, **SHUFFLED, "num_lanes": 2},
    ),
    ("one-token-packs", "map", {"max_seq_len": 1, "overlong": "split", **THRICE, **FOUR}),
]


QUICK = [case for i, case in enumerate(CASES) if i % 2 or i >= 5 * len(WAYS)]


@pytest.mark.parametrize(("kind", "settings"), [case[1:] for case in QUICK], ids=[case[0] for case in QUICK])
def test_resume_at_every_step(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    """25 packs or more; stopped after every one; and stopped once more after the resume."""
    resumed_at_every_step(tmp_path, kind, settings, packs=25)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_resume_at_every_step_of_a_longer_run(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    resumed_at_every_step(tmp_path, kind, settings, packs=300)


def resumed_at_every_step(tmp_path: Path, kind: str, settings: dict[str, Any], *, packs: int) -> None:
    too_long = "overlong" in settings or "split_across_pack" in settings
    count = 14 * packs // 3 // (settings["epochs"] or 4)
    data = rows(count, overlong=70 if too_long else 0, empty="empty" in settings)
    if settings.get("max_seq_len") == 1 or settings.get("buffer_size") == 64:
        data = data[: packs * 22 // 300 + 3]  # three epochs of one-token packs; six epochs in a buffer
    found = check_resume_everywhere(
        lambda: make(make_source(kind, tmp_path, data), **settings),
        packs=1000 if settings["epochs"] else packs,  # to the end of what ends
    )
    assert len(found) >= packs / 2
    if settings["epochs"]:
        assert [pack["epoch"] for pack in found] == sorted(pack["epoch"] for pack in found)
        assert {pack["epoch"] for pack in found} == set(range(settings["epochs"]))
        if settings.get("overlong", "split") == "split":
            assert samples_in(found) == all_of(data, settings["epochs"])


@pytest.mark.parametrize("num_lanes", [1, 4])
def test_a_resume_reads_at_most_the_window_and_the_pieces_in_flight(tmp_path: Path, num_lanes: int) -> None:
    data = [{"i": i, "n": 1 + i * 7 % 11} for i in range(1000, 4000)]
    path = write(tmp_path / "a.jsonl", data)
    line = path.stat().st_size / 3000
    for window in (0, 50):
        settings = {"shuffle": window > 0, "shuffle_window": window or 1, "num_lanes": num_lanes}
        dataset = make(JSONLSource(path), **settings)
        iterator = iter(dataset)
        for _ in range(10):
            for _ in islice(iterator, 37):
                pass
            state = dataset.state_dict()
            in_flight = 0
            for lane_state in map(LaneState.from_dict, state["lanes"].values()):
                in_flight += lane_state.next_piece - lane_state.first
            source, encoder = JSONLSource(path), Numbers()
            resumed = make(source, encoder=encoder, **settings)
            resumed.load_state_dict(state)
            looked, encoder.calls = source.bytes_read, 0  # at a few rows, to compare
            stream = resumed.stream()
            # Up to a window before the row in question, and up to a window to have the last one whole.
            rows_read = (source.bytes_read - looked) / line
            assert rows_read <= in_flight + 2 * window * num_lanes + 1
            waiting = sum(len(lane.planner.waiting) for lane in stream.lanes)
            assert encoder.calls == waiting, "what is gone is not tokenized again"
            assert waiting <= 8 * num_lanes


def test_states_stay_small() -> None:
    dataset = make(MapSource(rows(30_000)), num_lanes=1, buffer_size=128, shuffle=True)
    sizes = []
    for _ in islice(dataset, 2000):
        sizes.append(len(pickle.dumps(dataset.state_dict()["lanes"][0])))
    assert max(sizes) < 300
