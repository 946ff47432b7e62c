"""Processes that are killed, fail, hang up or are left alone, at every moment: the stream stays the same."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from streampack import IterablePackedDataset, IterableSource, Sample
from streampack.loader import workers
from streampack.loader.workers import Worker
from streampack.streaming.lane_state import LaneEvent
from tests.support.corpus import Numbers, plain, rows, write
from tests.support.interrupts import Injector, within

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at processes through /proc"),
    # Python 3.12 warns of every fork beside a thread; torch's own DataLoader does the same.
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
ROWS = rows(60)


def dataset(source: Any = ROWS, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(
        source,
        **{"max_seq_len": 24, "buffer_size": 6, "encoder": Numbers(), "num_lanes": 2, "shuffle": True}
        | settings,
    )


def worker(
    of: IterablePackedDataset, *, consumer: int = 0, consumers: int = 1, prefetch: int = 2, **settings: Any
) -> Worker:
    return Worker(
        of,
        **{"consumer": consumer, "consumers": consumers, "lane_states": {}, "prefetch": prefetch} | settings,
    )


def content(event: LaneEvent) -> tuple[Any, ...]:
    return event.lane, event.epoch, event.pack and plain(event.pack), event.state


def expected(of: IterablePackedDataset, consumer: int = 0, consumers: int = 1) -> list[tuple[Any, ...]]:
    """The same stream in this process."""
    stream = of.stream(consumer, consumers)
    events = []
    while True:
        try:
            events.append(content(stream.next_event()))
        except StopIteration:
            return events


def state_of(pid: int) -> str | None:
    """What /proc says of a process; None if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def gone(pids: list[int], *, within: float) -> bool:
    """Whether all are dead by then; a zombie only waits for someone to ask for its exit code."""
    deadline = time.monotonic() + within
    while any(state_of(pid) not in (None, "Z", "X") for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid() and fields[0] != "Z":
            found.add(int(stat.parent.name))
    return found


def held() -> dict[str, Any]:
    """All that a worker could leave behind."""
    return {
        "children": children(),
        "threads": {thread for thread in threading.enumerate() if "_receive" in thread.name},
        "descriptors": {
            entry.name: str(entry.readlink())
            for entry in Path("/proc/self/fd").iterdir()
            if entry.is_symlink() and "/proc/" not in str(entry.readlink())
        },
    }


class Deadly:
    """Rows, one of which kills the process that reads it, so many times."""

    def __init__(self, folder: Path, *, at: int, times: int = 1, by: Callable[[], Any] | None = None) -> None:
        self.folder, self.at, self.times, self.by = folder, at, times, by
        self.home = os.getpid()

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, i: int) -> dict[str, int]:
        if i == self.at and os.getpid() != self.home and (deaths := count_files(self.folder)) < self.times:
            (self.folder / str(deaths)).touch()
            (self.by or die)()
        return ROWS[i]


def count_files(folder: Path) -> int:
    return len(list(folder.iterdir()))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


# What a worker gives.


@pytest.mark.parametrize("prefetch", [1, 8])
@pytest.mark.parametrize("consumers", [1, 2])
def test_a_worker_gives_the_events_of_its_stream(consumers: int, prefetch: int) -> None:
    for consumer in range(consumers):
        one = worker(dataset(epochs=2), consumer=consumer, consumers=consumers, prefetch=prefetch)
        assert list(map(content, one)) == expected(dataset(epochs=2), consumer, consumers)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(one)


