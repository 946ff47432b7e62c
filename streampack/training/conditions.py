"""Conditions that the values of a config must meet, each with the sentence that reports a violation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from typing import Any, get_args

from streampack.attention import ATTENTIONS
from streampack.instantiate import COMPONENT
from streampack.losses import LOSS_NORMS
from streampack.packing.encoders.shaped import AUTO, SHAPE_KEYS
from streampack.streaming.dataset import IterablePackedDataset
from streampack.training.config import DTYPES, REFERENCES, RunConfig, require_device
from streampack.validation import did_you_mean, require, require_positive, wrong_arguments

Condition = tuple[Callable[[RunConfig], Any], str]

COUNTS = (
    "batch_size", "batch_size_val", "gradient_accumulation_steps", "epochs", "max_steps", "max_steps_per_epoch",
    "run_val_every_n_steps", "save_every_n_steps", "keep_last_n_checkpoints", "log_every_n_steps",
    "tensor_parallel_dim", "data_parallel_replicate_dim",
)  # fmt: skip
"""Keys whose value is null or an integer from 1."""
WORDS = {
    "dtype": DTYPES, "loss_norm": LOSS_NORMS, "attention": ATTENTIONS, "reference": REFERENCES,
    "ac_mode": ("selective", "full"),
}  # fmt: skip
"""Keys whose value is null or one of these words."""
LINEAR_LOSS = "torchtune.modules.loss.LinearCrossEntropyLoss"
"""The loss that never holds all logits; torchtune has it after 0.6.1, and recipes need its name only."""
CROSS_ENTROPIES = (
    "torchtune.modules.loss.CEWithChunkedOutputLoss", "torch.nn.CrossEntropyLoss", LINEAR_LOSS,
)  # fmt: skip
"""Losses that a config may name for recipes other than dpo."""
COLUMNS = (
    "input", "output", "instruction", "image", "images", "texts", "conversations", "messages", "prompt", "chosen",
    "rejected",
)  # fmt: skip
"""Keys of a ``column_map`` that torchtune's builders read; they ignore others without a word."""
OF_RESUMES = ("adapter_checkpoint", "recipe_checkpoint", "should_load_recipe_state", "resume_from_checkpoint")
"""Arguments of torchtune's checkpointers for a resume of its own recipes."""

NOT_IN_LORA = "is not in the recipe for adapters; remove the key, or copy full_finetune's loop"

