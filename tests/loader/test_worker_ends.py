"""Worker processes that end, or whose trainer does, leave nothing behind."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from streampack import IterablePackedDataset
from streampack.lanes.lane_state import LaneEvent
from streampack.loader.workers import start_worker  # private: what is left of one
from tests.harness.corpus import Numbers, rows, write
from tests.harness.interrupts import Injector, within
from tests.harness.workers import content, dataset, expected, gone, held, process_of, worker

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at processes through /proc")

Worker = Generator[LaneEvent]


def finish(one: Worker) -> None:
    list(one)


def fail(one: Worker) -> None:
    with pytest.raises(ValueError, match="sample 2990"):
        list(one)


def give_up(one: Worker) -> None:
    process_of().kill()
    with (
        mock.patch("streampack.loader.workers.MAX_RESTARTS", 0),
        pytest.raises(RuntimeError, match="SIGKILL"),
    ):
        list(one)


def mend(one: Worker) -> None:
    for _ in range(3):
        next(one)
        process_of().kill()
    next(one)


@pytest.mark.parametrize(
    ("leave", "cycle"),
    [(leave, False) for leave in (lambda one: None, finish, mend, give_up, fail, Generator.close)]
    + [(next, True)],
)
def test_no_process_thread_or_descriptor_is_left(leave: Callable[[Worker], Any], cycle: bool) -> None:
    finish(worker(dataset(epochs=1)))  # the first worker of a process opens what stays open
    gc.collect()
    before = held()
    encoder = Numbers()
    encoder.bad = 2990  # behind all that a worker makes ahead, or it might have ended before it is seen
    settings = {"epochs": 1 if leave is finish else 99, "encoder": encoder, "shuffle": leave is not fail}
    one = worker(dataset(rows(3000 if leave is fail else 60), **settings))
    assert leave is finish or len(held()["children"]) == len(before["children"]) + 1, "it can be seen at all"
    leave(one)
    watch, held_by = weakref.ref(one), [one]
    if cycle:
        held_by.append(held_by)  # type: ignore[arg-type]
    del one, held_by
    if cycle:
        gc.collect()
    assert watch() is None, "an error's traceback must not keep it"
    assert held() == before


def test_a_forked_copy_does_not_end_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    one = worker(dataset(epochs=3))
    found = [content(next(one))]
    if not (pid := os.fork()):
        try:
            list(one)  # and takes none of the original's packs
        except RuntimeError:
            os._exit(7)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    found += map(content, one)
    assert "is started again" not in caplog.text
    assert found == expected(dataset(epochs=3))


def test_a_worker_that_hangs_in_its_fork_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Python 3.11 may hang so, beside threads of gloo."""
    next_forks, seconds = [600.0], list[float]()
    os.register_at_fork(
        before=lambda: seconds.append(next_forks.pop() if next_forks else 0),
        after_in_child=lambda: time.sleep(seconds[-1]),
    )
    monkeypatch.setattr("streampack.loader.workers.START_SECONDS", 1)
    assert list(map(content, worker(dataset(epochs=1)))) == expected(dataset(epochs=1))
    assert "died of signal SIGKILL, before it ran; it is started again" in caplog.text


class Collecting(Numbers):
    """Collects garbage before each row."""

    def __call__(self, row: Any, /) -> Any:
        gc.collect()
        return super().__call__(row)


class Noted:
    """Notes in a file that it is deleted in another process than the one that made it."""

    def __init__(self, path: Path) -> None:
        self.path, self.pid = path, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            self.path.touch()


class Watching(Numbers):
    """Refuses rows while the garbage collector is off."""

    def __call__(self, row: Any, /) -> Any:
        assert gc.isenabled()
        return super().__call__(row)


def test_a_worker_collects_its_garbage_where_the_trainer_does_not() -> None:
    gc.disable()
    try:
        assert list(worker(dataset(epochs=1, encoder=Watching())))
    finally:
        gc.enable()


