"""SIGTERM and SIGINT: the running step, its checkpoint, and out."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from streampack_recipes.full_finetune import train

from streampack.distributed.world import World
from streampack.training import signals
from streampack.training.run_folder import Interrupted
from streampack.training.signals import stop_on_signals
from tests.harness.processes import run_ranks
from tests.harness.tiny import interrupt_step, losses, tiny_config

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*multi-threaded:DeprecationWarning"
)  # of Python 3.12 on fork


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(tiny_config(folder, log_every=1))
    return losses(folder), losses(folder, "validation_loss")


def steps_of(folder):
    return [int(path.name[5:]) for path in sorted((folder / "out" / "checkpoints").iterdir())]


@pytest.mark.parametrize(
    ("number", "step", "changes"),
    [
        (signal.SIGTERM, 6, {}),
        (signal.SIGINT, 2, {"async_checkpoint": True}),  # before its first checkpoint
        (signal.SIGTERM, 5, {"num_workers": 1}),  # a validation is due after it
        (signal.SIGTERM, 8, {}),  # a checkpoint is due after it
    ],
)
def test_a_signal_in_a_step_checkpoints_that_step(
    tmp_path, monkeypatch, uninterrupted, number, step, changes
):
    config = tiny_config(tmp_path, log_every=1, **changes)
    with monkeypatch.context() as patched:
        interrupt_step(step, patched, lambda: os.kill(os.getpid(), number))
        with pytest.raises(Interrupted, match=f"resume=True goes on from step {step}, its newest") as raised:
            train(config)
    assert (raised.value.step, raised.value.status) == (step, 128 + number)
    assert max(losses(tmp_path)) == step
    assert steps_of(tmp_path)[-1] == step
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    config.resume = True
    train(config)
    assert (losses(tmp_path), losses(tmp_path, "validation_loss")) == uninterrupted


def test_without_checkpoints_a_signal_ends_the_run_after_its_step(tmp_path, monkeypatch):
    interrupt_step(3, monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM))
    message = "nothing was saved: checkpoint_every is not set; the same command begins anew"
    with pytest.raises(Interrupted, match=message):
        train(tiny_config(tmp_path, checkpoint_every=None, log_every=1))
    assert max(losses(tmp_path)) == 3
    assert not (tmp_path / "out" / "checkpoints").exists()


def train_with_a_signal(config, rank, step):
    with pytest.MonkeyPatch.context() as patched:
        if int(os.environ["RANK"]) == rank:
            interrupt_step(step, patched, lambda: os.kill(os.getpid(), signal.SIGTERM))
        try:
            return train(config)["step"]
        except Interrupted as error:
            return error.step, error.status


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path, uninterrupted, rank):
    config = tiny_config(tmp_path, log_every=1)
    assert run_ranks(train_with_a_signal, 2, config, rank, 7) == [(7, 143), (7, 143)]
    assert steps_of(tmp_path) == [4, 7]
    config.resume = True
    assert run_ranks(train_with_a_signal, 2, config, None, 0) == [12, 12]
    for name, expected in zip(("loss", "validation_loss"), uninterrupted, strict=True):
        found = losses(tmp_path, name)
        assert found.keys() == expected.keys()
        assert [float(value) for value in found.values()] == pytest.approx(
            [float(value) for value in expected.values()], rel=1e-5
        )


# A second signal, in processes that are forked: they end without a return.


def end_status(work):
    """Run ``work(pipe)`` in a process; return its exit code after three signals.

    ``work`` writes a byte when it is ready, and one for each signal that was noted.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        work(writer)
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        assert os.read(reader, 1) == b"!"
        os.kill(child, number)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(reader)
    os.close(writer)
    return code


@pytest.mark.parametrize(("times", "by"), [([0.0, 0.9, 1.1], signal.SIGINT), ([0.0, 1.1], signal.SIGTERM)])
def test_a_second_signal_ends_a_process_that_waits_in_a_library(times, by):
    """As in a collective, where Python runs no handler. What comes within a second of the first counts as the same."""

    def work(pipe):
        def clock():
            os.write(pipe, b"!")
            return left.pop(0)

        left = list(times)
        signals.time = SimpleNamespace(monotonic=clock)  # in this process only
        mutex = ctypes.create_string_buffer(256)
        with stop_on_signals(World(rank=1)):
            os.write(pipe, b"!")
            for _ in range(2):  # the second one waits for ever
                ctypes.CDLL(None).pthread_mutex_lock(mutex)

    assert end_status(work) == 128 + by


def test_handlers_are_left_alone_outside_the_main_thread():
    found = []

    def work():
        with stop_on_signals(World()) as stop:
            found.append((stop.agree(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(0, signal.SIG_DFL)]


def test_the_first_signal_is_answered(capsys):
    with stop_on_signals(World()) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agree() == signal.SIGTERM
    assert capsys.readouterr().err == (
        "\nSIGTERM: stopping after this step; a second signal ends the run at once\n"
    )


def forked():
    """Fork a process that waits; return its pid once it runs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"!")
        time.sleep(60)
        os._exit(0)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    return child


def test_forked_processes_end_by_sigterm_and_leave_ctrl_c_to_their_parent():
    with stop_on_signals(World()) as stop:
        child = forked()
        os.kill(child, signal.SIGINT)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert stop.agree() == 0


def test_the_block_ends_while_forked_processes_hold_its_pipe():
    with stop_on_signals(World()):
        child = forked()
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
