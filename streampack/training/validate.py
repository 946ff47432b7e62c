"""Check a config before it trains: its sections, its files, its first rows, and that no sample of a pack sees another.

Builds tokenizer, sources, optimizer, schedule, and the model without its weights; nothing that writes files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune import training

from streampack.attention import Inputs
from streampack.attention.prepare import prepare_model_for_packing
from streampack.attention.probe import find_leaks, probe_length
from streampack.instantiate import build
from streampack.sources.bad_records import quarantine_for
from streampack.streaming.dataset import IterablePackedDataset
from streampack.training.checks import loss_problems, read_config
from streampack.training.config import RunConfig
from streampack.training.data import build_datasets, entries_of, first_rows, held_out_packs, trains
from streampack.training.model import find_adapters
from streampack.training.preferences import shares_prefixes
from streampack.training.world import World
from streampack.validation import did_you_mean

SCHEDULE_STEPS = 100  # number of training steps given to the schedule that is built
PROBED_LAYERS = 2
"""First layers of a model that `validate` probes. In torchtune's models every kind of layer is among them."""
PROBED_TOKENS = 64
"""Tokens of the pack in which it does: with those of a run, or of a window, it would take minutes on a CPU."""


def validate(config: Any, *, files: bool = True, recipe: str | None = None) -> list[str]:
    """Return the problems of a config, each a line that begins with the key; an empty list if there are none.

    Args:
        config: a mapping, OmegaConf's or plain.
        files: also open files, build the tokenizer, read and encode the first rows of every source, and look for leaks
            in the model's first layers, with random weights. False checks keys, values and components only.
        recipe: the name of the recipe that the config is for; None: any.
    """
    try:
        cfg = read_config(config)
    except ValueError as error:
        return str(error).splitlines()
    problems = training_problems(cfg)
    with _collect_errors(problems, "model" if recipe is None else f"recipe {recipe}"):
        if recipe is None:
            find_adapters(cfg)
        else:
            adapters = None if recipe == "dpo" else recipe == "lora_finetune"
            require_recipe(cfg, adapters=adapters, pairs=recipe == "dpo")
    return problems + (_file_problems(cfg) if files else [])


@contextmanager
def _collect_errors(problems: list[str], where: str) -> Iterator[None]:
    """Append an exception raised in the block to ``problems``, as a line that begins with the key ``where``."""
    try:
        yield
    except Exception as error:  # tokenizers and sources of users may raise anything
        text = " ".join(str(error).split())
        text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
        has_key = text.startswith(tuple(f"{where}{end}" for end in ":. ="))
        problems.append(text if has_key else f"{where}: {text}")


def training_problems(cfg: RunConfig) -> list[str]:
    """Return the problems of optimizer and schedule, by building them for a model of one parameter.

    A run asks, too, before it reads weights.
    """
    problems: list[str] = []
    optimizer = None
    with _collect_errors(problems, "optimizer"):
        optimizer = build(cfg.optimizer, [torch.nn.Parameter(torch.zeros(1))])
    if optimizer is not None:
        with _collect_errors(problems, "lr_scheduler"):
            build(cfg.lr_scheduler, inject={"optimizer": optimizer, "num_training_steps": SCHEDULE_STEPS})
    return problems


def require_recipe(cfg: RunConfig, *, adapters: bool | None, pairs: bool) -> bool:
    """Refuse a config that does not fit a recipe, before it reads weights; return whether adapters are trained.

    ``adapters`` and ``pairs`` are what the recipe trains, see `streampack.training.run.Run.open`.
    """
    if problems := list(loss_problems(cfg, pairs=pairs)):
        raise ValueError("\n".join(problems))
    found = find_adapters(cfg, wanted=adapters)
    if cfg.save_adapter_weights_only and not found:
        raise ValueError(
            "save_adapter_weights_only: the model has no adapters, and nothing would be saved; remove the key, or run "
            "lora_finetune"
        )
    return found


