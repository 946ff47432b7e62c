"""Ranks in step, as threads of this process: thousands of runs in the time that real processes need for one.

`tests/distributed/test_processes.py` does the same through gloo, real processes and real signals, for few cases.
"""

from __future__ import annotations

import math
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streampack import IterablePackedDataset, IterableSource, MapSource, PackedDataLoader, Sample
from streampack.distributed.rank_sync import RankSync, verdict
from streampack.loader.data_loader import ROUND
from streampack.packing.batch import Batch
from streampack.streaming.lane_state import Receipt
from streampack.streaming.round_robin import Event, PackStream
from streampack.types import ReceiptNumbers
from tests.support.corpus import Numbers, rows

UNEVEN = pytest.mark.filterwarnings("ignore:.*lanes do not divide evenly")


# Ranks that are threads.


class OutOfStep(AssertionError):
    """Ranks that spoke of different things: through gloo, they would wait for one another for ever."""


class Board:
    """Where the ranks write what they say, the n-th thing of each beside the n-th of the others."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.said: list[list[tuple[str, Any]]] = [[] for _ in range(world_size)]
        self.changed = threading.Condition()
        self.dead: list[int] = []

    def write(self, rank: int, kind: str, value: Any) -> int:
        with self.changed:
            self.said[rank].append((kind, value))
            self.changed.notify_all()
            return len(self.said[rank]) - 1

    def read(self, index: int) -> list[Any]:
        with self.changed:
            while not all(len(said) > index for said in self.said):
                if self.dead:
                    raise ConnectionError(f"rank {self.dead[0]} is gone")
                if not self.changed.wait(20):
                    raise OutOfStep(
                        f"no answer to question {index}; asked: {[len(said) for said in self.said]}"
                    )
            entries = [said[index] for said in self.said]
        if len({kind for kind, _ in entries}) > 1:
            raise OutOfStep(f"question {index}: {entries}")
        return [value for _, value in entries]

    def leave(self, rank: int) -> None:
        with self.changed:
            self.dead.append(rank)
            self.changed.notify_all()


class OnBoard(RankSync):
    """Says what the real one says."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.world_size = board, rank, board.world_size
        self.alone = board.world_size == 1
        self.timeout = timedelta(seconds=60)
        self.group = None
        self.words: list[int] = []

    def say(self, count: int, *, failed: bool = False) -> Any:
        self.words.append(~count if failed else count)
        return _Read(self.board, self.board.write(self.rank, "say", self.words[-1]))

    def gather(self, value: Any) -> list[Any]:
        return self.board.read(self.board.write(self.rank, "gather", pickle.loads(pickle.dumps(value))))


class _Read:
    def __init__(self, board: Board, index: int) -> None:
        self.board, self.index = board, index

    def wait(self) -> tuple[int, bool]:
        return verdict(self.board.read(self.index))


def together(size: int, rank: Callable[[int], None]) -> None:
    """``rank(number)`` on so many threads."""
    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"


class Here:
    """Stands in for `Worker`, in this process."""

    def __init__(
        self,
        dataset: IterablePackedDataset,
        *,
        consumer: int,
        consumers: int,
        receipts: Mapping[int, ReceiptNumbers],
        first_epoch: int | None,
        prefetch: int,
        max_restarts: int,
    ) -> None:
        self.begin = (pickle.loads(pickle.dumps(dataset)), consumer, consumers, dict(receipts), first_epoch)
        self.stream: PackStream | None = None
        self.closed = False

    def __iter__(self) -> Iterator[Event]:
        return self

    def close(self) -> None:
        self.closed = True

    def __next__(self) -> Event:
        if self.closed:
            raise StopIteration
        if self.stream is None:
            dataset, consumer, consumers, receipts, first_epoch = self.begin
            self.stream = dataset.stream(consumer, consumers, receipts=receipts, first_epoch=first_epoch)
        return self.stream.next_event()


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streampack.loader.merge.Worker", Here)


@dataclass(frozen=True)
class Topology:
    ranks: int = 1
    workers: int = 0
    batch_size: int = 1
    batches_per_step: int = 1

    @property
    def packs_per_step(self) -> int:
        return self.ranks * self.batch_size * self.batches_per_step

    @property
    def consumers(self) -> int:
        return self.ranks * max(1, self.workers)


