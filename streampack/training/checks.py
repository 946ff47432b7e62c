"""Read a config and check it without opening a file: all that is wrong with it, in one list."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from streampack.attention import ATTENTIONS
from streampack.instantiate import COMPONENT, component_problems
from streampack.losses import LOSS_NORMS
from streampack.packing.encoders.shaped import AUTO, SHAPE_KEYS
from streampack.streaming.dataset import IterablePackedDataset
from streampack.training.config import DTYPES, REFERENCES, RunConfig, require_device
from streampack.training.multi_dataset import with_dataset
from streampack.validation import require, require_positive, wrong_arguments

COUNTS = (
    "batch_size", "batch_size_val", "gradient_accumulation_steps", "epochs", "max_steps", "max_steps_per_epoch",
    "run_val_every_n_steps", "save_every_n_steps", "keep_last_n_checkpoints", "log_every_n_steps",
    "tensor_parallel_dim", "data_parallel_replicate_dim",
)  # fmt: skip
"""Keys whose value is null or a whole number from 1 on."""
CROSS_ENTROPIES = (
    "torchtune.modules.loss.CEWithChunkedOutputLoss", "torch.nn.CrossEntropyLoss",
)  # fmt: skip
"""Losses that a config may name for recipes other than dpo."""
DISTILLATION = "is of torchtune's distillation; run its recipe, with streampack.packed_dataset as the dataset"
FP8 = "is not in these recipes; set dtype=bf16"
NOT_USED = {
    "packs_per_step": "is now gradient_accumulation_steps, the batches of one rank in a step",
    "resume": "is now resume_from_checkpoint", "checkpoint_every": "is now save_every_n_steps",
    "keep_checkpoints": "is now keep_last_n_checkpoints", "log_every": "is now log_every_n_steps",
    "activation_checkpointing": "is now enable_activation_checkpointing",
    "context_parallel_dim": "is not in these recipes; streampack_examples.context_parallel shows it",
    "data_parallel_shard_dim": "follows from the ranks; set data_parallel_replicate_dim and tensor_parallel_dim",
    "teacher_model": DISTILLATION, "teacher_checkpointer": DISTILLATION, "kd_loss": DISTILLATION,
    "kd_ratio": DISTILLATION, "max_seq_len": "is that of the tokenizer; set tokenizer.max_seq_len",
    "log_level": "is not used; Python's logging decides",
    "memory_efficient_fsdp_wrap": "is not used; name large modules in custom_sharded_layers",
    "enable_fp8_training": FP8, "fp8_recipe_name": FP8,
    "expert_parallel_dim": "is not in these recipes; shard by data_parallel_replicate_dim and tensor_parallel_dim",
    "save_last_epoch_only": "is always so; save_every_n_steps keeps more",
    "activation_offloading_use_streams": "is not used; enable_activation_offloading takes torchtune's default",
    "train_from_scratch": "is not used; streampack.training.weights.random_weights makes a checkpoint to begin from",
}  # fmt: skip
"""Keys that users of torchtune may expect, and what to do about each."""
OF_RESUMES = ("adapter_checkpoint", "recipe_checkpoint", "should_load_recipe_state", "resume_from_checkpoint")
"""Arguments of torchtune's checkpointers for a resume of its own recipes."""


