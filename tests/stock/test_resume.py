"""A run of a stock config, stopped after every step and continued on another number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from streampack_recipes.full_finetune import train

from streampack.training.checkpoint import read_run
from tests.harness.processes import run_ranks
from tests.harness.stock import shrink, shrunk_config
from tests.harness.tiny import numbers

STEPS = 5


def train_shrunk(config: Any, steps: int) -> int:
    """Train until a step, from the newest checkpoint on."""
    config = config.copy()
    config.max_steps, config.resume_from_checkpoint = steps, True
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        step: int = train(config)["step"]
    return step


def rows_of_steps(folder: Path) -> dict[int, list[Any]]:
    """What each step trained: row, first and last token of every sequence, and the sum of its ids."""
    found: dict[int, list[Any]] = {}
    for path in (folder / "out" / "rows").iterdir():
        for line in map(json.loads, path.read_text().splitlines()):
            rows = [(row, start, stop, ids) for row, start, stop, _, _, ids in line["rows"]]
            found[line["step"]] = sorted(found.get(line["step"], []) + rows)
    return found


@pytest.mark.filterwarnings("ignore")  # torchtune's own
def test_a_run_stopped_at_every_step_trains_the_same_rows_on_one_and_two_ranks(tmp_path: Path) -> None:
    """With ``seed: null``, which the first checkpoint keeps, and the step of the first two ranks."""
    settings = {
        "tokenizer.max_seq_len": 256, "batch_size": 1, "gradient_accumulation_steps": 2, "dtype": "fp32",
        "save_every_n_steps": 1, "log_rows": True, "keep_last_n_checkpoints": 9, "max_steps": None,
    }  # fmt: skip
    folders = [tmp_path / "broken", tmp_path / "whole"]
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        configs = [shrunk_config("llama3_2/1B_full", each, packed=True, **settings) for each in folders]
    for config, folder in zip(configs, folders, strict=True):
        assert config.seed is None
        config.output_dir = config.checkpointer.output_dir = str(folder / "out")
        config.metric_logger = {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(folder / "out" / "logs"), "filename": "log.txt",
        }  # fmt: skip
    run_ranks(train_shrunk, 2, configs[0], 1)
    shutil.copytree(folders[0] / "out", folders[1] / "out")
    run_ranks(train_shrunk, 2, configs[1], STEPS)
    for step in range(2, STEPS + 1):
        assert set(run_ranks(train_shrunk, 1 + step % 2, configs[0], step)) == {step}
    rows = rows_of_steps(folders[1])
    assert [*rows] == [*range(1, STEPS + 1)]
    assert rows_of_steps(folders[0]) == rows
    assert numbers(folders[0]) == pytest.approx(numbers(folders[1]), rel=1e-6)
    runs = [read_run(each / "out" / "checkpoints" / f"step_{STEPS:08d}") for each in folders]
    assert runs[0]["seed"] == runs[1]["seed"]
    assert runs[0]["packs_per_step"] == runs[1]["packs_per_step"] == 4
