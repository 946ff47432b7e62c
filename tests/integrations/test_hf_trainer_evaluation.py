"""Evaluation under transformers' Trainer: a loss that is the mean over tokens, with Trainer's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from streampack import FlatteningCollator, IterablePackedDataset, PaddedCollator, prepare_trainer_for_packing
from tests.harness.hf_models import build
from tests.harness.hf_trainers import (
    held_out,
    losses,
    model,
    packed,
    samples,
    settings,
    stream,
    trainer_of,
    truth,
)
from tests.harness.quick import sweep

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")

ROWS = samples(26, seed=1)  # packed by `held_out`


@pytest.fixture(scope="module")
def true_loss() -> float:
    return truth(model(), ROWS)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_loss_of_packs_is_the_mean_over_tokens(tmp_path: Path, true_loss: float, batch_size: int) -> None:
    """Trainer's mean over batches is 0.02 off with 1 pack in a batch, and 0.05 with 4, three of them null packs."""
    trainer = packed(tmp_path, eval_dataset=held_out(), per_device_eval_batch_size=batch_size)
    for _ in range(2):
        assert trainer.evaluate()["eval_loss"] == pytest.approx(true_loss, rel=1e-6)


@pytest.mark.parametrize("collator", [FlatteningCollator(), PaddedCollator()])
def test_the_loss_of_other_data_beside_packs(tmp_path: Path, true_loss: float, collator: Any) -> None:
    """Trainer's own loader, on a model that was prepared for packs."""
    trainer = packed(
        tmp_path, eval_dataset=ROWS, data_collator=collator, per_device_eval_batch_size=4,
        remove_unused_columns=False,
    )  # fmt: skip
    assert trainer.evaluate()["eval_loss"] == pytest.approx(true_loss, rel=1e-6)


def test_the_best_model_by_several_datasets(tmp_path: Path, true_loss: float) -> None:
    trainer = packed(
        tmp_path, eval_dataset={"packs": held_out(), "rows": ROWS}, per_device_eval_batch_size=4,
        data_collator=FlatteningCollator(), remove_unused_columns=False, eval_on_start=True,
        eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=4,
        load_best_model_at_end=True, metric_for_best_model="packs_loss", learning_rate=3e-2,
    )  # fmt: skip
    trainer.train()
    found = {
        name: {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}
        for name in ("eval_packs_loss", "eval_rows_loss")
    }
    assert list(found["eval_packs_loss"]) == [0, 4, 8, 12]
    assert found["eval_packs_loss"] == pytest.approx(found["eval_rows_loss"], rel=1e-5)
    assert found["eval_packs_loss"][0] == pytest.approx(true_loss, rel=1e-6)
    best = min((4, 8, 12), key=found["eval_packs_loss"].__getitem__)
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    assert trainer.state.best_metric == pytest.approx(truth(trainer.model, ROWS), rel=1e-5)


def test_predictions_of_one_rank_have_no_null_packs(tmp_path: Path, true_loss: float) -> None:
    """With one rank, the rows of null packs are left out of the predictions."""
    packs = len(list(held_out()))
    output = packed(tmp_path, per_device_eval_batch_size=packs - 1).predict(held_out())
    assert output.metrics["test_loss"] == pytest.approx(true_loss, rel=1e-6)
    assert len(output.predictions) == len(output.label_ids) == packs
    assert all((labels != -100).any() for labels in output.label_ids)


