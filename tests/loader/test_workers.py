"""Worker processes that are killed or fail at any moment: the stream stays the same."""

from __future__ import annotations

import json
import logging
import multiprocessing as mp
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from streampack import Batch, IterablePackedDataset, IterableSource, PackedDataLoader
from tests.harness.corpus import Numbers, write
from tests.harness.interrupts import within
from tests.harness.workers import (
    ROWS,
    Deadly,
    content,
    count_files,
    dataset,
    die,
    expected,
    gone,
    process_of,
    state_of,
    worker,
)

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at processes through /proc")

# What a worker gives.


@pytest.mark.parametrize("consumers", [1, 2])
def test_a_worker_yields_the_events_of_its_stream(consumers: int) -> None:
    for consumer in range(consumers):
        one = worker(dataset(epochs=2), consumer=consumer, consumers=consumers)
        assert list(map(content, one)) == expected(dataset(epochs=2), consumer, consumers)
        for _ in range(2):
            with pytest.raises(StopIteration):
                next(one)


def test_a_worker_makes_a_bounded_number_of_packs_ahead() -> None:
    """A worker whose packs are not taken stops when its queue and the pipe are full."""
    made = mp.Value("i", 0)

    def count(row: Any) -> Any:
        with made.get_lock():
            made.value += 1
        return Numbers()(row)

    large = dataset(
        [{"i": i, "n": 40_000} for i in range(100)], encoder=count, max_seq_len=40_000, num_lanes=1
    )
    one = worker(large)
    for taken in range(1, 40):
        next(one)
        with within(20, "making packs ahead"):
            while made.value < taken + 4:
                time.sleep(0.001)
        arrived, in_pipe, queued, being_made = 8, 8, 8, 1
        assert made.value <= taken + arrived + in_pipe + queued + being_made
    one.close()


# Deaths.


