"""Each argument that changes what a stock Trainer does with its data has an effect on packs, a refusal or a line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from streampack import FlatteningCollator, IterablePackedDataset, TokensEncoder, prepare_trainer_for_packing
from tests.harness.hf_trainers import (
    MAX_SEQ_LEN,
    SAMPLES,
    model,
    packed,
    samples,
    settings,
    stream,
    trainer_of,
)

transformers = pytest.importorskip("transformers")

# TRL 1.16 switches it on by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")

# Of model, optimizer, logs, checkpoints and the Hub: with packs as with other data.
OTHERS = {
    "output_dir", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim",
    "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_target_modules",
    "max_grad_norm", "bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32",
    "activation_checkpointing", "activation_checkpointing_kwargs", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "torch_compile", "torch_compile_backend", "torch_compile_mode",
    "torch_empty_cache_steps", "logging_first_step",
    "log_on_each_node", "logging_nan_inf_filter", "log_level", "log_level_replica", "disable_tqdm",
    "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id",
    "trackio_static_space_id", "eval_delay", "prediction_loss_only", "eval_do_concat_batches",
    "eval_use_gather_object", "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics",
    "save_only_model", "save_on_each_node", "enable_jit_checkpoint", "push_to_hub", "hub_token",
    "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision",
    "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
    "restore_callback_states_from_checkpoint", "full_determinism", "seed", "use_cpu", "label_names",
    "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph",
    "ddp_backend", "ddp_timeout", "fsdp", "fsdp_config", "deepspeed", "debug", "skip_memory_metrics",
    "do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank",
    "accelerator_config.gradient_accumulation_kwargs", "accelerator_config.use_configured_state",
    "model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "loss_type", "activation_offloading",
}  # fmt: skip

# The tests of this folder that use them prove it.
EFFECT = {
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
    "num_train_epochs", "max_steps", "label_smoothing_factor", "auto_find_batch_size", "logging_strategy",
    "logging_steps", "eval_strategy", "eval_steps", "eval_on_start", "save_strategy", "save_steps",
    "save_total_limit", "dataloader_num_workers", "dataloader_pin_memory", "use_cache",
    "use_liger_kernel", "liger_kernel_config",
}  # fmt: skip

REFUSED: dict[str, tuple[Any, str]] = {
    "average_tokens_across_devices": (False, "weighs each rank's tokens"),
    "include_num_input_tokens_seen": ("non_padding", "the logs have num_tokens"),
    "neftune_noise_alpha": (5.0, "less noise than alone"),
    "parallelism_config": (None, "tp_size is 2"),
    "accelerator_config.split_batches": (True, "divide per_device_train_batch_size by the number"),
    "train_sampling_strategy": ("group_by_length", "orders rows of Trainer's own loader .*; leave it out"),
    "data_seed": (7, "and the packs have seed=0; give IterablePackedDataset seed=7, or leave it out"),
    # TRL's.
    "packing": (True, "leave it out, packing is done here"),
    "padding_free": (True, "leave it out, packing is done here"),
    "eval_packing": (True, "leave it out, packing is done here"),
}
ELSEWHERE = {"average_tokens_across_devices", "parallelism_config", "accelerator_config.split_batches"} | {
    "packing", "padding_free", "eval_packing"
}  # fmt: skip
"""Refusals that need several ranks or TRL, tested in test_hf_trainer.py and test_trl.py."""

SAID: dict[str, Any] = {
    "dataloader_drop_last": True,
    "dataloader_persistent_workers": True,
    "dataloader_prefetch_factor": 4,
    "dataloader_multiprocessing_context": "spawn",
    "dataloader_in_order": False,
    "remove_unused_columns": False,
    "length_column_name": "n",
    "ignore_data_skip": True,
    "accelerator_config.dispatch_batches": True,
    "accelerator_config.even_batches": False,
    "accelerator_config.use_seedable_sampler": False,
    "accelerator_config.non_blocking": True,
    "pad_to_multiple_of": 8,
}

# What TRL does with rows before they are packed; said if the packs hold other rows. Those with a value are tested.
OF_TRL: dict[str, Any] = {
    "chat_template_path": None, "eos_token": "w7", "pad_token": None, "dataset_num_proc": None,
    "dataset_text_field": "other", "dataset_kwargs": None, "max_length": 32,
    "truncation_mode": None, "shuffle_dataset": True, "completion_only_loss": False, "assistant_only_loss": None,
    "packing_strategy": None,
}  # fmt: skip


def known() -> set[str]:
    return OTHERS | EFFECT | {*REFUSED, *SAID, *OF_TRL}


def test_every_argument_of_the_installed_versions_is_in_a_table() -> None:
    """A release with a new argument fails here: decide what packs make of it, and write it into a table above."""
    trl = pytest.importorskip("trl")
    from transformers.trainer_pt_utils import AcceleratorConfig

    nested = {f"accelerator_config.{each.name}" for each in fields(AcceleratorConfig)}
    there = {each.name for each in fields(trl.SFTConfig)} - {"accelerator_config"} | nested
    assert there == known()
    tables = [OTHERS, EFFECT, set(REFUSED), set(SAID), set(OF_TRL)]
    assert sum(map(len, tables)) == len(known()), "one is in two tables"
    tests = (
        "".join(
            file.read_text() for file in Path(__file__).parent.glob("test_*.py") if file != Path(__file__)
        )
        + (Path(__file__).parents[1] / "harness/hf_trainers.py").read_text()
    )
    assert not {name for name in EFFECT | ELSEWHERE if name.rpartition(".")[2] not in tests}


def prepared(folder: Path, name: str, value: Any, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Prepare a trainer with a value of one argument, twice; return the lines that the second logs."""
    outer, _, inner = name.rpartition(".")
    changes = {outer: {inner: value}} if outer else {name: value}
    if name in ("dataloader_persistent_workers", "dataloader_prefetch_factor"):
        changes["dataloader_num_workers"] = 1
    trainer = trainer_of(folder, **changes)
    prepare_trainer_for_packing(trainer, train_dataset=stream())
    caplog.clear()
    prepare_trainer_for_packing(trainer)
    return [record.getMessage() for record in caplog.records if record.name.startswith("streampack")]