def test_packs_as_an_argument_of_evaluate(tmp_path: Path, true_loss: float) -> None:
    trainer = packed(tmp_path, eval_dataset=ROWS[:3])
    assert trainer.evaluate(held_out())["eval_loss"] == pytest.approx(true_loss, rel=1e-6)
    metrics = trainer.evaluate({"a": held_out(), "b": held_out()}, metric_key_prefix="x")
    assert [metrics[f"x_{name}_loss"] for name in "ab"] == pytest.approx([true_loss] * 2, rel=1e-6)
    assert trainer.eval_dataset == ROWS[:3]
    with pytest.raises(
        ValueError, match="eval_dataset has epochs=None and would never end; give it epochs=1"
    ):
        trainer.evaluate(stream(epochs=None))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch_eval_metrics": True},
        {"include_for_metrics": ["inputs", "loss"]},
        {"eval_do_concat_batches": False},
    ],
)
def test_the_users_metrics(tmp_path: Path, true_loss: float, changes: dict[str, Any]) -> None:
    right: list[int] = []

    def accuracy(prediction: Any, compute_result: bool = True) -> dict[str, float]:
        if not changes.get("batch_eval_metrics"):
            right.clear()
        predictions, labels = prediction.predictions, prediction.label_ids
        batches = (
            zip(predictions, labels, strict=True)
            if isinstance(predictions, list)
            else [(predictions, labels)]
        )
        for logits, targets in batches:
            guesses, targets = np.asarray(logits).argmax(-1)[:, :-1], np.asarray(targets)[:, 1:]
            right.extend((guesses == targets)[targets != -100].tolist())
        assert (
            (prediction.inputs is not None)
            == (prediction.losses is not None)
            == ("include_for_metrics" in changes)
        )
        return {"accuracy": sum(right) / len(right)} if compute_result else {}

    trainer = trainer_of(
        tmp_path, train_dataset=stream(), eval_dataset=held_out(), compute_metrics=accuracy,
        per_device_eval_batch_size=2, max_steps=2, **changes,
    )  # fmt: skip
    prepare_trainer_for_packing(trainer)
    trainer.train()
    metrics = trainer.evaluate()
    assert len(right) == sum(label != -100 for row in ROWS for label in row["labels"][1:])
    assert metrics["eval_accuracy"] == sum(right) / len(right) > 0
    assert metrics["eval_loss"] == pytest.approx(truth(trainer.model, ROWS), rel=1e-5)


def test_every_evaluation_has_the_same_order(tmp_path: Path) -> None:
    """Iterating shuffled packs again would otherwise be their next epoch, in another order."""
    packs = stream(ROWS, epochs=1)
    trainer = packed(tmp_path, eval_dataset=packs)
    first, second = (trainer.predict(packs).label_ids for _ in range(2))
    assert np.array_equal(first, second)


# Models whose layers carry a state: every flag that a Trainer sets must leave samples apart.

SHORT = [{"input_ids": [1 + (7 * i + j) % 59 for j in range(3 + i % 12)]} for i in range(60)]


def hybrid_trainer(family: str, folder: Path, *, checkpointing: bool) -> Any:
    arguments = settings(folder, max_steps=3, gradient_checkpointing=checkpointing)
    trainer = transformers.Trainer(
        build(family),
        arguments,
        train_dataset=IterablePackedDataset(SHORT, max_seq_len=32, shuffle=True),
        eval_dataset=IterablePackedDataset(SHORT[:20], max_seq_len=32),
    )
    prepare_trainer_for_packing(trainer)
    return trainer


@pytest.mark.parametrize("family", sweep(["lfm2", "mamba", "qwen3_next"], ["lfm2"]))
def test_it_trains_the_same_with_activation_checkpointing(family: str, tmp_path: Path) -> None:
    curves = []
    for checkpointing in (False, True):
        trainer = hybrid_trainer(family, tmp_path, checkpointing=checkpointing)
        trainer.train()
        curves.append([*losses(trainer).values()])
    plain, checkpointed = curves
    assert len(plain) == 3
    assert checkpointed == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("family", sweep(["lfm2", "mamba", "qwen3_next"], ["qwen3_next"]))
def test_its_evaluation_is_that_of_the_samples_alone(family: str, tmp_path: Path) -> None:
    found = hybrid_trainer(family, tmp_path, checkpointing=False).evaluate()["eval_loss"]
    model, total, count = build(family), 0.0, 0
    with torch.no_grad():
        for row in SHORT[:20]:
            tokens = torch.tensor([row["input_ids"]])
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
            total += float(F.cross_entropy(logits, tokens[0, 1:], reduction="sum"))
            count += tokens.numel() - 1
    assert found == pytest.approx(total / count, rel=1e-5)
