"""The packs of a past step: made again, they hold the sequences that the run's own log of rows has."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from streampack_recipes.full_finetune import train

from streampack.distributed.world import World
from streampack.instantiate import build
from streampack.streaming.dataset import IterablePackedDataset
from streampack.training.config import read_config
from streampack.training.data import build_datasets
from streampack.training.past_steps import packs_of_step
from streampack.training.row_losses import ROWS_FOLDER, hashes, read_step
from tests.harness.tiny import mixed_config, tiny_config


def dataset_of(config: Any) -> IterablePackedDataset:
    cfg = read_config(config)
    return build_datasets(cfg, tokenizer=build(cfg.tokenizer), vocab_size=16, world=World()).train


def logged(folder: Path, step: int) -> Counter[Any]:
    return Counter((row.fragment[:3], row.checksum) for row in read_step(folder / "out" / ROWS_FOLDER, step))


def made_again(config: Any, folder: Path, step: int) -> Counter[Any]:
    import torch

    found: Counter[Any] = Counter()
    for pack in packs_of_step(dataset_of(config), folder / "out" / "checkpoints", step):
        at = 0
        for fragment, length in zip(pack.fragments, pack.seq_lens, strict=True):
            tokens = torch.from_numpy(pack.tokens[at : at + length])
            found[fragment[:3], int(hashes(tokens).sum())] += 1
            at += length
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data.split_across_pack": True},
        {"data.balance_window": 4},
        {"epochs": 3, "max_steps": None, "packs_per_step": 6},
    ],
)
def test_the_packs_of_each_step_are_those_of_the_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = tiny_config(tmp_path, rows=120, log_rows=True, checkpoint_every=5, keep_checkpoints=2, **changes)
    last = train(config)["step"]
    assert last > 10
    for step in (1, 4, 5, 6, 9, 10, 11, last):
        assert made_again(config, tmp_path, step) == logged(tmp_path, step), step
    with pytest.raises(ValueError, match=r"^step 0 cannot be: steps are counted from 1$"):
        made_again(config, tmp_path, 0)
    if config.epochs is not None:
        with pytest.raises(
            ValueError, match=rf"^the data end before step {last + 9}, which was never trained$"
        ):
            made_again(config, tmp_path, last + 9)


def test_a_resume_may_have_changed_how_many_packs_a_step_has(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, log_rows=True, keep_checkpoints=9)
    train(config)
    config.update({"max_steps": 20, "resume": True, "packs_per_step": 8})
    train(config)
    for step in range(1, 21):
        assert made_again(config, tmp_path, step) == logged(tmp_path, step), step


def test_steps_of_a_mixture(tmp_path: Path) -> None:
    config = mixed_config(tmp_path, log_rows=True)
    last = train(config)["step"]
    for step in (1, last):
        assert made_again(config, tmp_path, step) == logged(tmp_path, step), step


def test_what_cannot_be_made_again_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    with pytest.raises(ValueError, match=r"checkpoints holds no checkpoint of a run"):
        made_again(config, tmp_path, 3)
    train(config)
    config.data.buffer_size = 17
    with pytest.raises(ValueError, match="buffer_size"):
        made_again(config, tmp_path, 3)
    config.data.buffer_size = 16
    second = tiny_config(
        tmp_path, output_dir=str(tmp_path / "two" / "out"), max_steps=20, checkpoint_every=4,
        resume_from=str(tmp_path / "out" / "checkpoints" / "step_00000012"),
    )  # fmt: skip
    second.checkpointer.output_dir = str(tmp_path / "two" / "out")
    train(second)
    with pytest.raises(
        ValueError, match=r"^the run began at step 12 behind another run, .* no checkpoint before step"
    ):
        made_again(second, tmp_path / "two", 13)
    shutil.rmtree(tmp_path / "out")
