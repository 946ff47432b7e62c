"""An interrupt, or any other exception, inside ``next()`` loses no batch, repeats none and hangs nowhere."""

from __future__ import annotations

import json
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from streampack import IterablePackedDataset, JSONLSource, MapSource, Mix, PackedDataLoader
from streampack.packing.batch import Batch
from streampack.sources.bad_records import Quarantine
from tests.harness.corpus import Numbers, rows, write
from tests.harness.interrupts import Injector, within

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    # A file or socket that an interrupt kept from being closed: the garbage collector closes it, and says so.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROWS = rows(70, longest=16)
Seen = tuple[Any, ...]


def dataset(source: Any = ROWS, **settings: Any) -> IterablePackedDataset:
    defaults = {
        "untrained": "keep",
        "max_seq_len": 24,
        "buffer_size": 6,
        "num_lanes": 3,
        "shuffle": True,
        "epochs": 2,
    }
    return IterablePackedDataset(source, encoder=Numbers(), **{**defaults, "shuffle_window": 8, **settings})


def seen(batch: Batch) -> Seen:
    return (batch.tokens.tolist(), batch.labels.tolist(), batch.seq_lens.tolist(), batch.fragments)


class Run:
    """A run without an interrupt: its batches, and the state before the first and after each."""

    def __init__(self, source: Any = ROWS, *, num_workers: int = 0, **settings: Any) -> None:
        self.source, self.num_workers, self.settings = source, num_workers, settings
        loader = self.loader(num_workers)
        self.states = [loader.state_dict()]
        self.batches = []
        for batch in loader:
            self.batches.append(seen(batch))
            self.states.append(loader.state_dict())
        self.end = loader.state_dict()  # the ends of lanes after the last batch are filed too

    def loader(self, num_workers: int = 0) -> PackedDataLoader:
        data = dataset(self.source, **self.settings)
        return PackedDataLoader(data, batch_size=2, packs_per_step=4, num_workers=num_workers)

    def interrupted(self, injector: Injector) -> None:
        """Interrupt one ``next()``; then resume from the state, and go on with the same iterator."""
        loader = self.loader(self.num_workers)
        iterator = iter(loader)
        found: list[Seen] = []
        told = f"interrupted at place {injector.at}"
        while True:
            try:
                found.append(seen(injector.call(iterator.__next__)))
            except StopIteration:
                break
            except injector.error:
                told += f", after {len(found)} batches"
                state = loader.state_dict()
                assert state == self.states[len(found)], f"{told}: another state than of the last batch"
                self.resume(state, len(found), told)
        assert found == self.batches, f"{told}, went on: other batches"
        assert loader.state_dict() == self.end, told

    def resume(self, state: dict[str, Any], done: int, told: str) -> None:
        again = self.loader()
        again.load_state_dict(state)
        # A state in the middle of a step begins the next step there: compare the packs.
        rest = [pack for batch in again for pack in zip(*seen(batch), strict=True) if pack[3]]
        wanted = [pack for batch in self.batches[done:] for pack in zip(*batch, strict=True) if pack[3]]
        assert [pack[0] for pack in rest] == [pack[0] for pack in wanted], f"{told}, resumed: other packs"

    def places(self) -> int:
        """Where one of its calls can be interrupted, all in all."""
        injector, iterator = Injector(), iter(self.loader(self.num_workers))
        while True:
            try:
                injector.call(iterator.__next__)
            except StopIteration:
                return injector.places


@pytest.fixture(scope="module")
def run() -> Run:
    return Run()


