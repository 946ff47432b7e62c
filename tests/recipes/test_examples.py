"""The scripts under examples/, cut short: each trains, and goes on where it was when it is started again."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")  # TRL's own setting


def run(name: str, folder: Path, *options: str) -> Any:
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    common = [
        "--output_dir",
        str(folder),
        "--save_steps",
        "2",
        "--logging_steps",
        "1",
        "--lr_scheduler_type",
        "constant",
    ]
    return main([*common, "--use_cpu", "True", "--disable_tqdm", "True", *options])


@pytest.mark.parametrize(("name", "needs"), [("hf_trainer", "accelerate"), ("trl_sft", "trl")])
def test_an_example_trains_and_resumes(
    name: str, needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(needs)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    whole = run(name, tmp_path / "whole", "--max_steps", "4").state.log_history
    run(name, tmp_path / "cut", "--max_steps", "2")
    resumed = run(name, tmp_path / "cut", "--max_steps", "4").state.log_history
    curves = [[entry["loss"] for entry in history if "loss" in entry] for history in (whole, resumed)]
    assert len(curves[0]) == 4
    assert curves[0] == curves[1]
    assert curves[0][-1] < curves[0][0]
