"""Loaders on several ranks, which are threads of this process: agreement, order, errors, and groups of ranks.

`tests.harness.chains` draws runs on ranks; `test_processes.py` has ranks that are processes, over gloo.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from streampack import Batch, IterablePackedDataset, JSONLSource, MapSource, Mix, PackedDataLoader
from streampack.distributed.rank_sync import RankSync  # private: what a rank says and hears
from tests.harness.corpus import Numbers, rows
from tests.harness.mixtures import APART, entry, shifted
from tests.harness.mixtures import make as mixture
from tests.harness.threads import (
    Board,
    Fails,
    OutOfStep,
    Place,
    ThreadSync,
    Topology,
    check_steps,
    check_whole,
    in_process,
    make,
    on_ranks,
    packs_of,
    run,
    run_threads,
    skewed,
    steps_of,
)

# RankSync by itself.


def test_a_board_sees_ranks_that_are_out_of_step() -> None:
    board = Board(2)
    ThreadSync(board, 0).exchange([1])
    with pytest.raises(OutOfStep):
        ThreadSync(board, 1).gather("x")


def test_a_merge_takes_each_lane_from_its_owner() -> None:
    """After a load every rank holds all lanes; the others' become stale."""

    def act(rank_sync: ThreadSync) -> Any:
        own = {lane: b"new" if lane % 3 == rank_sync.rank else b"stale" for lane in range(10)}
        return rank_sync.merge_lanes(own)

    assert on_ranks(3, act) == [dict.fromkeys(range(10), b"new")] * 3


def test_after_an_interrupted_gather_a_rank_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next message would be taken for part of the interrupted one. After torch's error it raises that again."""
    rank_sync = RankSync(timeout=timedelta(seconds=1))
    rank_sync.alone = False
    raised = [RuntimeError("closed by peer"), RuntimeError("closed by peer"), KeyboardInterrupt("stop")]
    monkeypatch.setattr(rank_sync, "_all_to_all", Mock(side_effect=raised))
    for error in raised:
        with pytest.raises(type(error), match=str(error)):
            rank_sync.gather(1)
    with pytest.raises(RuntimeError, match="rank 0 was interrupted while .* last checkpoint"):
        rank_sync.gather(1)


# Ranks in step.


@pytest.mark.parametrize(("small", "least", "most"), [(3, 0, 0.3), (400, 0.6, 1)])
def test_a_mixture_that_stops_with_its_first_source_has_equal_steps_until_a_lane_ends(
    small: int, least: float, most: float
) -> None:
    """A lane ends when it needs a source of which it has no row left: with 3 rows for 12 lanes, some soon."""
    sizes, weights = (10 * small + 90, small, 10 * small + 90), (0.5, 0.2, 1)
    data = [shifted(rows(size, longest=12, seed=i), APART * i) for i, size in enumerate(sizes)]

    def built() -> IterablePackedDataset:
        entries = [entry(f"{i}", MapSource(each), weights[i]) for i, each in enumerate(data)]
        return mixture(Mix(entries, stop="first_exhausted"), num_lanes=12, shuffle=True, seed=3)

    steps, equal = [], set()
    for topology in (Topology(1, 0, 6), Topology(3, 1, 2), Topology(2, 0, 3)):
        result = run(built, topology)
        steps = steps_of([[packs_of(batch) for batch in batches] for batches in result.batches], 1)
        equal.add(check_steps(steps, built, 12, 6))
    assert len(equal) == 1
    assert least <= equal.pop() / len(steps) <= most


