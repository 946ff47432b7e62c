"""Ranks as threads of this process, and checks of what they hand out: a run takes milliseconds, not seconds."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

from streampack import Batch, IterablePackedDataset, MapSource, PackedDataLoader, Sample
from streampack.distributed.rank_sync import Exchange, RankSync  # private: where ranks become threads
from streampack.loader.workers import OpenStream
from tests.harness.corpus import Numbers
from tests.harness.interrupts import Injector

Place = tuple[int, int]  # data rank and number of data ranks
PackKey = tuple[Any, ...]
Lengths = Sequence[Mapping[str, int]]
Make = Callable[[], IterablePackedDataset]


class OutOfStep(AssertionError):
    """Ranks called different collectives: over gloo, they would wait for one another for ever."""


class Board:
    """A rendezvous in memory: the n-th message of each rank is matched with the n-th of the others."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.sent: list[list[tuple[str, Any]]] = [[] for _ in range(world_size)]
        self.changed = threading.Condition()
        self.dead: list[int] = []

    def write(self, rank: int, kind: str, value: Any) -> int:
        with self.changed:
            self.sent[rank].append((kind, value))
            self.changed.notify_all()
            return len(self.sent[rank]) - 1

    def read(self, index: int) -> list[Any]:
        with self.changed:
            while not all(len(sent) > index for sent in self.sent):
                if self.dead:
                    raise ConnectionError(f"rank {self.dead[0]} is gone")
                if not self.changed.wait(60):
                    counts = [len(sent) for sent in self.sent]
                    raise OutOfStep(f"message {index} is missing; sent so far: {counts}")
            entries = [sent[index] for sent in self.sent]
        if len({kind for kind, _ in entries}) > 1:
            raise OutOfStep(f"message {index}: {entries}")
        return [value for _, value in entries]

    def leave(self, rank: int) -> None:
        with self.changed:
            self.dead.append(rank)
            self.changed.notify_all()


class ThreadSync(RankSync):
    """A `RankSync` over a `Board` in place of gloo."""

    def __init__(self, board: Board, rank: int, place: Place | None = None) -> None:
        self.board, self.rank, self.world_size = board, rank, board.world_size
        self.has_data_groups = place is not None
        self.data_rank, self.data_world_size = place or (rank, board.world_size)
        self.alone = board.world_size == 1
        self.timeout = timedelta(minutes=10)  # more than a remote source may try again
        self.group = None

    def placed(self, place: Place | None) -> ThreadSync:
        """Return the same rank with a place among the data ranks."""
        return ThreadSync(self.board, self.rank, place)

    def exchange(self, numbers: Sequence[int]) -> Exchange:
        index = self.board.write(self.rank, "exchange", list(numbers))
        return lambda: self.board.read(index)

    def gather(self, value: Any) -> list[Any]:
        return self.board.read(self.board.write(self.rank, "gather", pickle.loads(pickle.dumps(value))))


def run_threads(size: int, rank: Callable[[int], None]) -> None:
    """Call ``rank(number)`` on ``size`` threads, with their workers within them, and wait for all."""
    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(size)]
    with mock.patch("streampack.loader.iteration.start_worker", in_process):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
            assert not thread.is_alive(), "a rank hangs"


def on_ranks(size: int, act: Callable[[ThreadSync], Any]) -> list[Any]:
    """Return the result of ``act`` on each of ``size`` ranks, or the error that it raises."""
    board, found = Board(size), [None] * size

    def rank(number: int) -> None:
        try:
            found[number] = act(ThreadSync(board, number))
        except Exception as error:
            found[number] = error

    run_threads(size, rank)
    return found


def in_process(stream: OpenStream, lane_states: Any, name: str) -> Any:
    """A stand-in for `start_worker` in this process."""
    return pickle.loads(pickle.dumps(stream))(lane_states=lane_states)


# Runs.


@dataclass(frozen=True)
class Topology:
    """Data ranks, each of which is ``share`` ranks that are given the same batches."""

    ranks: int = 1
    workers: int = 0
    batch_size: int = 1
    batches_per_step: int = 1
    share: int = 1

    @property
    def packs_per_step(self) -> int:
        return self.ranks * self.batch_size * self.batches_per_step

    @property
    def consumers(self) -> int:
        return self.ranks * max(1, self.workers)


@dataclass
class Run:
    """The batches, last state and end of every data rank."""

    batches: list[list[Batch]]
    states: list[dict[str, Any]]
    ended: list[bool]  # the data, before the limit
    batches_per_step: int = 1
    cut: bool = False  # whether an interrupt struck within a step, behind which another one begins


