"""Hints for unknown keys of a config: torchtune's keys, and misspelt ones."""

from __future__ import annotations

from collections.abc import Collection

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
    "loss": "the loss is built in: cross-entropy over the trained tokens, divided once; see loss_norm",
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
    "context_parallel_dim": "a sequence is never split over ranks here",
    "quantizer": "no recipe quantizes weights after training; for QLoRA name a qlora_ builder under model",
    "low_cpu_ram": "remove the key",
    "cudnn_deterministic_mode": "remove the key",
    "trusted_packages": "a config cannot widen what it may name; add --trust NAME to the command",
}
"""Keys of torchtune's configs for full and LoRA fine-tuning that have another name here, or none."""


def hint_for(key: str, known: Collection[str], *, top: bool = False) -> str:
    """Return the end of an error message for a key that is not ``known``; ``top`` for keys at the top of a config.

    >>> hint_for("shufle", ["shuffle", "seed"])
    "; did you mean 'shuffle'?"
    """
    if top and key in TORCHTUNE_KEYS:
        return f"; {TORCHTUNE_KEYS[key]}"
    return did_you_mean(key, known) or f"; the keys are {', '.join(sorted(known))}"
