"""torchtune's keys about the model and its memory: the same losses and weights, and refusals of what cannot work."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from streampack_recipes import full_finetune, lora_finetune

from tests.harness.processes import run_ranks
from tests.harness.tiny import BASE, lora_config, numbers, tiny_config

MODEL = {"_component_": "torchtune.models.llama3.llama3", **BASE}
RUN = {
    "rows": 60, "max_steps": 3, "validation": None, "save_every_n_steps": None, "lr_scheduler": None,
    "batch_size": 4, "gradient_accumulation_steps": 1, "data.num_lanes": 4, "log_every_n_steps": 1,
    "clip_grad_norm": None,
    "optimizer.eps": 0.01,  # or Adam would hide gradients of a wrong scale
}  # fmt: skip
TENSOR_PARALLEL = {
    "tensor_parallel_dim": 2,
    "tensor_parallel_plan": {"_component_": "torchtune.models.llama3.base_llama_tp_plan"},
}
QAT = {
    "quantizer": {
        "_component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer",
        "groupsize": 16,
    }
}


def config_of(folder: Path, **changes):
    config = tiny_config(folder, **RUN | {"model": MODEL} | changes)
    if not (folder / "init" / "two_layers").exists():
        from torchtune.models.llama3 import llama3

        torch.manual_seed(0)
        torch.save(llama3(**BASE).state_dict(), folder / "init" / "model.bin")
        (folder / "init" / "two_layers").touch()
    return config


def outcome(folder: Path):
    """Return the losses of a run by step, its counts, and its final weights."""
    weights = torch.load(next((folder / "out" / "epoch_0").glob("*.bin")), weights_only=True)
    counts = [numbers(folder, name) for name in ("trained_tokens", "samples_per_step", "ledger_packed")]
    return numbers(folder), counts, weights


def train(*configs):
    with redirect_stdout(io.StringIO()):
        return [full_finetune.train(config) for config in configs]


def assert_same(found, expected):
    losses, counts, weights = found
    assert losses == pytest.approx(expected[0], rel=1e-5)  # as the log rounds them
    assert counts == expected[1]
    assert weights.keys() == expected[2].keys()
    for name, value in expected[2].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-6, atol=1e-6, msg=name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    [result] = train(config_of(folder))
    losses, counts, weights = outcome(folder)
    initial = torch.load(folder / "init" / "model.bin", weights_only=True)
    assert len(losses) == 3
    assert all(not torch.equal(weights[name], value) for name, value in initial.items())
    return (losses, counts, weights), result


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's compiler looks at it
@pytest.mark.parametrize("changes", [
    {"optimizer_in_bwd": True},
    {"enable_activation_checkpointing": True, "clip_grad_norm": float("inf"), "optimizer.fused": True},
    {"ac_mode": "selective", "ac_option": 2, "fsdp_cpu_offload": True},
    {**QAT, "fake_quant_after_n_steps": 3},
    {"compile": True, "cudnn_deterministic_mode": 0},
], ids=lambda changes: "-".join(changes))  # fmt: skip
def test_keys_that_change_neither_losses_nor_weights(tmp_path, plain, changes, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")  # torchtune's variable; the default takes minutes
    train(config_of(tmp_path, **changes))
    assert_same(outcome(tmp_path), plain[0])


SEVERAL_RANKS = [
    {"optimizer_in_bwd": True, "batch_size": 2, "ac_mode": "full"},
    {"data_parallel_replicate_dim": 2, "clip_grad_norm": float("inf"), "batch_size": 2},
    {**TENSOR_PARALLEL, "clip_grad_norm": float("inf"), "log_rows": True},
    {**QAT, "fake_quant_after_n_steps": 3, "batch_size": 2},
]


def test_two_ranks_train_as_one_with_each_key(tmp_path, plain):
    configs = [config_of(tmp_path / str(number), **changes) for number, changes in enumerate(SEVERAL_RANKS)]
    for results in run_ranks(train, 2, *configs):
        assert [result["ledger"] for result in results] == [plain[1]["ledger"]] * len(configs)
        assert {result["tokens"] for result in results} == {plain[1]["tokens"]}
    for number in range(len(configs)):
        assert_same(outcome(tmp_path / str(number)), plain[0])
    norms = [numbers(tmp_path / number, "grad_norm") for number in ("1", "2")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    rows = tmp_path / "2" / "out" / "rows"
    assert [path.name for path in rows.iterdir()] == ["rank_00000.jsonl"], (
        "ranks that read the same count once"
    )


@pytest.mark.slow
def test_four_ranks_split_data_and_layers(tmp_path, plain):
    changes = {**TENSOR_PARALLEL, "batch_size": 2, "clip_grad_norm": float("inf")}
    configs = [config_of(tmp_path / "tp", **changes)]
    configs.append(config_of(tmp_path / "hsdp", batch_size=1, data_parallel_replicate_dim=2))
    for results in run_ranks(train, 4, *configs):
        assert [result["ledger"] for result in results] == [plain[1]["ledger"]] * 2
    for name in ("tp", "hsdp"):
        assert_same(outcome(tmp_path / name), plain[0])


def test_checkpoints_pass_between_keys_and_numbers_of_ranks(tmp_path, plain):
    """2 -> 1 -> 2: sharded copies with an optimizer in the backward pass, that one alone, tensor parallel."""
    config = config_of(tmp_path, save_every_n_steps=1, resume_from_checkpoint=True, optimizer_in_bwd=True)
    run_ranks(
        train, 2, OmegaConf.merge(config, {"max_steps": 1, "batch_size": 2, "data_parallel_replicate_dim": 2})
    )
    with pytest.raises(ValueError, match="a step has 2 of them on each rank; set batch_size=4"):
        train(OmegaConf.merge(config, {"max_steps": 2, "batch_size": 2}))
    train(OmegaConf.merge(config, {"max_steps": 2}))
    run_ranks(train, 2, OmegaConf.merge(config, {**TENSOR_PARALLEL, "optimizer_in_bwd": False}))
    assert_same(outcome(tmp_path), plain[0])


def test_rounding_begins_after_its_steps_and_a_resume_knows(tmp_path, plain):
    changes = {**QAT, "fake_quant_after_n_steps": 1, "save_every_n_steps": 2}
    train(config_of(tmp_path / "whole", **changes))
    losses, _, weights = rounded = outcome(tmp_path / "whole")
    assert losses[1] == pytest.approx(plain[0][0][1], rel=1e-6)
    assert losses[2] != pytest.approx(plain[0][0][2], rel=1e-4)
    assert weights.keys() == plain[0][2].keys(), "weights as they are without rounding"
    config = config_of(tmp_path / "resumed", **changes, resume_from_checkpoint=True)
    train(OmegaConf.merge(config, {"max_steps": 2}))
    train(config)
    assert_same(outcome(tmp_path / "resumed"), rounded)


def test_held_out_rows_before_the_first_step_are_measured_without_rounding_that_begins_later(tmp_path):
    found = []
    for name, changes in (("plain", {}), ("qat", {**QAT, "fake_quant_after_n_steps": 1})):
        config = config_of(tmp_path / name, max_steps=1, validation={"fraction": 0.2}, **changes)
        found.append(train(config)[0]["held_out"][0])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_adapters_on_a_base_that_rounds(tmp_path):
    small = {
        "rows": 60,
        "max_steps": 2,
        "validation": None,
        "save_every_n_steps": None,
        "log_every_n_steps": 1,
    }
    found = []
    for name, changes in (("plain", {}), ("qat", QAT)):
        with redirect_stdout(io.StringIO()):
            lora_finetune.train(lora_config(tmp_path / name, **small, **changes))
        found.append(numbers(tmp_path / name))
        assert (tmp_path / name / "out" / "adapter" / "adapter_model.pt").exists()
    assert found[0][1] == pytest.approx(found[1][1], rel=0.2)
    assert found[0] != found[1]


INT4 = {"_component_": "torchtune.training.quantization.Int8DynActInt4WeightQuantizer"}
REFUSED = [
    ({**TENSOR_PARALLEL}, "tensor_parallel_dim=2 need a multiple of 2 ranks, and there are 1"),
    ({"data_parallel_replicate_dim": 2}, "data_parallel_replicate_dim=2 .* need a multiple of 2 ranks"),
    ({"ac_mode": "selective", "ac_option": 0}, "ac_mode='selective' needs ac_option"),
    ({"ac_mode": "full", "enable_activation_checkpointing": True}, "ac_mode='full' chooses layers, and enable_act"),
    ({"enable_activation_offloading": True, "enable_activation_checkpointing": True, "device": "auto"},
     "moves activations off a GPU, and the device is cpu"),
    ({"custom_sharded_layers": ["tok_embedings"]}, "custom_sharded_layers: the model has no 'tok_embedings'; did you "),
    ({"compile": True, **QAT}, "compile=True does not work with quantizer in torchtune"),
    ({"quantizer": INT4}, "Int8DynActInt4WeightQuantizer quantizes weights after training; name one"),
    ({"quantizer": QAT["quantizer"] | {"groupsize": 256}}, "groupsize=256 divides the input size of no layer"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_work_is_refused_before_the_first_step(tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        train(config_of(tmp_path, **changes))
    assert not (tmp_path / "out" / "epoch_0").exists()
