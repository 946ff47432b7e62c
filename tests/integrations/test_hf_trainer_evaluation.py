"""Evaluation under transformers' Trainer: a loss that is the mean over tokens, with Trainer's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streampack import FlatteningCollator, prepare_trainer_for_packing
from tests.harness.hf_trainers import held_out, model, packed, samples, stream, trainer_of, truth
from tests.oracle.padding import padded

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


@pytest.mark.parametrize("collator", [FlatteningCollator(), padded])
def test_the_loss_of_other_data_beside_packs(tmp_path: Path, true_loss: float, collator: Any) -> None:
    """Trainer's own loader, on a model that was prepared for packs."""
    trainer = packed(
        tmp_path, eval_dataset=ROWS, data_collator=collator, per_device_eval_batch_size=4,
        remove_unused_columns=False,
    )  # fmt: skip
    assert trainer.evaluate()["eval_loss"] == pytest.approx(true_loss, rel=1e-6)


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