def every(run: Run, *, times: int, error: type[BaseException] = KeyboardInterrupt) -> None:
    """Interrupt a run at so many places, evenly spread over all of its calls of ``next()``."""
    places, raised = run.places(), 0
    assert places > 300, "too few to choose from"
    for number in range(times):
        # With workers, what arrives together is a matter of time, and so is the number of places.
        injector = Injector(1 + number * places * 9 // 10 // times, error=error)
        with within(60, f"an interrupt at place {injector.at}"):
            run.interrupted(injector)
        raised += injector.raised
    assert raised > times * 0.9


def test_an_interrupt_anywhere_in_next_consumes_nothing(run: Run) -> None:
    every(run, times=60)


def test_an_interrupt_with_workers_consumes_nothing(run: Run) -> None:
    every(Run(num_workers=2), times=8)


def test_what_a_signal_handler_raises_may_be_any_exception(run: Run) -> None:
    every(run, times=12, error=TimeoutError)


@pytest.mark.parametrize("kind", ["gz", "mixture"])
def test_an_interrupt_consumes_nothing_of_other_sources(tmp_path: Path, kind: str) -> None:
    if kind == "mixture":
        parts = {"a": MapSource(ROWS[::2]), "b": JSONLSource(write(tmp_path / "b.jsonl", ROWS[1::2]))}
        run = Run(Mix([{"source": part, "weight": 1, "name": name} for name, part in parts.items()]))
    else:
        run = Run(JSONLSource([write(tmp_path / f"{i}.jsonl.gz", ROWS[i::3]) for i in range(3)]))
    every(run, times=12)


def test_an_interrupt_consumes_nothing_of_a_dataset() -> None:
    wanted = [pack["tokens"].tolist() for pack in dataset()]
    counting, places = Injector(), 0
    iterator = iter(dataset())
    for _ in wanted:
        counting.call(iterator.__next__)
    places = counting.places
    for at in range(1, places, places // 30):
        injector, data = Injector(at), dataset()
        found, iterator = [], iter(data)
        while len(found) < len(wanted):
            try:
                found.append(injector.call(iterator.__next__)["tokens"].tolist())
            except KeyboardInterrupt:
                again = dataset()
                again.load_state_dict(data.state_dict())
                rest = [pack["tokens"].tolist() for pack in again]
                assert found + rest == wanted, f"resumed, place {at}"
                assert data.ledger().packed == again_packed(data.state_dict()), (
                    "the ledger is of the last pack"
                )
        assert found == wanted, f"went on, place {at}"


def again_packed(state: dict[str, Any]) -> int:
    data = dataset()
    data.load_state_dict(state)
    return data.ledger().packed


def test_a_pack_that_cannot_be_converted_is_not_consumed(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [pack["tokens"].tolist() for pack in dataset()]
    data = dataset()
    iterator = iter(data)
    found = [next(iterator)["tokens"].tolist() for _ in range(3)]
    before = data.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr("streampack.streaming.iteration.to_torchtune", fail)
        with pytest.raises(MemoryError):
            next(iterator)
    assert data.state_dict() == before
    assert found + [pack["tokens"].tolist() for pack in iterator] == wanted


def fail(*_: Any, **__: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_cannot_be_collated_is_not_consumed(
    run: Run, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    """Three tries lost three batches."""
    loader = run.loader(num_workers)
    iterator = iter(loader)
    found = [seen(next(iterator)) for _ in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr("streampack.loader.iteration.stack_packs", fail)
        for _ in range(3):
            with pytest.raises(MemoryError):
                next(iterator)
            assert loader.state_dict()["lanes"].keys() == run.states[5]["lanes"].keys()
            assert loader.ledger().packs == 10
    assert found + list(map(seen, iterator)) == run.batches


def test_a_loader_that_could_not_be_iterated_keeps_its_state(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = run.loader()
    loader.load_state_dict(run.states[6])
    with monkeypatch.context() as patch:
        patch.setattr("streampack.loader.iteration.RankBatches", fail)
        with pytest.raises(MemoryError):
            iter(loader)
    assert loader.state_dict() == run.states[6]
    assert list(map(seen, loader)) == run.batches[6:]


def test_several_ranks_refuse_to_continue_after_an_interrupt(run: Run) -> None:
    """What this rank has told the others, and what not, cannot be known."""
    loader = run.loader()
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        Injector(40).call(iterator.__next__)
    loader.rank_sync.alone = False
    for what, ask in (
        ("batch", iterator.__next__),
        ("state", loader.state_dict),
        ("anew", lambda: iter(loader)),
    ):
        with pytest.raises(RuntimeError, match=f"rank 0 .*{what}.* cut its last next.* last checkpoint"):
            ask()


def test_a_skipped_record_is_listed_once(tmp_path: Path) -> None:
    """Its line is written before it is known to be there."""
    kept = Quarantine(str(tmp_path), 10)
    places = Injector()
    places.call(lambda: kept.append(0, shard="a", offset=0, reason="first"))
    for number in range(1, 2 * places.places):
        with suppress(KeyboardInterrupt):
            Injector(number).call(lambda: kept.append(0, shard="a", offset=number, reason="broken"))  # noqa: B023
        kept.append(0, shard="a", offset=number, reason="broken")
    offsets = [
        json.loads(line)["offset"] for line in (tmp_path / "lane-00000.jsonl").read_text().splitlines()
    ]
    assert offsets == list(range(2 * places.places))


def by_signals(run: Run, *, times: int, seed: int) -> int:
    """Interrupt runs by real signals at random times, as Ctrl-C does; how many struck inside ``next()``."""
    rng, struck = random.Random(seed), 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while struck < times:
            loader = run.loader(run.num_workers)
            iterator, found = iter(loader), []
            ended, longest, done = False, 8e-3, 0
            while not ended:
                # Shorter than it takes to begin again on a busy machine, it would never come to a batch.
                longest = longest * 2 if len(found) == done else max(8e-3, longest / 2)
                done = len(found)
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, longest))
                    for batch in iterator:
                        found.append(batch)  # noqa: PERF402 - what has arrived is there after an interrupt
                    ended = True
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    struck += 1
                    told = f"signal {struck}, after {len(found)} batches"
                    # Behind the last batch, its end may have been found or not.
                    states = [run.states[len(found)], *([run.end] if len(found) == len(run.batches) else [])]
                    assert loader.state_dict() in states, told
                    if rng.random() < 0.2:
                        run.resume(loader.state_dict(), len(found), told)
            assert list(map(seen, found)) == run.batches
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return struck


def test_an_interrupt_by_a_signal_consumes_nothing(run: Run) -> None:
    assert by_signals(run, times=30, seed=0) >= 30


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_three_hundred_interrupts(num_workers: int) -> None:
    every(Run(num_workers=num_workers), times=300)
    every(Run(num_workers=num_workers), times=30, error=MemoryError)
