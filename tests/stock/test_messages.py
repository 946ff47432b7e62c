"""Slips in a stock config: each is refused by one line that names the key, the reason and the way out."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from streampack.training.checks import read_config
from streampack.training.conditions import recipe_problems
from tests.harness.stock import read_stock, recipe_of, shrunk, shrunk_config

FULL = "llama3_2/1B_full"
PACKED = {"dataset.packed": True, "tokenizer.max_seq_len": 4096}
OURS = {"source": {"_component_": "streampack.JSONLSource", "paths": "a.jsonl"}, "max_seq_len": 64}
ALPACA = {"_component_": "torchtune.datasets.alpaca_dataset"}

SLIPS: list[tuple[dict[str, Any], str]] = [
    (
        {"gradient_accumulation_step": 8},
        "gradient_accumulation_step: .* Did you mean: 'gradient_accumulation_steps'",
    ),
    ({"lr": 1e-4}, r"lr is no key by itself; set optimizer\.lr"),
    ({"packed": True}, r"packed is no key by itself; set dataset\.packed"),
    ({"data": OURS}, "dataset and data are two answers .*; give one"),
    ({"dataset.packed": True}, r"dataset\.packed=True needs .*; set tokenizer\.max_seq_len"),
    ({"dataset.packed": "yes"}, "dataset: .*: packed='yes' is text; give true or false"),
    (
        {"dataset": [ALPACA | {"packed": True}, ALPACA], "tokenizer.max_seq_len": 4096},
        "dataset: some of its nodes are packed .*; give all the same",
    ),
    (
        {"model": {"_component_": "torchtune.models.llama3_2.llama3_2", "max_seq_len": 2048}} | PACKED,
        r"tokenizer\.max_seq_len=4096 is above model\.max_seq_len=2048, .*; lower",
    ),
    (PACKED | {"collate_fn": "torchtune.data.padded_collate_sft"}, "collate_fn=.* is for padded .*; remove one"),
    ({"collate_fn": "torchtune.data.left_pad_sequence"}, "collate_fn=.* is for inference only; name "),
    ({"dtype": "fp16"}, "dtype='fp16' is unknown; choose one of .*; fp16 needs loss scaling, which these recipes"),
    ({"device": "gpu"}, "device='gpu' is unknown; choose one of .*; a GPU is 'cuda'"),
    (
        {"enable_activation_offloading": True},
        "enable_activation_offloading=True needs enable_activation_checkpointing=True",
    ),
    (
        {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1, "clip_grad_norm": 1.0},
        r"clip_grad_norm=1\.0 needs .* optimizer_in_bwd=True frees; leave one out",
    ),
    (
        {"optimizer_in_bwd": True, "gradient_accumulation_steps": 8},
        "gradient_accumulation_steps=8 sums .* optimizer_in_bwd=True frees; leave one out",
    ),
    ({"ac_mode": "selective"}, "ac_mode='selective' needs ac_option"),
    ({"ac_option": 2}, "ac_option=2 is of ac_mode='selective', .*; set that, or remove"),
    ({"cudnn_deterministic_mode": 7}, "cudnn_deterministic_mode=7 is no mode of torch's; give 0, 1 .*, or null"),
    (
        {"checkpointer.recipe_checkpoint": "recipe_state.pt"},
        r"checkpointer\.recipe_checkpoint=recipe_state\.pt is not used: .*; remove it, or set resume_from",
    ),
    (
        {"checkpointer.adapter_checkpoint": "adapter_0.pt"},
        r"checkpointer\.adapter_checkpoint=adapter_0\.pt is not used: .*; remove it",
    ),
    ({"checkpointer.should_load_recipe_state": True}, r"checkpointer\.should_load_recipe_state=True is not used"),
    (
        {"lr_scheduler": "torch.optim.lr_scheduler.ConstantLR"},
        "lr_scheduler='torch.optim.lr_scheduler.ConstantLR' is text; write it as a component: {_component_: torch",
    ),
    (
        {"tensor_parallel_dim": 2, "optimizer.fused": False},
        "tensor_parallel_dim=2 needs tensor_parallel_plan, such as",
    ),
    ({"memory_efficient_fsdp_wrap": True}, "memory_efficient_fsdp_wrap is not used; name large modules"),
    ({"tokenizer.max_seq_len": 0}, "tokenizer.max_seq_len=0 is below 1"),
    ({"loss.num_output_chunks": 0}, "loss.num_output_chunks=0 is below 1"),
    ({"enable_fp8_training": True}, "enable_fp8_training is not in these recipes; set dtype=bf16"),
    ({"context_parallel_dim": 2}, "context_parallel_dim is not in these recipes; .* shows it"),
    ({"kd_ratio": 0.5}, "kd_ratio is of torchtune's recipe knowledge_distillation_distributed, .*; run torchtune's"),
    ({"run_val_every_n_steps": 5}, "run_val_every_n_steps=5 needs held-out rows; set dataset_val or validation"),
    ({"batch_size_val": 5}, "batch_size_val=5 needs held-out rows; set dataset_val or validation, or remove it"),
    ({"low_cpu_ram": True}, "low_cpu_ram=True is for models with a quantized base .*; remove it"),
    ({"collate_fn": "torchtune.data.padded_collate_dpo"}, "collate_fn=.*padded_collate_dpo is for preference pairs; "),
    ({"dataset.column_map": {"inputs": "a"}}, "dataset.column_map: 'inputs' is not read; did you mean 'input'?"),
    (
        {"model._component_": "torchtune.models.llama3_2.llama3_2_2b"},
        "model: .*llama3_2_2b' leads to nothing .*; did you mean",
    ),
    (
        {"optimizer._component_": "bitsandbytes.optim.AdamW8bit"},
        "optimizer: .*needs bitsandbytes, which is not installed",
    ),
    ({"optimizer.learning_rate": 1e-4}, "optimizer: .* keyword argument 'learning_rate'"),
    ({"epochs": None}, "neither epochs nor max_steps is set; say when"),
    (
        {"loss._component_": "torchtune.rlhf.loss.DPOLoss"},
        "loss: .*DPOLoss is not the cross-entropy .*; name .*, or run dpo",
    ),
]  # fmt: skip


def problems(name: str, changes: dict[str, Any]) -> list[str]:
    """What is wrong with a changed stock config, in the recipe that it belongs to."""
    config = read_stock(name)
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True, merge=False)
    try:
        cfg = read_config(config)
    except ValueError as error:
        return str(error).splitlines()
    return list(recipe_problems(cfg, pairs=recipe_of(name) == "dpo"))


@pytest.mark.parametrize(("changes", "message"), SLIPS, ids=lambda each: str(each)[:40])
def test_a_slip_is_one_line(changes: dict[str, Any], message: str) -> None:
    (said,) = problems(FULL, changes)
    assert re.match(message, said), said


def test_all_slips_are_told_at_once() -> None:
    alone = {
        "collate_fn",
        "kd_ratio",
        "loss._component_",
        "loss.num_output_chunks",
        "data",
        *PACKED,
        "dataset",
        "optimizer.learning_rate",
        "ac_option",
    }
    slips = [slip for slip in SLIPS if not alone & {*slip[0]}]
    together = problems(FULL, {key: value for changes, _ in slips for key, value in changes.items()})
    for _, message in slips:
        assert any(re.match(message, said) for said in together), message
    assert len(together) == len(slips) > 15


def test_a_config_of_pairs_needs_a_loss_that_compares_them() -> None:
    cross_entropy = {"loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}}
    (said,) = problems("llama3_1/8B_lora_dpo", cross_entropy)
    assert "compares no pairs; name torchtune.rlhf.loss.DPOLoss" in said


def test_a_missing_value_is_named_and_not_the_keys_that_refer_to_it() -> None:
    (said,) = problems(FULL, {"output_dir": None})
    assert re.match("output_dir: .*None", said)
    (said,) = problems(FULL, {"output_dir": "???"})
    assert said.startswith("missing: output_dir; ")
    (said,) = problems(FULL, {"tokenizer.path": "???"})
    assert said.startswith("missing: tokenizer.path; ")


def test_a_cross_entropy_of_torch_takes_no_settings() -> None:
    assert not problems(FULL, {"loss": {"_component_": "torch.nn.CrossEntropyLoss"}})
    (said,) = problems(FULL, {"loss": {"_component_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.1}})
    assert re.match(r"loss\.label_smoothing=0\.1 is not used: ", said)


def test_pairs_are_not_compared_with_rounding() -> None:
    """The reference would round from the first step on, whatever the policy does."""
    quantizer = {"_component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"}
    (said,) = problems("llama3_1/8B_full_dpo", {"quantizer": quantizer})
    assert said.startswith(
        "quantizer: dpo does not train with rounding; remove the key, or run full_finetune"
    )


def test_a_config_of_another_recipe_is_one_line() -> None:
    (said,) = problems("mistral/7B_full_ppo_low_memory", {})
    assert (
        "is of torchtune's recipe ppo_full_finetune_single_device, for which there is none here; run " in said
    )


LORA, DPO = "llama3_2/1B_lora_single_device", "llama3_1/8B_lora_dpo_single_device"
PLAN = {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}
LINES = {
    "_component_": "torchtune.datasets.text_completion_dataset", "source": "text", "data_files": __file__,
    "split": "train",
}  # fmt: skip
PAIRS = "torchtune.datasets.stack_exchange_paired_dataset"
IN_RECIPES: list[tuple[str, str, dict[str, Any], str]] = [
    ("full_finetune", LORA, {}, "model: .*lora_llama3_2_1b has adapters, and .*; run lora_finetune, or name"),
    ("lora_finetune", FULL, {}, "model: .*llama3_2_1b has no adapters to train; name .*, or run full_finetune"),
    ("lora_finetune", DPO, {}, "loss: .*DPOLoss is not the cross-entropy .*; name .*, or run dpo"),
    ("dpo", LORA, {}, "loss: .*CEWithChunkedOutputLoss compares no pairs; name .*DPOLoss, or run full_finetune"),
    ("full_finetune", FULL, {"ac_mode": "selective", "ac_option": 9}, "ac_option=9 is above the model's 2 layers, "),
    ("full_finetune", FULL, {"custom_sharded_layers": ["embed"]}, "custom_sharded_layers: the model has no 'embed'"),
    ("lora_finetune", LORA, {"model.lora_rank": 0}, "model.lora_rank=0 is below 1"),
    (
        "lora_finetune", LORA, {"model.lora_attn_modules": ["q_prj"]},
        "model.lora_attn_modules='q_prj' is unknown; choose one of .*; did you mean 'q_proj'",
    ),
    ("dpo", DPO, {"dataset": LINES}, "the rows are no preference pairs: TokensEncoder makes single samples, .*; name"),
    (
        "full_finetune", FULL, {"checkpointer.checkpoint_files": ["a.bin"]},
        r"checkpointer\.checkpoint_files: there is no 'a\.bin' in ",
    ),
    (
        "full_finetune", FULL, {"metric_logger._component_": "torchtune.training.metric_logging.CometLogger"},
        "metric_logger: .*comet_ml.* not found.*; install what it needs, or name torchtune",
    ),
    ("full_finetune", FULL, {"checkpointer.model_type": "GEMMA2"}, "the checkpointer's weights do not fit .*; name"),
    (
        "full_finetune", FULL, PACKED,
        r"tokenizer\.max_seq_len=4096 is above the model's 2048 positions; lower it to 2048",
    ),
    (
        "full_finetune", FULL, {"tensor_parallel_dim": 2, "tensor_parallel_plan": PLAN, "optimizer.fused": False},
        ".*tensor_parallel_dim=2 need a multiple of 2 ranks, and there are 1; start more",
    ),
    ("full_finetune", FULL, {"dataset._component_": PAIRS}, "dataset: .* there is no 'question'; map your columns"),
    (
        "full_finetune", FULL, {"dataset.train_on_inputs": False},
        "dataset: .* keyword argument 'train_on_inputs'; did you mean 'train_on_input'",
    ),
    ("full_finetune", FULL, {"dataset.data_files": "no.json"}, r"dataset: .*Unable to find .*no\.json'; a file of"),
]  # fmt: skip


@pytest.mark.usefixtures(shrunk.__name__)
@pytest.mark.filterwarnings("ignore")  # torchtune's own
def test_a_slip_that_a_recipe_sees_is_one_line(tmp_path: Path) -> None:
    (broken := tmp_path / "broken.json").write_text('{"a": 1}\n{"a": \n')
    said = rf"dataset: {broken}: JSON parse error: .* in row 1"
    of_file = ("full_finetune", FULL, {"dataset.data_files": str(broken)}, said)
    for recipe, name, changes, message in [*IN_RECIPES, of_file]:
        config = shrunk_config(name, tmp_path, **changes)
        with pytest.raises(ValueError, match=f"^{message}") as raised:
            import_module(f"streampack_recipes.{recipe}").train(config)
        assert "\n" not in str(raised.value)
        assert not Path(config.output_dir, "epoch_0").exists()
