"""LoRA, DoRA and QLoRA on a toy model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from streampack_recipes.full_finetune import train as train_all
from streampack_recipes.lora_finetune import train
from torchtune.models.llama3 import llama3, lora_llama3

from tests.harness.processes import RankError, run_ranks
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


def test_a_running_checkpoint_holds_the_adapters_only(lora: Run) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    keys = FileSystemReader(lora.checkpoint(20)).read_metadata().state_dict_metadata
    assert {key.rsplit(".", 2)[1] for key in keys if key.startswith("model.")} == {"lora_a", "lora_b"}


def test_a_resumed_run_has_the_same_losses_and_weights(tmp_path: Path, lora: Run) -> None:
    config = lora_config(tmp_path, max_steps=7, resume=True, async_checkpoint=True)
    train(config)
    config.max_steps = 20
    train(config)
    assert losses(tmp_path) == losses(lora.folder)
    for pattern in ("model-*.bin", "adapter_model.pt"):
        ours, theirs = saved(tmp_path, pattern), saved(lora.folder, pattern)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_initial_adapters_depend_on_the_seed_only_and_merged_weights_can_be_left_out(tmp_path: Path) -> None:
    def initial(name: str, **changes: Any) -> dict[str, torch.Tensor]:
        folder = tmp_path / name
        settings = {
            "max_steps": 1,
            "save_adapter_weights_only": True,
            "validation": None,
            "optimizer.lr": 0.0,
        }
        train(lora_config(folder, **settings | changes))
        assert [path.name for path in (folder / "out" / "adapter").iterdir()] == ["adapter_model.pt"]
        assert not (folder / "out" / "epoch_0").exists()
        return saved(folder, "adapter_model.pt")

    first, again, other = initial("first"), initial("again", batch_size=1), initial("other", seed=1234)
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name, value in first.items():
        assert value.any() == name.endswith("lora_a.weight")
        assert name.endswith("lora_b.weight") or not torch.equal(value, other[name])
    bound = 1 / 16**0.5  # as torchtune's own: kaiming, uniform
    assert 0.8 * bound < max(float(v.abs().max()) for n, v in first.items() if "q_proj.lora_a" in n) <= bound


def test_models_and_keys_of_the_other_recipe_are_refused(tmp_path: Path) -> None:
    config = lora_config(tmp_path)
    with pytest.raises(
        ValueError, match="lora_llama3 has adapters, and this recipe trains all weights; run lora_"
    ):
        train_all(config)
    config.save_adapter_weights_only = True
    with pytest.raises(
        ValueError, match="save_adapter_weights_only: this recipe trains all weights; remove the key"
    ):
        train_all(config)
    config.model = {"_component_": "torchtune.models.llama3.llama3", **BASE}
    with pytest.raises(ValueError, match="llama3 has no adapters to train; name one of torchtune's lora_"):
        train(config)


# torchao quantizes in groups of 64 * 256 numbers, and a rank needs whole groups of each weight.
QUANTIZABLE = BASE | {"embed_dim": 256, "intermediate_dim": 256, "num_layers": 1}


KINDS = {
    "dora": (BASE, ADAPTERS | {"use_dora": True}),
    "qlora": (QUANTIZABLE, ADAPTERS | {"quantize_base": True, "apply_lora_to_output": False}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one(tmp_path, kind):
    base, adapters = KINDS[kind]
    folders = [tmp_path / "one", tmp_path / "two"]
    changes = {"max_steps": 6, "optimizer.lr": 0.005, "resume": True}
    configs = [lora_config(f, base=base, adapters=adapters, **changes) for f in folders]
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


def test_quantized_weights_that_cannot_be_sharded_are_refused(tmp_path):
    base, adapters = QUANTIZABLE | {"embed_dim": 128, "intermediate_dim": 128}, KINDS["qlora"][1]
    with pytest.raises(
        RankError, match="ValueError: the model cannot be sharded over 2 ranks: .*quantization"
    ):
        run_ranks(train, 2, lora_config(tmp_path, base=base, adapters=adapters))