@dataclass
class Run:
    """What every rank did."""

    batches: list[list[Batch]]  # of each rank
    states: list[dict[str, Any]]
    ended: list[bool]  # the data, before the limit


def run(
    make: Callable[[], IterablePackedDataset],
    topology: Topology,
    *,
    state: dict[str, Any] | None = None,
    limit: int | None = None,
    packs_per_step: int | None = None,
) -> Run:
    """At most ``limit`` batches on every rank, then the state."""
    board = Board(topology.ranks)
    size = topology.ranks
    result = Run([[] for _ in range(size)], [{} for _ in range(size)], [False] * size)
    errors: list[BaseException | None] = [None] * size

    def rank(number: int) -> None:
        try:
            loader = PackedDataLoader(
                make(),
                batch_size=topology.batch_size,
                num_workers=topology.workers,
                packs_per_step=packs_per_step or topology.packs_per_step,
            )
            loader.rank_sync = OnBoard(board, number)
            if state is not None:
                loader.load_state_dict(state)
            iterator = iter(loader)
            while limit is None or len(result.batches[number]) < limit:
                try:
                    result.batches[number].append(next(iterator))
                except StopIteration:
                    result.ended[number] = True
                    break
            result.states[number] = loader.state_dict()
        except BaseException as error:
            errors[number] = error
            board.leave(number)

    together(size, rank)
    for number, error in enumerate(errors):
        if error is not None:
            raise AssertionError(f"rank {number}") from error
    return result


PackKey = tuple[Any, ...]


def packs_of(batch: Batch) -> list[PackKey]:
    """The packs of a batch without its null packs: what they hold, and from where."""
    keys = []
    for i, fragments in enumerate(batch.fragments):
        if fragments:
            real = int(batch.seq_lens[i, : len(fragments)].sum())
            keys.append((tuple(batch.tokens[i, :real].tolist()), fragments))
    return keys


def steps_of(result: Run, topology: Topology) -> list[list[PackKey]]:
    """All ranks' packs, by optimizer step; every rank has made the same number of them."""
    counts = {len(batches) for batches in result.batches}
    assert len(counts) == 1, "every rank makes the same number of batches"
    [count] = counts
    assert count % topology.batches_per_step == 0, "an epoch is whole steps"
    return [
        [
            key
            for batches in result.batches
            for batch in batches[begin : begin + topology.batches_per_step]
            for key in packs_of(batch)
        ]
        for begin in range(0, count, topology.batches_per_step)
    ]


def by_lane(make: Callable[[], IterablePackedDataset], num_lanes: int) -> list[list[list[PackKey]]]:
    """The packs of each lane read alone, in each epoch: ``[epoch][lane][pack]``."""
    epochs: list[list[list[PackKey]]] = []
    for lane in range(num_lanes):
        for pack in make().stream(lane, num_lanes):
            while len(epochs) <= pack.epoch:
                epochs.append([[] for _ in range(num_lanes)])
            epochs[pack.epoch][lane].append(
                (tuple(pack.tokens[: sum(pack.seq_lens)].tolist()), pack.fragments)
            )
    return epochs


def in_turn(lanes: list[list[PackKey]]) -> list[PackKey]:
    """One pack of each lane in turn: the order of one consumer."""
    order = sorted((number, lane) for lane, packs in enumerate(lanes) for number in range(len(packs)))
    return [lanes[lane][number] for number, lane in order]


# The threads are as good as processes: what a board does.


def test_a_board_hands_on_what_all_said() -> None:
    board = Board(3)
    ranks = [OnBoard(board, rank) for rank in range(3)]
    answers = [
        [rank.say(word) for rank, word in zip(ranks, words, strict=True)] for words in ((0, 0, 0), (0, 2, 1))
    ]
    assert [[answer.wait() for answer in of] for of in answers] == [[(0, False)] * 3, [(2, False)] * 3]


def test_a_board_sees_ranks_that_are_out_of_step() -> None:
    board = Board(2)
    OnBoard(board, 0).say(1)
    with pytest.raises(OutOfStep):
        OnBoard(board, 1).gather("x")


# RankSync itself, without others.