def run(
    make: Make,
    topology: Topology,
    *,
    state: dict[str, Any] | None = None,
    limit: int | None = None,
    packs_per_step: int | None = None,
    peek: int = 0,
    injector: Injector | None = None,
    whole_steps: bool = False,
) -> Run:
    """Take at most ``limit`` batches on every rank, then the state.

    With ``packs_per_step=0`` the loader is given none. After ``peek`` batches it is iterated anew, and after an
    interrupt by the ``injector``, which is for a single rank; with ``whole_steps``, none strikes within a step.
    """
    size = topology.ranks * topology.share
    board = Board(size)
    result = Run([[] for _ in range(size)], [{} for _ in range(size)], [False] * size)
    errors: list[BaseException | None] = [None] * size

    def rank(number: int) -> None:
        try:
            loader = PackedDataLoader(
                make(),
                batch_size=topology.batch_size,
                num_workers=topology.workers,
                packs_per_step=(topology.packs_per_step if packs_per_step is None else packs_per_step)
                or None,
            )
            place = (number // topology.share, topology.ranks) if topology.share > 1 else None
            loader.rank_sync = ThreadSync(board, number, place)
            if state is not None:
                loader.load_state_dict(state)
            iterator = iter(loader)
            while limit is None or len(result.batches[number]) < limit:
                if peek and len(result.batches[number]) == peek:
                    iterator = iter(loader)
                within = len(result.batches[number]) % loader.batches_per_step > 0
                strikes = injector if not (whole_steps and within) else None
                try:
                    batch = strikes.call(iterator.__next__) if strikes else next(iterator)
                except StopIteration:
                    result.ended[number] = True
                    break
                except KeyboardInterrupt:
                    result.cut |= within
                    iterator = iter(loader)
                    continue
                result.batches[number].append(batch)
            result.states[number] = loader.state_dict()
            result.batches_per_step = loader.batches_per_step
        except BaseException as error:
            errors[number] = error
            board.leave(number)

    run_threads(size, rank)
    for number, error in enumerate(errors):
        if error is not None:
            raise AssertionError(f"rank {number}") from error
    if topology.share > 1:
        for number in range(size):
            first = number // topology.share * topology.share
            ours, theirs = (list(map(packs_of, result.batches[rank])) for rank in (number, first))
            assert ours == theirs, f"rank {number} has other batches than rank {first}, its data rank's first"
        result.batches = result.batches[:: topology.share]
    return result


# Corpora.


def make(data: Lengths, **changes: Any) -> Make:
    """A function that builds the dataset: 12 lanes, 2 epochs, shuffled, unless ``changes`` differ."""
    common = {"max_seq_len": 12, "buffer_size": 4, "num_lanes": 12, "shuffle": True, "epochs": 2, "seed": 3}
    return lambda: IterablePackedDataset(MapSource(data), **{"encoder": Numbers(), **common, **changes})


def skewed(count: int, *, num_lanes: int, heavy: int = 0) -> list[dict[str, int]]:
    """Rows of which one lane has ten times as many tokens as each other lane."""
    return [{"i": i, "n": 10 if i % num_lanes == heavy else 1} for i in range(count)]


class Fails:
    """An encoder that raises at one row."""

    def __init__(self, at: int | None, error: Exception) -> None:
        self.at, self.error = at, error

    def __call__(self, row: Mapping[str, int], /) -> Sample:
        if row["i"] == self.at:
            self.error.__dict__.pop("__notes__", None)  # of the last time
            raise self.error
        return Numbers()(row)


# Packs, compared with those of each lane read alone.


def packs_of(batch: Batch) -> list[PackKey]:
    """Return (tokens, fragments) of each pack of a batch, null packs left out."""
    keys = []
    for i, fragments in enumerate(batch.fragments):
        if fragments:
            real = int(batch.seq_lens[i, : len(fragments)].sum())
            keys.append((tuple(batch.tokens[i, :real].tolist()), fragments))
    return keys


def steps_of(ranks: Sequence[Sequence[list[PackKey]]], batches_per_step: int) -> list[list[PackKey]]:
    """Return all ranks' packs by optimizer step, given ``[rank][batch][pack]``; all ranks have as many batches."""
    counts = {len(batches) for batches in ranks}
    assert len(counts) == 1, "every rank makes the same number of batches"
    [count] = counts
    assert count % batches_per_step == 0, "an epoch is whole steps"
    return [
        [key for batches in ranks for batch in batches[begin : begin + batches_per_step] for key in batch]
        for begin in range(0, count, batches_per_step)
    ]


def steps_of_run(result: Run, topology: Topology) -> list[list[PackKey]]:
    return steps_of(
        [[packs_of(batch) for batch in batches] for batches in result.batches], topology.batches_per_step
    )


def by_lane(make: Make, num_lanes: int) -> list[list[list[PackKey]]]:
    """Return the packs of each lane read alone: ``[epoch][lane][pack]``."""
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
    """Merge lanes, one pack of each in turn: the order of one consumer."""
    order = sorted((number, lane) for lane, packs in enumerate(lanes) for number in range(len(packs)))
    return [lanes[lane][number] for number, lane in order]


def split_epochs(steps: list[list[PackKey]], epochs: list[list[list[PackKey]]]) -> list[list[list[PackKey]]]:
    """Split steps into epochs, by the number of packs that the lanes have in each."""
    parts, rest = [], iter(steps)
    for lanes in epochs:
        part, left = [], sum(map(len, lanes))
        while left > 0 and (step := next(rest, None)) is not None:
            part.append(step)
            left -= len(step)
        parts.append(part)
    assert all(not step for step in rest)
    return parts


def check_whole(made: list[PackKey], data: Lengths, times: int) -> None:
    """Assert that every token of every sample came ``times`` times; an oracle without the package's code."""
    found = Counter(token for tokens, _ in made for token in tokens)
    wanted = {1000 * row["i"] + j: times for row in data for j in range(1, row["n"] + 1)}
    assert found == wanted


def check_steps(steps: list[list[PackKey]], make: Make, num_lanes: int, packs_per_step: int) -> int:
    """Assert that steps hold the lanes' packs in turn until a lane ends, and all packs of each epoch.

    Returns the number of steps before a lane ends.
    """
    checked = 0
    epochs = by_lane(make, num_lanes)
    for lanes, part in zip(epochs, split_epochs(steps, epochs), strict=True):
        order = in_turn(lanes)
        full = min(map(len, lanes)) * num_lanes // packs_per_step
        for number in range(full):
            wanted = order[number * packs_per_step : (number + 1) * packs_per_step]
            assert sorted(part[number]) == sorted(wanted), f"step {number}"
            checked += 1
        assert Counter(order) == Counter(key for step in part for key in step)
    return checked
