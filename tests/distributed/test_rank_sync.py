"""Loaders on several ranks, which are threads of this process: many runs in the time that processes need for one.

`tests/distributed/test_processes.py` runs fewer cases over gloo, with real processes and signals.
"""

from __future__ import annotations

import math
import pickle
import threading
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from itertools import islice
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import IterablePackedDataset, IterableSource, MapSource, PackedDataLoader
from streampack.distributed.rank_sync import RankSync, shared_sync
from streampack.loader.agreed_batches import ROUND
from streampack.loader.batching import Batching
from streampack.streaming.lane_state import LaneState
from tests.harness.corpus import Numbers, rows
from tests.harness.strategies import WAYS, settings_of
from tests.harness.threads import (
    CORPORA,
    Board,
    Fails,
    InProcess,
    OutOfStep,
    PackKey,
    ThreadSync,
    Topology,
    by_lane,
    check_steps,
    check_whole,
    in_turn,
    make,
    on_ranks,
    packs_of,
    run,
    run_threads,
    skewed,
    split_epochs,
    steps_of,
    steps_of_run,
)

UNEVEN = pytest.mark.filterwarnings("ignore:.*do not divide .* evenly")


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streampack.loader.merge.Worker", InProcess)


# RankSync by itself.


def test_a_board_sees_ranks_that_are_out_of_step() -> None:
    board = Board(2)
    ThreadSync(board, 0).agree(1)
    with pytest.raises(OutOfStep):
        ThreadSync(board, 1).gather("x")


def test_a_single_rank_exchanges_nothing() -> None:
    rank_sync = RankSync(timeout=timedelta(seconds=1))
    assert (rank_sync.alone, rank_sync.rank, rank_sync.world_size, rank_sync.group) == (True, 0, 1, None)
    assert rank_sync.gather("x") == ["x"]
    assert rank_sync.merge_lanes({3: b"c", 0: b"a"}) == {0: b"a", 3: b"c"}


def test_a_shared_one_belongs_to_one_process_group() -> None:
    """Its connections end with the group."""
    short, long = timedelta(seconds=7), timedelta(seconds=8)
    found = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        found += [shared_sync(timeout=limit) for limit in (short, long, short)]
        dist.destroy_process_group()
    first, other, again, later, *_ = found
    assert first is again
    assert (first.timeout, other.timeout) == (short, long)
    assert later is not first
    with pytest.raises(ValueError, match="there is no process group"):
        shared_sync(timeout=short)


def test_a_merge_takes_each_lane_from_its_owner() -> None:
    """After a load every rank holds all lanes; the others' become stale."""

    def act(rank_sync: ThreadSync) -> Any:
        own = {lane: b"new" if lane % 3 == rank_sync.rank else b"stale" for lane in range(10)}
        return rank_sync.merge_lanes(own)

    assert on_ranks(3, act) == [dict.fromkeys(range(10), b"new")] * 3