def test_alone_it_answers_itself() -> None:
    rank_sync = RankSync(timeout=timedelta(seconds=1))
    assert (rank_sync.alone, rank_sync.rank, rank_sync.world_size, rank_sync.group) == (True, 0, 1, None)
    assert [rank_sync.say(count).wait() for count in (0, 1)] == [(0, False), (1, False)]
    assert rank_sync.say(0, failed=True).wait() == (0, True)
    assert rank_sync.gather("x") == ["x"]
    assert rank_sync.merge({3: b"c", 0: b"a"}) == {0: b"a", 3: b"c"}


def test_an_error_beats_data_and_data_beats_nothing() -> None:
    """The batches before the first error are handed out, whoever has them."""
    assert verdict([0, 0]) == (0, False)
    assert verdict([3, 8, 0]) == (8, False)
    assert verdict([3, 8, ~5, ~4]) == (4, True)
    assert verdict([8, ~0]) == (0, True)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_merge_takes_each_lane_from_its_owner(size: int) -> None:
    """After a load every rank holds all receipts; the others' grow stale, and must not win, whoever comes last."""
    board = Board(size)
    merged: list[dict[int, bytes]] = [{} for _ in range(size)]

    def rank(number: int) -> None:
        receipts = {lane: b"new" if lane % size == number else b"stale" for lane in range(10)}
        merged[number] = OnBoard(board, number).merge(receipts)

    together(size, rank)
    assert merged == [dict.fromkeys(range(10), b"new")] * size


# Ranks in step.


def make(data: Sequence[Mapping[str, int]], **changes: Any) -> Callable[[], IterablePackedDataset]:
    common = {"max_seq_len": 12, "buffer_size": 4, "num_lanes": 12, "shuffle": True, "epochs": 2, "seed": 3}
    return lambda: IterablePackedDataset(MapSource(data), encoder=Numbers(), **{**common, **changes})


def check_whole(made: list[PackKey], data: Sequence[Mapping[str, int]], times: int) -> None:
    """Every token of every sample so many times; told without any of the package's code."""
    found = Counter(token for tokens, _ in made for token in tokens)
    wanted = {1000 * row["i"] + j: times for row in data for j in range(1, row["n"] + 1)}
    assert found == wanted


def skewed(count: int, *, num_lanes: int, heavy: int = 0) -> list[dict[str, int]]:
    """One lane holds 100 times as many tokens as each other one."""
    return [{"i": i, "n": 10 if i % num_lanes == heavy else 1} for i in range(count)]


CORPORA: dict[str, tuple[list[dict[str, int]], int]] = {
    "even": (rows(200), 12),
    "skewed": (skewed(200, num_lanes=12), 12),
    "skewed to the last": (skewed(200, num_lanes=4, heavy=3), 4),
    "fewer documents than lanes": (rows(7), 12),
    "one document": (rows(1), 12),
    "one long document": ([{"i": 0, "n": 100}], 4),
    "as many documents as lanes": (rows(12), 12),
}


@UNEVEN
@pytest.mark.parametrize(
    ("corpus", "ranks", "workers"),
    [
        (corpus, ranks, workers)
        for corpus, (_, num_lanes) in CORPORA.items()
        for ranks in (1, 2, 3, 4)
        for workers in (0, 1, 3)
        if ranks * max(1, workers) <= num_lanes
    ],
)
def test_every_rank_makes_as_many_batches_and_every_sample_comes_once_an_epoch(
    corpus: str, ranks: int, workers: int
) -> None:
    data, num_lanes = CORPORA[corpus]
    built = make(data, num_lanes=num_lanes, overlong="split", epochs=3)
    for batch_size, batches_per_step in ((1, 1), (3, 2)):
        topology = Topology(ranks, workers, batch_size, batches_per_step)
        result = run(built, topology)
        assert all(result.ended)
        assert result.states == [result.states[0]] * ranks
        steps = steps_of(result, topology)
        check_whole([key for step in steps for key in step], data, 3)
        # Epochs do not mix, neither in a batch nor in a step, and each is shuffled anew.
        expected = by_lane(built, num_lanes)
        assert [Counter(in_turn(lanes)) for lanes in expected] == [
            Counter(key for step in part for key in step) for part in cut(steps, expected)
        ]


