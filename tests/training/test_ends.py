"""How a run ends: by an error, alone and as one of several ranks, by SIGTERM, and by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError
from streampack_recipes import full_finetune
from streampack_recipes.full_finetune import train

from streampack import IterablePackedDataset, IterableSource, PackedDataLoader
from streampack.training import run_folder
from streampack.training.checkpoint import CheckpointError
from streampack.training.entry import shown_errors
from streampack.training.run_folder import Interrupted, stop_on_signals
from streampack.training.world import World
from tests.harness.processes import run_ranks
from tests.harness.raising import fail
from tests.harness.runs import Run
from tests.harness.tiny import interrupt_step, losses, numbers, tiny_config


@contextmanager
def ends(status):
    with pytest.raises(SystemExit) as ended:
        yield
    assert ended.value.code == status


# Errors of one process.


@pytest.mark.parametrize(("words", "status", "message"), [
    (["{whole}", "device=cpu", "data.max_seq_len=8"], 1, "tokens, max_seq_len is 8"),
    (["/nowhere/my.yaml"], 2, "unknown config '/nowhere/my.yaml': no name that `streampack ls` shows, and no file"),
    (["{bad}"], 2, "bad.yaml cannot be read as YAML: while parsing a flow mapping in"),
    (["{good}", "lr"], 2, "'lr' is no override; write KEY=VALUE"),
    (
        ["{whole}", "checkpointer.checkpoint_dir=/nowhere"], 1,
        "error: checkpointer.checkpoint_dir='/nowhere' is no folder; download the weights, or correct",
    ),
    (["{good}", "output_dir=${nothing}"], 1, "Interpolation key 'nothing' not found"),
])  # fmt: skip
def test_mistakes_on_the_command_line_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    status: int,
    message: str,
) -> None:
    (tmp_path / "bad.yaml").write_text("model: {\n  a: 1\n  b\n: 2")
    (tmp_path / "good.yaml").write_text("seed: 1\n")
    OmegaConf.save(tiny_config(tmp_path), tmp_path / "whole.yaml")
    places = {f"{{{name}}}": str(tmp_path / f"{name}.yaml") for name in ("bad", "good", "whole")}
    command = ["full_finetune", "--config", *(places.get(word, word) for word in words)]
    monkeypatch.setattr("sys.argv", command)
    with ends(status):
        full_finetune.recipe_main()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert line.endswith("(--traceback shows where)")
    monkeypatch.setattr("sys.argv", [*command, "--traceback"])
    with pytest.raises((ValueError, OSError, yaml.YAMLError, InterpolationKeyError)):
        full_finetune.recipe_main()


def read(*, num_workers: int, wrong: Any) -> None:
    """Read a row, and then one that is ``wrong``, or an error of the user's own code."""

    def rows() -> Iterator[Any]:
        yield {"tokens": [1, 2], "labels": [1, 2]}
        if wrong is None:
            raise ValueError("a mistake in the code")
        yield wrong

    list(
        PackedDataLoader(IterablePackedDataset(IterableSource(rows), max_seq_len=4), num_workers=num_workers)
    )


def noted() -> ValueError:
    error = ValueError("column 'text' is missing")
    error.add_note("in row 3")
    error.add_note("Traceback:\n  many lines")
    return error


BAD = {"tokens": [-1], "labels": [1]}
ONE_LINE: list[tuple[Callable[[], Any], str]] = [
    (lambda: fail(ValueError("lr is 3")), "lr is 3"),
    (lambda: fail(ImportError("no trl")), "no trl"),
    (lambda: fail(ConnectionRefusedError("gone")), "gone"),
    (lambda: fail(InterpolationKeyError("key\nfull_key: a")), "key"),
    (lambda: fail(yaml.YAMLError("line\n  3")), "line"),
    (lambda: fail(ValueError()), "ValueError"),
    (lambda: fail(noted()), "error: column 'text' is missing in row 3 (--traceback shows where)"),
    (lambda: read(num_workers=0, wrong=BAD), "-1"),
    (lambda: read(num_workers=1, wrong=BAD), "-1"),
]


