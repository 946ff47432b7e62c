"""The keys of a recipe's config as typed fields, and checks that open no file."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from streampack.attention import ATTENTIONS
from streampack.instantiate import COMPONENT, component_problems
from streampack.losses import LOSS_NORMS
from streampack.streaming.dataset import IterablePackedDataset
from streampack.validation import require, require_positive, wrong_arguments

Node = dict[str, Any]

REFERENCES = ("model", "data")
DEVICES = ("auto", "cpu", "cuda", "npu", "xpu")
DTYPES = ("bf16", "fp32", "fp64")


@dataclass(kw_only=True)
class Validation:
    """Which rows are held out, and how often the loss on them is measured.

    Attributes:
        fraction: of the rows to hold out, above 0 and below 1, by their content: the same rows in every run; of a
            mixture also a mapping of its sources to fractions, where those left out hold out nothing.
        source: instead of ``fraction``, a source of its own, as ``data.source``.
        max_packs: the most packs of each source that an evaluation reads.
        every: steps between two evaluations; there is one before the first step and one after the last in any case.
    """

    fraction: Any = None
    source: Node | None = None
    max_packs: int = 32
    every: int | None = None

    def __post_init__(self) -> None:
        if (self.fraction is None) == (self.source is None):
            raise ValueError(
                "validation needs a fraction of the rows, or a source of its own; give one of the two"
            )
        require_positive(self.max_packs, "validation.max_packs")
        if self.every is not None:
            require_positive(self.every, "validation.every")
        given = 0.5 if self.fraction is None else self.fraction
        for fraction in given.values() if isinstance(given, Mapping) else [given]:
            if not isinstance(fraction, int | float) or not (0 < fraction < 1 or given != fraction == 0):
                raise ValueError(
                    f"validation.fraction={fraction!r} is no fraction of the rows; give a number between 0 and 1"
                )


@dataclass(kw_only=True)
class RunConfig:
    """The config of one run. Nodes with a ``_component_`` stay plain dicts until the recipe builds them.

    Attributes:
        output_dir: the folder of checkpoints, weights and logs.
        tokenizer: a node, which is handed to the encoders.
        model: a node of one of torchtune's builders.
        checkpointer: a node of one of torchtune's: where the weights come from, and the format in which they are saved.
        optimizer: a node.
        data: ``source``, ``encoder``, and arguments of `IterablePackedDataset`.
        metric_logger: a node of one of torchtune's.
        seed: of dropout, and of the shuffled order where ``data.seed`` is not given.
        device: ``"auto"`` takes the GPU where there is one; or ``"cuda"``, ``"cpu"``.
        dtype: of weights and computation: ``"bf16"``, ``"fp32"`` or ``"fp64"``.
        validation: rows to hold out: a mapping with the keys of `Validation`.
        lr_scheduler: a node of a schedule that takes ``num_training_steps``; without one, the rate stays as it is.
        epochs: how often the data is read; without it, again and again, until ``max_steps``.
        max_steps: optimizer steps of the whole run.
        batch_size: the most packs in a forward pass of one rank.
        packs_per_step: packs in an optimizer step, over all ranks; default: one batch a rank.
        num_workers: processes that read, encode and pack, for each rank.
        loss_norm: ``"token"``, or ``"sample"``: every sample weighs the same, whatever its length.
        clip_grad_norm: the norm to which gradients are clipped.
        attention: ``"auto"``, ``"dense"`` (``"sdpa"``), ``"flex"``, ``"varlen"`` or ``"flash"``; see
            `prepare_model_for_packing`.
        verify_isolation: whether to check before the first step that no sample of a pack attends to another.
        activation_checkpointing: whether activations are computed again in the backward pass, to save memory.
        compile: whether the model is compiled.
        custom_sharded_layers: names of modules that are sharded one by one, as layers are.
        fsdp_reshard_after_forward: False keeps layers whole until the backward pass, which takes more memory.
        collective_timeout: seconds that ranks wait for the slowest one.
        checkpoint_every: steps between checkpoints; without it, only the final weights are saved.
        keep_checkpoints: how many of the newest checkpoints are kept.
        async_checkpoint: whether to write while training continues, from a copy in memory.
        save_adapter_weights_only: LoRA: whether to leave out the merged weights.
        document_masking: pretraining: False lets a token attend to all documents before it in its pack.
        z_loss: pretraining: the weight of the squared log-normalizer in the loss; PaLM's was 1e-4.
        loss: dpo: a node of a loss that compares pairs: torchtune's ``DPOLoss`` or ``RSOLoss``, or `PreferenceLoss`.
        reference: dpo: what the policy is compared with: ``"model"``, its weights at the beginning; or ``"data"``, the
            numbers in the field ``ref_logps``.
        ref_checkpointer: dpo: a node of another checkpointer, from which the reference gets its weights.
        resume: whether to go on from the newest checkpoint in ``output_dir``, or from step 0 if there is none.
        resume_from: another run's checkpoint, from which a second phase begins.
        continue_data: with ``resume_from``: whether to read on behind what that run has packed.
        log_every: steps between two logs.
        log_rows: whether to keep the loss of every sequence, for ``streampack trace``.
        profiler: a node of one of torchtune's profilers.
    """

    output_dir: str
    tokenizer: Node
    model: Node
    checkpointer: Node
    optimizer: Node
    data: Node
    metric_logger: Node
    seed: int = 0
    device: str = "auto"
    dtype: str = "bf16"
    validation: Validation | None = None
    lr_scheduler: Node | None = None
    epochs: int | None = None
    max_steps: int | None = None
    batch_size: int = 1
    packs_per_step: int | None = None
    num_workers: int = 0
    loss_norm: str = "token"
    clip_grad_norm: float | None = None
    attention: str = "auto"
    verify_isolation: bool = True
    activation_checkpointing: bool = False
    compile: bool = False
    custom_sharded_layers: list[str] = field(default_factory=list)
    fsdp_reshard_after_forward: bool = True
    collective_timeout: float = 600
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    async_checkpoint: bool = False
    save_adapter_weights_only: bool = False
    document_masking: bool = True
    z_loss: float = 0.0
    loss: Node | None = None
    reference: str = "model"
    ref_checkpointer: Node | None = None
    resume: bool = False
    resume_from: str | None = None
    continue_data: bool = False
    log_every: int = 1
    log_rows: bool = False
    profiler: Node | None = None

    def __post_init__(self) -> None:
        for name in (
            "batch_size", "packs_per_step", "epochs", "max_steps", "checkpoint_every", "keep_checkpoints", "log_every",
        ):  # fmt: skip
            if getattr(self, name) is not None:
                require_positive(getattr(self, name), name)
        self._check_nodes()
        require_positive(self.num_workers, "num_workers", least=0)
        require_positive(self.seed, "seed", least=0)
        require_device(self.device)
        require(self.dtype, "dtype", DTYPES)
        if self.epochs is None and self.max_steps is None:
            raise ValueError("neither epochs nor max_steps is set; say when the run ends")
        require(self.loss_norm, "loss_norm", LOSS_NORMS)
        require(self.attention, "attention", ATTENTIONS)
        require(self.reference, "reference", REFERENCES)
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ValueError(
                f"clip_grad_norm={self.clip_grad_norm} is no norm; give a number above 0, or null"
            )
        if self.continue_data and self.resume_from is None:
            raise ValueError(
                "continue_data=True reads on behind another run; name its checkpoint with resume_from, or leave it "
                "out"
            )
        if self.data.get("pad_seqs_to", 1) != 1 and not self.document_masking:
            raise ValueError(
                f"data.pad_seqs_to={self.data['pad_seqs_to']} pads every document, and document_masking=False lets "
                "those after it attend to that padding; leave one of the two out"
            )
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss={self.z_loss} is no weight; give 0, or a small number such as 1e-4")
        if not self.collective_timeout > 0:
            raise ValueError(
                f"collective_timeout={self.collective_timeout} is no time to wait; give seconds, at least as many as "
                "the slowest rank may need for a step and a checkpoint"
            )

    def _check_nodes(self) -> None:
        for each in fields(self):
            node = getattr(self, each.name)
            if isinstance(node, dict) and each.name != "data" and COMPONENT not in node:
                raise ValueError(f"{each.name} names no {COMPONENT}, so there is nothing to build")
        if lacking := [key for key in ("source", "max_seq_len") if self.data.get(key) is None]:
            raise ValueError(f"data.{lacking[0]} is missing")
        if isinstance(encoder := self.data.get("encoder"), str):
            raise ValueError(
                f"data.encoder={encoder!r} is text; write it as a component: {{_component_: {encoder}}}"
            )
        most, wanted = self.model.get("max_seq_len"), self.data["max_seq_len"]
        if isinstance(most, int) and isinstance(wanted, int) and wanted > most:
            raise ValueError(
                f"data.max_seq_len={wanted} is above model.max_seq_len={most}, the positions that the model has; lower "
                "data.max_seq_len, or raise model.max_seq_len if the builder takes it"
            )


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


def read_config(config: Any, *, built: Collection[str] | None = None) -> RunConfig:
    """Check a config, OmegaConf's or a plain mapping, and return it as a `RunConfig`. Nothing is built.

    Args:
        config: the config.
        built: keys that the caller uses and whose components it builds; the others may be missing, or need libraries
            that are not installed. None: all.

    Raises:
        ValueError: with a line for each key that is unknown, or has a value of another type.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    problems: list[str] = []
    try:
        merged, problems = _merged(config, built)
        plain: dict[str, Any] = OmegaConf.to_container(merged, resolve=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:  # because of a key that was removed, if one was
        raise ValueError("\n".join(problems or [_named(error)])) from None
    data = plain["data"] if isinstance(plain["data"], dict) else {}
    packing = {key: value for key, value in data.items() if key not in ("source", "encoder")}
    problems += [f"data: {problem}" for problem in wrong_arguments(IterablePackedDataset, packing)]
    for key in plain if built is None else built:
        problems += component_problems(plain[key], key)
    if problems:
        raise ValueError("\n".join(problems))
    cfg = OmegaConf.to_object(merged)
    assert isinstance(cfg, RunConfig)
    # What else is wrong with data shows here, and not after the weights were read.
    try:
        IterablePackedDataset([{"tokens": [0], "labels": [0]}], **packing)
    except (TypeError, ValueError) as error:
        raise ValueError(f"data: {error}") from None
    return cfg


def _merged(config: Any, built: Collection[str] | None) -> tuple[Any, list[str]]:
    """Return a config merged into `RunConfig` without the keys that do not fit, and a message for each of these.

    Keys that are not ``built`` and missing get a value that nobody uses.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    given, problems, refused = OmegaConf.create(config).copy(), list[str](), set[str]()
    if not isinstance(given, DictConfig):
        raise ValueError(f"a config is a mapping of keys to values, this is a {type(config).__name__}")
    while True:
        try:
            merged: Any = OmegaConf.merge(OmegaConf.structured(RunConfig), given)
            break
        except OmegaConfBaseException as error:  # it raises at the first
            key = error.full_key or ""
            above, _, last = key.rpartition(".")
            node = OmegaConf.select(given, above) if above else given
            problems.append(_named(error))
            if not last or node is None or last not in node:
                raise ValueError("\n".join(problems)) from None
            refused.add(key)
            del node[last]
    try:
        missing = OmegaConf.missing_keys(merged) - refused
    except OmegaConfBaseException as error:  # perhaps of a variable that was no key, and is removed
        raise ValueError("\n".join(problems or [_named(error)])) from None
    if built is not None:
        for name in missing.difference(built):
            merged[name] = {"output_dir": "", "data": {"source": "", "max_seq_len": 1}}.get(
                name, {COMPONENT: ""}
            )
        if merged.epochs is None and merged.max_steps is None:
            merged.epochs = 1
        missing &= {*built}
    if missing:
        problems.append(
            f"missing: {', '.join(sorted(missing))}; the keys without a default must be in a config"
        )
    return merged, problems


def _named(error: Any) -> str:
    """Return the first line of an error of OmegaConf's, after its key."""
    return f"{f'{error.full_key}: ' if error.full_key else ''}{str(error).splitlines()[0]}"


def to_plain(config: Any) -> dict[str, Any]:
    """Return a config as plain dicts and lists, with its interpolations resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        plain = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(str(error).partition("\n")[0]) from None
    if not isinstance(plain, dict):
        raise ValueError(f"a config is a mapping of keys to values, this is a {type(plain).__name__}")
    return {str(key): value for key, value in plain.items()}