# Each message may name keys of the config in braces.
CONDITIONS: tuple[Condition, ...] = (
    (lambda c: c.clip_grad_norm is not None and not c.clip_grad_norm > 0,
     "clip_grad_norm={clip_grad_norm} is no norm; give a number above 0, or null"),
    (lambda c: not 0 <= c.z_loss < math.inf, "z_loss={z_loss} is no weight; give 0, or a small number such as 1e-4"),
    (lambda c: not c.collective_timeout > 0,
     "collective_timeout={collective_timeout} is no time to wait; give the seconds that the slowest rank "
     "may need for a step and a checkpoint"),
    (lambda c: c.cudnn_deterministic_mode not in (None, 0, 1, 2),
     "cudnn_deterministic_mode={cudnn_deterministic_mode} is no mode of torch's; give 0, 1 (warn), 2 (error), or null"),
    (lambda c: "left_pad_sequence" in (c.collate_fn or ""),
     "collate_fn={collate_fn} is for inference only; name torchtune.data.padded_collate_sft"),
    (lambda c: c.epochs is None and c.max_steps is None,
     "neither epochs nor max_steps is set; say when the run ends"),
    (lambda c: c.max_steps_per_epoch is not None and c.epochs is None,
     "max_steps_per_epoch={max_steps_per_epoch} without epochs says nothing; set epochs, or max_steps"),
    (lambda c: c.continue_data and c.resume_from is None,
     "continue_data=True continues the data of another run; name its checkpoint with resume_from, or remove it"),
    (lambda c: c.validation is not None and c.dataset_val is not None,
     "validation and dataset_val both say which rows are held out; give one of the two"),
    (lambda c: c.run_val_every_n_steps and c.validation is None and c.dataset_val is None,
     "run_val_every_n_steps={run_val_every_n_steps} needs held-out rows; set dataset_val or validation, or remove it"),
    (lambda c: c.batch_size_val and c.validation is None and c.dataset_val is None,
     "batch_size_val={batch_size_val} needs held-out rows; set dataset_val or validation, or remove it"),
    (lambda c: c.optimizer_in_bwd and c.gradient_accumulation_steps > 1,
     "gradient_accumulation_steps={gradient_accumulation_steps} sums gradients, which optimizer_in_bwd=True frees; "
     "leave one out"),
    (lambda c: c.optimizer_in_bwd and c.clip_grad_norm is not None,
     "clip_grad_norm={clip_grad_norm} needs all gradients at once, which optimizer_in_bwd=True frees; leave one out"),
    (lambda c: c.enable_activation_offloading and not c.enable_activation_checkpointing,
     "enable_activation_offloading=True needs enable_activation_checkpointing=True, as in torchtune"),
    (lambda c: c.enable_activation_offloading and c.device == "cpu",
     "enable_activation_offloading=True moves activations off a GPU, and device=cpu has none; leave it out"),
    (lambda c: c.ac_mode == "selective" and (c.ac_option or 0) < 1,
     "ac_mode='selective' needs ac_option, the distance of the layers that are checkpointed: 2 is every second"),
    (lambda c: c.ac_mode != "selective" and c.ac_option is not None,
     "ac_option={ac_option} is of ac_mode='selective', and ac_mode is {ac_mode}; set that, or remove ac_option"),
    (lambda c: c.ac_mode is not None and c.enable_activation_checkpointing,
     "ac_mode={ac_mode!r} chooses layers, and enable_activation_checkpointing=True takes all; keep one"),
    (lambda c: c.compile and c.quantizer is not None,
     "compile=True does not work with quantizer in torchtune; set compile=False"),
    (lambda c: c.tensor_parallel_dim > 1 and c.tensor_parallel_plan is None,
     "tensor_parallel_dim={tensor_parallel_dim} needs tensor_parallel_plan, such as {{_component_: "
     "torchtune.models.llama3.base_llama_tp_plan}}"),
    (lambda c: c.tensor_parallel_dim > 1 and c.optimizer.get("fused"),
     "optimizer.fused=True does not work with tensor_parallel_dim above 1; set optimizer.fused=False"),
    (lambda c: c.fake_quant_after_n_steps is not None and c.quantizer is None,
     "fake_quant_after_n_steps={fake_quant_after_n_steps} needs quantizer, which is missing"),
    (lambda c: c.low_cpu_ram and "qlora" not in str(c.model.get(COMPONENT)) and not c.model.get("quantize_base"),
     "low_cpu_ram=True is for models with a quantized base (QLoRA); remove it"),
)  # fmt: skip
OF_PAIRS: tuple[Condition, ...] = (
    (lambda c: c.loss is None,
     "loss is missing; name one that compares pairs, such as loss: {{_component_: torchtune.rlhf.loss.DPOLoss, beta: "
     "0.1}}"),
    (lambda c: c.loss is not None and c.loss.get(COMPONENT) in CROSS_ENTROPIES,
     "loss: {loss[_component_]} compares no pairs; name torchtune.rlhf.loss.DPOLoss, or run full_finetune"),
    (lambda c: c.loss_norm != "token",
     "loss_norm={loss_norm} is for cross-entropy, and dpo compares pairs; remove the key"),
    (lambda c: c.z_loss, "z_loss={z_loss} is for cross-entropy, and dpo compares pairs; remove the key"),
    (lambda c: not c.document_masking,
     "document_masking=False is for cross-entropy, and dpo compares pairs; remove the key"),
    (lambda c: c.quantizer is not None,
     "quantizer: dpo does not train with rounding; remove the key, or run full_finetune or lora_finetune"),
    (lambda c: "padded_collate_sft" in (c.collate_fn or ""),
     "collate_fn={collate_fn} is for single samples, and dpo compares pairs; remove the key"),
)  # fmt: skip
"""Conditions of the recipe dpo."""
OF_CROSS_ENTROPY: tuple[Condition, ...] = (
    (lambda c: c.loss is not None and c.loss.get(COMPONENT, CROSS_ENTROPIES[0]) not in CROSS_ENTROPIES,
     f"loss: {{loss[_component_]}} is not the cross-entropy of this recipe; name {CROSS_ENTROPIES[0]}, or run dpo for "
     "a loss that compares pairs"),
    (lambda c: "padded_collate_dpo" in (c.collate_fn or ""),
     "collate_fn={collate_fn} is for preference pairs; remove the key, or run dpo"),
    (lambda c: c.ref_checkpointer is not None,
     "ref_checkpointer is set, and this recipe has no reference; remove the key, or run dpo"),
    (lambda c: c.reference != "model",
     "reference={reference}: this recipe has no reference; remove the key, or run dpo"),
)  # fmt: skip
"""Conditions of the other recipes."""
OF_ADAPTERS: tuple[Condition, ...] = (
    (lambda c: c.z_loss, f"z_loss={{z_loss}} {NOT_IN_LORA}"),
    (lambda c: not c.document_masking, f"document_masking=False {NOT_IN_LORA}"),
    (lambda c: c.optimizer_in_bwd, f"optimizer_in_bwd=True {NOT_IN_LORA}"),
)
"""Conditions of the recipe lora_finetune besides those of `OF_CROSS_ENTROPY`."""


