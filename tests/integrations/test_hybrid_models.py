"""A Trainer on packs with models whose layers carry a state: every flag that it sets must leave samples apart.

That a family's samples are apart is tested in tests/attention; here, what a Trainer adds: `make test` runs one family a
test, `make test-slow` three.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from streampack import IterablePackedDataset, prepare_trainer_for_packing
from tests.harness.hf_models import build
from tests.harness.hybrid_models import HYBRIDS
from tests.harness.quick import sweep

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROWS = [{"input_ids": [1 + (7 * i + j) % 59 for j in range(3 + i % 12)]} for i in range(60)]

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")


def trainer_of(family: str, folder: Path, *, checkpointing: bool) -> Any:
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=checkpointing,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        build(family, **HYBRIDS[family]),
        arguments,
        train_dataset=IterablePackedDataset(ROWS, max_seq_len=32, shuffle=True),
        eval_dataset=IterablePackedDataset(ROWS[:20], max_seq_len=32),
    )
    prepare_trainer_for_packing(trainer)
    return trainer


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("family", sweep(["lfm2", "mamba", "qwen3_next"], ["lfm2"]))
def test_it_trains_the_same_with_activation_checkpointing(family: str, tmp_path: Path) -> None:
    plain, checkpointed = (
        losses(trainer_of(family, tmp_path, checkpointing=checkpointing)) for checkpointing in (False, True)
    )
    assert len(plain) == 3
    assert checkpointed == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("family", sweep(["lfm2", "mamba", "qwen3_next"], ["qwen3_next"]))
def test_its_evaluation_is_that_of_the_samples_alone(family: str, tmp_path: Path) -> None:
    found = trainer_of(family, tmp_path, checkpointing=False).evaluate()["eval_loss"]
    model, total, count = build(family, **HYBRIDS[family]), 0.0, 0
    with torch.no_grad():
        for row in ROWS[:20]:
            tokens = torch.tensor([row["input_ids"]])
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
            total += float(F.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
            count += tokens.numel() - 1
    assert found == pytest.approx(total / count, rel=1e-5)
