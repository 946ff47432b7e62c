"""Pretraining on a toy model: mixtures, z-loss, document masking, resume."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from streampack_recipes.pretrain import train
from torchtune.models.llama3 import llama3

from streampack import IterablePackedDataset, JSONLSource, TextEncoder
from streampack.training.config import read_config
from tests.support.tiny import WordTokenizer, mixed_config, numbers, tiny_config

SPLIT = {
    "data.split_across_pack": True,
    "lr_scheduler": None,
    "optimizer": {"_component_": "torch.optim.SGD", "lr": 0.2},
}


def pretrain_config(folder: Path, **changes: Any) -> Any:
    return tiny_config(folder, **{**SPLIT, **changes})


def test_a_run_learns_a_mixture_from_random_weights(tmp_path: Path) -> None:
    config = mixed_config(tmp_path, max_steps=30, z_loss=1e-3, **{"data.split_across_pack": True})
    config.checkpointer.checkpoint_dir = {
        "_component_": "streampack.training.weights.random_weights",
        "model": config.model,
        "folder": config.output_dir,
    }
    result = train(config)
    (first, before), (last, after) = result["held_out"][0], result["held_out"][-1]
    assert (first, last) == (0, 30)
    assert after < before - 0.5
    ledger = result["ledger"]
    assert ledger.padding == 0
    assert ledger.tokens_in == ledger.packed + ledger.buffered
    by_source = {name: numbers(tmp_path, f"validation_loss_{name}") for name in ("counting", "words")}
    for step, loss in numbers(tmp_path, "validation_loss").items():
        assert loss == pytest.approx(0.75 * by_source["counting"][step] + 0.25 * by_source["words"][step])
    assert by_source["counting"] != by_source["words"]
    assert all(value > 0 for value in numbers(tmp_path, "z_loss").values())
    weights = torch.load(next((tmp_path / "out" / "epoch_0").glob("*.bin")), weights_only=True)
    [start] = (tmp_path / "out").glob("random-*/model.bin")
    assert weights.keys() == torch.load(start, weights_only=True).keys()


def first_step(folder: Path) -> tuple[float, float, float]:
    """Compute loss, z-loss and gradient norm of the first step with a plain causal model on whole packs."""
    packs = IterablePackedDataset(
        JSONLSource(folder / "rows.jsonl"), encoder=TextEncoder(WordTokenizer()), max_seq_len=32,
        split_across_pack=True, buffer_size=16, shuffle=True, shuffle_window=50, num_lanes=2, epochs=None,
    )  # fmt: skip
    rows = list(islice(packs, 4))
    config = OmegaConf.to_container(tiny_config(folder).model)
    model = llama3(**{key: value for key, value in config.items() if key != "_component_"})
    model.load_state_dict(torch.load(folder / "init" / "model.bin", weights_only=True))
    logits = model(torch.stack([row["tokens"] for row in rows]))[:, :-1]
    labels = torch.stack([row["labels"] for row in rows])[:, 1:]
    trained = (labels != -100).sum()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / trained
    z_loss = 0.1 * logits.logsumexp(-1)[labels != -100].square().sum() / trained
    (loss + z_loss).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    return loss.item(), z_loss.item(), norm.item()


def test_without_document_masking_a_pack_is_one_sequence(tmp_path: Path) -> None:
    options = {"z_loss": 0.1, "validation": None, "max_steps": 1, "clip_grad_norm": 1e9}
    train(pretrain_config(tmp_path, document_masking=False, **options))
    loss, z_loss, norm = first_step(tmp_path)
    assert numbers(tmp_path)[1] == pytest.approx(loss, rel=1e-5)
    assert numbers(tmp_path, "z_loss")[1] == pytest.approx(z_loss, rel=1e-5)
    assert numbers(tmp_path, "grad_norm")[1] == pytest.approx(norm, rel=1e-4)
    train(pretrain_config(tmp_path / "masked", **options))
    assert abs(numbers(tmp_path / "masked")[1] - loss) > 1e-4


def test_validation_is_masked_as_training_is(tmp_path: Path) -> None:
    results = [
        train(pretrain_config(tmp_path / str(masking), document_masking=masking, max_steps=1))["held_out"][0]
        for masking in (True, False)
    ]
    assert abs(results[0][1] - results[1][1]) > 1e-4  # of fp32 losses near 3, whose noise is 1e-6


@pytest.mark.parametrize("weight", [-1e-4, float("nan")])
def test_a_bad_z_loss_is_refused(tmp_path: Path, weight: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"z_loss={weight} is no weight")):
        read_config(tiny_config(tmp_path, z_loss=weight))