def read_config(config: Any, *, built: Collection[str] | None = None) -> RunConfig:
    """Check a config, OmegaConf's or a plain mapping, and return it as a `RunConfig`. Nothing is built.

    Args:
        config: the config.
        built: keys that the caller uses and whose components it builds; the others may be missing, or need libraries
            that are not installed. None: all.

    Raises:
        ValueError: with a line for each key that is unknown, or has a value that cannot be.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    problems: list[str] = []
    try:
        merged, given, problems = _merged(config, built)
        plain: dict[str, Any] = OmegaConf.to_container(merged, resolve=True)  # type: ignore[assignment]
        cfg = OmegaConf.to_object(OmegaConf.create(merged))
    except OmegaConfBaseException as error:  # because of a key that was removed, if one was
        raise ValueError("\n".join(problems or [_named(error)])) from None
    except ValueError as error:  # of `Validation`
        raise ValueError("\n".join([*problems, str(error)])) from None
    assert isinstance(cfg, RunConfig)
    for key in plain:
        if key in given:
            problems += component_problems(plain[key], key)
    problems += _problems(cfg, built)
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))
    return cfg


def _problems(cfg: RunConfig, built: Collection[str] | None) -> Iterator[str]:
    """Yield what is wrong with the values of a config, each by itself or beside others."""
    for check in (_numbers, _choices, _data, _beside, _nodes):
        if built is None or (check is _data and "data" in built):
            yield from check(cfg)


def _message(check: Callable[..., Any], *args: Any, **settings: Any) -> Iterator[str]:
    """Yield the message of a check that raises ValueError."""
    try:
        check(*args, **settings)
    except ValueError as error:
        yield str(error)


def _numbers(cfg: RunConfig) -> Iterator[str]:
    for name in COUNTS:
        if getattr(cfg, name) is not None:
            yield from _message(require_positive, getattr(cfg, name), name)
    for name in ("num_workers", "seed", "fake_quant_after_n_steps"):
        if getattr(cfg, name) is not None:
            yield from _message(require_positive, getattr(cfg, name), name, least=0)
    if cfg.clip_grad_norm is not None and not cfg.clip_grad_norm > 0:
        yield f"clip_grad_norm={cfg.clip_grad_norm} is no norm; give a number above 0, or null"
    if not 0 <= cfg.z_loss < math.inf:
        yield f"z_loss={cfg.z_loss} is no weight; give 0, or a small number such as 1e-4"
    if not cfg.collective_timeout > 0:
        yield (
            f"collective_timeout={cfg.collective_timeout} is no time to wait; give seconds, at least as many as "
            "the slowest rank may need for a step and a checkpoint"
        )


def _choices(cfg: RunConfig) -> Iterator[str]:
    yield from _message(require_device, cfg.device)
    if cfg.dtype == "fp16":
        yield "dtype=fp16 needs loss scaling, which these recipes do not have; set bf16 or fp32"
    else:
        yield from _message(require, cfg.dtype, "dtype", DTYPES)
    yield from _message(require, cfg.loss_norm, "loss_norm", LOSS_NORMS)
    yield from _message(require, cfg.attention, "attention", ATTENTIONS)
    yield from _message(require, cfg.reference, "reference", REFERENCES)
    if cfg.ac_mode is not None:
        yield from _message(require, cfg.ac_mode, "ac_mode", ("selective", "full"))
    if unknown := sorted({*(cfg.fsdp or {})} - {"cpu_offload"}):
        yield f"fsdp.{unknown[0]} is not used; fsdp takes cpu_offload"
    if "left_pad_sequence" in (cfg.collate_fn or ""):
        yield f"collate_fn={cfg.collate_fn} is for inference only; name torchtune.data.padded_collate_sft"


def _data(cfg: RunConfig) -> Iterator[str]:
    """Yield what is wrong with the keys that say which rows are trained, and how they are packed."""
    if (cfg.data is None) == (cfg.dataset is None):
        both = "are two answers" if cfg.data is not None else "are both missing"
        yield f"dataset and data {both} to what is trained; give one: torchtune's builder, or a source of streampack's"
    elif cfg.data is not None:
        yield from _own_data(cfg, cfg.data)
    else:
        yield from _dataset(cfg)


def _own_data(cfg: RunConfig, data: dict[str, Any]) -> Iterator[str]:
    lacking = [f"data.{key} is missing" for key in ("source", "max_seq_len") if data.get(key) is None]
    yield from lacking
    if isinstance(encoder := data.get("encoder"), str) and encoder != AUTO:
        yield f"data.encoder={encoder!r} is text; write it as a component: {{_component_: {encoder}}}"
    for key in ("collate_fn", "dataset_val"):
        if getattr(cfg, key) is not None:
            instead = "leave it out" if key == "collate_fn" else "set validation.source"
            yield f"{key} is for dataset; with data, {instead}"
    if cfg.shuffle is not None:
        yield "shuffle is for dataset; with data, set data.shuffle"
    if data.get("pad_seqs_to", 1) != 1 and not cfg.document_masking:
        yield (
            f"data.pad_seqs_to={data['pad_seqs_to']} pads every document, and document_masking=False lets those after "
            "it attend to that padding; leave one of the two out"
        )
    yield from _too_long(cfg, "data.max_seq_len", data.get("max_seq_len"))
    packing = {key: value for key, value in data.items() if key not in ("source", "encoder", *SHAPE_KEYS)}
    if unfit := [f"data: {problem}" for problem in wrong_arguments(IterablePackedDataset, packing)]:
        yield from unfit
    elif not lacking:
        # What else is wrong with data shows here, and not after the weights were read.
        try:
            IterablePackedDataset([{"tokens": [0], "labels": [0]}], **packing)
        except (TypeError, ValueError) as error:
            yield f"data: {error}"


def _dataset(cfg: RunConfig) -> Iterator[str]:
    nodes = cfg.dataset if isinstance(cfg.dataset, list) else [cfg.dataset]
    if not nodes or not all(isinstance(node, dict) and COMPONENT in node for node in nodes):
        yield f"dataset={cfg.dataset!r} names no {COMPONENT}, so there is nothing to build"
        return
    packed = {node.get("packed", False) for node in nodes}
    if any(isinstance(value, str) for value in packed):
        return  # as the builder's argument says
    if not packed <= {True, False}:
        yield f"dataset.packed={(packed - {True, False}).pop()!r} is neither true nor false"
    elif len(packed) > 1:
        yield "dataset: some of its nodes are packed and some are not; give all the same"
    elif packed == {True} and cfg.tokenizer.get("max_seq_len") is None:
        yield "dataset.packed=True needs the length of a pack; set tokenizer.max_seq_len, such as 4096"
    elif packed == {True} and cfg.collate_fn is not None:
        yield f"collate_fn={cfg.collate_fn} is for padded samples, and dataset.packed=True packs them; remove one"
    if cfg.validation is not None and cfg.validation.source is not None:
        yield "validation.source is for data; with dataset, set dataset_val"
    if (longest := cfg.tokenizer.get("max_seq_len")) is not None:
        yield from _message(require_positive, longest, "tokenizer.max_seq_len")
    yield from _too_long(cfg, "tokenizer.max_seq_len", longest)


def _too_long(cfg: RunConfig, name: str, wanted: Any) -> Iterator[str]:
    most = cfg.model.get("max_seq_len")
    if isinstance(most, int) and isinstance(wanted, int) and wanted > most:
        yield (
            f"{name}={wanted} is above model.max_seq_len={most}, the positions that the model has; lower {name}, or "
            "raise model.max_seq_len if the builder takes it"
        )


def _beside(cfg: RunConfig) -> Iterator[str]:
    """Yield keys that do not go together, those that torchtune refuses among them."""
    steps, clip = cfg.gradient_accumulation_steps, cfg.clip_grad_norm
    refused = [
        (
            cfg.epochs is None and cfg.max_steps is None,
            "neither epochs nor max_steps is set; say when the run ends",
        ),
        (
            cfg.max_steps_per_epoch is not None and cfg.epochs is None,
            f"max_steps_per_epoch={cfg.max_steps_per_epoch} without epochs says nothing; set epochs, or max_steps",
        ),
        (
            cfg.continue_data and cfg.resume_from is None,
            "continue_data=True reads on behind another run; name its checkpoint with resume_from, or leave it out",
        ),
        (
            cfg.validation is not None and cfg.dataset_val is not None,
            "validation and dataset_val both say which rows are held out; give one of the two",
        ),
        (
            cfg.optimizer_in_bwd and steps > 1,
            f"gradient_accumulation_steps={steps} sums gradients, which optimizer_in_bwd=True frees; leave one out",
        ),
        (
            cfg.optimizer_in_bwd and clip is not None,
            f"clip_grad_norm={clip} needs all gradients at once, which optimizer_in_bwd=True frees; leave one out",
        ),
        (
            cfg.enable_activation_offloading and not cfg.enable_activation_checkpointing,
            "enable_activation_offloading=True needs enable_activation_checkpointing=True, as in torchtune",
        ),
        (
            cfg.enable_activation_offloading and cfg.device == "cpu",
            "enable_activation_offloading=True moves activations off a GPU, and device=cpu has none; leave it out",
        ),
        (
            cfg.ac_mode == "selective" and (cfg.ac_option is None or cfg.ac_option < 1),
            "ac_mode='selective' needs ac_option, the distance of the layers that are checkpointed: 2 is every second",
        ),
        (
            cfg.ac_mode != "selective" and cfg.ac_option is not None,
            f"ac_option={cfg.ac_option} is of ac_mode='selective', and ac_mode is {cfg.ac_mode}; set that, or remove "
            "ac_option",
        ),
        (
            cfg.cudnn_deterministic_mode not in (None, 0, 1, 2),
            f"cudnn_deterministic_mode={cfg.cudnn_deterministic_mode} is no mode of torch's; give 0, 1 (warn), 2 "
            "(error), or null",
        ),
        (
            cfg.ac_mode is not None and cfg.enable_activation_checkpointing,
            f"ac_mode={cfg.ac_mode!r} chooses layers, and enable_activation_checkpointing=True takes all; keep one",
        ),
        (
            cfg.compile and cfg.quantizer is not None,
            "compile=True does not work with quantizer in torchtune; set compile=False",
        ),
        (
            cfg.tensor_parallel_dim > 1 and cfg.tensor_parallel_plan is None,
            f"tensor_parallel_dim={cfg.tensor_parallel_dim} needs tensor_parallel_plan, such as {{_component_: "
            "torchtune.models.llama3.base_llama_tp_plan}",
        ),
        (
            cfg.tensor_parallel_dim > 1 and bool(cfg.optimizer.get("fused", False)),
            "optimizer.fused=True does not work with tensor_parallel_dim above 1; set optimizer.fused=False",
        ),
        (
            cfg.fake_quant_after_n_steps is not None and cfg.quantizer is None,
            f"fake_quant_after_n_steps={cfg.fake_quant_after_n_steps} needs quantizer, which is missing",
        ),
    ]  # fmt: skip
    yield from (message for holds, message in refused if holds)


def _nodes(cfg: RunConfig) -> Iterator[str]:
    for each in fields(cfg):
        node = getattr(cfg, each.name)
        if isinstance(node, dict) and each.name not in ("data", "fsdp", "dataset") and COMPONENT not in node:
            yield f"{each.name} names no {COMPONENT}, so there is nothing to build"
    for key in OF_RESUMES:
        if value := cfg.checkpointer.get(key):
            yield (
                f"checkpointer.{key}={value} is not used: a run resumes from checkpoints of streampack's own; remove "
                "it, or set resume_from_checkpoint=True to continue from the newest in output_dir"
            )


def loss_problems(cfg: RunConfig, *, pairs: bool, adapters: bool | None = None) -> Iterator[str]:
    """Yield what does not fit the loop of a recipe, which compares ``pairs``, or trains ``adapters``, or neither."""
    name = None if cfg.loss is None else cfg.loss[COMPONENT]
    if pairs:
        if name is None:
            yield (
                "loss is missing; name one that compares pairs, such as loss: {_component_: "
                "torchtune.rlhf.loss.DPOLoss, beta: 0.1}"
            )
        elif name in CROSS_ENTROPIES:
            yield f"loss: {name} compares no pairs; name torchtune.rlhf.loss.DPOLoss, or run full_finetune"
        for key, plain in (("loss_norm", "token"), ("z_loss", 0), ("document_masking", True)):
            if (value := getattr(cfg, key)) != plain:
                yield f"{key}={value} is for cross-entropy, and dpo compares pairs; remove the key"
        if cfg.quantizer is not None:
            yield "quantizer: dpo does not train with rounding; remove the key, or run full_finetune or lora_finetune"
        return
    for key, plain in (("z_loss", 0), ("document_masking", True), ("optimizer_in_bwd", False)):
        if adapters and (value := getattr(cfg, key)) != plain:
            yield f"{key}={value} is not in the recipe for adapters; remove the key, or copy full_finetune's loop"
    if cfg.loss is not None and name not in CROSS_ENTROPIES:
        yield (
            f"loss: {name} is not the cross-entropy of this recipe; name {CROSS_ENTROPIES[0]}, or run dpo for a loss "
            "that compares pairs"
        )
    elif cfg.loss is not None:
        used = {"num_output_chunks", "ignore_index"} if name == CROSS_ENTROPIES[0] else {"ignore_index"}
        if (chunks := cfg.loss.get("num_output_chunks")) is not None:
            yield from _message(require_positive, chunks, "loss.num_output_chunks")
        for key, value in cfg.loss.items():
            if key not in (COMPONENT, *used) or (key == "ignore_index" and value != -100):
                yield f"loss.{key}={value} is not used: all labels but -100 are trained, and weigh the same; remove it"
    for key in ("ref_checkpointer", "reference"):
        if (value := getattr(cfg, key)) not in (None, "model"):
            yield f"{key}={value}: this recipe has no reference; remove the key, or run dpo"


def _merged(config: Any, built: Collection[str] | None) -> tuple[Any, set[str], list[str]]:
    """Return a config merged into `RunConfig`, its keys that can be built, and a message for each that does not fit.

    Keys that do not fit are removed. Keys that are missing get a value that nobody uses.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    given, problems, refused = OmegaConf.create(config).copy(), list[str](), set[str]()
    if not isinstance(given, DictConfig):
        raise ValueError(f"a config is a mapping of keys to values, this is a {type(config).__name__}")
    if "datasets" in given or "dataloader" in given:
        given = OmegaConf.create(with_dataset(to_plain(given)))
    for name in (each.name for each in fields(RunConfig) if each.default is MISSING):
        if name in given and OmegaConf.select(given, name, throw_on_missing=False) is None:
            problems.append(f"{name} is null; the run needs one")
            refused.add(name)
            given[name] = "???"  # OmegaConf's word for what is missing; other keys may refer to it
    while True:
        try:
            merged: Any = OmegaConf.merge(OmegaConf.structured(RunConfig), given)
            break
        except OmegaConfBaseException as error:  # it raises at the first
            key = error.full_key or ""
            above, _, last = key.rpartition(".")
            node = OmegaConf.select(given, above) if above else given
            reason = NOT_USED.get(key)
            if reason is None or not _asks_for_nothing(key, node[key]):
                problems.append(_slip(given, key) or _named(error) if reason is None else f"{key} {reason}")
            if not last or node is None or last not in node:
                raise ValueError("\n".join(problems)) from None
            refused.add(key)
            del node[last]
    try:
        # Values inside of nodes may refer to one that is missing.
        unfilled = {name for name in OmegaConf.missing_keys(merged) if name in RunConfig.__dataclass_fields__}
        for name in unfilled:
            merged[name] = "" if name == "output_dir" else {COMPONENT: ""}
        missing = (unfilled | OmegaConf.missing_keys(merged)) - refused
    except OmegaConfBaseException as error:  # perhaps of a variable that was no key, and is removed
        raise ValueError("\n".join(problems or [_named(error)])) from None
    if missing := missing if built is None else missing & {*built}:
        problems.append(
            f"missing: {', '.join(sorted(missing))}; the keys without a default must be in a config"
        )
    keys = {str(key) for key in merged} if built is None else {*built}
    return merged, keys - unfilled, problems


def _slip(given: Any, key: str) -> str | None:
    """Return a message for a key that belongs into a node of the config, and for text in place of a node; else None."""
    if (known := RunConfig.__dataclass_fields__.get(key)) is not None:
        text = str(known.type).startswith("Node") and isinstance(given[key], str)
        return (
            f"{key}={given[key]!r} is text; write it as a component: {{{COMPONENT}: {given[key]}}}"
            if text
            else None
        )
    for name, node in given.items_ex(resolve=False):
        if isinstance(node, Mapping) and key in node:
            return f"{key} is no key by itself; set {name}.{key}"
    return None


def _asks_for_nothing(key: str, value: Any) -> bool:
    """Return whether torchtune, too, does nothing with this value of a key that is not used here."""
    return value is None or value is False or (key.endswith("_dim") and value in (1, -1))


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
