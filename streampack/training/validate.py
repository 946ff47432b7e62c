"""Check a config before it trains: its sections, its files, its first rows.

Builds tokenizer, sources, optimizer and schedule; neither the model nor anything that writes files.
"""

from __future__ import annotations

import difflib
import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf.errors import OmegaConfBaseException

from streampack.distributed.world import World
from streampack.instantiate import COMPONENT, build, locate, resolve, trusted_by_user
from streampack.packing.assemble import as_sample
from streampack.streaming.dataset import IterablePackedDataset
from streampack.training.config import RunConfig, config_problems, to_plain
from streampack.training.data import build_datasets, first_rows, held_out_packs, leaves_of
from streampack.training.devices import missing_device, named_device
from streampack.training.nodes import config_node_problems
from streampack.types import IGNORE_INDEX

OF_TORCHTUNES_RECIPES = frozenset(
    ["dataset", "datasets", "dataloader", "loss", "kd_loss", "tasks", "prompt", "quantizer"]
)
STEPS = 100  # of the schedule that is tried
ROWS = 4  # of a stock config's dataset


def for_torchtune(values: Mapping[str, Any]) -> bool:
    """Return whether a config is for one of torchtune's own recipes, whose keys are others."""
    return "data" not in values and not OF_TORCHTUNES_RECIPES.isdisjoint(values)


def validate(config: Any, *, recipe: str | None = None, files: bool = True) -> list[str]:
    """Return the problems of a config, one line each, which begins with the key; empty if it is well-formed.

    Args:
        config: a mapping, OmegaConf's or plain.
        recipe: the recipe of ours that it is for, if known.
        files: also open files, build the tokenizer, and read and encode the first rows of every source. False checks
            keys, values and components only.
    """
    try:
        values = to_plain(config)
    except (OmegaConfBaseException, ValueError) as error:
        return [str(error).splitlines()[0]]
    if recipe is None and for_torchtune(values):
        problems = list(config_node_problems(values, find=_installed))
        problems += list(_not_packed(values.get("dataset"), "dataset"))
        return problems or (_stock_problems(values) if files else [])
    problems = config_problems(values, recipe=recipe)
    if problems:
        return problems
    cfg = RunConfig(**values)
    problems += _training_problems(values)
    return problems + (_file_problems(cfg) if files else [])


def notes(config: Any) -> list[str]:
    """Return what a well-formed config needs and this machine lacks: no problem, if it is for another machine."""
    device = to_plain(config).get("device", "auto")
    if device == "auto" or (lack := missing_device(named_device(device))) is None:
        return []
    return [f"device={device!r}: {lack}; here the run would be refused, device=auto would take what there is"]


@contextmanager
def _noted(problems: list[str], where: str) -> Iterator[None]:
    """Append to ``problems`` what is raised in the block."""
    try:
        yield
    except Exception as error:  # tokenizers and sources of users may raise anything
        text = " ".join(str(error).split())
        text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
        has_key = text.startswith(tuple(f"{where}{end}" for end in ":. ="))
        problems.append(text if has_key else f"{where}: {text}")


def _training_problems(values: Mapping[str, Any]) -> list[str]:
    """Return the problems of device, optimizer and schedule, which are built for a model of one number."""
    problems: list[str] = []
    optimizer = None
    if (device := values.get("device", "auto")) != "auto":
        with _noted(problems, "device"):
            named_device(device)
    if values.get("optimizer"):
        with _noted(problems, "optimizer"):
            optimizer = build(values["optimizer"], [torch.nn.Parameter(torch.zeros(1))])
    if values.get("lr_scheduler") and optimizer is not None:
        with _noted(problems, "lr_scheduler"):
            build(values["lr_scheduler"], inject={"optimizer": optimizer, "num_training_steps": STEPS})
    return problems