def test_a_worker_leaves_garbage_of_the_trainers_process_alone(tmp_path: Path) -> None:
    """Of other libraries' objects it may be deadly to delete them without the threads that a fork does not copy."""
    gc.disable()
    try:
        garbage: list[Any] = [Noted(tmp_path / "deleted")]
        garbage.append(garbage)
        del garbage
        assert list(worker(dataset(epochs=1, encoder=Collecting())))
    finally:
        gc.enable()
    assert not (tmp_path / "deleted").exists()


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # a socket that was not handed on
def test_a_worker_that_was_not_started_is_closed() -> None:
    """An interrupt may strike between any two steps of a worker's start, and of its closing."""
    before, of, injector = held(), dataset(), Injector()

    def start_and_close() -> None:
        start_worker(of.events, {}, "worker 0 of 1").close()

    injector.call(start_and_close)
    places = injector.places
    assert places > 100
    for at in range(1, places, places // 10):
        injector = Injector(at)
        # threading makes a RuntimeError of one that strikes while it starts a thread.
        with within(20, f"closing after an interrupt at {at}"), suppress(KeyboardInterrupt, RuntimeError):
            injector.call(start_and_close)
    gc.collect()
    assert gone(list(held()["children"] - before["children"]), within=10)


def fork(target: Callable[..., None], *args: Any) -> Any:
    process = mp.get_context("fork").Process(target=target, args=args)
    process.start()
    return process


def train_and_wait(pipe: Any, of: IterablePackedDataset, taken: int) -> None:
    workers = [worker(of, consumer=consumer, consumers=2) for consumer in range(2)]
    for _ in range(taken):
        for one in workers:
            next(one)
    pipe.send([process_of(consumer, 2).pid for consumer in range(2)])
    time.sleep(60)


@pytest.mark.parametrize(("busy", "how"), [("writing", signal.SIGKILL), ("encoding", signal.SIGTERM)])
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


def test_a_stopped_worker_does_not_keep_others_alive() -> None:
    """It holds the other end of the pipe by which the others notice that their trainer was killed."""
    of = dataset([{"i": i, "n": 100_000} for i in range(20)], max_seq_len=100_000)
    ours, theirs = mp.Pipe()
    trainer = fork(train_and_wait, theirs, of, 1)
    pids = ours.recv()
    os.kill(pids[1], signal.SIGSTOP)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.join()
    try:
        assert gone(pids[:1], within=10)
        os.kill(pids[1], signal.SIGCONT)
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
    pid = process_of().pid
    for _ in range(200):
        next(one[0])
    pipe.send(process_of().pid == pid)


def test_a_worker_outlives_the_thread_that_made_it() -> None:
    ours, theirs = mp.Pipe()
    trainer = fork(start_in_a_thread_that_ends, theirs)
    assert ours.poll(30)
    assert ours.recv(), "it was not started again"
    trainer.join(10)


def train_and_leave(pipe: Any) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # as trainers do that want to write a checkpoint first
    one = worker(dataset(epochs=99))
    next(one)
    pipe.send([process_of().pid])
    threading.kept = one  # type: ignore[attr-defined]  # until the interpreter's end


def test_a_trainer_with_its_own_signal_handler_can_exit() -> None:
    """At exit, multiprocessing sends SIGTERM to workers and waits; a handler forked along would swallow it."""
    ours, theirs = mp.Pipe()
    trainer = fork(train_and_leave, theirs)
    pids = ours.recv()
    trainer.join(10)
    stuck = trainer.exitcode is None
    trainer.kill()
    assert not stuck
    assert gone(pids, within=5)


def test_workers_ignore_ctrl_c(caplog: pytest.LogCaptureFixture) -> None:
    one = worker(dataset())
    found = [content(next(one))]
    os.kill(process_of().pid, signal.SIGINT)
    found += map(content, one)
    assert "is started again" not in caplog.text
    assert found == expected(dataset())


SPAWNED = """
import multiprocessing as mp, sys
from streampack import IterablePackedDataset, PackedDataLoader
from tests.harness.corpus import Numbers

def batches(path, num_workers):
    settings = {"num_lanes": 2, "shuffle": True, "epochs": 2, "untrained": "keep"}
    data = IterablePackedDataset(path, max_seq_len=24, encoder=Numbers(), **settings)
    loader = PackedDataLoader(data, batch_size=3, num_workers=num_workers)
    return [(b.tokens.tolist(), b.labels.tolist(), b.fragments) for b in loader]

if __name__ == "__main__":
    mp.set_start_method("spawn")
    found = batches(sys.argv[1], 1)
    assert found == batches(sys.argv[1], 0)
    print(len(found), "batches")
    endless = IterablePackedDataset(sys.argv[1], max_seq_len=24, encoder=Numbers(), untrained="keep", epochs=None)
    kept = iter(PackedDataLoader(endless))
    next(kept)  # and is alive at the end
"""


def test_workers_can_be_spawned_instead_of_forked(tmp_path: Path) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    path = write(tmp_path / "a.jsonl", rows(80))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, script, path],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert int(done.stdout.split()[0]) > 10
