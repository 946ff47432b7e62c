"""Hints for unknown keys of a config: keys of torchtune, of Trainer and TRL, and misspelt ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from streampack.validation import did_you_mean

TORCHTUNE_KEYS = {
    "gradient_accumulation_steps": "packs_per_step is the packs of an optimizer step over all ranks; "
    "batches accumulate until it is reached",
    "log_every_n_steps": "write log_every",
    "log_level": "set Python's logging",
    "log_peak_memory_stats": "GPU memory is always logged",
    "enable_activation_checkpointing": "write activation_checkpointing",
    "enable_activation_offloading": "activations are not offloaded here; set activation_checkpointing=True, or lower "
    "batch_size or data.max_seq_len",
    "ac_mode": "activation_checkpointing=True checkpoints every layer",
    "ac_option": "activation_checkpointing=True checkpoints every layer",
    "resume_from_checkpoint": "write resume=True to go on from the newest checkpoint in output_dir",
    "optimizer_in_bwd": "the optimizer steps after the backward pass, never in it; remove the key",
    "max_steps_per_epoch": "write max_steps, which counts the steps of the whole run",
    "dataset": "write data.source, and data.encoder for rows that are no tokens yet",
    "datasets": "write data.source: {_component_: streampack.Mix, sources: [...]}",
    "dataset_val": "write validation.source",
    "run_val_every_n_steps": "write validation.every",
    "batch_size_val": "held-out packs take batch_size",
    "shuffle": "write data.shuffle",
    "max_seq_length": "write data.max_seq_len",
    "collate_fn": "packs are collated here; remove the key",
    "dataloader": "write num_workers and batch_size",
    "save_every_n_steps": "write checkpoint_every",
    "keep_last_n_checkpoints": "write keep_checkpoints",
    "enable_async_checkpointing": "write async_checkpoint",
    "fsdp": "start several processes (--nproc_per_node) and the model is sharded over them",
    "fsdp_cpu_offload": "weights are not offloaded here; start more processes, or lower batch_size",
    "memory_efficient_fsdp_wrap": "name large modules in custom_sharded_layers",
    "tensor_parallel_dim": "a model is sharded over all ranks (FSDP2) here, without tensor parallelism",
    "tensor_parallel_plan": "a model is sharded over all ranks (FSDP2) here, without tensor parallelism",
    "data_parallel_shard_dim": "a model is sharded over all ranks (FSDP2) here",
    "data_parallel_replicate_dim": "a model is sharded over all ranks (FSDP2) here",
    "context_parallel_dim": "recipes split no sequence over ranks; examples/ has how, for your own loop",
    "quantizer": "no recipe quantizes weights after training; for QLoRA name a qlora_ builder under model",
    "low_cpu_ram": "remove the key",
    "cudnn_deterministic_mode": "remove the key",
    "trusted_packages": "a config cannot widen what it may name; add --trust NAME to the command",
}
"""Keys of torchtune's configs for full and LoRA fine-tuning that have another name here, or none."""

TRAINER_KEYS = {
    "per_device_train_batch_size": "write batch_size, which counts packs",
    "per_device_eval_batch_size": "held-out packs take batch_size",
    "learning_rate": "write optimizer.lr",
    "weight_decay": "write optimizer.weight_decay",
    "adam_beta1": "write optimizer.betas",
    "adam_beta2": "write optimizer.betas",
    "optim": "write optimizer: {_component_: torch.optim.AdamW, lr: ...}",
    "lr_scheduler_type": "write lr_scheduler: {_component_: ...}, torchtune's schedule or one of transformers'",
    "warmup_steps": "write lr_scheduler.num_warmup_steps",
    "warmup_ratio": "write lr_scheduler.num_warmup_steps",
    "num_train_epochs": "write epochs",
    "max_grad_norm": "write clip_grad_norm",
    "bf16": "write dtype: bf16",
    "fp16": "write dtype: bf16, which needs no loss scaling; fp16 is not offered",
    "gradient_checkpointing": "write activation_checkpointing",
    "torch_compile": "write compile",
    "attn_implementation": "write attention",
    "dataloader_num_workers": "write num_workers",
    "logging_steps": "write log_every",
    "eval_steps": "write validation.every",
    "eval_strategy": "write validation.every",
    "save_steps": "write checkpoint_every",
    "save_strategy": "write checkpoint_every, in steps",
    "save_total_limit": "write keep_checkpoints",
    "report_to": "write metric_logger: {_component_: ...}",
    "data_seed": "write data.seed",
    "max_length": "write data.max_seq_len",
    "packing": "packing is always on; remove the key",
    "packing_strategy": "write data.strategy",
    "padding_free": "packs have no padding but at their end; remove the key",
    "group_by_length": "packs have hardly any padding; remove the key",
    "completion_only_loss": "write data.encoder: {_component_: streampack.ChatEncoder}",
    "assistant_only_loss": "write data.encoder: {_component_: streampack.ChatEncoder}, which trains the answers",
    "dataset_text_field": "write data.encoder: {_component_: streampack.TextEncoder, column: ...}",
}
"""Arguments of transformers' Trainer and TRL's SFTTrainer that have another name in a config of ours, or none."""


DATA_KEYS = {
    "packed": "packing is always on; remove the key",
    "train_on_input": "write it under data.encoder.message_transform",
    "column_map": "write it under data.encoder.message_transform",
    "new_system_prompt": "write it under data.encoder.message_transform",
    "message_transform": "write it under data.encoder",
    "column": "write it under data.encoder",
    "paths": "write it under data.source",
    "data_files": "write it under data.source",
    "split": "write it under data.source",
    "name": "write it under data.source",
    "streaming": "write it under data.source",
    "max_length": "write max_seq_len",
    "pad_to_multiple_of": "make max_seq_len a multiple of it",
    "pad_seq_length_to_mult": "write pad_seqs_to",
}
"""Keys of a torchtune ``dataset`` node, and of ours, that are not keys of ``data``."""

NO_HINTS: Mapping[str, str] = MappingProxyType({})


def hint_for(key: str, known: Collection[str], *, elsewhere: Mapping[str, str] = NO_HINTS) -> str:
    """Return the end of an error message for a key that is not ``known``; ``elsewhere`` has hints for other names.

    >>> hint_for("shufle", ["shuffle", "seed"])
    "; did you mean 'shuffle'?"
    >>> hint_for("save_steps", ["checkpoint_every"], elsewhere=TRAINER_KEYS)
    '; write checkpoint_every'
    """
    if key in elsewhere:
        return f"; {elsewhere[key]}"
    return did_you_mean(key, known) or f"; the keys are {', '.join(sorted(known))}"