@pytest.mark.parametrize(("ranks", "workers", "batch_size"), [(2, 0, 3), (2, 3, 7), (1, 4, 3)])
def test_a_resume_at_every_batch_keeps_the_order(ranks: int, workers: int, batch_size: int) -> None:
    """In the middle, after a lane has ended, at the end of an epoch, on the first pack of the next."""
    built = make(skewed(60, num_lanes=12) + rows(40)[30:], overlong="split")
    topology = Topology(ranks, workers, batch_size)
    whole = run(built, topology)
    for stop in range(len(whole.batches[0]) + 1):
        first = run(built, topology, limit=stop)
        assert first.states == [first.states[0]] * ranks
        rest = run(built, topology, state=first.states[0])
        for rank in range(ranks):
            made = [packs_of(batch) for batch in first.batches[rank] + rest.batches[rank]]
            assert made == [packs_of(batch) for batch in whole.batches[rank]], (
                f"rank {rank}, cut after {stop}"
            )
        assert rest.states == whole.states


# Steps on other topologies.


@pytest.mark.parametrize(("count", "lanes"), [(150, 1), (300, 2), (2000, 8)])
def test_what_a_new_run_packs_follows_from_the_data_on_ranks_that_divide_its_lanes(
    count: int, lanes: int
) -> None:
    """200 rows made 1, 1, 2 and 3 lanes with 0 to 3 workers, 2,000 rows 2, 2, 2 and 3."""
    built, packs_per_step = make(rows(count), num_lanes=None, epochs=1), 8
    for topology in (
        Topology(workers=0),
        Topology(workers=3),
        Topology(ranks=2, workers=2),
        Topology(ranks=4),
    ):
        found = run(built, topology, packs_per_step=packs_per_step)
        own = lanes if lanes % topology.ranks == 0 else topology.ranks
        assert {state["num_lanes"] for state in found.states} == {own}
        if own > lanes:
            continue
        steps = steps_of([list(map(packs_of, each)) for each in found.batches], found.batches_per_step)
        assert check_steps(steps, built, lanes, packs_per_step) > 5


@pytest.mark.parametrize(("count", "ranks", "lanes"), [(2000, 3, 9), (300, 4, 4), (150, 3, 3), (2000, 2, 8)])
def test_ranks_that_do_not_divide_the_default_lanes_get_the_next_multiple(
    count: int, ranks: int, lanes: int
) -> None:
    built = make(rows(count), num_lanes=None)
    assert on_ranks(ranks, lambda rank_sync: _lanes_of(rank_sync, built)) == [lanes] * ranks


def _lanes_of(rank_sync: ThreadSync, built: Callable[[], IterablePackedDataset]) -> int | None:
    loader = _on(rank_sync, built())
    next(iter(loader))
    return loader.dataset.num_lanes


def test_a_new_run_with_fewer_lanes_given_than_ranks_is_refused_with_the_way_out() -> None:
    built = make(rows(300), num_lanes=2)
    found = on_ranks(4, lambda rank_sync: next(iter(_on(rank_sync, built()))))
    assert {str(error) for error in found} == {
        "num_lanes=2 gives 2 of 4 ranks nothing to read; in a new run, set num_lanes=4 or a multiple of every number "
        "of ranks that you may resume on, or use fewer ranks"
    }


