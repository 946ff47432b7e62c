"""An interrupt, or any other exception, inside ``next()`` loses no batch, repeats none and hangs nowhere."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from streampack import Batch, IterablePackedDataset, JSONLSource, MapSource, Mix, PackedDataLoader
from tests.harness.corpus import Numbers, rows, write
from tests.harness.interrupts import Injector, within

pytestmark = [
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
        "shuffle": 8,
        "epochs": 2,
    }
    return IterablePackedDataset(source, encoder=Numbers(), **{**defaults, **settings})


def seen(batch: Batch) -> Seen:
    return (batch.tokens.tolist(), batch.labels.tolist(), batch.seq_lens.tolist(), batch.fragments)


def packs_of(batches: list[Seen]) -> list[Any]:
    """The packs in batches, less null packs."""
    return [pack[0] for batch in batches for pack in zip(*batch, strict=True) if pack[3]]


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
        """Interrupt one ``next()``; then resume from the state, and iterate the same loader anew."""
        loader = self.loader(self.num_workers)
        iterator = iter(loader)
        found: list[Seen] = []
        told = f"interrupted at place {injector.at}"
        while True:
            try:
                found.append(seen(injector.call(iterator.__next__)))
            except StopIteration:
                break
            except (injector.error, RuntimeError) as error:
                # threading makes a RuntimeError of one that strikes while it starts a thread.
                assert injector.error in (type(error), type(error.__context__)), told
                told += f", after {len(found)} batches"
                state = loader.state_dict()
                assert state == self.states[len(found)], f"{told}: another state than of the last batch"
                self.resume(state, len(found), told)
                iterator = iter(loader)
        # Iterated anew in the middle of a step, the next one begins there.
        assert packs_of(found) == packs_of(self.batches), f"{told}, went on: other packs"
        ends = loader.state_dict()
        slot = {"slot": 0, "checksum": 0}
        assert {**ends, **slot} == {**self.end, **slot}, told

    def resume(self, state: dict[str, Any], done: int, told: str) -> None:
        again = self.loader()
        again.load_state_dict(state)
        # A state in the middle of a step begins the next step there: compare the packs.
        rest = packs_of([seen(batch) for batch in again])
        assert rest == packs_of(self.batches[done:]), f"{told}, resumed: other packs"

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


def run_of(kind: str, folder: Path) -> Run:
    if kind == "mixture":
        parts = {"a": MapSource(ROWS[::2]), "b": JSONLSource(write(folder / "b.jsonl", ROWS[1::2]))}
        return Run(Mix([{"source": part, "weight": 1, "name": name} for name, part in parts.items()]))
    if kind == "gz":
        return Run(JSONLSource([write(folder / f"{i}.jsonl.gz", ROWS[i::3]) for i in range(3)]))
    return Run(num_workers=2 if kind == "workers" else 0)


@pytest.mark.parametrize(
    ("kind", "times", "error"),
    [
        ("rows", 25, KeyboardInterrupt),
        ("rows", 8, TimeoutError),  # what a signal handler raises may be any exception
        ("workers", 4, KeyboardInterrupt),
        ("gz", 8, KeyboardInterrupt),
        ("mixture", 8, KeyboardInterrupt),
    ],
)
def test_an_interrupt_anywhere_in_next_consumes_nothing(
    kind: str, times: int, error: type[BaseException], tmp_path: Path
) -> None:
    every(run_of(kind, tmp_path), times=times, error=error)


def test_several_ranks_refuse_to_continue_after_an_interrupt(run: Run) -> None:
    """What this rank has told the others, and what not, cannot be known."""
    loader = run.loader()
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        Injector(40).call(iterator.__next__)
    loader.rank_sync.alone = False
    for ask in (iterator.__next__, loader.state_dict, lambda: iter(loader)):
        with pytest.raises(RuntimeError, match=r"rank 0 was interrupted while .* last checkpoint"):
            ask()


def test_several_ranks_refuse_to_continue_after_a_start_that_failed_on_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have begun to make batches."""

    def fail(*args: Any) -> Any:
        raise OSError("no process can be started")

    monkeypatch.setattr("streampack.loader.iteration.start_worker", fail)
    loader = run.loader(num_workers=1)
    with pytest.raises(OSError, match="no process can be started"):
        iter(loader)
    loader.rank_sync.alone = False
    with pytest.raises(RuntimeError, match=r"rank 0 was interrupted while .* last checkpoint"):
        iter(loader)


@pytest.mark.parametrize("door", [dataset, lambda **settings: PackedDataLoader(dataset(**settings))])
def test_an_iteration_that_raised_says_so_when_it_is_asked_again(door: Any) -> None:
    """A generator would say that it has come to its end."""
    broken = [{**row, "n": "x"} if row["i"] == 40 else row for row in ROWS]
    iterator = iter(door(source=broken, shuffle=False))
    with pytest.raises(TypeError, match="sample 40"):
        for _ in iterator:
            pass
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cut this iteration short; iterate again"):
            next(iterator)


def test_a_skipped_record_is_listed_once(tmp_path: Path) -> None:
    """Its line is written before it is known to be there."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join("{\n" if row["i"] % 4 == 3 else f"{json.dumps(row)}\n" for row in ROWS))
    bad = [number for number in range(len(ROWS)) if number % 4 == 3]
    raised = 0
    for at in range(400, 6000, 400):
        folder, injector, done = tmp_path / f"bad-{at}", Injector(at), False
        settings = {"skip_bad": folder, "epochs": 1, "num_lanes": 1}
        data = dataset(JSONLSource(path), **settings)
        iterator = iter(data)
        while not done:
            try:
                done = injector.call(lambda iterator=iterator: next(iterator, None)) is None
            except KeyboardInterrupt:
                raised += 1
                iterator = iter(data)
        lines = [line for file in folder.iterdir() for line in file.read_text().splitlines()]
        assert len({*lines}) == len(lines) == len(bad), f"interrupted at place {at}"
    assert raised > 8


def by_signals(run: Run, *, times: int, seed: int) -> int:
    """Interrupt runs by real signals at random times, as Ctrl-C does; how many struck inside ``next()``."""
    rng, struck = random.Random(seed), 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while struck < times:
            loader = run.loader(run.num_workers)
            found = []
            ended, longest, done = False, 8e-3, 0
            while not ended:
                # Shorter than it takes to begin again on a busy machine, it would never come to a batch.
                longest = longest * 2 if len(found) == done else max(8e-3, longest / 2)
                done = len(found)
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, longest))
                    for batch in loader:
                        found.append(batch)  # noqa: PERF402 - what has arrived is there after an interrupt
                    ended = True
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    struck += 1
                    told = f"signal {struck}, after {len(found)} batches"
                    # Behind the last batch, its end may have been found or not.
                    packs = len(packs_of([*map(seen, found)]))
                    assert loader.ledger().packs == packs, told
            assert packs_of([*map(seen, found)]) == packs_of(run.batches)
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
