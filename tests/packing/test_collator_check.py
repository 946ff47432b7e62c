"""Packs under a DataLoader or Trainer with an unfit collator: the error names the forgotten call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from streampack import (
    FlatteningCollator,
    IterablePackedDataset,
    PackedDataset,
    PaddedCollator,
    collate_packed,
    prepare_trainer_for_packing,
)
from tests.support.hf_trainers import held_out, samples, stream, trainer_of

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

FORGOTTEN = r"call prepare_trainer_for_packing\(trainer\) before it trains or evaluates"
COLUMNS = r"set remove_unused_columns=False in TrainingArguments"


def map_style() -> PackedDataset:
    return PackedDataset(samples(60), max_seq_len=64)


@pytest.mark.parametrize("remove", [True, False])
def test_an_unprepared_trainer_is_refused(tmp_path: Path, remove: bool) -> None:
    """With the default collator, and with transformers' own for flat rows."""
    given = {} if remove else {"data_collator": transformers.DataCollatorWithFlattening()}
    trainer = trainer_of(tmp_path, train_dataset=stream(), max_steps=2, remove_unused_columns=remove, **given)
    with pytest.raises(ValueError, match=FORGOTTEN):
        trainer.train()
    prepare_trainer_for_packing(trainer)
    assert trainer.train().global_step == 2


def test_an_unprepared_evaluation_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, eval_dataset=held_out())
    with pytest.raises(ValueError, match=FORGOTTEN):
        trainer.evaluate()


def test_map_style_packs_under_a_stock_trainer_are_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, train_dataset=map_style(), max_steps=2)
    with pytest.raises(ValueError, match=rf"data_collator=FlatteningCollator\(\) and {COLUMNS}"):
        trainer.train()


@pytest.mark.parametrize("packs", [stream, map_style])
def test_a_flattening_collator_without_its_columns_is_refused(tmp_path: Path, packs: Any) -> None:
    settings = {"train_dataset": packs(), "data_collator": FlatteningCollator(), "max_steps": 2}
    with pytest.raises(ValueError, match=COLUMNS):
        trainer_of(tmp_path, **settings).train()
    assert trainer_of(tmp_path, remove_unused_columns=False, **settings).train().global_step == 2


@pytest.mark.parametrize("collator", [FlatteningCollator, PaddedCollator])
def test_samples_without_their_tokens_are_refused(tmp_path: Path, collator: Any) -> None:
    trainer = trainer_of(tmp_path, train_dataset=samples(60), data_collator=collator(), max_steps=2)
    with pytest.raises(ValueError, match=rf"sample 0 of the batch has no .*'labels'.*{COLUMNS}"):
        trainer.train()


@pytest.mark.parametrize(("packs", "workers"), [(stream, 0), (map_style, 0), (map_style, 1)])
def test_torchs_default_collator_is_refused(packs: Any, workers: int) -> None:
    with pytest.raises(ValueError, match="collate_fn=streampack.collate_packed"):
        next(iter(DataLoader(packs(), batch_size=2, num_workers=workers)))
    batch = next(iter(DataLoader(packs(), batch_size=2, num_workers=workers, collate_fn=collate_packed)))
    assert batch.tokens.shape == (2, 64)


def test_a_users_own_collator_passes() -> None:
    def mine(packs: list[dict[str, Any]]) -> torch.Tensor:
        return torch.stack([pack["tokens"] for pack in packs])

    assert next(iter(DataLoader(stream(), batch_size=2, collate_fn=mine))).shape == (2, 64)
    assert next(iter(DataLoader(stream(), batch_size=None)))["tokens"].shape == (64,)
    assert next(iter(DataLoader(map_style(), batch_size=None)))["tokens"].shape == (64,)


def test_a_refusal_consumes_no_pack() -> None:
    packs = stream(shuffle=True)
    with pytest.raises(ValueError, match="collate_packed"):
        iter(DataLoader(packs, batch_size=2))
    assert packs.state_dict()["lanes"] == {}
    again: IterablePackedDataset = stream(shuffle=True)
    assert all(ours["tokens"].equal(theirs["tokens"]) for ours, theirs in zip(packs, again, strict=True)), (
        "the error did not begin an epoch"
    )