def _file_problems(cfg: RunConfig) -> list[str]:
    """Return the problems that show when files are opened and the first rows are encoded."""
    problems = list(_checkpoint_problems(cfg.checkpointer))
    tokenizer = None
    with _collect_errors(problems, "tokenizer"):
        tokenizer = build(cfg.tokenizer)
    if tokenizer is None:
        return problems  # no row can be encoded without it
    # Lists of skipped records are written to a temporary folder, so that nothing is left of the check.
    with tempfile.TemporaryDirectory() as scratch, _collect_errors(problems, "data"):
        kept = quarantine_for((cfg.data or {}).get("skip_bad"))
        data = {**(cfg.data or {}), "skip_bad": kept and replace(kept, folder=None)}
        cfg = replace(cfg, output_dir=scratch, data=data)
        vocab_size = cfg.model.get("vocab_size")
        datasets = build_datasets(
            cfg,
            tokenizer=tokenizer,
            vocab_size=vocab_size if isinstance(vocab_size, int) else None,
            world=World(),
        )
        config = datasets.train.lane_config
        for entry in entries_of(config.source, config.encode):
            with _collect_errors(problems, f"data: source {entry.name!r}" if entry.name else "data"):
                _require_training(first_rows(entry, datasets.settings))
        for name, dataset in datasets.held_out.items():
            with _collect_errors(problems, "validation"):
                held_out_packs(dataset, name=name, max_packs=1)
        if not problems and cfg.verify_isolation and cfg.document_masking:
            with _collect_errors(problems, "model"):
                _probe(cfg, groups=cfg.loss is not None and shares_prefixes(config))
    return problems


def _probe(cfg: RunConfig, *, groups: bool) -> None:
    """Check the isolation of the model's first layers on the CPU, with random weights: a leak is in the code.

    A builder that cannot build without weights is left to the run, which probes its whole model.
    """
    dtype = training.get_dtype(cfg.dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(cfg.seed or 0)
    try:
        with training.set_default_dtype(dtype), torch.device("meta"):
            model: Any = build(cfg.model)
        del model.layers[PROBED_LAYERS:]
        model.to_empty(device="cpu")
        with training.set_default_dtype(dtype), torch.no_grad():
            for module in model.modules():
                if hasattr(module, "rope_init"):  # computes a buffer
                    module.rope_init()
            for value in model.parameters():
                value.fill_(1.0) if value.ndim == 1 else value.normal_(std=0.05, generator=generator)
    except (RuntimeError, NotImplementedError, AttributeError):  # quantized, or not of torchtune's form
        return
    # The kernel of "flash" needs a GPU.
    inputs = prepare_model_for_packing(model, attention="auto" if cfg.attention == "flash" else cfg.attention)
    size = min((cfg.data or {})["max_seq_len"], PROBED_TOKENS)
    require_isolation(model, inputs, max_seq_len=size, groups=groups)


def require_isolation(model: nn.Module, inputs: Inputs, *, max_seq_len: int, groups: bool = False) -> None:
    """Check that samples of a pack do not attend to one another in a model; a collective if the model is sharded.

    Makes 12 passes of one pack of 256 tokens, or of a longer pack if the model has a window. Model and random
    generators are afterwards as before. See `find_leaks`, also for ``groups``.
    """
    report = find_leaks(
        model, inputs=inputs, max_seq_len=probe_length(model, max_length=max_seq_len), groups=groups
    )
    if not report.ok:
        raise ValueError(f"{report}\nverify_isolation=False lets it train like this")


def _require_training(dataset: IterablePackedDataset) -> None:
    """Check that the first pack of a dataset trains something."""
    pack = next(iter(dataset.stream()))
    if not trains(pack):
        raise ValueError(
            f"the first pack trains nothing: every label of its {len(pack.fragments)} sample(s) is masked, or was cut "
            "off; check the roles of the messages, overlong and max_seq_len"
        )


def _checkpoint_problems(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield missing files and unknown formats of a checkpointer node."""
    from torchtune.training.checkpointing import ModelType

    folder, kind = node.get("checkpoint_dir"), node.get("model_type")
    if kind is not None and kind not in ModelType.__members__:
        hint = (
            did_you_mean(kind, ModelType.__members__) or f"; choose one of {', '.join(ModelType.__members__)}"
        )
        yield f"checkpointer.model_type={kind!r} is unknown{hint}"
    if not isinstance(folder, str):
        return  # it is a node, which would write the files when it is built
    if not Path(folder).is_dir():
        yield f"checkpointer.checkpoint_dir={folder!r} is no folder; download the weights, or correct the path"
        return
    names = node.get("checkpoint_files")
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and not Path(folder, name).is_file():
            yield f"checkpointer.checkpoint_files: there is no {name!r} in {folder}"