def problems_of(cfg: RunConfig, built: Collection[str] | None) -> Iterator[str]:
    """Yield what is wrong with the values of a config; ``built`` as for `read_config`."""
    if built is None or "data" in built:
        yield from _data(cfg)
    if built is None:
        yield from _values(cfg)
        yield from _apply(CONDITIONS, cfg)
        yield from _nodes(cfg)


def recipe_problems(cfg: RunConfig, *, pairs: bool, adapters: bool | None = None) -> Iterator[str]:
    """Yield what does not fit the loop of a recipe, which compares ``pairs``, or trains ``adapters``, or neither."""
    yield from _apply(OF_PAIRS if pairs else OF_CROSS_ENTROPY, cfg)
    if adapters:
        yield from _apply(OF_ADAPTERS, cfg)
    if pairs or cfg.loss is None or (name := cfg.loss.get(COMPONENT)) not in CROSS_ENTROPIES:
        return
    if (chunks := cfg.loss.get("num_output_chunks")) is not None:
        yield from message_from(require_positive, chunks, "loss.num_output_chunks")
    used = {COMPONENT, "ignore_index", *["num_output_chunks"] * (name != CROSS_ENTROPIES[1])}
    for key, value in cfg.loss.items():
        if key not in used or (key == "ignore_index" and value != -100):
            yield f"loss.{key}={value} is not used: all labels but -100 are trained, and weigh the same; remove it"


def _apply(conditions: tuple[Condition, ...], cfg: RunConfig) -> Iterator[str]:
    for holds, message in conditions:
        if holds(cfg):
            yield message.format_map(vars(cfg))


def message_from(check: Callable[..., Any], *args: Any, **settings: Any) -> Iterator[str]:
    """Yield the message of a check that raises ValueError."""
    try:
        check(*args, **settings)
    except ValueError as error:
        yield str(error)


