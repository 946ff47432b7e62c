"""What a recipe prints when it fails, alone and as one of several ranks."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError
from streampack_recipes import full_finetune

from streampack import IterablePackedDataset, IterableSource, PackedDataLoader
from streampack.distributed.rank_sync import OtherRankFailed
from streampack.training import errors
from streampack.training.errors import shown_errors
from tests.harness.raising import fail
from tests.harness.tiny import tiny_config


@pytest.fixture(autouse=True)
def no_tracebacks(monkeypatch):
    monkeypatch.delenv(errors.TRACEBACK, raising=False)


@contextmanager
def ends(status):
    with pytest.raises(SystemExit) as ended:
        yield
    assert ended.value.code == status


def test_a_users_mistake_in_a_recipe_is_one_line(tmp_path, monkeypatch, capsys):
    OmegaConf.save(tiny_config(tmp_path), tmp_path / "run.yaml")
    command = ["full_finetune", "--config", str(tmp_path / "run.yaml"), "device=cpu", "data.max_seq_len=8"]
    monkeypatch.setattr("sys.argv", command)
    with ends(1):
        full_finetune.recipe_main()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "tokens, max_seq_len is 8" in line
    assert line.endswith("(--traceback shows where)")
    monkeypatch.setattr("sys.argv", [*command, "--traceback"])
    with pytest.raises(ValueError, match="tokens, max_seq_len is 8"):
        full_finetune.recipe_main()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "/nowhere/my.yaml"], "No such file or directory: /nowhere/my.yaml"),
        (["--config", "{bad}"], "while parsing a flow mapping in"),
        (["--config", "{good}", "lr"], "'lr' is no override; write KEY=VALUE"),
        (
            ["--config", "{whole}", "checkpointer.checkpoint_dir=/nowhere"],
            "error: torchtune.training.FullModelTorchTuneCheckpointer: /nowhere is not a valid directory",
        ),
        (["--config", "{good}", "output_dir=${nothing}"], "Interpolation key 'nothing' not found"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(tmp_path, monkeypatch, capsys, words, message):
    (tmp_path / "bad.yaml").write_text("model: {\n  a: 1\n  b\n: 2")
    (tmp_path / "good.yaml").write_text("seed: 1\n")
    OmegaConf.save(tiny_config(tmp_path), tmp_path / "whole.yaml")
    places = {f"{{{name}}}": str(tmp_path / f"{name}.yaml") for name in ("bad", "good", "whole")}
    monkeypatch.setattr("sys.argv", ["full_finetune", *(places.get(word, word) for word in words)])
    with ends(1):
        full_finetune.recipe_main()
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    "error",
    [
        ValueError("lr is 3"),
        ImportError("no trl"),
        ConnectionRefusedError("gone"),
        torch.OutOfMemoryError("CUDA out of memory"),
        InterpolationKeyError("key\nfull_key: a"),
        yaml.YAMLError("line\n  3"),
        ValueError(),
    ],
)
def test_expected_errors_are_one_line(error, capsys):
    with ends(1), shown_errors():
        fail(error)
    assert len(capsys.readouterr().err.splitlines()) == 1


def read(*, num_workers, wrong):
    """Read a row, and then one that is ``wrong``, or an error of the user's own code."""

    def rows():
        yield {"tokens": [1, 2], "labels": [1, 2]}
        if wrong is None:
            raise ValueError("a mistake in the code")
        yield wrong

    data = IterablePackedDataset(IterableSource(rows), max_seq_len=4)
    list(PackedDataLoader(data, num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_bad_row_is_one_line(num_workers, capsys):
    with ends(1), shown_errors():
        read(num_workers=num_workers, wrong={"tokens": [-1], "labels": [1]})
    [line] = capsys.readouterr().err.splitlines()
    assert "-1" in line


@pytest.mark.parametrize(
    ("kind", "work"),
    [
        (TypeError, lambda: fail(TypeError("a mistake in the code"))),
        (ValueError, lambda: torch.optim.SGD([torch.zeros(1)], lr=-1)),
        (ValueError, lambda: exec('int("x")', {"__name__": "streampack.somewhere"})),
        (OSError, lambda: torch.load("/nowhere/weights.pt")),
        (ValueError, lambda: read(num_workers=0, wrong=None)),
        (ValueError, lambda: read(num_workers=1, wrong=None)),
    ],
)
def test_other_errors_keep_their_traceback(kind, work):
    """Also of a library, or of a source of the user's, ten hours into a run."""
    with pytest.raises(kind), shown_errors():
        work()


def test_a_row_is_named_by_its_note(capsys):
    error = ValueError("column 'text' is missing")
    error.add_note("in row 3")
    error.add_note("Traceback:\n  many lines")
    with ends(1), shown_errors():
        fail(error)
    assert capsys.readouterr().err == "error: column 'text' is missing in row 3 (--traceback shows where)\n"


def test_an_environment_variable_asks_for_tracebacks_too(monkeypatch):
    for value, kind in ("1", ValueError), ("0", SystemExit):
        monkeypatch.setenv(errors.TRACEBACK, value)
        with pytest.raises(kind), shown_errors():
            fail(ValueError("x"))


def test_ctrl_c_is_one_line(capsys):
    for error, line in (KeyboardInterrupt(), "interrupted"), (KeyboardInterrupt("at step 3"), "at step 3"):
        with ends(130), shown_errors():
            raise error
        assert capsys.readouterr().err == f"{line}\n"


# Several ranks of a machine; torchrun gives each a folder.


@pytest.fixture
def as_rank(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(errors, "PATIENCE", 0.0)

    def fail_on(rank, error, *, status=1):
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        with ends(status), shown_errors():
            fail(error)
        return capsys.readouterr().err

    return fail_on


def test_ranks_that_fail_alike_print_one_line(as_rank, tmp_path):
    assert as_rank(1, ValueError("no file")) == "error (rank 1): no file (--traceback shows where)\n"
    assert as_rank(0, ValueError("no file")) == ""
    assert as_rank(2, ValueError("disk full")).startswith("error (rank 2): disk full")
    told = json.loads((tmp_path / "attempt_0" / "1" / "error.json").read_text())
    assert "no file" in told["message"]["extraInfo"]["py_callstack"]
    assert not (tmp_path / "attempt_0" / "0" / "error.json").exists()


FOLLOWING = [
    OtherRankFailed("rank 1 failed: ValueError: no file"),
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:552] Connection closed by peer"),
    torch.distributed.DistBackendError("NCCL communicator was aborted"),
]


@pytest.mark.parametrize("following", FOLLOWING)
def test_a_rank_that_fails_because_of_another_prints_nothing(as_rank, following):
    as_rank(1, ValueError("no file"))
    assert as_rank(0, following) == ""


@pytest.mark.parametrize("following", FOLLOWING)
def test_a_following_error_is_printed_if_no_cause_was(as_rank, following):
    assert str(following) in as_rank(0, following)
    assert as_rank(2, following) == ""


def test_an_unexpected_error_has_one_traceback(as_rank):
    assert "TypeError: ours\n" in as_rank(1, TypeError("ours"))
    assert as_rank(0, TypeError("ours")) == as_rank(2, FOLLOWING[0]) == ""


def test_ctrl_c_prints_one_line_for_all_ranks(as_rank):
    assert as_rank(1, KeyboardInterrupt("go on from step 3"), status=130) == "go on from step 3\n"
    assert as_rank(0, KeyboardInterrupt(), status=130) == ""