def _file_problems(cfg: RunConfig) -> list[str]:
    problems = list(_checkpoint_problems(cfg.checkpointer))
    tokenizer = None
    with _noted(problems, "tokenizer"):
        tokenizer = build(cfg.tokenizer)
    if tokenizer is None:
        return problems  # no row can be encoded without it
    # Lists of skipped records go to a folder that is removed.
    with tempfile.TemporaryDirectory() as scratch:
        cfg = replace(cfg, output_dir=scratch, data={**cfg.data, "quarantine": None})
        with _noted(problems, "data"):
            vocab_size = _vocab_size(cfg.model)
            datasets = build_datasets(cfg, tokenizer=tokenizer, vocab_size=vocab_size, world=World())
            config = datasets.train.lane_config
            for leaf in leaves_of(config.source, config.encode):
                with _noted(problems, f"data: source {leaf.name!r}" if leaf.name else "data"):
                    _require_training(first_rows(leaf, datasets.settings))
            for name, dataset in datasets.held_out.items():
                with _noted(problems, "validation"):
                    held_out_packs(dataset, name=name, max_packs=1)
    return problems


def _require_training(dataset: IterablePackedDataset) -> None:
    """Raise ValueError unless the first pack of a dataset trains something."""
    pack = next(iter(dataset.stream()), None)
    if pack is None:
        raise ValueError("the rows make no pack; there are none, or all of them were dropped")
    if not (pack.labels != IGNORE_INDEX).any():
        raise ValueError(
            f"the first pack trains nothing: every label of its {len(pack.fragments)} sample(s) is masked, or was cut "
            "off; check the roles of the messages, overlong and max_seq_len"
        )


def _vocab_size(model: Mapping[str, Any]) -> int | None:
    """Return the size of the vocabulary if the model node names it."""
    size = model.get("vocab_size")
    return size if isinstance(size, int) else None


def _checkpoint_problems(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield missing files and unknown formats of a checkpointer node."""
    from torchtune.training.checkpointing import ModelType

    folder, kind = node.get("checkpoint_dir"), node.get("model_type")
    if kind is not None and kind not in ModelType.__members__:
        close = difflib.get_close_matches(str(kind), ModelType.__members__, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(ModelType.__members__)}"
        yield f"checkpointer.model_type={kind!r} is unknown; {hint}"
    if not isinstance(folder, str):
        return  # a node that writes the files
    if not Path(folder).is_dir():
        yield f"checkpointer.checkpoint_dir={folder!r} is no folder; download the weights, or correct the path"
        return
    names = node.get("checkpoint_files")
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and not Path(folder, name).is_file():
            yield f"checkpointer.checkpoint_files: there is no {name!r} in {folder}"


def _installed(path: str) -> Any:
    """Return a component of torchtune's recipes, or None if importing it would run a module nobody trusts."""
    package = path.split(".")[0]
    if package in ("streampack", "torch", "torchao", "torchtune", "transformers"):
        return locate(path)
    if package in trusted_by_user():
        return resolve(path)
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"_component_ {path!r}: {package} is not installed; if it lies in the working directory, --trust {package} "
            "has it checked"
        )
    return None


def _not_packed(node: Any, where: str) -> Iterator[str]:
    """Yield `packed_dataset` nodes whose recipe would drop the boundaries between samples."""
    if isinstance(node, list):
        for number, each in enumerate(node):
            yield from _not_packed(each, f"{where}.{number}")
    elif not isinstance(node, Mapping) or node.get(COMPONENT) != "streampack.packed_dataset":
        return
    elif node.get("packed") is not True:
        yield (
            f"{where}.packed={node.get('packed')!r}: write `packed: True` beside `_component_: "
            "streampack.packed_dataset`, or the recipe drops the boundaries between samples"
        )


def _stock_problems(values: Mapping[str, Any]) -> list[str]:
    """Return the problems of tokenizer, rows, optimizer and schedule in a config for torchtune's recipes."""
    problems = _training_problems(values)
    tokenizer = None
    with _noted(problems, "tokenizer"):
        tokenizer = build(values.get("tokenizer"))
    node = values.get("dataset")
    if tokenizer is not None and isinstance(node, Mapping) and "dataset" in node:
        with _noted(problems, "dataset"):
            rows = build(node["dataset"], tokenizer)
            for number in range(min(ROWS, len(rows))):
                as_sample(rows[number])
    return problems
