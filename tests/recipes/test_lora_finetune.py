"""LoRA, DoRA and QLoRA on a toy model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from streampack_recipes.lora_finetune import train
from torchtune.models.llama3 import llama3, lora_llama3

from tests.harness.processes import run_ranks
from tests.harness.runs import Run, lora_run
from tests.harness.tiny import ADAPTERS, BASE, lora_config, losses, numbers


def saved(folder: Path, pattern: str) -> dict[str, torch.Tensor]:
    where = "adapter" if pattern.startswith("adapter") else "epoch_0"
    return torch.load(next((folder / "out" / where).glob(pattern)), weights_only=True)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return lora_run(tmp_path_factory)


def test_a_run_trains_the_adapters_only(lora: Run) -> None:
    folder = lora.folder
    (_, before), (_, after) = lora.result["held_out"][0], lora.result["held_out"][-1]
    assert after < before - 0.5
    assert "nan" not in (folder / "out" / "logs" / "log.txt").read_text()
    base, merged = torch.load(folder / "init" / "model.bin", weights_only=True), saved(folder, "model-*.bin")
    adapters = saved(folder, "adapter_model.pt")
    adapted = {name.rsplit(".", 2)[0] for name in adapters}
    assert {name.rpartition(".")[2] for name in adapted} == {"q_proj", "v_proj", "w1", "w2", "w3", "output"}
    assert merged.keys() == base.keys()
    for name, value in base.items():
        layer = name.removesuffix(".weight")
        if layer in adapted:
            b, a = adapters[f"{layer}.lora_b.weight"], adapters[f"{layer}.lora_a.weight"]
            assert b.any()
            assert torch.allclose(merged[name], value + 12 / 4 * b @ a, atol=1e-6)
        else:
            assert torch.equal(merged[name], value), f"{name} is frozen"

    in_torchtune, whole = lora_llama3(**BASE, **ADAPTERS), llama3(**BASE)
    in_torchtune.load_state_dict(base | adapters)
    whole.load_state_dict(merged)
    tokens = torch.arange(12)[None]
    assert torch.allclose(in_torchtune(tokens), whole(tokens), atol=1e-5)


def test_a_resumed_run_has_the_same_losses_and_weights(tmp_path: Path, lora: Run) -> None:
    config = lora_config(tmp_path, max_steps=7, resume_from_checkpoint=True, enable_async_checkpointing=True)
    train(config)
    config.max_steps = 20
    train(config)
    assert losses(tmp_path) == losses(lora.folder)
    for pattern in ("model-*.bin", "adapter_model.pt"):
        ours, theirs = saved(tmp_path, pattern), saved(lora.folder, pattern)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_adapters_begin_as_torchtunes_do_and_merged_weights_are_optional(tmp_path: Path) -> None:
    settings = {"max_steps": 1, "save_adapter_weights_only": True, "validation": None, "optimizer.lr": 0.0}
    train(lora_config(tmp_path, **settings))
    assert [path.name for path in (tmp_path / "out" / "adapter").iterdir()] == ["adapter_model.pt"]
    assert not (tmp_path / "out" / "epoch_0").exists()
    first = saved(tmp_path, "adapter_model.pt")
    assert all(value.any() == name.endswith("lora_a.weight") for name, value in first.items())
    bound = 1 / 16**0.5  # kaiming, uniform
    assert 0.8 * bound < max(float(v.abs().max()) for n, v in first.items() if "q_proj.lora_a" in n) <= bound


# torchao quantizes in groups of 64 * 256 numbers, and a rank needs complete groups of each weight.
QUANTIZABLE = BASE | {"embed_dim": 256, "intermediate_dim": 256, "num_layers": 1}


KINDS = {
    "dora": (BASE, ADAPTERS | {"use_dora": True}),
    "qlora": (QUANTIZABLE, ADAPTERS | {"quantize_base": True, "apply_lora_to_output": False}),
}


@pytest.mark.parametrize("kind", ["dora", pytest.param("qlora", marks=pytest.mark.slow)])
def test_two_ranks_train_as_one(tmp_path, kind):
    base, adapters = KINDS[kind]
    folders = [tmp_path / "one", tmp_path / "two"]
    changes = {"max_steps": 6, "optimizer.lr": 0.005, "resume_from_checkpoint": True}
    configs = [lora_config(f, base=base, adapters=adapters, **changes) for f in folders]
    configs[1].gradient_accumulation_steps = 1  # of two ranks, and 2 of one
    result = train(configs[0])
    assert result["held_out"][-1][1] < result["held_out"][0][1] - 0.05
    both = run_ranks(train, 2, configs[1])
    assert numbers(folders[1]) == pytest.approx(numbers(folders[0]), rel=1e-5)
    assert both[0]["held_out"] == both[1]["held_out"]
    for pattern in ("model-*.bin", "adapter_model.pt"):
        one, two = (saved(folder, pattern) for folder in folders)
        assert one.keys() == two.keys()
        for name in one:
            # One rank merges quantized weights in bf16, as torchtune's single-device recipe does.
            limits = {"rtol": 1e-2, "atol": 1e-3} if kind == "qlora" else {"rtol": 1e-4, "atol": 1e-5}
            assert torch.allclose(one[name].float(), two[name].float(), **limits), name
    if kind == "dora":  # the checkpoint of two ranks resumes on one
        configs[1].max_steps = 8
        assert train(configs[1])["step"] == 8
