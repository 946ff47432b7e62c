"""`streampack unpack` and `streampack trace`, on a run that kept its rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from streampack_recipes.full_finetune import train

from streampack.cli import main
from streampack.training.row_losses import ROWS_FOLDER, read_step
from tests.harness.runs import whole_run
from tests.harness.tiny import tiny_config
from tests.harness.tiny_hf import write_base

WITHOUT_TORCHTUNE = """
import json, sys
from importlib.machinery import PathFinder
class Without(PathFinder):  # as where these are not installed
    @classmethod
    def find_spec(cls, name, *more):
        missing = name.split(".")[0] in ("torchtune", "torchao", "torchdata")
        return None if missing else super().find_spec(name, *more)
sys.meta_path = [Without if each is PathFinder else each for each in sys.meta_path]
from streampack.cli import main
for words in json.loads(sys.argv[1]):
    print("status", main(words), flush=True)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is over, and its config beside it."""
    folder = whole_run(tmp_path_factory).copy_to(tmp_path_factory.mktemp("copy"))
    OmegaConf.save(tiny_config(folder, log_rows=True, keep_last_n_checkpoints=9), folder / "my.yaml")
    return folder


def out_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_trace_lists_the_steps_with_the_highest_loss(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, *lines = out_of(capsys, "trace", "--config", str(run / "my.yaml"), "--top", "3").splitlines()
    assert header.split()[:2] == ["step", "loss"]
    assert len(lines) == 3
    losses = [float(line.split()[1]) for line in lines]
    assert losses == sorted(losses, reverse=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "loss": NaN}\n')
    words = ["trace", str(run / "my.yaml"), f"output_dir={tmp_path}", "--top", "1"]
    assert out_of(capsys, *words).splitlines()[1].split() == ["2", "nan"]


def test_trace_shows_the_rows_of_a_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = out_of(capsys, "trace", str(run / "my.yaml"), "--step", "3", "--top", "4")
    title, header, *lines = text.splitlines()
    rows = read_step(run / "out" / ROWS_FOLDER, 3)
    assert (
        title
        == f"step 3: loss {sum(row.loss for row in rows) / sum(row.weight for row in rows):.3f}, {len(rows)} sequences"
    )
    assert header.split() == ["excess", "loss", "tokens", "row"]
    assert len(lines) == 4
    texts = [json.loads(line)["text"] for line in (run / "rows.jsonl").read_text().splitlines()]
    for line, row in zip(lines, rows, strict=False):
        excess, mean, tokens, place, text = line.split(maxsplit=4)
        assert excess == f"{row.excess:+.2%}"
        assert float(mean) == pytest.approx(row.mean, abs=1e-3)
        assert int(tokens) == row.fragment.stop - row.fragment.start
        assert text == texts[int(place.rstrip(":").rpartition(":")[2]) - 1]


def test_trace_says_what_is_not_what_was_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row that changed, and a file that is no longer there."""
    config = tiny_config(tmp_path, log_rows=True, max_steps=3)
    (tmp_path / "data").mkdir()
    texts = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    for number in range(2):
        (tmp_path / "data" / f"{number}.jsonl").write_text("".join(texts[200 * number : 200 * (number + 1)]))
    config.data.source.paths = str(tmp_path / "data")
    OmegaConf.save(config, tmp_path / "my.yaml")
    train(config)
    capsys.readouterr()
    assert {row.fragment.row_id[0] for row in read_step(tmp_path / "out" / ROWS_FOLDER, 2)} == {0, 1}
    words = ["trace", str(tmp_path / "my.yaml"), "--step", "2", "--top", "99"]

    first = tmp_path / "data" / "0.jsonl"
    first.write_text(first.read_text().replace("cat", "dog"))  # as long, so that rows begin where they did
    lines = out_of(capsys, *words).splitlines()[2:]
    changed = [line for line in lines if "(not what was trained on: the row or the list of files" in line]
    assert changed
    assert all("dog" in line for line in changed)

    first.unlink()
    lines = out_of(capsys, *words).splitlines()[2:]
    assert any("of file 1, which no longer exists: files were removed since" in line for line in lines)
    # What is found by the number of a file is never shown as if it were the row.
    reasons = ("no longer exists", "(not what was trained on", "can no longer be read")
    assert all(any(reason in line for reason in reasons) for line in lines)


def test_unpack_shows_the_packs_of_a_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = out_of(capsys, "unpack", str(run / "my.yaml"), "--step", "7")
    assert text.count("── sequence") == len(read_step(run / "out" / ROWS_FOLDER, 7))
    assert text.count(" of 4 in step 7: ") == 4
    text = out_of(capsys, "unpack", str(run / "my.yaml"), "--step", "7", "--packs", "1")
    assert text.count(" in step 7: ") == 1


BOLD, DIM, END = "\x1b[1m", "\x1b[2m", "\x1b[0m"


