"""The scripts under examples/, cut short: each trains, and resumes when it is started again."""

from __future__ import annotations

import runpy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # TRL's own setting


def run(name: str, folder: Path, *options: str) -> Any:
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    common = ["--output_dir", str(folder), "--save_steps", "2", "--logging_steps", "1"]
    common += ["--lr_scheduler_type", "constant"]
    return main([*common, "--use_cpu", "True", "--disable_tqdm", "True", *options])


@pytest.fixture(autouse=True)
def one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use 300 rows, and train the tokenizer once for all runs."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    text = import_module("stdlib_text")
    rows = text.pairs()[:300]
    tokenizer = text.train_tokenizer(rows)
    monkeypatch.setattr(text, "pairs", lambda: rows)
    monkeypatch.setattr(text, "train_tokenizer", lambda _: tokenizer)


@pytest.mark.parametrize(
    ("name", "needs"), [("hf_trainer", "accelerate"), pytest.param("trl_sft", "trl", marks=pytest.mark.slow)]
)
def test_an_example_trains_and_resumes(name: str, needs: str, tmp_path: Path) -> None:
    pytest.importorskip(needs)
    whole = run(name, tmp_path / "whole", "--max_steps", "4").state.log_history
    run(name, tmp_path / "cut", "--max_steps", "2")
    resumed = run(name, tmp_path / "cut", "--max_steps", "4").state.log_history
    curves = [[entry["loss"] for entry in history if "loss" in entry] for history in (whole, resumed)]
    assert len(curves[0]) == 4
    assert curves[0] == curves[1]
    assert curves[0][-1] < curves[0][0]
