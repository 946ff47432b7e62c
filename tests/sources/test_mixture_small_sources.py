"""Sources of a mixture that have fewer rows than there are lanes."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import islice
from typing import Any

import pytest

from streampack import IterablePackedDataset, MapSource, Mix
from streampack.sources import Holdout, Reading
from tests.support.conformance import check_resume_everywhere
from tests.support.corpus import numbered, rows
from tests.support.mixtures import APART, ENDLESS, ONCE, SHUFFLED, entry, make, shifted, training

LANES = 32


def small_and_large(small: Any, *, weight: float = 0.1, large: int = 2000, stop: str = "never") -> Mix:
    return Mix(
        [entry("small", small, weight), entry("large", shifted(rows(large, longest=12), APART), 1 - weight)],
        stop=stop,
    )


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("count", [1, 2, 5, 33])
def test_every_row_comes_once_in_each_pass_over_all_lanes(count: int, window: int) -> None:
    """Each lane reads its passes one after the other, and the passes that all lanes have ended are whole."""
    mix = small_and_large(MapSource(numbered(count)), weight=0.5)
    came: dict[int, Counter[int]] = defaultdict(Counter)
    ended = []
    for lane in range(LANES):
        reader = mix.read(Reading(lane, num_lanes=LANES, shuffle_window=window, seed=1))
        drawn = 0
        while drawn < 12:
            row = next(reader)
            reader.charge(training(1))
            if mix.source_index(row.row_id) == 0:
                drawn += 1
                came[reader.states[0].restarts][row.data["i"]] += 1
        ended.append(reader.states[0].restarts)
    assert min(ended) > 5
    for number in range(min(ended)):
        assert came[number] == Counter(range(count)), f"pass {number}"


@pytest.mark.parametrize("stop", ["never", "all_exhausted"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_source_of_fewer_rows_than_lanes_keeps_its_weight(count: int, stop: str) -> None:
    data = make(small_and_large(rows(count, longest=12), stop=stop), epochs=None, num_lanes=LANES, **SHUFFLED)
    lanes = Counter(pack["lane"] for pack in islice(data, 2000))
    assert set(lanes) == set(range(LANES))
    assert max(lanes.values()) - min(lanes.values()) <= 1, "no lane ended"
    stats = data.source_stats()
    trained = [source.trained for source in stats.values()]
    assert abs(trained[0] / sum(trained) - 0.1) < (0.01 if stop == "never" else 0.03), (
        "epochs have 70 rows a lane"
    )
    if stop == "never":
        passes = stats["small"].epochs / LANES
        assert abs(passes * count - stats["small"].samples) < 0.1 * stats["small"].samples, (
            "a lane counts the passes in which it has no rows as well"
        )


@pytest.mark.parametrize(
    ("stop", "how"),
    [("never", ENDLESS)]
    + [(stop, how) for stop in ("all_exhausted", "first_exhausted") for how in (ENDLESS, ONCE)],
)
def test_a_run_with_a_source_of_two_rows_resumes_at_every_pack(stop: str, how: dict[str, Any]) -> None:
    mix = small_and_large(rows(2, longest=9), weight=0.3, large=60, stop=stop)
    packs = check_resume_everywhere(
        lambda: make(mix, num_lanes=5, **how, **SHUFFLED), packs=40 if how == ENDLESS else 100
    )
    assert len(packs) > 5


def test_all_exhausted_leaves_no_row_out() -> None:
    data = make(small_and_large(rows(3), large=300, stop="all_exhausted"), num_lanes=8, epochs=2)
    came: dict[int, Counter[Any]] = {0: Counter(), 1: Counter()}
    for pack in data:
        came[pack["epoch"]].update(fragment.row_id for fragment in pack["fragments"])
    assert [len(counts) for counts in came.values()] == [303, 303]
    large = {n for counts in came.values() for row_id, n in counts.items() if row_id[0] == 1}
    assert large <= {1, 2}


def test_first_exhausted_ends_where_a_lane_has_no_row_left() -> None:
    """A lane without rows of a source ends when that is needed. In the next epoch others are without."""
    mix = small_and_large(rows(3), large=300, stop="first_exhausted")
    once = make(mix, num_lanes=8, epochs=4)
    came = [Counter(), Counter(), Counter(), Counter()]  # type: list[Counter[Any]]
    for pack in once:
        came[pack["epoch"]].update(fragment.row_id for fragment in pack["fragments"])
    assert all(max(counts.values()) == 1 for counts in came)
    assert all(sum(source == 0 for source, _ in counts) == 3 for counts in came)
    endless = make(mix, num_lanes=8, epochs=None)
    lanes = Counter(pack["lane"] for pack in islice(endless, 400))
    assert set(lanes.values()) == {50}, "a lane without a row in one epoch goes on with the next"


@pytest.mark.parametrize("stop", ["never", "all_exhausted", "first_exhausted"])
def test_a_source_without_rows_is_refused(stop: str) -> None:
    """A lane that has no rows looks whether the others have some."""
    none = Holdout(MapSource(rows(1)), fraction=1e-9, part="validation")
    with pytest.raises(ValueError) as error:
        list(make(small_and_large(none, weight=0.5, stop=stop), num_lanes=4))
    assert str(error.value) == (
        "lane 0 of 4: source 'small' has no rows in 9 passes over it, so its weight cannot be reached; leave the "
        "source out"
    )


@pytest.mark.parametrize("trained", [2, 0])
def test_a_small_source_in_which_few_rows_are_trained_is_read_on(trained: int) -> None:
    masked = {"tokens": [1, 2], "labels": [-100] * 2}
    few = [*[{"tokens": [1] * 9, "labels": [1] * 9}] * trained, *[masked] * (30 - trained)]
    large = [{"tokens": [2] * 9, "labels": [2] * 9}] * 200
    mix = Mix([entry("few", few), entry("large", large)], stop="never")
    data = IterablePackedDataset(mix, max_seq_len=24, num_lanes=8, untrained="drop", epochs=None)
    if not trained:
        with pytest.raises(ValueError, match=r"the last 100\d rows of source 'few' trained no token"):
            next(iter(data))
        return
    packs = list(islice(data, 200))
    assert len(packs) == 200
    stats = data.source_stats()
    assert abs(stats["few"].trained / stats["large"].trained - 1) < 0.2


def test_the_default_lanes_are_those_that_all_sources_fill_together() -> None:
    many, few = MapSource([{}] * 2048), MapSource([{}] * 20)
    sources = [entry("a", many), entry("b", many), entry("c", few)]
    assert Mix(sources, stop="never").natural_lanes() == 8
    assert Mix(sources[1:]).natural_lanes() == 4
    assert Mix(sources[2:]).natural_lanes() == 1
    assert Mix(sources, stop="first_exhausted").natural_lanes() == 1