@pytest.mark.parametrize(("prefetch", "most"), [(1, 1), (3, 1), (4, 2), (8, 4), (40, 4)])
def test_packs_come_several_at_a_time(prefetch: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every arrival takes a core from whatever works there. The first one comes alone, so that it comes soon."""
    monkeypatch.setattr(workers, "PATIENCE", 60.0)  # the machine may pause
    one = worker(dataset(epochs=8, num_lanes=1), prefetch=prefetch)
    sizes = []
    while not one.ended:
        with suppress(StopIteration):
            next(one)
            sizes.append(1 + len(one.arrived))
            while one.arrived:
                next(one)
    *full, last = sizes
    assert full == ([2**i for i in range(9) if 2**i < most] + [most] * len(full))[: len(full)]
    assert 0 < last <= most
    assert sum(sizes) == len(expected(dataset(epochs=8, num_lanes=1)))


def test_a_pack_that_takes_long_comes_alone() -> None:
    """Nobody waits for the next one, too."""

    def slow(row: Any) -> Sample:
        time.sleep(1.5 * workers.PATIENCE)
        return Numbers()(row)

    full = [{"i": i, "n": 24} for i in range(6)]
    one = worker(dataset(full, encoder=slow, num_lanes=1), prefetch=40)
    for event in one:
        assert event.pack is None or not one.arrived


def test_what_was_made_before_an_error_comes_before_it(tmp_path: Path) -> None:
    """And what came is not made again."""

    def fail() -> None:
        raise ValueError("not this time")

    one = worker(dataset(Deadly(tmp_path, at=40, times=2, by=fail), shuffle=False, num_lanes=1), prefetch=64)
    whole = expected(dataset(shuffle=False, num_lanes=1))
    found = []
    for _ in range(2):
        with pytest.raises(ValueError, match="not this time"):
            while True:
                found.append(content(next(one)))
        assert 0 < len(found) < len(whole)
    assert found + list(map(content, one)) == whole


def test_packs_own_their_memory_and_can_be_written_to() -> None:
    for event in worker(dataset()):
        if event.pack is not None:
            for array in (event.pack.tokens, event.pack.labels):
                assert array.flags.writeable


@pytest.mark.parametrize(("prefetch", "most"), [(3, 1 + 3 + 1 + 1 + 1), (8, 1 + 2 + 4 + 4 + 1)])
def test_a_worker_makes_a_bounded_number_of_packs_ahead(prefetch: int, most: int) -> None:
    """Nobody takes them: it stops when the inbox and the pipe are full."""
    made = mp.Value("i", 0)

    def count(row: Any) -> Any:
        with made.get_lock():
            made.value += 1
        return Numbers()(row)

    large = dataset(
        [{"i": i, "n": 40_000} for i in range(100)], encoder=count, max_seq_len=40_000, num_lanes=1
    )
    one = worker(large, prefetch=prefetch)
    next(one)
    time.sleep(0.3)
    # Taken, in the inbox, in the receiver's hand, in the pipe (each pack is larger than it), and one to find an end. Of
    # 3, one comes at a time; of 8, first two and then four together, and the inbox holds one group.
    assert made.value <= most
    one.close()


# Deaths.


@pytest.mark.parametrize("at", range(0, 60, 3))
def test_a_worker_that_dies_at_any_row_is_mended(at: int, tmp_path: Path) -> None:
    one = worker(dataset(Deadly(tmp_path, at=at), epochs=2), max_restarts=1)
    assert list(map(content, one)) == expected(dataset(epochs=2))
    assert one.restarts == 1


def test_a_worker_that_dies_again_and_again_is_mended_as_often_as_allowed(tmp_path: Path) -> None:
    one = worker(dataset(Deadly(tmp_path, at=30, times=3)), max_restarts=3)
    assert list(map(content, one)) == expected(dataset())
    assert one.restarts == 3


class DeadlyEnd:
    """A source whose readers kill the process where they should end, once each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> Iterator[dict[str, int]]:
        yield from ROWS
        if (deaths := count_files(self.folder)) < 2:
            (self.folder / str(deaths)).touch()
            die()


def test_a_worker_that_dies_at_the_end_of_each_epoch_is_mended(tmp_path: Path) -> None:
    source = IterableSource(DeadlyEnd(tmp_path))
    one = worker(dataset(source, epochs=2, num_lanes=1, shuffle=False))
    found = list(map(content, one))
    assert one.restarts == 2
    assert found == expected(dataset(IterableSource(ROWS), epochs=2, num_lanes=1, shuffle=False))


@pytest.mark.parametrize("taken", [0, 1, 2, 5, 17, "all"])
def test_a_kill_from_outside_is_mended(taken: Any) -> None:
    """At its start, in the middle, and when all but its end was taken."""
    whole = expected(dataset(epochs=3))
    one = worker(dataset(epochs=3), prefetch=1)
    found = [content(next(one)) for _ in range(len(whole) if taken == "all" else taken)]
    one.process.kill()
    found += map(content, one)
    assert found == whole


def test_twenty_kills_in_a_row() -> None:
    # Packs of 312 KB do not fit into a pipe, so each kill meets a worker that is still at work: writing, most times.
    data = [{"i": i, "n": 38_800 + i} for i in range(180)]
    large = {"source": data, "max_seq_len": 39_000, "num_lanes": 2}
    one = worker(dataset(**large), prefetch=1, max_restarts=20)
    found = []
    for kills in range(1, 21):
        time.sleep(0.0007 * kills)
        assert state_of(one.process.pid) != "Z", "it is alive when it is killed"
        one.process.kill()
        while one.restarts < kills:  # what had arrived is taken first
            found.append(content(next(one)))
    found += map(content, one)
    assert one.restarts == 20
    assert found == expected(dataset(**large))


def test_a_kill_in_the_middle_of_writing_a_pack() -> None:
    data = [{"i": i, "n": 60_000} for i in range(12)]
    large = {"source": data, "max_seq_len": 60_000, "num_lanes": 1}
    one = worker(dataset(**large), prefetch=1)
    found = [content(next(one))]
    for _ in range(2):
        deadline = time.monotonic() + 10
        while state_of(one.process.pid) != "S" or not one.room.empty():
            assert time.monotonic() < deadline
        time.sleep(0.1)  # it sleeps in write(): 0.5 MB a pack, and nobody reads
        one.process.kill()
        found += [content(next(one)) for _ in range(4)]
    found += map(content, one)
    assert one.restarts == 2
    assert found == expected(dataset(**large))


def test_a_worker_that_only_closed_its_pipe_is_made_again(tmp_path: Path) -> None:
    def hang_up() -> None:
        os.closerange(3, 1000)
        time.sleep(60)

    one = worker(dataset(Deadly(tmp_path, at=30, by=hang_up)))
    begin = time.monotonic()
    assert list(map(content, one)) == expected(dataset())
    assert time.monotonic() - begin < 10


def test_once_too_often(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = worker(dataset(Deadly(tmp_path, at=30, times=99)), max_restarts=2)
    begin = time.monotonic()
    message = (
        r"^worker 0 of 1 \(pid \d+\) died of signal SIGKILL, after 2 restart\(s\); if the system killed it, it may "
        r"lack memory: use fewer workers or a smaller buffer_size$"
    )
    with caplog.at_level(logging.WARNING, "streampack"), pytest.raises(RuntimeError, match=message):
        list(one)
    logged = [record.getMessage() for record in caplog.records]
    assert [line.partition("; ")[2] for line in logged] == [
        f"restart {n} of 2 from its last state" for n in (1, 2)
    ]
    for _ in range(2):  # asked again, it says so again: it neither hangs nor ends
        with pytest.raises(RuntimeError, match=message):
            next(one)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("by", "what"),
    [
        (lambda: os._exit(7), "with exit code 7"),
        (lambda: sys.exit(3), "with exit code 3"),
        (lambda: os.kill(os.getpid(), signal.SIGUSR1), "of signal SIGUSR1"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "of signal SIGTERM"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_death_is_named(tmp_path: Path, by: Callable[[], Any], what: str) -> None:
    one = worker(dataset(Deadly(tmp_path, at=30, by=by)), max_restarts=0)
    with pytest.raises(RuntimeError, match=rf"died {what}, after 0 restart\(s\)"):
        list(one)


# Errors.


class TwoArguments(Exception):
    """Pickles, and fails to unpickle, as many libraries' errors do."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


class Locked(Exception):
    """Does not pickle."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Faulty:
    """An encoder that fails at one row until a file is there; counts its tries in another."""

    def __init__(self, error: Callable[[], BaseException], folder: Path, *, at: int = 30) -> None:
        self.error, self.folder, self.at = error, folder, at

    def __call__(self, row: Any) -> Any:
        if row["i"] == self.at and not (self.folder / "repaired").exists():
            with (self.folder / "tries").open("a") as file:
                file.write(".")
            raise self.error()
        return Numbers()(row)

    @property
    def tries(self) -> int:
        return (self.folder / "tries").stat().st_size


ERRORS: list[tuple[Callable[[], Exception], type[Exception], str]] = [
    (lambda: ValueError("no luck"), ValueError, "no luck"),
    (lambda: KeyError("no luck"), KeyError, "no luck"),
    (lambda: OSError(5, "no luck"), OSError, "no luck"),
    (lambda: json.JSONDecodeError("no luck", "x", 0), ValueError, "no luck"),  # pickles without its notes
    (lambda: StopIteration("no luck"), RuntimeError, "StopIteration"),
    (lambda: TwoArguments("no", "luck"), RuntimeError, "TwoArguments: no: luck"),
    (lambda: Locked("no luck"), RuntimeError, "Locked: no luck"),
]


@pytest.mark.parametrize(("error", "kind", "words"), ERRORS)
def test_an_error_arrives_with_its_place_and_is_tried_again_when_asked(
    tmp_path: Path, error: Callable[[], Exception], kind: type[Exception], words: str
) -> None:
    faulty = Faulty(error, tmp_path)
    one = worker(dataset(encoder=faulty), max_restarts=0)
    found: list[Any] = []
    for tries in range(1, 4):
        with pytest.raises(kind) as caught:
            for event in one:
                found.append(content(event))
        everything = "\n".join([str(caught.value), *caught.value.__notes__])
        assert words in everything
        assert "sample 30" in everything
        assert "in worker 0 of 1:\nTraceback" in everything
        assert "in __call__" in everything, "the traceback in the worker's process"
        time.sleep(0.05)
        assert faulty.tries == tries, "it waits until it is asked"
    (tmp_path / "repaired").touch()
    found += map(content, one)
    assert found == expected(dataset())


def test_an_error_in_the_beginning_is_raised_and_tried_again(tmp_path: Path) -> None:
    """A state that does not fit, or a file that is missing for a moment, before there is a stream."""
    path = write(tmp_path / "a.jsonl", ROWS)
    settings = {"source": path, "shuffle": True, "shuffle_window": 8, "num_lanes": 1}
    stream = dataset(**settings).stream()
    first = [content(stream.next_event()) for _ in range(9)]
    resumed = dataset(**settings)
    hidden = path.rename(tmp_path / "hidden")
    one = worker(resumed, lane_states=stream.lane_states())
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            next(one)
    hidden.rename(path)
    assert first + list(map(content, one)) == expected(dataset(**settings))


@pytest.mark.parametrize("repaired", [False, True])
def test_a_death_after_an_error_is_mended(tmp_path: Path, repaired: bool) -> None:
    faulty = Faulty(lambda: ValueError("no luck"), tmp_path)
    one = worker(dataset(encoder=faulty))
    found: list[Any] = []
    with pytest.raises(ValueError, match="no luck"):
        for event in one:
            found.append(content(event))
    one.process.kill()
    one.process.join()
    if not repaired:
        with pytest.raises(ValueError, match="no luck"):
            next(one)
    (tmp_path / "repaired").touch()
    found += map(content, one)
    assert one.restarts == 1
    assert found == expected(dataset())


# What is left behind: nothing.


def finish(one: Worker) -> None:
    list(one)


def fail(one: Worker) -> None:
    one.dataset.lane_config.encode.bad = 30  # too late for the worker, which was forked
    with pytest.raises(ValueError, match="sample 30"):
        list(one)


def give_up(one: Worker) -> None:
    one.max_restarts = 0
    one.process.kill()
    with pytest.raises(RuntimeError, match="SIGKILL"):
        list(one)


def mend(one: Worker) -> None:
    for _ in range(3):
        next(one)
        one.process.kill()
    next(one)


@pytest.mark.parametrize(
    "leave", [lambda one: None, next, finish, mend, give_up, fail, Worker.close], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("cycle", [False, True], ids=["dropped", "in a cycle"])
def test_nothing_is_left_behind(leave: Callable[[Worker], Any], cycle: bool) -> None:
    gc.collect()
    before = held()
    encoder = Numbers()
    if leave is fail:
        encoder.bad = 30
    one = worker(dataset(epochs=1 if leave is finish else 99, encoder=encoder))
    assert leave is finish or len(held()["children"]) == len(before["children"]) + 1, "it can be seen at all"
    leave(one)
    if cycle:
        one.itself = one  # type: ignore[attr-defined]
    watch = weakref.ref(one)
    del one
    if cycle:
        gc.collect()
    assert watch() is None, "an error's traceback must not keep it"
    assert held() == before


def test_a_worker_uses_no_shared_memory() -> None:
    """Which would stay behind when it is killed. What torch shares bears the process's number."""

    def shared(pid: int) -> list[str]:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        links = [str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
        return sorted(line.split()[-1] for line in [*maps, *links] if "/dev/shm" in line)

    before = shared(os.getpid())
    one = worker(dataset(epochs=99))
    next(one)
    assert shared(os.getpid()) == shared(one.process.pid) == before
    numbers = {str(os.getpid()), str(one.process.pid)}
    assert not [entry for entry in Path("/dev/shm").glob("*") if numbers & set(entry.name.split("_"))]


def test_a_copy_that_was_forked_along_ends_nothing() -> None:
    one = worker(dataset(epochs=3), prefetch=1)
    found = [content(next(one))]
    if not (pid := os.fork()):
        one.__del__()
        os._exit(0)
    os.waitpid(pid, 0)
    found += map(content, one)
    assert one.restarts == 0
    assert found == expected(dataset(epochs=3))


def test_the_garbage_collector_may_run_in_the_receiving_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in a cycle is closed by whichever thread allocates at the wrong moment, its own receiver included."""
    held: list[Worker] = []
    closed = threading.Event()

    class Inbox(SimpleQueue[Any]):
        def put(self, message: Any, block: bool = True, timeout: float | None = None) -> None:
            if threading.current_thread() is not threading.main_thread() and not closed.is_set():
                while not held:
                    time.sleep(0.001)
                closed.set()  # before: closing puts something, too
                held[0].close()
            super().put(message)

    monkeypatch.setattr(workers, "SimpleQueue", Inbox)
    held.append(one := worker(dataset(epochs=3), prefetch=1))
    with suppress(RuntimeError):  # it may be closed by now
        next(one)
    assert closed.wait(10)
    with pytest.raises(RuntimeError, match="worker 0 of 1 was closed; iterate the loader anew"):
        list(one)
    assert one.receiver is not None
    one.receiver.join(10)
    assert not one.receiver.is_alive()


def test_closing_waits_for_nobody_who_holds_the_other_end_of_the_pipe() -> None:
    """As a process does that was forked between the making of the pipe and the closing of its end here."""
    one = worker(dataset(epochs=99), prefetch=1)
    next(one)
    kept = os.dup(one.pipe.fileno())  # an end of this pipe that does not close with the process
    theirs = one.theirs = mp.connection.Connection(os.dup(kept))
    assert one.receiver is not None
    with within(20, "closing"):
        one.close()
    assert not one.receiver.is_alive()
    assert theirs.closed
    os.close(kept)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # a socket that was not handed on
def test_what_was_not_started_is_closed() -> None:
    """An interrupt may strike between any two steps of a worker's start, and of its closing."""
    before, of, injector = held(), dataset(), Injector()
    one: list[Worker] = []

    def start_and_close() -> None:
        one.append(new := Worker.__new__(Worker))
        new.__init__(of, consumer=0, consumers=1, lane_states={})  # type: ignore[misc]
        new.close()

    injector.call(start_and_close)
    places = injector.places
    assert places > 100
    for at in range(1, places, places // 20):
        injector = Injector(at)
        with within(20, f"closing after an interrupt at {at}"), suppress(KeyboardInterrupt):
            injector.call(start_and_close)
        with within(20, f"closing after an interrupt at {at}"):
            while one:
                one.pop().__del__()
    gc.collect()
    assert not [thread for thread in held()["threads"] - before["threads"] if thread.is_alive()]
    assert gone(list(held()["children"] - before["children"]), within=10)


def fork(target: Callable[..., None], *args: Any) -> Any:
    process = mp.get_context("fork").Process(target=target, args=args)
    process.start()
    return process


def train_and_wait(pipe: Any, of: IterablePackedDataset, taken: int) -> None:
    workers = [worker(of, consumer=consumer, consumers=2, prefetch=1) for consumer in range(2)]
    for _ in range(taken):
        for one in workers:
            next(one)
    pipe.send([one.process.pid for one in workers])
    time.sleep(60)


@pytest.mark.parametrize("busy", ["writing", "encoding"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_die_with_their_trainer(busy: str, how: signal.Signals) -> None:
    def slow(row: Any) -> Any:
        time.sleep(60)

    data = [{"i": i, "n": 100_000} for i in range(20)]
    encode = {"encoder": slow} if busy == "encoding" else {}
    of = dataset(data, max_seq_len=100_000, **encode)
    ours, theirs = mp.Pipe()
    trainer = fork(train_and_wait, theirs, of, 1 if busy == "writing" else 0)
    pids = ours.recv()
    time.sleep(0.1)
    assert not gone(pids, within=0)
    os.kill(trainer.pid, how)
    trainer.join()
    assert gone(pids, within=5)


@pytest.mark.parametrize("stopped", [[0], [1], [0, 1]])
def test_stopped_workers_die_with_a_trainer_that_was_killed(stopped: list[int]) -> None:
    """They cannot see that; and the last one holds pipes by which the others would."""
    of = dataset([{"i": i, "n": 100_000} for i in range(20)], max_seq_len=100_000)
    ours, theirs = mp.Pipe()
    trainer = fork(train_and_wait, theirs, of, 1)
    pids = ours.recv()
    for number in stopped:
        os.kill(pids[number], signal.SIGSTOP)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.join()
    try:
        assert gone(pids, within=10)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start_in_a_thread_that_ends(pipe: Any) -> None:
    one: list[Worker] = []
    thread = threading.Thread(target=lambda: one.append(worker(dataset(epochs=99))))
    thread.start()
    thread.join()
    for _ in range(200):
        next(one[0])
    pipe.send(one[0].restarts)


def test_a_worker_outlives_the_thread_that_made_it() -> None:
    ours, theirs = mp.Pipe()
    trainer = fork(start_in_a_thread_that_ends, theirs)
    assert ours.poll(30)
    assert ours.recv() == 0
    trainer.join(10)


def train_and_leave(pipe: Any) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # as trainers do that want to write a checkpoint first
    one = worker(dataset(epochs=99))
    next(one)
    pipe.send([one.process.pid])
    threading.kept = one  # type: ignore[attr-defined]  # until the interpreter's end


def test_a_trainer_with_a_handler_of_its_own_can_leave() -> None:
    """At exit, multiprocessing sends SIGTERM to workers and waits; a handler forked along would swallow it."""
    ours, theirs = mp.Pipe()
    trainer = fork(train_and_leave, theirs)
    pids = ours.recv()
    trainer.join(10)
    stuck = trainer.exitcode is None
    trainer.kill()
    assert not stuck
    assert gone(pids, within=5)


def test_ctrl_c_is_the_trainers() -> None:
    one = worker(dataset(), prefetch=1)
    found = [content(next(one))]
    os.kill(one.process.pid, signal.SIGINT)
    found += map(content, one)
    assert one.restarts == 0
    assert found == expected(dataset())


SPAWNED = """
import multiprocessing as mp, sys
from streampack import IterablePackedDataset, PackedDataLoader
from tests.support.corpus import Numbers

def batches(path, num_workers):
    settings = {"num_lanes": 2, "shuffle": True, "epochs": 2, "untrained": "keep"}
    data = IterablePackedDataset(path, max_seq_len=24, encoder=Numbers(), **settings)
    loader = PackedDataLoader(data, batch_size=3, num_workers=num_workers)
    return [(b.tokens.tolist(), b.labels.tolist(), b.fragments) for b in loader]

if __name__ == "__main__":
    mp.set_start_method(sys.argv[2])
    found = batches(sys.argv[1], 1)
    assert found == batches(sys.argv[1], 0)
    print(len(found), "batches")
    endless = IterablePackedDataset(sys.argv[1], max_seq_len=24, encoder=Numbers(), untrained="keep", epochs=None)
    kept = iter(PackedDataLoader(endless))
    next(kept)  # and is alive at the end
"""


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_workers_can_be_started_anew_instead_of_forked(tmp_path: Path, method: str) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    path = write(tmp_path / "a.jsonl", rows(80))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, script, path, method],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert int(done.stdout.split()[0]) > 10