@pytest.mark.filterwarnings("ignore:. ranks do not divide")
@pytest.mark.parametrize(("ranks", "lanes", "workers"), [(1, 1, 2), (2, 3, 2), (3, 4, 2), (2, 8, 3)])
def test_no_worker_is_started_without_a_lane(
    ranks: int, lanes: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lane and two workers were refused; a rank with fewer lanes than another had idle workers."""
    started: list[str] = []

    def start(stream: Any, lane_states: Any, name: str) -> Any:
        started.append(name)
        return in_process(stream, lane_states, name)

    monkeypatch.setattr("tests.harness.threads.in_process", start)
    built = make(rows(200), num_lanes=lanes, epochs=1)
    found = run(built, Topology(ranks=ranks, workers=workers), packs_per_step=4)
    assert len(set(started)) == len(started) == min(lanes, ranks * workers)
    whole = run(built, Topology(), packs_per_step=4)
    assert sorted(key for each in found.batches for batch in each for key in packs_of(batch)) == sorted(
        key for each in whole.batches for batch in each for key in packs_of(batch)
    )


def _on(rank_sync: ThreadSync, data: IterablePackedDataset) -> PackedDataLoader:
    loader = PackedDataLoader(data)
    loader.rank_sync = rank_sync
    return loader


def test_lanes_that_do_not_divide_evenly_warn() -> None:
    loader = PackedDataLoader(make(rows(50), num_lanes=5)())
    loader.rank_sync = ThreadSync(Board(2), 0)
    loader.rank_sync.gather = lambda value: [value] * 2  # type: ignore[method-assign]  # the other says the same
    with pytest.warns(UserWarning, match="5 lanes") as caught:
        iter(loader)
    assert str(caught[0].message) == (
        "2 ranks do not divide 5 lanes evenly: some have fewer. A step trains the same packs as on other ranks, but "
        "takes 2 batch(es) of 1 on each, filled up with null packs; use a number of ranks that divides the lanes, or "
        "in a new run a num_lanes that the ranks divide"
    )
    assert caught[0].filename == __file__


def test_the_first_batch_of_a_later_epoch_comes_at_once() -> None:
    """As that of the first: rounds of batches made ahead begin short again."""
    data = [{"i": i, "n": 8} for i in range(80)]  # each a pack, 40 for each rank

    def act(rank_sync: ThreadSync) -> list[int]:
        asked = Counter[int]()

        def encode(row: Mapping[str, int]) -> Any:
            asked["rows"] += 1
            return Numbers()(row)

        dataset = IterablePackedDataset(
            data, encoder=encode, max_seq_len=8, num_lanes=2, epochs=2, strategy="next_fit"
        )
        loader = PackedDataLoader(dataset)
        loader.rank_sync = rank_sync
        return [asked["rows"] for _ in loader]

    for read in on_ranks(2, act):
        assert len(read) == 80
        assert read[40] - read[39] <= 3
        assert read[60] - read[40] >= 20 + 7, "then a round is ahead"


# Errors.


@pytest.mark.parametrize(("size", "at", "workers"), [(2, 0, 0), (3, 1, 2), (3, 810, 0)])
def test_an_error_on_one_rank_is_raised_on_all_and_again(size: int, at: int, workers: int) -> None:
    """After the same batch everywhere; the ranks stay in step and can save a state."""
    board = Board(size)
    caught: list[list[Any]] = [[] for _ in range(size)]
    counts = [0] * size
    states: list[Any] = [None] * size
    data = rows(900)  # so many that the other ranks would go on for many rounds

    def rank(number: int) -> None:
        dataset = IterablePackedDataset(
            MapSource(data),
            max_seq_len=12,
            num_lanes=12,
            encoder=Fails(at, KeyError("no luck")),
            buffer_size=4,
        )
        loader = PackedDataLoader(dataset, batch_size=2, num_workers=workers)
        loader.rank_sync = ThreadSync(board, number)
        for _ in range(3):
            try:
                for _ in loader:
                    counts[number] += 1
            except Exception as error:
                caught[number].append(error)
        states[number] = loader.state_dict()

    run_threads(size, rank)
    assert len(set(counts)) == 1
    assert states == [states[0]] * size
    failing = at % 12 % size
    for number, errors in enumerate(caught):
        assert len(errors) == 3, "iterating anew raises again"
        for error in errors:
            if number == failing:
                assert isinstance(error, KeyError)
                assert f"while encoding sample {at}" in error.__notes__
            else:
                assert isinstance(error, RuntimeError)
                assert str(error) == (
                    f"rank {failing} failed while making packs: KeyError: 'no luck' while encoding sample {at}"
                )


# Data-parallel groups: equal batches within a group, different ones across, and one state for all.


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([(0, 2), (0, 2)], "rank 0: 0 of 2, rank 1: 0 of 2.*its part of the data would never be read"),
        ([(0, 2), (1, 2), (0, 1)], "rank 2 has data_ranks=1 and rank 0 has data_ranks=2"),
        ([(0, 2), (1, 2), None], "rank 2 has data_ranks=None"),
    ],
)
def test_places_that_do_not_make_up_a_whole_are_refused_on_all_ranks(
    places: list[Place | None], message: str
) -> None:
    def begin(sync: ThreadSync) -> None:
        loader = PackedDataLoader(make(rows(60))(), packs_per_step=12)
        loader.rank_sync = sync.placed(places[sync.rank])
        iter(loader)

    found = on_ranks(len(places), begin)
    assert all(isinstance(error, ValueError) for error in found), found
    for error in found:
        with pytest.raises(ValueError, match=message):
            raise error


def of_groups(places: Sequence[Place], build: Callable[[int], IterablePackedDataset]) -> list[list[Batch]]:
    """Return the batches of each data rank, of which all its ranks have the same; all ranks have one state."""

    def drive(sync: ThreadSync) -> Any:
        loader = PackedDataLoader(build(sync.rank), batch_size=2, packs_per_step=12)
        loader.rank_sync = sync.placed(places[sync.rank])
        assert loader.packs_per_step == 12
        return list(loader), loader.state_dict()

    groups: dict[int, list[Batch]] = {}
    outcomes = on_ranks(len(places), drive)
    for (data_rank, _), outcome in zip(places, outcomes, strict=True):
        if isinstance(outcome, Exception):
            raise outcome
        batches, state = outcome
        assert list(map(packs_of, groups.setdefault(data_rank, batches))) == list(map(packs_of, batches))
        assert state == outcomes[0][1]
    return [groups[data_rank] for data_rank in sorted(groups)]


@pytest.mark.parametrize(
    "places",
    [[(rank % 2, 2) for rank in range(8)], [(0, 1)] * 3, [(0, 3), (1, 3), (1, 3), (2, 3), (2, 3), (2, 3)]],
    ids=["tp 4 x dp 2", "tp 3", "uneven groups"],
)
def test_ranks_of_a_group_get_the_same_batches_and_groups_different_ones(places: list[Place]) -> None:
    """`tests.harness.chains` draws groups of ranks that lie side by side."""
    built, size = make(rows(150)), places[0][1]
    groups = of_groups(places, lambda rank: built())
    steps = steps_of([[packs_of(batch) for batch in batches] for batches in groups], 12 // (2 * size))
    assert check_steps(steps, built, 12, 12) > 3
    check_whole([key for step in steps for key in step], rows(150), 2)


def test_a_group_whose_ranks_make_other_packs_is_refused_when_a_state_is_taken() -> None:
    """Here, the encoder of one rank fails at a row, which is left out."""

    def build(rank: int) -> IterablePackedDataset:
        return make(rows(60), encoder=Fails(31 if rank else None, ValueError("no luck")), skip_bad=True)()

    with pytest.raises(ValueError, match="rank 1 has made other packs of lane 7"):
        of_groups([(0, 1)] * 2, build)


def test_bad_records_are_listed_by_one_rank_of_a_group(tmp_path: Path) -> None:
    path, folder = tmp_path / "a.jsonl", tmp_path / "bad"
    lines = [json.dumps(row) for row in rows(120)]
    lines[7] = lines[55] = "{"
    path.write_text("\n".join(lines) + "\n")
    settings: dict[str, Any] = {"max_seq_len": 12, "num_lanes": 4, "skip_bad": folder}

    def build(rank: int) -> IterablePackedDataset:
        return IterablePackedDataset(JSONLSource(path), encoder=Numbers(), **settings)

    assert sum(map(len, of_groups([(0, 2), (0, 2), (1, 2), (1, 2)], build))) > 8
    assert len([line for each in folder.iterdir() for line in each.read_text().splitlines()]) == 2


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((2, 2), r"data_ranks=\(2, 2\) must be \(rank, size\), counted from 0"),
        (
            ("dp",),
            r"data_ranks=\('dp',\) must be .*a DeviceMesh of the dimensions along which batches differ",
        ),
        ((0, 2), "data_ranks of 2 need as many ranks, and there are 1"),
    ],
)
def test_a_place_that_cannot_be_is_refused(place: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedDataLoader(make(rows(9))(), data_ranks=place)