@pytest.mark.parametrize(
    ("encoder", "row", "shown"),
    [
        ("TextEncoder", {"text": "red cat"}, f"{BOLD}<1>red cat<2>{END}\n"),
        (
            "TokensEncoder",
            {"tokens": [8, 3, 4, 5], "labels": [-100, -100, -100, 5]},
            f"{DIM}8 3 4 {END}{BOLD}5 {END}\n",
        ),
        ("TokensEncoder", {"tokens": [8, 3, 4, 5], "labels": [8, 3, 4, 5]}, f"{BOLD}8 3 4 5 {END}\n"),
    ],
    ids=["text", "masked ids", "ids"],
)
def test_unpack_shows_what_is_trained(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    encoder: str,
    row: dict[str, object],
    shown: str,
) -> None:
    """Trained text is bold and masked text dim; tokens that decode to nothing are shown by their ids."""
    config = tiny_config(tmp_path, **{"data.pad_seqs_to": 8, "data.num_lanes": 1, "validation": None})
    Path(config.data.source.paths).write_text(f"{json.dumps(row)}\n")
    config.data.encoder = {"_component_": f"streampack.{encoder}"}
    OmegaConf.save(config, tmp_path / "my.yaml")
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = out_of(capsys, "unpack", str(tmp_path / "my.yaml"), "--packs", "1")
    assert shown in text
    assert "4 tokens" in text
    assert "4 of padding" in text


def test_unpack_shows_the_first_packs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.rglob("*"))
    text = out_of(capsys, "unpack", str(run / "my.yaml"), "--packs", "3", "output_dir=nowhere")
    assert text.count("\npack ") == 3
    assert sorted(run.rglob("*")) == before
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("trace --step 99", 1, "rows has no rows of step 99; it has steps 1 to 12"),
        (
            "trace output_dir=nowhere",
            1,
            "nowhere/metrics.jsonl has no steps: no run has logged any in this output_dir",
        ),
        ("trace --top 0", 2, "argument --top: '0' is no whole number from 1 on"),
        ("unpack --packs 0", 2, "argument --packs: '0' is no whole number from 1 on"),
        ("unpack --step 0", 1, "step 0 cannot be: steps are counted from 1"),
        ("unpack --step 3 output_dir=nowhere", 1, "nowhere/checkpoints holds no checkpoint of a run"),
        ("unpack --step 3 seed=9", 1, "seed"),
    ],
)
def test_what_cannot_be_shown_is_said(
    run: Path, capsys: pytest.CaptureFixture[str], words: str, status: int, said: str
) -> None:
    command, *rest = words.split()
    assert main([command, "--config", str(run / "my.yaml"), *rest]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err


def test_commands_that_build_no_model_of_torchtune_do_without_it(run: Path, tmp_path: Path) -> None:
    mine, base = str(run / "my.yaml"), str(write_base(tmp_path / "base"))
    commands = [
        ["trace", mine],
        ["trace", mine, "--step", "3"],
        ["unpack", mine],
        ["unpack", mine, "--step", "2"],
        ["inspect", "--config", mine, "--json", str(tmp_path / "report.json")],
        ["tokenize", mine, "--out", str(tmp_path / "tokens")],
        ["score", mine, "--model", base, "--out", str(tmp_path / "scores.jsonl")],
        [
            "score",
            mine,
            "--model",
            base,
            "--out",
            str(tmp_path / "in_bf16.jsonl"),
            "dtype=bf16",
            "device=auto",
        ],
    ]
    others = [
        ["score", mine, "--out", str(tmp_path / "none.jsonl")],
        ["validate", mine],
        ["export", str(run / "out" / "checkpoints" / "step_00000004"), mine, "--out", str(tmp_path / "none")],
        ["run", "full_finetune", "--config", mine],
    ]
    theirs = "data.encoder={_component_: torchtune.data.AlpacaToMessages}"
    with_theirs = ["tokenize", mine, "--out", str(tmp_path / "none"), theirs]
    words = [sys.executable, "-c", WITHOUT_TORCHTUNE, json.dumps([*commands, *others, with_theirs])]
    root = Path(__file__).parents[2]  # of the config's tokenizer
    ended = subprocess.run(
        words, capture_output=True, text=True, cwd=root, env={**os.environ, "PYTHONPATH": "."}
    )
    assert ended.returncode == 0, ended.stderr
    statuses = [int(line.split()[1]) for line in ended.stdout.splitlines() if line.startswith("status ")]
    assert statuses == [0] * len(commands) + [2] * len(others) + [1], ended.stderr
    assert "AlpacaToMessages' needs torchtune, which is not installed\n" in ended.stderr
    needs = "streampack: error: this needs torchtune, which is not installed: pip install 'streampack[tune]'"
    assert ended.stderr.count(needs) == len(others)
    assert json.loads((tmp_path / "report.json").read_text())
    assert (tmp_path / "tokens" / "index.json").is_file()
    assert len((tmp_path / "scores.jsonl").read_text().splitlines()) == 400


def test_a_config_of_data_alone_is_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(tmp_path, rows=40)
    OmegaConf.save({"tokenizer": config.tokenizer, "data": config.data}, tmp_path / "data.yaml")
    mine = str(tmp_path / "data.yaml")
    assert "pack 1: " in out_of(capsys, "unpack", mine)
    assert json.loads(out_of(capsys, "inspect", mine, "--json", "-"))
    assert main(["trace", mine]) == 1
    assert "error: missing: output_dir; the keys without a default" in capsys.readouterr().err
    assert main(["unpack", mine, "--step", "1"]) == 1
    assert "error: missing: output_dir; the keys without a default" in capsys.readouterr().err
    assert main(["unpack", mine, "~tokenizer", "optimiser=x"]) == 1
    said = capsys.readouterr().err
    assert "missing: tokenizer; the keys" in said
    assert "optimiser: Key 'optimiser' not in" in said
