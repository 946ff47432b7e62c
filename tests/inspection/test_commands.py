"""The commands ``unpack`` and ``trace``, on a run that kept its rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from streampack_recipes.full_finetune import train

from streampack.cli import main
from streampack.training.row_losses import ROWS_FOLDER, ranked, read_step
from tests.harness.tiny import tiny_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    config = tiny_config(folder, log_rows=True, checkpoint_every=5)
    OmegaConf.save(config, folder / "my.yaml")
    train(config)
    return folder


def test_trace_lists_the_steps_with_the_highest_loss(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--config", str(run / "my.yaml"), "--top", "3"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["step", "loss"]
    assert len(lines) == 3
    losses = [float(line.split()[1]) for line in lines]
    assert losses == sorted(losses, reverse=True)


def test_trace_shows_the_rows_of_a_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run / "my.yaml"), "--step", "3", "--top", "4"]) == 0
    title, header, *lines = capsys.readouterr().out.splitlines()
    rows = ranked(read_step(run / "out" / ROWS_FOLDER, 3))
    assert title == f"step 3: loss {rows[0].step_loss / rows[0].step_weight:.3f}, {len(rows)} sequences"
    assert header.split() == ["excess", "share", "loss", "tokens", "row"]
    assert len(lines) == 4
    texts = [json.loads(line)["text"] for line in (run / "rows.jsonl").read_text().splitlines()]
    for line, row in zip(lines, rows, strict=False):
        excess, share, mean, tokens, place, text = line.split(maxsplit=5)
        assert (excess, share) == (f"{row.excess:+.2%}", f"{row.share:.2%}")
        assert float(mean) == pytest.approx(row.mean, abs=1e-3)
        assert int(tokens) == row.fragment.stop - row.fragment.start
        file, number = place.rstrip(":").rsplit(":", 1)
        assert file == str(run / "rows.jsonl")
        assert text == texts[int(number) - 1]


def test_trace_says_that_a_row_has_changed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "rows.jsonl"
    before = path.read_text()
    try:
        path.write_text(before.replace("cat", "dog"))  # of the same length, so that rows begin where they did
        assert main(["trace", str(run / "my.yaml"), "--step", "3", "--top", "99"]) == 0
        lines = capsys.readouterr().out.splitlines()[2:]
        assert any("(not what was trained on: it changed since, or files" in line for line in lines)
        for line in lines:
            assert "dog" in line or "(not what" not in line
    finally:
        path.write_text(before)


def test_trace_says_that_files_came_or_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(tmp_path, log_rows=True, max_steps=3)
    (tmp_path / "data").mkdir()
    texts = (tmp_path / "rows.jsonl").read_text().splitlines(keepends=True)
    for number in range(2):
        (tmp_path / "data" / f"{number}.jsonl").write_text("".join(texts[200 * number : 200 * (number + 1)]))
    config.data.source.paths = str(tmp_path / "data")
    OmegaConf.save(config, tmp_path / "my.yaml")
    train(config)
    capsys.readouterr()
    (tmp_path / "data" / "0.jsonl").unlink()
    assert main(["trace", str(tmp_path / "my.yaml"), "--step", "2", "--top", "99"]) == 0
    files = {row.fragment.row_id[0] for row in read_step(tmp_path / "out" / ROWS_FOLDER, 2)}
    lines = capsys.readouterr().out.splitlines()[2:]
    assert files == {0, 1}
    assert any("of file 1, which there is no more: files were removed since" in line for line in lines)
    for line in lines:  # what is found by the number of a file is never shown as if it were the row
        assert (
            "there is no more" in line
            or "(not what was trained on" in line
            or "cannot be read any more" in line
        )


def test_unpack_shows_the_packs_of_a_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["unpack", str(run / "my.yaml"), "--step", "7"]) == 0
    text = capsys.readouterr().out
    rows = read_step(run / "out" / ROWS_FOLDER, 7)
    assert text.count("── sequence") == len(rows)
    assert text.count(" of 4 in step 7: ") == 4
    assert main(["unpack", str(run / "my.yaml"), "--step", "7", "--packs", "1"]) == 0
    assert capsys.readouterr().out.count(" in step 7: ") == 1


def test_unpack_shows_the_first_packs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path for path in run.rglob("*"))
    assert main(["unpack", str(run / "my.yaml"), "--packs", "3", "output_dir=nowhere"]) == 0
    assert capsys.readouterr().out.count("\npack ") == 3
    assert sorted(path for path in run.rglob("*")) == before
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["trace", "--step", "99"], 1, "rows has no rows of step 99; it has steps 1 to 12"),
        (
            ["trace", "output_dir=nowhere"],
            1,
            "nowhere/rows has no rows; a run keeps them with log_rows: true",
        ),
        (["trace", "--by", "size"], 2, "--by size is none of excess, share, mean"),
        (["trace", "--top", "0"], 2, "--top 0 is below 1"),
        (["unpack", "--packs", "0"], 2, "--packs 0 is below 1"),
        (["unpack", "--step", "0"], 1, "step 0 cannot be: steps are counted from 1"),
        (
            ["unpack", "--step", "3", "output_dir=nowhere"],
            1,
            "nowhere/checkpoints holds no checkpoint of a run",
        ),
        (["unpack", "--step", "3", "seed=9"], 1, "seed"),
    ],
)
def test_what_cannot_be_shown_is_said(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, said: str
) -> None:
    command, *rest = words
    assert main([command, "--config", str(run / "my.yaml"), *rest]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