def cut(steps: list[list[PackKey]], epochs: list[list[list[PackKey]]]) -> list[list[list[PackKey]]]:
    """The steps of each epoch, from how many packs each has."""
    parts: list[list[list[PackKey]]] = []
    rest = iter(steps)
    for lanes in epochs:
        left, part = sum(map(len, lanes)), []
        while left > 0 and (step := next(rest, None)) is not None:
            part.append(step)
            left -= len(step)
        parts.append(part)
    assert all(not step for step in rest)
    return parts


@pytest.mark.parametrize("workers", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_the_same_topology_goes_on_in_the_same_order_from_every_batch(workers: int, batch_size: int) -> None:
    """Cut anywhere: in the middle, after a lane ran dry, at the end of an epoch, on the first pack of the next."""
    built = make(skewed(60, num_lanes=12) + rows(40)[30:], overlong="split")
    topology = Topology(2 if workers < 4 else 1, workers, batch_size)
    whole = run(built, topology)
    total = len(whole.batches[0])
    for stop in range(total + 1):
        first = run(built, topology, limit=stop)
        assert first.states == [first.states[0]] * topology.ranks
        rest = run(built, topology, state=first.states[0])
        for rank in range(topology.ranks):
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
                for rank in range(ranks):
                    assert list(map(packs_of, other.batches[rank])) == list(
                        map(packs_of, expected.batches[rank])
                    )


def test_a_rank_speaks_ahead_of_what_it_hands_out() -> None:
    """So that the answer is there when it is needed, one for many batches; but the first batch comes at once."""
    board = Board(2)
    loaders = [PackedDataLoader(make(rows(600))()) for _ in range(2)]
    for rank, loader in enumerate(loaders):
        loader.rank_sync = OnBoard(board, rank)
    helper = threading.Thread(target=lambda: list(islice(loaders[1], 60)), daemon=True)
    helper.start()
    batches = iter(loaders[0])
    asked, ahead = [], []
    for taken in range(1, 61):
        next(batches)
        words = loaders[0].rank_sync.words  # type: ignore[attr-defined]
        asked.append(len(words))
        ahead.append(sum(words) - taken)
        assert loaders[0].ledger().packs == taken, "the state is of what was handed out"
    assert (asked[0], ahead[0]) == (1, 0)
    assert words[:5] == [1, 2, 4, 8, 8]
    assert asked[-1] - asked[-1 - 3 * ROUND] == 3, "one question for each round"
    assert min(ahead[20:]) >= ROUND - 1, "a whole round is agreed on before it is needed"
    assert max(ahead) <= 2 * ROUND
    helper.join(20)


# Steps that cannot be shared out evenly.


@pytest.mark.parametrize("packs_per_step", [1, 5, 6, 7, 24])
@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 4), (2, 1), (3, 1), (3, 2), (4, 1), (4, 3)])
def test_null_packs_fill_what_cannot_be_shared_out(packs_per_step: int, ranks: int, batch_size: int) -> None:
    """Step s trains the slots [s P, (s + 1) P) on every topology, resumed there too, until a lane runs dry."""
    data = rows(400, longest=10)
    built = make(data, num_lanes=12, epochs=2)
    lanes = by_lane(built, 12)
    order = in_turn(lanes[0])
    even = 12 * min(map(len, lanes[0]))  # slots before the first lane is dry
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
        for packs in steps_of(result, topology):
            assert len(packs) <= packs_per_step
            expected = order[step * packs_per_step : (step + 1) * packs_per_step]
            if (step + 1) * packs_per_step <= even:
                assert sorted(packs) == sorted(expected), f"step {step} on {size} ranks"
            step += 1
            made += packs
    check_whole(made, data, 2)


# Another topology.