def test_after_an_interrupted_gather_a_rank_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next message would be taken for part of the interrupted one."""
    rank_sync = RankSync(timeout=timedelta(seconds=1))
    rank_sync.alone = False

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(rank_sync, "_all_to_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rank_sync.gather(1)
    with pytest.raises(RuntimeError, match="rank 0 was interrupted while it agreed .* last checkpoint"):
        rank_sync.gather(1)


# Ranks in step.


@UNEVEN
@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize(("ranks", "workers"), [(1, 3), (3, 1), (4, 0)])
def test_ranks_make_equally_many_batches_and_every_sample_comes_once_an_epoch(
    corpus: str, ranks: int, workers: int
) -> None:
    data, num_lanes = CORPORA[corpus]
    built = make(data, num_lanes=num_lanes, overlong="split", epochs=3)
    topology = Topology(ranks, workers, 3, 2)
    result = run(built, topology)
    assert all(result.ended)
    assert result.states == [result.states[0]] * ranks
    steps = steps_of_run(result, topology)
    check_whole([key for step in steps for key in step], data, 3)
    # Epochs do not mix, neither in a batch nor in a step, and each is shuffled anew.
    expected = by_lane(built, num_lanes)
    assert [Counter(in_turn(lanes)) for lanes in expected] == [
        Counter(key for step in part for key in step) for part in split_epochs(steps, expected)
    ]


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


def test_the_order_does_not_depend_on_the_workers() -> None:
    built = make(skewed(120, num_lanes=12), overlong="split")
    for ranks in (1, 2, 3):
        expected = run(built, Topology(ranks, 0, 5))
        for workers in range(1, 12 // ranks + 1):
            if 12 % (ranks * workers) == 0:
                other = run(built, Topology(ranks, workers, 5))
                for ours, theirs in zip(other.batches, expected.batches, strict=True):
                    assert list(map(packs_of, ours)) == list(map(packs_of, theirs))


def test_ranks_agree_ahead_of_the_batches_they_hand_out() -> None:
    """The result is there when it is needed, one for many batches; but the first batch comes at once."""
    board = Board(2)
    loaders = [PackedDataLoader(make(rows(600))()) for _ in range(2)]
    syncs = [ThreadSync(board, rank) for rank in range(2)]
    for loader, rank_sync in zip(loaders, syncs, strict=True):
        loader.rank_sync = rank_sync
    helper = threading.Thread(target=lambda: list(islice(loaders[1], 60)), daemon=True)
    helper.start()
    batches = iter(loaders[0])
    asked, ahead = [], []
    for taken in range(1, 61):
        next(batches)
        numbers = syncs[0].numbers
        asked.append(len(numbers))
        ahead.append(sum(numbers) - taken)
        assert loaders[0].ledger().packs == taken, "the state is that of the batches handed out"
    assert (asked[0], ahead[0]) == (1, 0)
    assert numbers[:5] == [1, 2, 4, 8, 8]
    assert asked[-1] - asked[-1 - 3 * ROUND] == 3, "one collective a round"
    assert min(ahead[20:]) >= ROUND - 1, "a whole round is agreed on before it is needed"
    assert max(ahead) <= 2 * ROUND
    helper.join(20)


# Steps on other topologies.


@pytest.mark.parametrize(("packs_per_step", "ranks", "batch_size"), [(1, 4, 3), (7, 3, 2), (24, 3, 1)])
def test_null_packs_fill_up_uneven_steps(packs_per_step: int, ranks: int, batch_size: int) -> None:
    """Step s trains the slots [s P, (s + 1) P) on every topology, resumed there too, until a lane ends."""
    data = rows(400, longest=10)
    built = make(data)
    lanes = by_lane(built, 12)
    order = in_turn(lanes[0])
    even = 12 * min(map(len, lanes[0]))  # slots before the first lane ends
    made: list[PackKey] = []
    state: dict[str, Any] | None = None
    step = 0
    for size, steps in ((ranks, 3), (1, 2), (ranks, 1), (4, 2), (ranks, None)):
        each = math.ceil(math.ceil(packs_per_step / size) / batch_size)
        topology = Topology(size, 0, batch_size, each)
        limit = steps and steps * each
        result = run(built, topology, state=state, limit=limit, packs_per_step=packs_per_step)
        assert result.states == [result.states[0]] * size
        state = result.states[0]
        for packs in steps_of_run(result, topology):
            assert len(packs) <= packs_per_step
            expected = order[step * packs_per_step : (step + 1) * packs_per_step]
            if (step + 1) * packs_per_step <= even:
                assert sorted(packs) == sorted(expected), f"step {step} on {size} ranks"
            step += 1
            made += packs
    check_whole(made, data, 2)


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


def test_a_lane_in_the_middle_of_an_older_epoch_is_an_error() -> None:
    """A state in which one lane lags by an epoch: the rest of its epoch must not be skipped silently."""
    data = [
        {"i": i, "n": 12} for i in range(24)
    ]  # packs of one sample each, so that nothing waits between them
    early = run(make(data, num_lanes=2, epochs=3), Topology(1), limit=6)
    late = run(make(data, num_lanes=2, epochs=3), Topology(1), limit=30)
    mixed = {**late.states[0], "lanes": {0: late.states[0]["lanes"][0], 1: early.states[0]["lanes"][1]}}
    loader = PackedDataLoader(make(data, num_lanes=2, epochs=3)())
    loader.load_state_dict(mixed)
    with pytest.raises(ValueError, match="lane 1 cannot begin epoch 1: it is in the middle of epoch 0"):
        list(loader)


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
        assert read[60] - read[40] >= 20 + ROUND, "then a round is ahead"


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
        iterator = iter(loader)
        for _ in range(3):
            try:
                for _ in iterator:
                    counts[number] += 1
            except Exception as error:
                caught[number].append(error)
        states[number] = loader.state_dict()

    run_threads(size, rank)
    assert len(set(counts)) == 1
    assert states == [states[0]] * size
    failing = at % 12 % size
    for number, errors in enumerate(caught):
        assert len(errors) == 3, "the next call raises again"
        for error in errors:
            if number == failing:
                assert isinstance(error, KeyError)
                assert f"while encoding sample {at}" in error.__notes__
            else:
                assert isinstance(error, RuntimeError)
                assert str(error) == (
                    f"rank {failing} failed while making packs: KeyError: 'no luck' while encoding sample {at}"
                )


def test_an_error_at_the_start_of_one_rank_is_raised_on_all() -> None:
    """Before there is a pack: a state that only this rank, which sees other data, cannot load."""
    data = rows(100)

    def loader(rows: list[dict[str, int]]) -> PackedDataLoader:
        source: Any = IterableSource(rows)
        source.identity = lambda: {"source": "the same"}
        source.examples = lambda count: []
        return PackedDataLoader(
            IterablePackedDataset(source, max_seq_len=12, buffer_size=4, num_lanes=2, encoder=Numbers())
        )

    state: list[dict[str, Any]] = []
    first = loader(data)
    while not state or LaneState.from_dict(state[-1]["lanes"][1]).ledger.buffered == 0:
        list(islice(first, 2 + len(state)))
        state.append(first.state_dict())
    waiting = state[-1]["lanes"][1]["cursor"][1]  # the number of a row of lane 1, rank 1's
    changed = [{**row, "n": row["n"] + (row["i"] == waiting)} for row in data]

    def act(rank_sync: ThreadSync) -> Any:
        mine = loader(changed if rank_sync.rank else data)
        mine.rank_sync = rank_sync
        mine.load_state_dict(state[-1])
        return list(mine)

    other, own = on_ranks(2, act)
    assert isinstance(own, ValueError)
    assert "wait after reading again" in str(own)
    assert str(other) == f"rank 1 failed while making packs: ValueError: {own}"


# Generated.


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, ...]:
    """Lengths, settings, packs per step, a chain of topologies with the steps (or batches) made on each."""
    num_lanes = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    lengths = draw(st.lists(st.one_of(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=60))
    if draw(st.booleans()):  # a lane without rows, or all but one
        lengths = lengths[: draw(st.integers(1, num_lanes))]
    settings = {
        "num_lanes": num_lanes,
        "max_seq_len": draw(st.integers(4, 12)),
        "buffer_size": draw(st.integers(1, 6)),
        **settings_of(draw(st.sampled_from(WAYS))),
        "overlong": "split",
        "shuffle": draw(st.booleans()),
        "epochs": draw(st.integers(1, 3)),
        "seed": draw(st.integers(0, 3)),
    }
    ranks = st.integers(1, min(4, num_lanes))
    sizes = draw(st.lists(ranks, min_size=1, max_size=4))
    packs_per_step = math.lcm(*sizes) * draw(st.integers(1, 3))
    chain = []
    for size in sizes:
        of_rank = packs_per_step // size
        batch_size = draw(st.sampled_from([n for n in range(1, of_rank + 1) if of_rank % n == 0]))
        workers = draw(st.integers(0, min(3, num_lanes // size)))
        chain.append((Topology(size, workers, batch_size, of_rank // batch_size), draw(st.integers(0, 7))))
    whole_steps = draw(st.booleans())
    return [{"i": i, "n": n} for i, n in enumerate(lengths)], settings, packs_per_step, chain, whole_steps


def check_case(case: tuple[Any, ...]) -> None:
    data, settings, packs_per_step, chain, whole_steps = case
    built = make(data, **settings)
    state: dict[str, Any] | None = None
    steps: list[list[PackKey]] = []
    for number, (topology, count) in enumerate(chain):
        if not whole_steps:  # cut in the middle of steps
            topology = Topology(topology.ranks, topology.workers, topology.batch_size)
        batching = Batching(
            topology.batch_size, topology.packs_per_step, topology.ranks, settings["num_lanes"]
        )
        batches_per_step = batching.batches_per_step if whole_steps else 1
        limit = None if number == len(chain) - 1 else count * batches_per_step
        result = run(built, topology, state=state, limit=limit)
        assert result.states == [result.states[0]] * topology.ranks
        state = result.states[0]
        check_size(state)
        steps += steps_of([list(map(packs_of, batches)) for batches in result.batches], batches_per_step)
    check_whole([key for step in steps for key in step], data, settings["epochs"])
    even = all(settings["num_lanes"] % topology.consumers == 0 for topology, _ in chain)
    if whole_steps and even:
        check_steps(steps, built, settings["num_lanes"], packs_per_step)
    # Whatever the topologies, a lane's packs come in its own order.
    epochs = by_lane(built, settings["num_lanes"])
    for lane in range(settings["num_lanes"]):
        mine = {key for lanes in epochs for key in lanes[lane]}
        place = [index for index, step in enumerate(steps) for key in step if key in mine]
        assert place == sorted(place)


def check_size(state: Mapping[str, Any]) -> None:
    for data in state["lanes"].values():
        assert len(pickle.dumps(data)) <= 350 + (data["next_piece"] - data["first"]) / 4


@UNEVEN
@settings(max_examples=80)
@given(cases())
def test_random_topologies_keep_the_order_and_every_sample(case: tuple[Any, ...]) -> None:
    check_case(case)


@pytest.mark.slow
@UNEVEN
@settings(max_examples=1500)
@given(cases())
def test_more_random_topologies_keep_the_order_and_every_sample(case: tuple[Any, ...]) -> None:
    check_case(case)