@pytest.mark.parametrize("name", sorted(SAID.keys() - {"pad_to_multiple_of"}))
def test_an_argument_that_packs_do_not_use_is_said(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    [line] = prepared(tmp_path, name, SAID[name], caplog)
    assert f"packs do not use {name}={SAID[name]!r}; " in line


def test_settings_that_agree_with_the_packs_are_not_spoken_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not prepared(tmp_path, "data_seed", 0, caplog)
    assert not prepared(tmp_path, "train_sampling_strategy", "random", caplog)
    assert not prepared(tmp_path, "dataloader_num_workers", 2, caplog)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - ELSEWHERE))
def test_an_argument_that_cannot_be_kept_is_refused(name: str, tmp_path: Path) -> None:
    value, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"{name}={value!r} ?.*{message}"):
        packed(tmp_path, **{name: value})


def test_all_that_is_refused_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        packed(tmp_path, train_sampling_strategy="batch_rebalance", data_seed=3, neftune_noise_alpha=5.0)
    for name in ("train_sampling_strategy='batch_rebalance'", "data_seed=3", "neftune_noise_alpha=5.0"):
        assert name in str(error.value)


def test_the_order_of_rows_is_the_one_that_trainer_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="train_sampling_strategy='sequential' .* shuffle=False"):
        packed(tmp_path, stream(shuffle=True), train_sampling_strategy="sequential")
    caplog.clear()
    packed(tmp_path, stream(shuffle=False), train_sampling_strategy="sequential")
    assert not caplog.text
    packed(tmp_path, stream(shuffle=False))
    assert "Trainer would shuffle" in caplog.text
    assert "shuffle=True" in caplog.text


def test_a_collator_that_packs_do_not_use_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(tmp_path, data_collator=FlatteningCollator())
    prepare_trainer_for_packing(trainer, train_dataset=stream())
    assert "packs do not use data_collator=FlatteningCollator; " in caplog.text


def test_what_trl_does_with_rows_is_said_where_packs_hold_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from tests.integrations.test_trl import tokenizer

    rows = datasets.Dataset.from_list(
        [{"prompt": "w1 w2", "completion": " w3", "other": "w4"}] * (SAMPLES // 10)
    )
    given = {name: value for name, value in OF_TRL.items() if value is not None}
    args = settings(tmp_path, trl.SFTConfig, bf16=False, pad_to_multiple_of=8, **given)
    trainer = trl.SFTTrainer(model(), args, train_dataset=rows, processing_class=tokenizer())
    own = IterablePackedDataset(
        trainer.train_dataset,
        max_seq_len=MAX_SEQ_LEN,
        encoder=TokensEncoder(tokens="input_ids"),
        shuffle=True,
    )
    caplog.clear()
    prepare_trainer_for_packing(trainer, train_dataset=own)
    assert "packs do not use pad_to_multiple_of=8; " in caplog.text
    assert "max_length=32 has cut rows, and packs hold samples of up to 64 tokens" in caplog.text
    assert "completion_only_loss" not in caplog.text
    caplog.clear()
    other = IterablePackedDataset(samples(), max_seq_len=MAX_SEQ_LEN, shuffle=True)
    prepare_trainer_for_packing(trainer, train_dataset=other)
    for name, value in given.items():
        assert f"{name}={value!r}" in caplog.text
    assert "are not the rows of trainer.train_dataset" in caplog.text