@pytest.mark.parametrize(("work", "message"), ONE_LINE)
def test_expected_errors_are_one_line_unless_a_traceback_is_asked_for(
    work: Callable[[], Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ends(1), shown_errors():
        work()
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
    with pytest.raises(Exception, match=".*"), shown_errors(tracebacks=True):  # not SystemExit
        work()


@pytest.mark.parametrize(("kind", "work"), [
    (TypeError, lambda: fail(TypeError("a mistake in the code"))),
    (ValueError, lambda: torch.optim.SGD([torch.zeros(1)], lr=-1)),
    (ValueError, lambda: exec('int("x")', {"__name__": "streampack.somewhere"})),
    (OSError, lambda: torch.load("/nowhere/weights.pt")),
    (ValueError, lambda: read(num_workers=0, wrong=None)),
    (ValueError, lambda: read(num_workers=1, wrong=None)),
])  # fmt: skip
def test_other_errors_keep_their_traceback(kind: type[Exception], work: Callable[[], Any]) -> None:
    """Also of a library, or of a source of the user's, ten hours into a run."""
    with pytest.raises(kind), shown_errors():
        work()


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for error, line in (KeyboardInterrupt(), "interrupted"), (KeyboardInterrupt("at step 3"), "at step 3"):
        with ends(130), shown_errors():
            raise error
        assert capsys.readouterr().err == f"{line}\n"


# Errors of several ranks; torchrun gives each a file, and shows the first one at its end.


@pytest.mark.parametrize("error", [ValueError("no file"), CheckpointError("disk full")])
def test_a_rank_says_which_one_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    for rank, said in ("0", f"error: {error} (--traceback"), ("2", f"error (rank 2): {error} (--traceback"):
        monkeypatch.setenv("RANK", rank)
        with ends(1), shown_errors():
            fail(error)
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(said)


@pytest.mark.parametrize("tracebacks", [False, True])
def test_torchrun_is_told_an_error_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracebacks: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:552] Connection closed by peer")
    with pytest.raises(RuntimeError, match="Connection closed"), shown_errors(tracebacks=tracebacks):
        exec("raise lost", {"__name__": "torch.distributed", "lost": lost})
    told = json.loads((tmp_path / "error.json").read_text())["message"]
    assert told["message"] == f"RuntimeError: {lost}"
    assert "Traceback (most recent call last)" in told["extraInfo"]["py_callstack"]


# Signals: the running step, its checkpoint, and out.


def steps_of(folder):
    return [int(path.name[5:]) for path in sorted((folder / "out" / "checkpoints").iterdir())]


@pytest.mark.parametrize(("number", "step", "changes"), [
    (signal.SIGINT, 2, {"enable_async_checkpointing": True, "save_every_n_steps": None}),  # its only one
    (signal.SIGTERM, 5, {"num_workers": 1}),  # a validation is due after it
    pytest.param(signal.SIGTERM, 8, {}, marks=pytest.mark.slow),  # a checkpoint is due after it
])  # fmt: skip
def test_a_signal_in_a_step_checkpoints_that_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: Run,
    number: int,
    step: int,
    changes: dict[str, Any],
) -> None:
    config = tiny_config(tmp_path, **changes)
    with monkeypatch.context() as patched:
        interrupt_step(step, patched, lambda: os.kill(os.getpid(), number))
        with pytest.raises(
            Interrupted, match=f"resume_from_checkpoint=True resumes from step {step}, its newest"
        ) as raised:
            train(config)
    assert (raised.value.step, raised.value.status) == (step, 128 + number)
    assert max(losses(tmp_path)) == step
    assert max(losses(tmp_path, "validation_loss")) < step, "a scheduler kills what takes long to end"
    assert steps_of(tmp_path)[-1] == step
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    config.resume_from_checkpoint = True
    train(config)
    for name in ("loss", "validation_loss"):
        assert losses(tmp_path, name) == losses(whole.folder, name)


def train_with_a_signal(config, rank, step):
    with pytest.MonkeyPatch.context() as patched:
        if int(os.environ["RANK"]) == rank:
            interrupt_step(step, patched, lambda: os.kill(os.getpid(), signal.SIGTERM))
        try:
            return train(config)["step"]
        except Interrupted as error:
            return error.step, error.status


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path, whole: Run, rank: int) -> None:
    config = tiny_config(tmp_path, gradient_accumulation_steps=1)
    assert run_ranks(train_with_a_signal, 2, config, rank, 7) == [(7, 143), (7, 143)]
    assert steps_of(tmp_path) == [4, 7]
    config.resume_from_checkpoint = True
    assert run_ranks(train_with_a_signal, 2, config, None, 0) == [12, 12]
    for name in ("loss", "validation_loss"):
        assert numbers(tmp_path, name) == pytest.approx(numbers(whole.folder, name), rel=1e-5)


@pytest.mark.parametrize(("times", "by"), [([0.0, 0.9, 1.1], signal.SIGINT), ([0.0, 1.1], signal.SIGTERM)])
def test_a_second_signal_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, times: list[float], by: int
) -> None:
    """What comes within a second of the first counts as the same."""
    left = list(times)
    monkeypatch.setattr(run_folder, "time", SimpleNamespace(monotonic=lambda: left.pop(0)))
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended, stop_on_signals(World(rank=1)):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
    assert (ended.value.code, left) == (128 + by, [])


@pytest.mark.parametrize("heard", [True, False], ids=["", "nobody reads"])
def test_the_first_signal_is_answered(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    if not heard:
        monkeypatch.setattr(os, "write", lambda *_: fail(BrokenPipeError()))
    with stop_on_signals(World()) as agreed:
        os.kill(os.getpid(), signal.SIGTERM)
        assert agreed() == signal.SIGTERM
    said = "\nSIGTERM: stopping after this step; a second signal ends the run at once\n"
    assert capfd.readouterr().err == said * heard


def test_a_forked_worker_ends_by_sigterm_and_leaves_ctrl_c_to_its_parent() -> None:
    with stop_on_signals(World()) as agreed:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGTERM
        assert not agreed()