@pytest.mark.parametrize("workers", [(0, 1, 2, 3), (2, 0, 1, 4), (3, 2, 4, 0)])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_steps_hold_the_same_packs_on_every_topology(after: int, workers: tuple[int, ...]) -> None:
    """4 -> 2 -> 3 -> 1 ranks: the same set of packs in each step until a lane runs dry, each sample once throughout."""
    data = rows(900, longest=10)
    built = make(data, num_lanes=12, epochs=2)
    packs_per_step = 24
    steps: list[list[PackKey]] = []
    state: dict[str, Any] | None = None
    chain = [
        Topology(ranks, n, batch_size, packs_per_step // (ranks * batch_size))
        for ranks, n, batch_size in zip((4, 2, 3, 1), workers, (3, 4, 2, 6), strict=True)
    ]
    for topology in [*chain, chain[0], *chain]:
        if 12 % topology.consumers:
            topology = Topology(topology.ranks, 0, topology.batch_size, topology.batches_per_step)
        result = run(built, topology, state=state, limit=after * topology.batches_per_step)
        steps += steps_of(result, topology)
        state = result.states[0]
        assert result.states == [state] * topology.ranks
    result = run(built, chain[1], state=state)
    steps += steps_of(result, chain[1])
    check_steps(steps, built, 12, packs_per_step)
    check_whole([key for step in steps for key in step], data, 2)


def check_steps(
    steps: list[list[PackKey]],
    built: Callable[[], IterablePackedDataset],
    num_lanes: int,
    packs_per_step: int,
) -> int:
    """Steps against the lanes read alone: the sets until the first lane is dry, then the whole. Returns how many."""
    checked = 0
    epochs = by_lane(built, num_lanes)
    for lanes, part in zip(epochs, cut(steps, epochs), strict=True):
        order = in_turn(lanes)
        full = min(map(len, lanes)) * num_lanes // packs_per_step
        for number in range(full):
            wanted = order[number * packs_per_step : (number + 1) * packs_per_step]
            assert sorted(part[number]) == sorted(wanted), f"step {number}"
            checked += 1
        assert Counter(order) == Counter(key for step in part for key in step)
    return checked


@UNEVEN
@pytest.mark.parametrize("num_lanes", [5, 7, 11])
def test_lanes_that_do_not_divide_evenly_lose_nothing(num_lanes: int) -> None:
    data = rows(150)
    built = make(data, num_lanes=num_lanes)
    made: list[PackKey] = []
    state = None
    for topology in (
        Topology(2, 0, 3),
        Topology(3, 1, 2),
        Topology(4, 0, 1),
        Topology(2, 2, 3),
        Topology(1, 3, 2),
    ):
        result = run(built, topology, state=state, limit=5)
        state = result.states[0]
        made += [key for batches in result.batches for batch in batches for key in packs_of(batch)]
    result = run(built, Topology(5, 0, 2), state=state)
    made += [key for batches in result.batches for batch in batches for key in packs_of(batch)]
    check_whole(made, data, 2)


def test_lanes_that_do_not_divide_evenly_are_warned_of() -> None:
    loader = PackedDataLoader(make(rows(50), num_lanes=5)())
    loader.rank_sync = OnBoard(Board(2), 0)
    loader.rank_sync.gather = lambda value: [value] * 2  # type: ignore[method-assign]  # the other says the same
    with pytest.warns(UserWarning, match="5 lanes") as caught:
        iter(loader)
    assert str(caught[0].message) == (
        "5 lanes do not divide evenly among 2 ranks: every sample still comes exactly once, but steps hold other packs "
        "than on another number of ranks, and at an epoch's end the ranks with fewer lanes hand out null packs; use a "
        "number of ranks that divides the lanes, or in a new run a num_lanes that the ranks divide"
    )
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("num_lanes", "ranks", "workers"),
    [(12, 2, 0), (12, 3, 3), (5, 1, 3), (8, 2, 3), (10, 2, 4), pytest.param(5, 2, 0, marks=UNEVEN)],
)
def test_steps_hold_other_packs_only_where_the_ranks_do_not_divide_the_lanes(
    num_lanes: int, ranks: int, workers: int
) -> None:
    """Until the first lane is dry. A warning would be an error, but for the last case; workers never matter."""
    built, size = make(rows(400), num_lanes=num_lanes, epochs=1), 60
    expected = steps_of(run(built, Topology(1, batch_size=size)), Topology(1, batch_size=size))
    topology = Topology(ranks, workers, batch_size=size // ranks)
    steps = steps_of(run(built, topology), topology)
    first = min(map(len, by_lane(built, num_lanes)[0])) * num_lanes // size
    assert first > 0
    same = [sorted(ours) == sorted(theirs) for ours, theirs in zip(steps[:first], expected, strict=False)]
    assert any(same) == all(same) == (num_lanes % ranks == 0)
    assert sorted(key for step in steps for key in step) == sorted(key for step in expected for key in step)


def test_a_lane_is_not_skipped_by_a_state_that_does_not_fit() -> None:
    """A lane behind the others that has not ended its epoch: what is left of it must not vanish in silence."""
    data = [
        {"i": i, "n": 12} for i in range(24)
    ]  # packs of one sample each, so that nothing waits between them
    early = run(make(data, num_lanes=2, epochs=3), Topology(1), limit=6)
    late = run(make(data, num_lanes=2, epochs=3), Topology(1), limit=30)
    mixed = {**late.states[0], "lanes": {0: late.states[0]["lanes"][0], 1: early.states[0]["lanes"][1]}}
    for lane in (0, 1):
        receipt = Receipt.from_bytes(mixed["lanes"][lane])
        assert (receipt.epoch, receipt.done) == (1 - lane, False)
    loader = PackedDataLoader(make(data, num_lanes=2, epochs=3)())
    loader.load_state_dict(mixed)
    with pytest.raises(ValueError, match="lane 1 cannot begin epoch 1: it is in the middle of epoch 0"):
        list(loader)


# Errors.


class Fails:
    """An encoder that fails at one row, on the copies that are told to."""

    def __init__(self, at: int | None, error: Exception) -> None:
        self.at, self.error = at, error

    def __call__(self, row: Mapping[str, int], /) -> Sample:
        if row["i"] == self.at:
            raise self.error
        return Numbers()(row)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("at", [0, 1, 25, 90])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_on_one_rank_is_raised_on_all_and_again(size: int, at: int, workers: int) -> None:
    """After the same batch everywhere, with the others in step: what they ask afterwards is answered too."""
    board = Board(size)
    caught: list[list[Any]] = [[] for _ in range(size)]
    counts = [0] * size
    states: list[Any] = [None] * size
    data = rows(100)

    def rank(number: int) -> None:
        dataset = make(data, shuffle=False)()
        encoder = Fails(at, KeyError("no luck"))
        loader = PackedDataLoader(
            IterablePackedDataset(
                MapSource(data), max_seq_len=12, num_lanes=dataset.num_lanes, encoder=encoder, buffer_size=4
            ),
            batch_size=2,
            num_workers=workers,
        )
        loader.rank_sync = OnBoard(board, number)
        iterator = iter(loader)
        for _ in range(3):
            try:
                for _ in iterator:
                    counts[number] += 1
            except Exception as error:
                caught[number].append(error)
        states[number] = loader.state_dict()

    together(size, rank)
    assert len(set(counts)) == 1
    assert states == [states[0]] * size
    guilty = at % 12 % size
    for number, errors in enumerate(caught):
        assert len(errors) == 3, "asked again, it says so again"
        for error in errors:
            if number == guilty:
                assert isinstance(error, KeyError)
                assert f"while encoding sample {at}" in error.__notes__
            else:
                assert isinstance(error, RuntimeError)
                assert str(error) == (
                    f"rank {guilty} failed while making packs: KeyError: 'no luck' while encoding sample {at}"
                )


def test_an_error_at_the_start_of_one_rank_is_raised_on_all() -> None:
    """Before there is a pack: a state that only this rank, which sees other data, cannot take up."""
    data = rows(100)
    state: list[dict[str, Any]] = []
    caught: list[Any] = [None, None]

    def loader(rows: list[dict[str, int]]) -> PackedDataLoader:
        source: Any = IterableSource(rows, stride=True)
        source.identity = lambda: {"source": "the same"}
        source.examples = lambda count: []
        return PackedDataLoader(
            IterablePackedDataset(source, max_seq_len=12, buffer_size=4, num_lanes=2, encoder=Numbers())
        )

    first = loader(data)
    while not state or Receipt.from_bytes(state[-1]["lanes"][1]).ledger.buffered == 0:
        list(islice(first, 2 + len(state)))
        state.append(first.state_dict())
    waiting = Receipt.from_bytes(state[-1]["lanes"][1]).cursor[
        1
    ]  # the number of a row of lane 1, which is rank 1's
    changed = [{**row, "n": row["n"] + (row["i"] == waiting)} for row in data]
    board = Board(2)

    def rank(number: int) -> None:
        mine = loader(changed if number else data)
        mine.rank_sync = OnBoard(board, number)
        mine.load_state_dict(state[-1])
        try:
            list(mine)
        except Exception as error:
            caught[number] = error

    together(2, rank)
    assert isinstance(caught[1], ValueError)
    assert "wait after reading again" in str(caught[1])
    assert str(caught[0]) == f"rank 1 failed while making packs: ValueError: {caught[1]}"


# Generated.


@st.composite
def cases(
    draw: st.DrawFn,
) -> tuple[list[dict[str, int]], dict[str, Any], int, list[tuple[Topology, int]], bool]:
    """Lengths, settings, packs per step, a chain of topologies with the steps (or batches) made on each."""
    num_lanes = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    lengths = draw(st.lists(st.one_of(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=60))
    if draw(st.booleans()):  # a lane without rows, or all but one
        lengths = lengths[: draw(st.integers(1, num_lanes))]
    settings = {
        "num_lanes": num_lanes,
        "max_seq_len": draw(st.integers(4, 12)),
        "buffer_size": draw(st.integers(1, 6)),
        "strategy": draw(st.sampled_from(["exact_fit", "best_fit", "next_fit", "first_fit", "wrap"])),
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
        share = packs_per_step // size
        batch_size = draw(st.sampled_from([n for n in range(1, share + 1) if share % n == 0]))
        workers = draw(st.integers(0, min(3, num_lanes // size)))
        chain.append((Topology(size, workers, batch_size, share // batch_size), draw(st.integers(0, 7))))
    whole_steps = draw(st.booleans())
    return [{"i": i, "n": n} for i, n in enumerate(lengths)], settings, packs_per_step, chain, whole_steps


def check_case(case: tuple[Any, ...]) -> None:
    data, settings, packs_per_step, chain, whole_steps = case
    built = make(data, **settings)
    state: dict[str, Any] | None = None
    steps: list[list[PackKey]] = []
    for number, (topology, count) in enumerate(chain):
        limit: int | None = count * (topology.batches_per_step if whole_steps else 1)
        if number == len(chain) - 1:
            limit = None
        if not whole_steps:  # cut in the middle of steps, which then are none
            topology = Topology(topology.ranks, topology.workers, topology.batch_size)
        result = run(built, topology, state=state, limit=limit)
        assert result.states == [result.states[0]] * topology.ranks
        state = result.states[0]
        check_size(state, settings)
        steps += steps_of(result, topology)
    check_whole([key for step in steps for key in step], data, settings["epochs"])
    even = all(settings["num_lanes"] % topology.consumers == 0 for topology, _ in chain)
    if whole_steps and even:
        check_steps(steps, built, settings["num_lanes"], packs_per_step)
    # Whatever the topologies, a lane's packs come in its own order.
    for lane in range(settings["num_lanes"]):
        wanted = [key for lanes in by_lane(built, settings["num_lanes"]) for key in lanes[lane]]
        mine = set(wanted)
        place = [index for index, step in enumerate(steps) for key in step if key in mine]
        assert place == sorted(place)


def check_size(state: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for data in state["lanes"].values():
        receipt = Receipt.from_bytes(data)
        assert len(data) <= 128 + (receipt.next_piece - receipt.first) / 8 + 48


@UNEVEN
@settings(max_examples=400)
@given(cases())
def test_generated_cases(case: tuple[Any, ...]) -> None:
    check_case(case)


@pytest.mark.slow
@UNEVEN
@settings(max_examples=1000)
@given(cases())
def test_more_generated_cases(case: tuple[Any, ...]) -> None:
    check_case(case)


def test_after_an_interrupted_agreement_a_rank_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next word would be taken for the answer to an older question."""
    rank_sync = RankSync(timeout=timedelta(seconds=1))
    rank_sync.alone = False

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(rank_sync, "_tell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rank_sync.gather(1)
    with pytest.raises(RuntimeError, match="rank 0 was interrupted while it agreed .* last checkpoint"):
        rank_sync.gather(1)
