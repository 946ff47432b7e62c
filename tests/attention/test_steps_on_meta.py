"""Whole steps on the `meta` device, where reading a number raises: the host never waits for the device in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streampack import (
    Batch,
    FlatteningCollator,
    IterablePackedDataset,
    collate_packed,
    prepare_model_for_packing,
)
from streampack.attention import varlen
from streampack.losses import last_values, policy_losses, sequence_logps, summed_cross_entropy, token_logps
from streampack.training.run import Run
from tests.harness import groups, hf_models, tiny_torchtune
from tests.harness.preferences import dpo_config
from tests.harness.recipes_on import RECIPES, place_recipes_on
from tests.harness.tiny import lora_config, mixed_config, tiny_config

META = torch.device("meta")
STEP: dict[str, Any] = {
    "run_val_every_n_steps": None, "validation": None, "save_every_n_steps": None, "max_steps": 2,
    "verify_isolation": False, "clip_grad_norm": 1.0, "attention": "dense", "dtype": "fp32",
}  # fmt: skip


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that reads nothing, as torch's on a GPU; a CPU keeps the loop over sequences."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, key_ends: Any, *others: Any
    ) -> torch.Tensor:
        if q.device != META:
            return loop(q, k, v, ends, key_ends, *others)
        assert ends.dtype == torch.int32
        assert key_ends is None or len(key_ends) == len(ends)
        return (q.float() + (k.sum() * v.sum())).to(q.dtype)[..., : v.shape[-1]]

    loop: Any = varlen._attend_sequences  # private: torch's kernel for GPUs is not called on other devices
    monkeypatch.setattr(varlen, "_attend_sequences", attend)


def batch() -> Batch:
    rows = [{"tokens": [i] * n, "labels": [i] * n} for i, n in enumerate([9, 14, 20, 5, 11, 3], 1)]
    return collate_packed(list(IterablePackedDataset(rows, max_seq_len=32, num_lanes=1)))


def make_step(model: nn.Module, losses: Callable[[], Iterator[torch.Tensor]]) -> None:
    """Train a step of several batches, with clipping and an optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for loss in losses():
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def test_the_meta_device_reads_nothing() -> None:
    for read in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.nonzero, bool):
        with pytest.raises((RuntimeError, NotImplementedError)):
            read(torch.zeros(1, device=META))


@pytest.mark.parametrize("name", ["full", "lora", "dpo", "pretrain"])
def test_steps_of_recipes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "full":  # by source and by row
        config = mixed_config(tmp_path, **STEP | {"loss_norm": "sample", "log_rows": True})
    elif name == "pretrain":
        changes = {"z_loss": 1e-4, "document_masking": False, "data.split_across_pack": True}
        config = tiny_config(tmp_path, **STEP | changes)
    else:
        config = {"lora": lora_config, "dpo": dpo_config}[name](tmp_path, **STEP)
    assert config.gradient_accumulation_steps == 2
    config.log_every_n_steps = 100  # logging reads the sums of the steps, as it must
    place_recipes_on(META, monkeypatch, place=lambda model: model.to(META))
    monkeypatch.setattr(Run, "end", lambda run, _: run.step)
    assert RECIPES[name].train(config) == 2


def trained(family: str, attention: str, batches: list[Any]) -> None:
    """Train a step of a transformers model on batches of the meta device."""
    model: Any = hf_models.build(family, torch.bfloat16)
    inputs = prepare_model_for_packing(model, attention=attention)
    assert inputs(batch())  # an unknown model is tried
    model.to(META).train()

    def losses() -> Iterator[torch.Tensor]:
        for each in batches:
            output = model(**inputs(each))
            yield output.loss if "loss" in output else summed_cross_entropy(output.logits, each.labels)

    make_step(model, losses)


FAMILIES = ["llama", "mistral", "gemma3_text", "qwen3_moe", "gpt_oss", "lfm2", "llama4_text"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_steps_of_transformers_models(family: str, attention: str) -> None:
    if attention == "varlen" and family in ("gpt_oss", "llama4_text"):
        pytest.skip("it has attention sinks, or chunks")
    trained(family, attention, [batch().to(META)] * 2)


@pytest.mark.parametrize(("family", "attention"), [("llama", "varlen"), ("llama4_text", "dense")])
def test_steps_on_dicts(family: str, attention: str) -> None:
    """Kernels need the number of sequences, which the shape of ``cu_seq_lens_q`` tells; masks do not."""
    rows = [{"tokens": [i] * n, "labels": [i] * n} for i, n in enumerate([7, 3, 4], 1)]
    flat = FlatteningCollator(return_flash_attn_kwargs=attention == "varlen")(rows)
    there = {name: value.to(META) if torch.is_tensor(value) else value for name, value in flat.items()}
    trained(family, attention, [there] * 2)


@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_steps_of_policies_and_rewards(attention: str) -> None:
    """Answers share their prompts."""
    model = tiny_torchtune.build("llama3", vocab_size=groups.VOCAB, max_seq_len=groups.MAX_SEQ_LEN).to(META)
    inputs = prepare_model_for_packing(model, attention=attention)
    shared = groups.batch_of(groups.trees())
    assert shared.groups is not None
    fields = {"advantage": torch.zeros(shared.seq_lens.shape)}
    token_fields = {name: torch.zeros(shared.tokens.shape) for name in ("old_logps", "ref_logps")}
    there = replace(shared, groups=replace(shared.groups, fields=fields, token_fields=token_fields)).to(META)

    def losses() -> Iterator[torch.Tensor]:
        yield policy_losses(token_logps(model(**inputs(there)), there), there, kl=0.1).sum()
        sums, counts = sequence_logps(model(**inputs(there)), there)
        yield (sums / counts.clamp(min=1)).sum()
        yield last_values(model(**inputs(there))[..., 0], there).sum()

    make_step(model, losses)


def test_block_masks() -> None:
    model = tiny_torchtune.build("llama3", vocab_size=groups.VOCAB, max_seq_len=groups.MAX_SEQ_LEN).to(META)
    inputs = prepare_model_for_packing(model, attention="flex")
    for each in (batch(), groups.batch_of(groups.trees())):
        assert inputs(each.to(META))["mask"].block_mask.kv_indices.device == META