def _values(cfg: RunConfig) -> Iterator[str]:
    """Yield numbers and words that a key cannot have."""
    least = dict.fromkeys(COUNTS, 1) | dict.fromkeys(("num_workers", "seed", "fake_quant_after_n_steps"), 0)
    for name, lowest in least.items():
        if (value := getattr(cfg, name)) is not None:
            yield from message_from(require_positive, value, name, least=lowest)
    if isinstance(rank := cfg.model.get("lora_rank"), int):
        yield from message_from(require_positive, rank, "model.lora_rank")
    yield from message_from(require_device, cfg.device)
    for name, words in WORDS.items():
        hint = "; fp16 needs loss scaling, which these recipes do not have" * (getattr(cfg, name) == "fp16")
        if (value := getattr(cfg, name)) is not None:
            yield from message_from(require, value, name, words, hint=hint)
    if unknown := sorted({*(cfg.fsdp or {})} - {"cpu_offload"}):
        yield f"fsdp.{unknown[0]} is not used; fsdp takes cpu_offload"


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
    for key, instead in (
        ("collate_fn", "remove it"),
        ("dataset_val", "set validation.source"),
        ("shuffle", "set data.shuffle"),
    ):
        if getattr(cfg, key) is not None:
            yield f"{key} is for dataset; with data, {instead}"
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
        # Everything else that is wrong with data shows here, before the weights are read.
        try:
            IterablePackedDataset([{"tokens": [0], "labels": [0]}], **packing)
        except (TypeError, ValueError) as error:
            yield f"data: {error}"


def _dataset(cfg: RunConfig) -> Iterator[str]:
    nodes = cfg.dataset if isinstance(cfg.dataset, list) else [cfg.dataset]
    if not nodes or not all(isinstance(node, dict) and COMPONENT in node for node in nodes):
        yield f"dataset={cfg.dataset!r} names no {COMPONENT}, so there is nothing to build"
        return
    for node in [*nodes, cfg.dataset_val or {}]:
        for name in node.get("column_map") or ():
            if name not in COLUMNS:
                hint = did_you_mean(name, COLUMNS) or f"; torchtune knows {', '.join(COLUMNS)}"
                yield f"dataset.column_map: {name!r} is not read{hint}"
        if node.get("streaming"):
            yield (
                "dataset: torchtune's datasets have no length with streaming=True; remove it, or read the stream by "
                "data: {source: {_component_: streampack.HFSource, ...}, encoder: ...}"
            )
        if node.get("packed") and str(node.get(COMPONENT)).startswith("torchtune.datasets.multimodal."):
            yield (
                f"dataset: {node[COMPONENT]} has images, which torchtune's models take padded only; set packed: False"
            )
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
        yield from message_from(require_positive, longest, "tokenizer.max_seq_len")
    yield from _too_long(cfg, "tokenizer.max_seq_len", longest)


def _too_long(cfg: RunConfig, name: str, wanted: Any) -> Iterator[str]:
    most = cfg.model.get("max_seq_len")
    if isinstance(most, int) and isinstance(wanted, int) and wanted > most:
        yield (
            f"{name}={wanted} is above model.max_seq_len={most}, the positions that the model has; lower {name}, or "
            "raise model.max_seq_len if the builder takes it"
        )


def _nodes(cfg: RunConfig) -> Iterator[str]:
    for each in fields(cfg):
        node = getattr(cfg, each.name)
        if (
            node
            and isinstance(node, dict)
            and each.name not in ("data", "fsdp", "dataset")
            and COMPONENT not in node
        ):
            yield f"{each.name} names no {COMPONENT}, so there is nothing to build"
    for key in OF_RESUMES:
        if value := cfg.checkpointer.get(key):
            yield (
                f"checkpointer.{key}={value} is not used: a run resumes from checkpoints of streampack's own; remove "
                "it, or set resume_from_checkpoint=True to continue from the newest in output_dir"
            )
    if adapted := cfg.model.get("lora_attn_modules"):
        from torchtune.modules.peft import LORA_ATTN_MODULES

        for name in adapted if isinstance(adapted, list) else [adapted]:
            yield from message_from(require, name, "model.lora_attn_modules", get_args(LORA_ATTN_MODULES))
