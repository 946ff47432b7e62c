"""`streampack score`: a stopped job goes on behind its last whole row, and its file appears when it is complete."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from streampack.cli import main
from tests.harness.tiny import interrupt, tiny_config

ROWS = 12


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a job on rows with a column that is no ASCII, in three batches."""
    monkeypatch.setattr("streampack.training.score_rows.ROWS_AT_ONCE", 5)
    config = tiny_config(tmp_path)
    rows = ({"text": "red green blue", "note": f"größer {number}\n"} for number in range(ROWS))
    Path(config.data.source.paths).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    OmegaConf.save(config, tmp_path / "my.yaml")
    return ["score", "--config", str(tmp_path / "my.yaml")]


def interrupted(job: list[str], out: Path) -> Path:
    """Begin a job, interrupt it at its first forward pass, and return the file that holds its rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", lambda *_: interrupt())
        assert main([*job, "--out", str(out)]) == 130
    assert not out.exists()
    return out.with_name(f"{out.name}.unfinished")


@pytest.mark.parametrize(
    "torn", [b"", b'{"text": "red', b'{"text": "red"}'], ids=["none", "half", "no end of line"]
)
def test_a_stopped_job_goes_on_behind_its_last_whole_row(
    job: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], torn: bytes
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "again.jsonl"
    assert main([*job, "--per-token", "--out", str(whole)]) == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    assert len(lines) == ROWS
    interrupted([*job, "--per-token"], out).write_bytes(b"".join(lines[:5]) + torn)
    capsys.readouterr()
    assert main([*job, "--per-token", "--out", str(out)]) == 0
    assert f"{ROWS} rows, 5 of them by an earlier job" in capsys.readouterr().out
    assert out.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--out scores.csv", "ends in '.csv'; name a file that ends in .jsonl"),
        ("--out done.jsonl", "done.jsonl exists; name another file, or remove it"),
        ("--out begun.jsonl", "begun.jsonl.unfinished is written by another process; wait until it ends, or"),
        ("--out new.jsonl --overlong cut", "overlong='cut' is unknown"),
    ],
)
def test_what_is_refused(
    job: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("done.jsonl").write_text("precious")
    with Path("begun.jsonl.unfinished").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main([*job, *words.split()]) != 0
    assert message in capsys.readouterr().err
    assert Path("done.jsonl").read_text() == "precious"
