"""The keys of a recipe's config as typed fields. `streampack.training.checks` reads and checks one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streampack.validation import require_positive

Node = dict[str, Any]

REQUIRED = ("output_dir", "tokenizer", "model", "checkpointer", "optimizer", "metric_logger")
"""Keys that each config must have; without them they are empty."""
REFERENCES = ("model", "data")
DEVICES = ("auto", "cpu", "cuda", "npu", "xpu")
DTYPES = ("auto", "bf16", "fp32", "fp64")


@dataclass(kw_only=True)
class Validation:
    """Which rows are held out. The loss on them is measured before the first step and after the last, and in between
    every `RunConfig.run_val_every_n_steps`.

    Attributes:
        fraction: of the rows to hold out, above 0 and below 1, by their content: the same rows in every run; of a
            mixture also a mapping of its sources to fractions; the other sources hold out nothing.
        source: instead of ``fraction``, a source of its own, as ``data.source``.
        max_packs: the most packs of each source that an evaluation reads.
    """

    fraction: Any = None
    source: Node | None = None
    max_packs: int = 32

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.source is None):
            raise ValueError(
                "validation needs a fraction of the rows, or a source of its own; give one of the two"
            )
        require_positive(self.max_packs, "validation.max_packs")
        given = 0.5 if self.fraction is None else self.fraction
        for fraction in given.values() if isinstance(given, Mapping) else [given]:
            if not isinstance(fraction, int | float) or not (0 < fraction < 1 or given != fraction == 0):
                raise ValueError(
                    f"validation.fraction={fraction!r} is no fraction of the rows; give a number between 0 and 1"
                )


@dataclass(kw_only=True)
class RunConfig:
    """The config of one run. Keys that torchtune has mean here what they mean in its recipes.

    Nodes with a ``_component_`` stay plain dicts until the recipe builds them.

    Attributes:
        output_dir: the folder of checkpoints, weights and logs.
        tokenizer: a node; encoders and torchtune's dataset builders receive what it builds.
        model: a node of one of torchtune's builders.
        checkpointer: a node of one of torchtune's: where the weights come from, and the format in which they are saved.
        optimizer: a node.
        metric_logger: a node of one of torchtune's.
        dataset: a node of one of torchtune's dataset builders, or a list of them. ``packed: True`` packs their samples
            to ``tokenizer.max_seq_len`` tokens while the model trains; otherwise samples are padded.
        data: instead of ``dataset``: ``source``, ``encoder``, and arguments of `IterablePackedDataset`.
        shuffle: of ``dataset``: whether its rows are shuffled; ``data`` has a key of its own.
        collate_fn: of ``dataset`` where it is padded: makes a batch of samples, by its dotted name.
        dataset_val: a node of torchtune's, of the rows on which the loss is measured.
        validation: instead of ``dataset_val``, rows to hold out: a mapping with the keys of `Validation`.
        run_val_every_n_steps: steps between two measurements of the loss on held-out rows; null: before and after.
        batch_size_val: packs or samples in a forward pass over held-out rows; null: ``batch_size``.
        seed: of dropout and order; null: drawn, and kept in the checkpoints.
        device: ``"auto"`` takes the GPU where there is one; or ``"cuda"``, ``"cpu"``.
        dtype: of weights and computation: ``"bf16"``, ``"fp32"`` or ``"fp64"``; ``"auto"`` is bf16 on a GPU that
            computes in it, otherwise fp32.
        cudnn_deterministic_mode: torchtune's ``debug_mode`` of `torchtune.training.set_seed`.
        lr_scheduler: a node of a schedule that takes ``num_training_steps``; without one, the rate stays as it is.
        epochs: how often the data is read; without it, again and again, until ``max_steps``.
        max_steps: optimizer steps of the whole run.
        max_steps_per_epoch: the run makes at most ``epochs`` times as many steps. It does not read rows again before
            it has read all others, as torchtune would in the next epoch.
        batch_size: packs in a forward pass of one rank; samples, where they are padded.
        gradient_accumulation_steps: forward passes of one rank in an optimizer step. A resumed run keeps the packs a
            step of its checkpoint on any number of ranks.
        num_workers: processes that read, encode and pack, for each rank.
        loss: full and lora: one of torchtune's cross-entropies, or none; the loss is divided once, by the trained
            tokens of a step. ``torchtune.modules.loss.LinearCrossEntropyLoss`` never holds all logits in memory. dpo:
            one that compares pairs: torchtune's ``DPOLoss`` or ``RSOLoss``, or `PreferenceLoss`.
        loss_norm: ``"token"``, or ``"sample"``: every sample weighs the same, whatever its length.
        clip_grad_norm: the norm to which gradients are clipped; ``inf`` only logs it.
        attention: ``"auto"``, ``"dense"`` (``"sdpa"``), ``"flex"``, ``"varlen"`` or ``"flash"``; see
            `prepare_model_for_packing`.
        verify_isolation: whether to check before the first step that no sample of a pack attends to another.
        compile: whether model and loss are compiled.
        enable_activation_checkpointing: whether activations are computed again in the backward pass, to save memory.
        enable_activation_offloading: whether they wait in the host's memory for the backward pass.
        ac_mode: ``"selective"`` checkpoints every layer whose number is a multiple of ``ac_option``, ``"full"`` all.
        ac_option: see ``ac_mode``.
        optimizer_in_bwd: whether each weight is updated in the backward pass, which then frees its gradient.
        custom_sharded_layers: names of modules that are sharded one by one, as layers are.
        fsdp_cpu_offload: whether sharded weights, gradients and optimizer states wait in the host's memory.
        fsdp: a mapping with ``cpu_offload``, for ``fsdp_cpu_offload``.
        fsdp_reshard_after_forward: False keeps layers gathered until the backward pass, which takes more memory.
        data_parallel_replicate_dim: groups of ranks that each hold a copy of the sharded model (HSDP).
        tensor_parallel_dim: ranks that compute each layer together. They read the same data.
        tensor_parallel_plan: a node of one of torchtune's plans for it.
        low_cpu_ram: QLoRA: whether the final weights are made in a file instead of in memory.
        quantizer: a node of one of torchtune's quantizers for training (QAT).
        fake_quant_after_n_steps: QAT: steps that are made before numbers are rounded.
        collective_timeout: seconds that ranks wait for the slowest one.
        save_every_n_steps: steps between checkpoints; without it, there is only one where a signal ends the run.
        keep_last_n_checkpoints: how many of the newest checkpoints are kept.
        enable_async_checkpointing: whether to write while training continues, from a copy in memory.
        save_adapter_weights_only: LoRA: whether to write no merged weights.
        document_masking: pretraining: False lets a token attend to all documents before it in its pack.
        z_loss: pretraining: the weight of the squared log-normalizer in the loss; PaLM's was 1e-4.
        reference: dpo: what the policy is compared with: ``"model"``, its weights at the beginning; or ``"data"``, the
            numbers in the field ``ref_logps``.
        ref_checkpointer: dpo: a node of another checkpointer, from which the reference gets its weights.
        resume_from_checkpoint: whether to continue from the newest checkpoint in ``output_dir``, or from step 0 if
            there is none.
        resume_from: another run's checkpoint, from which a second phase begins.
        continue_data: with ``resume_from``: whether to read on after what that run has packed.
        log_every_n_steps: steps between two logs; null: every step.
        log_peak_memory_stats: whether the peak GPU memory of each rank is logged.
        log_rows: whether to keep the loss of every sequence, for ``streampack trace``.
        profiler: a node of one of torchtune's profilers.
    """

    output_dir: str = field(default_factory=str)
    tokenizer: Node = field(default_factory=dict)
    model: Node = field(default_factory=dict)
    checkpointer: Node = field(default_factory=dict)
    optimizer: Node = field(default_factory=dict)
    metric_logger: Node = field(default_factory=dict)
    dataset: Any = None
    data: Node | None = None
    shuffle: bool | None = None
    collate_fn: str | None = None
    dataset_val: Node | None = None
    validation: Validation | None = None
    run_val_every_n_steps: int | None = None
    batch_size_val: int | None = None
    seed: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    cudnn_deterministic_mode: int | None = None
    lr_scheduler: Node | None = None
    epochs: int | None = None
    max_steps: int | None = None
    max_steps_per_epoch: int | None = None
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    num_workers: int = 0
    loss: Node | None = None
    loss_norm: str = "token"
    clip_grad_norm: float | None = None
    attention: str = "auto"
    verify_isolation: bool = True
    compile: bool = False
    enable_activation_checkpointing: bool = False
    enable_activation_offloading: bool = False
    ac_mode: str | None = None
    ac_option: int | None = None
    optimizer_in_bwd: bool = False
    custom_sharded_layers: list[str] | None = None
    fsdp_cpu_offload: bool = False
    fsdp: Node | None = None
    fsdp_reshard_after_forward: bool = True
    data_parallel_replicate_dim: int = 1
    tensor_parallel_dim: int = 1
    tensor_parallel_plan: Node | None = None
    low_cpu_ram: bool = False
    quantizer: Node | None = None
    fake_quant_after_n_steps: int | None = None
    collective_timeout: float = 600
    save_every_n_steps: int | None = None
    keep_last_n_checkpoints: int = 2
    enable_async_checkpointing: bool = False
    save_adapter_weights_only: bool = False
    document_masking: bool = True
    z_loss: float = 0.0
    reference: str = "model"
    ref_checkpointer: Node | None = None
    resume_from_checkpoint: bool = False
    resume_from: str | None = None
    continue_data: bool = False
    log_every_n_steps: int | None = None
    log_peak_memory_stats: bool = True
    log_rows: bool = False
    profiler: Node | None = None

    def __post_init__(self) -> None:
        self.fsdp_cpu_offload |= bool((self.fsdp or {}).get("cpu_offload"))

    @property
    def most_steps(self) -> float:
        """Steps after which a run ends, whatever its data; infinity if only the data end it."""
        most = math.inf if self.max_steps is None else self.max_steps
        if self.max_steps_per_epoch is not None and self.epochs is not None:
            most = min(most, self.epochs * self.max_steps_per_epoch)
        return most

    @property
    def packs_of_rank(self) -> int:
        """Packs of one rank in an optimizer step."""
        return self.batch_size * self.gradient_accumulation_steps


def require_device(device: str) -> None:
    """Check that recipes know the kind of a device, given as ``cuda`` or ``cuda:1``."""
    kind, colon, number = device.partition(":")
    if kind not in DEVICES or (
        colon and not number.isdecimal()
    ):  # no near word: that of "gpu" would be "xpu"
        raise ValueError(
            f"device={device!r} is unknown; choose one of {', '.join(map(repr, DEVICES))}; a GPU is 'cuda', and mps "
            "has no float64, in which metrics are summed"
        )