def restarts(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("it is started again from its last state")


@pytest.mark.parametrize("at", range(0, 60, 10))
def test_a_worker_that_dies_at_any_row_is_restarted(
    at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = worker(dataset(Deadly(tmp_path, at=at), epochs=2))
    assert list(map(content, one)) == expected(dataset(epochs=2))
    assert restarts(caplog) == 1


class DeadlyEnd:
    """A source whose readers kill the process at the end of the data, the first two times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> Iterator[dict[str, int]]:
        yield from ROWS
        if (deaths := count_files(self.folder)) < 2:
            (self.folder / str(deaths)).touch()
            die()


def test_a_worker_that_dies_at_the_end_of_each_epoch_is_restarted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = IterableSource(DeadlyEnd(tmp_path))
    one = worker(dataset(source, epochs=2, num_lanes=1, shuffle=False))
    found = list(map(content, one))
    assert restarts(caplog) == 2
    assert found == expected(dataset(IterableSource(ROWS), epochs=2, num_lanes=1, shuffle=False))


@pytest.mark.parametrize("taken", [0, 5, "all"])
def test_a_killed_worker_is_restarted(taken: Any) -> None:
    """At its start, in the middle, and when all but its end was taken."""
    whole = expected(dataset(epochs=3))
    one = worker(dataset(epochs=3))
    found = [content(next(one)) for _ in range(len(whole) if taken == "all" else taken)]
    process_of().kill()
    found += map(content, one)
    assert found == whole


def test_a_worker_is_restarted_as_often_as_it_has_made_packs_since(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Packs of 312 KB do not fit into a pipe, so each kill meets a worker that is still at work: writing, most times.
    data = [{"i": i, "n": 38_800 + i} for i in range(60)]
    large = {"source": data, "max_seq_len": 39_000, "num_lanes": 2}
    one = worker(dataset(**large))
    found = []
    for kills in range(1, 7):
        found.append(content(next(one)))
        time.sleep(0.002 * kills)
        assert state_of(process_of().pid) != "Z", "it is alive when it is killed"
        process_of().kill()
        while restarts(caplog) < kills:  # what had arrived is taken first
            found.append(content(next(one)))
    found += map(content, one)
    assert restarts(caplog) == 6
    assert found == expected(dataset(**large))


def test_a_worker_that_closed_its_pipe_is_restarted(tmp_path: Path) -> None:
    def hang_up() -> None:
        os.closerange(3, 1000)
        time.sleep(60)

    one = worker(dataset(Deadly(tmp_path, at=30, by=hang_up)))
    begin = time.monotonic()
    assert list(map(content, one)) == expected(dataset())
    assert time.monotonic() - begin < 10


def test_an_error_of_a_signal_handler_is_not_taken_for_a_death(tmp_path: Path) -> None:
    one = worker(dataset(Deadly(tmp_path, at=5, by=lambda: os.kill(os.getpid(), signal.SIGSTOP))))
    with pytest.raises(TimeoutError), within(2, "a worker that is stopped"):
        list(one)


def large(row: Any) -> Any:
    return Numbers()({**row, "n": 38_800 + row["i"]})


# Packs of 312 KB do not fit into a pipe: the worker dies in the middle of writing.
LARGE = {"encoder": large, "max_seq_len": 39_000, "num_lanes": 1, "shuffle": False, "strategy": "next_fit"}


def test_a_worker_is_restarted_whose_child_lives_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The child holds the worker's end of the pipe, so that no end of file arrives."""
    deaths, child = tmp_path / "deaths", tmp_path / "child"
    deaths.mkdir()

    def leave_a_child() -> None:
        if (pid := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        child.write_text(str(pid))
        die()

    one = worker(dataset(Deadly(deaths, at=5, by=leave_a_child), **LARGE))
    assert gone([process_of().pid], within=20)
    try:
        with within(20, "the stream of a worker that has left a child"):
            assert list(map(content, one)) == expected(dataset(**LARGE))
        assert restarts(caplog) == 1
        assert state_of(int(child.read_text())) not in (None, "Z"), "the child lived on"
    finally:
        os.kill(int(child.read_text()), signal.SIGKILL)


def test_a_worker_is_restarted_whose_pipe_another_process_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a worker of another loader, started by another thread at the same time."""
    ends: list[Any] = []

    def pipe() -> Any:
        ours, theirs = mp.connection.Pipe()
        ends.extend((ours, mp.connection.Connection(os.dup(theirs.fileno()))))  # closed with the list
        return ours, theirs

    monkeypatch.setattr(mp, "Pipe", pipe)
    one = worker(dataset(**LARGE))
    assert ends[0].poll(20)
    process_of().kill()
    with within(20, "the stream of a worker whose pipe is held"):
        assert list(map(content, one)) == expected(dataset(**LARGE))
    assert restarts(caplog) == 1


def test_a_restarted_worker_keeps_the_settings_of_its_iteration(caplog: pytest.LogCaptureFixture) -> None:
    """Also if a state with other settings was loaded into its dataset since."""
    data = [{"i": i, "n": 38_800 + i} for i in range(60)]  # packs that do not fit into a pipe

    def built(**settings: Any) -> IterablePackedDataset:
        return dataset(data, **{"max_seq_len": 39_000, "num_lanes": None, **settings})

    def packs_of(batches: Iterable[Batch]) -> list[Any]:
        return [batch.fragments for batch in batches]

    other = built(num_lanes=7)
    next(iter(other))
    loader = PackedDataLoader(built(), num_workers=1)
    iterator: Any = iter(loader)
    found = [next(iterator)]
    assert loader.dataset.num_lanes != 7
    loader.dataset.load_state_dict(other.state_dict())
    assert loader.dataset.num_lanes == 7
    process_of().kill()
    found += iterator
    assert restarts(caplog) == 1
    assert packs_of(found) == packs_of(PackedDataLoader(built()))


def test_a_worker_that_dies_again_and_again_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = worker(dataset(Deadly(tmp_path, at=30, times=99)))
    begin = time.monotonic()
    message = (
        r"^worker 0 of 1 \(pid \d+\) died of signal SIGKILL, as after each of 3 restarts before it, without a pack; if "
        r"the system killed it, it may lack memory: use fewer workers or a smaller buffer_size$"
    )
    with caplog.at_level(logging.WARNING, "streampack"), pytest.raises(RuntimeError, match=message):
        list(one)
    logged = [record.getMessage() for record in caplog.records]
    assert {line.partition("; ")[2] for line in logged} == {"it is started again from its last state"}
    assert len(logged) >= 3
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("by", "what"),
    [
        (lambda: os._exit(7), "with exit code 7"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "of signal SIGTERM"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_message_names_how_a_worker_died(tmp_path: Path, by: Callable[[], Any], what: str) -> None:
    with pytest.raises(RuntimeError, match=rf"died {what}, as after each"):
        list(worker(dataset(Deadly(tmp_path, at=30, by=by, times=99))))


def test_a_worker_that_cannot_send_what_it_made_dies(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its thread that sends would else be gone, and the others wait for it."""

    def fail(*args: Any) -> bytes:
        raise MemoryError("no room for a message")

    monkeypatch.setattr("streampack.loader.workers.pickle.dumps", fail)
    with within(20, "a worker that cannot send"), pytest.raises(RuntimeError, match="died with exit code 1"):
        list(worker(dataset()))
    assert "no room for a message" in capfd.readouterr().err


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
    """An encoder that fails at one row."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self.error = error

    def __call__(self, row: Any) -> Any:
        if row["i"] == 30:
            raise self.error()
        return Numbers()(row)


ERRORS: list[tuple[Callable[[], Exception], type[Exception], str]] = [
    (lambda: ValueError("no luck"), ValueError, "no luck"),
    (lambda: json.JSONDecodeError("no luck", "x", 0), ValueError, "no luck"),  # pickles without its notes
    (lambda: StopIteration("no luck"), RuntimeError, "StopIteration"),
    (lambda: TwoArguments("no", "luck"), RuntimeError, "TwoArguments: no: luck"),
    (lambda: Locked("no luck"), RuntimeError, "Locked: no luck"),
]


@pytest.mark.parametrize(("error", "kind", "words"), ERRORS)
def test_an_error_arrives_with_its_place_and_another_worker_goes_on(
    error: Callable[[], Exception], kind: type[Exception], words: str
) -> None:
    one = worker(dataset(encoder=Faulty(error)))
    found: list[Any] = []
    states = {}
    with pytest.raises(kind) as caught:
        for event in one:
            found.append(content(event))
            states[event.lane] = event.state
    everything = "\n".join([str(caught.value), *caught.value.__notes__])
    assert words in everything
    assert "sample 30" in everything
    assert "in worker 0 of 1:\nTraceback" in everything
    assert "in __call__" in everything, "the traceback in the worker's process"
    found += map(content, worker(dataset(), lane_states=states))
    assert found == expected(dataset())


def test_an_error_when_a_stream_opens_is_raised(tmp_path: Path) -> None:
    """A state that does not fit, or a file that is missing for a moment, before there is a stream."""
    path = write(tmp_path / "a.jsonl", ROWS)
    settings = {"source": path, "shuffle": 8, "num_lanes": 1}
    events = list(islice(dataset(**settings).events(), 9))
    first, states = list(map(content, events)), {0: events[-1].state}
    resumed = dataset(**settings)
    hidden = path.rename(tmp_path / "hidden")
    with pytest.raises(FileNotFoundError):
        next(worker(resumed, lane_states=states))
    hidden.rename(path)
    rest = list(map(content, worker(resumed, lane_states=states)))
    assert first + rest == expected(dataset(**settings))
