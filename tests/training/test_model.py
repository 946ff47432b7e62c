"""Weights that do not fit the model."""

from __future__ import annotations

import re

import pytest
import torch
from streampack_recipes.full_finetune import train
from torchtune.training import FullModelTorchTuneCheckpointer

from tests.harness.processes import RankError, run_ranks
from tests.harness.tiny import tiny_config


def test_weights_of_another_model_are_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(FullModelTorchTuneCheckpointer, "load_checkpoint", None)
    with pytest.raises(ValueError, match="size mismatch") as caught:
        train(tiny_config(tmp_path, **{"model.vocab_size": 24, "model.num_layers": 2}))
    assert re.fullmatch(
        r"the checkpointer's weights do not fit the model: size mismatch for tok_embeddings.weight, \(16, 16\) in the "
        r"checkpoint and \(24, 16\) in the model; .*1 layer\(s\) in the checkpoint and 2 in the model; name the model "
        r"that the checkpoint is of",
        str(caught.value),
    )


def test_weights_of_another_model_are_refused_by_several_ranks(tmp_path):
    config = tiny_config(tmp_path)
    path = tmp_path / "init" / "model.bin"
    torch.save(torch.load(path) | {"other": torch.ones(2)}, path)
    expected = "ValueError: the checkpointer's weights do not fit the model: other is not in the model; name"
    with pytest.raises(RankError, match=expected):
        run_ranks(train, 2, config)
