"""Batches that are dicts of any collator: a prepared model keeps their samples apart, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streampack import (
    FlatteningCollator,
    IterablePackedDataset,
    collate_packed,
    make_mask,
    prepare_model_for_packing,
)
from tests.harness import tiny_torchtune
from tests.harness.hf_trainers import model as trainers_model
from tests.harness.hf_trainers import samples, truth
from tests.oracle.padding import padded

transformers = pytest.importorskip("transformers")

ROWS = samples(5)
FEATURES = [{"input_ids": row["tokens"], "labels": row["labels"]} for row in ROWS]


def flat(**changes: Any) -> dict[str, Any]:
    return FlatteningCollator(**changes)(FEATURES)


def ones(batch: dict[str, Any]) -> dict[str, Any]:
    """Add the mask that other collators add, with which transformers ignores positions."""
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def from_2(batch: dict[str, Any]) -> dict[str, Any]:
    """Positions as transformers' collator gives them with ``position_ids_start=2``."""
    return batch | {"position_ids": batch["position_ids"] + 2}


def left_padded() -> dict[str, Any]:
    batch = padded(FEATURES)
    order = batch["attention_mask"].argsort(dim=1, stable=True)
    return {name: value.gather(1, order) for name, value in batch.items()}


def of_trl() -> dict[str, Any]:
    sft_trainer = pytest.importorskip("trl.trainer.sft_trainer")
    made: dict[str, Any] = sft_trainer.DataCollatorForLanguageModeling(
        pad_token_id=0, padding_free=True, pad_to_multiple_of=8
    )(FEATURES)
    return made


BATCHES = {
    "flat": flat,
    "flat, static": lambda: flat(pad_to_multiple_of=96, return_flash_attn_kwargs=True),
    "flat, by ends, all ones": lambda: ones(flat(return_position_ids=False, return_flash_attn_kwargs=True)),
    "flat, by numbers, all ones": lambda: ones(flat(return_position_ids=False, return_seq_idx=True)),
    "flat, from 2": lambda: from_2(flat()),
    "flat, all ones": lambda: ones(flat()),
    "flat, padded, all ones": lambda: ones(flat(pad_to_multiple_of=16)),
    "transformers": lambda: transformers.DataCollatorWithFlattening()(FEATURES),
    "TRL": of_trl,
    "padded": lambda: padded(FEATURES),
    "padded on the left": left_padded,
    "a BatchEncoding": lambda: transformers.BatchEncoding(flat()),
    "torch's own": lambda: {
        name: torch.stack([pack[name] for pack in IterablePackedDataset(ROWS, max_seq_len=64)])
        for name in ("tokens", "labels", "input_pos")
    },
}


@pytest.fixture(scope="module")
def true_loss() -> float:
    return truth(trainers_model(), ROWS)


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("name", BATCHES)
def test_samples_of_a_dict_stay_apart(true_loss: float, attention: str, name: str) -> None:
    made = trainers_model()
    made.config.use_cache = True
    inputs = prepare_model_for_packing(made, attention=attention)
    batch = BATCHES[name]()
    given = {key: value.clone() for key, value in batch.items() if torch.is_tensor(value)}
    assert made(**inputs(batch)).loss.item() == pytest.approx(true_loss, rel=1e-5)
    assert all(torch.equal(batch[key], value) for key, value in given.items())


def test_without_inputs_they_see_one_another(true_loss: float) -> None:
    made = trainers_model()
    made.config.use_cache = True
    assert abs(made(**flat()).loss.item() - true_loss) > 3e-3


def test_the_first_label_of_a_sample_is_never_trained() -> None:
    """A collator may leave it in: it would be predicted from the sample before."""
    made = trainers_model()
    inputs = prepare_model_for_packing(made)
    found = made(**inputs(flat() | {"labels": flat()["input_ids"].clone()})).loss.item()
    rows = [{"tokens": row["tokens"], "labels": row["tokens"]} for row in ROWS]
    assert found == pytest.approx(truth(made, rows), rel=1e-5)
    assert "labels" not in inputs({name: value for name, value in flat().items() if name != "labels"})


def test_torchtune_models_take_dicts_too() -> None:
    decoder = tiny_torchtune.build("llama3", vocab_size=1024, max_seq_len=96)
    inputs = prepare_model_for_packing(decoder)
    [pack] = IterablePackedDataset(ROWS, max_seq_len=96)
    batch = collate_packed([pack])
    logits = decoder(**inputs(FlatteningCollator(pad_to_multiple_of=96)([pack])))
    assert torch.equal(logits, decoder(**inputs(batch)))
    assert torch.equal(make_mask(flat(pad_to_multiple_of=96)), make_mask(collate_packed([pack])))
