"""Check a config for a recipe: what its keys, model and files show, then a run that stops before its first step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune.modules import TransformerSelfAttentionLayer, peft
from torchtune.training.checkpointing import ModelType

from streampack.attention import Inputs
from streampack.attention.probe import find_leaks
from streampack.attention.probe_packs import probe_length
from streampack.instantiate import COMPONENT, build
from streampack.training.checks import checked
from streampack.training.conditions import CROSS_ENTROPIES, message_from, recipe_problems
from streampack.training.config import RunConfig
from streampack.validation import did_you_mean, require

SCHEDULE_STEPS = 100  # number of training steps given to the schedule that is built


class Checked(Exception):
    """Ends a run that was only to be checked, before its first step."""


def validate(
    config: Any, *, recipe: str | None = None, train_of: Callable[[str], Callable[..., Any]] | None = None
) -> list[str]:
    """Return the problems of a config, each a line that begins with the key; an empty list if there are none.

    Args:
        config: a mapping, OmegaConf's or plain.
        recipe: the name of the recipe that the config is for; None: the one that fits.
        train_of: returns the function ``train`` of a recipe. It is called to read the weights, the first batch and the
            rows held out, and to look for leaks in the model; what it writes goes to a temporary folder. None: no file
            is opened.
    """
    from omegaconf import OmegaConf

    recipe = recipe or _recipe_of(checked(config)[0])
    pairs, adapters = recipe == "dpo", recipe == "lora_finetune"
    _, problems = check(config, adapters=None if pairs else adapters, pairs=pairs, files=train_of is not None)
    if train_of is None or problems:
        return problems
    with tempfile.TemporaryDirectory() as scratch:
        scratched = OmegaConf.merge(config, {"output_dir": scratch, "checkpointer": {"output_dir": scratch}})
        try:
            return _caught("", lambda: train_of(recipe)(scratched, check=True))
        except Checked:
            return []


def _recipe_of(cfg: RunConfig | None) -> str:
    if cfg is None:
        return "full_finetune"
    if cfg.loss is not None and cfg.loss.get(COMPONENT, CROSS_ENTROPIES[0]) not in CROSS_ENTROPIES:
        return "dpo"
    return "lora_finetune" if "lora" in str(cfg.model.get(COMPONENT)) else "full_finetune"


def read_for_recipe(config: Any, *, adapters: bool | None, pairs: bool) -> RunConfig:
    """Read a config for a recipe; raise ValueError with a line for each problem, before any weights are read.

    ``adapters`` and ``pairs`` are what the recipe trains, see `streampack.training.run.open_run`.
    """
    cfg, problems = check(config, adapters=adapters, pairs=pairs)
    if cfg is None or problems:
        raise ValueError("\n".join(problems))
    return cfg


def check(
    config: Any, *, adapters: bool | None, pairs: bool, files: bool = True
) -> tuple[RunConfig | None, list[str]]:
    """Return a config, and everything that can be seen to be wrong with it; ``files``: with files of weights.

    Optimizer and schedule are built for a model of one parameter, the model without its weights.
    """
    cfg, problems = checked(config)
    if cfg is None:
        return None, problems
    problems += recipe_problems(cfg, pairs=pairs, adapters=adapters)

    def sound(key: str) -> bool:
        return bool(getattr(cfg, key).get(COMPONENT)) and not any(each.startswith(key) for each in problems)

    made: list[Any] = []
    if sound("optimizer"):
        parameters = [nn.Parameter(torch.zeros(1))]
        problems += _caught("optimizer", lambda: made.append(build(cfg.optimizer, parameters)))
    if made and cfg.lr_scheduler and sound("lr_scheduler"):
        inject = {"optimizer": made[0], "num_training_steps": SCHEDULE_STEPS}
        problems += _caught("lr_scheduler", lambda: build(cfg.lr_scheduler, inject=inject) and None)
    if sound("model"):
        problems += _caught("model", lambda: _model_problems(cfg, adapters=adapters))
    for key in ("checkpointer", "ref_checkpointer") if files else ():
        if getattr(cfg, key) and sound(key):
            problems += _checkpoint_problems(key, getattr(cfg, key))
    return cfg, problems


def _caught(where: str, act: Callable[[], Iterable[str] | None]) -> list[str]:
    """Return the messages of a function, or that of the error which it raises, in a line that begins with a key."""
    try:
        return list(act() or ())
    except Checked:
        raise
    except Exception as error:  # tokenizers and sources of users may raise anything
        text = " ".join(str(error).split())
        text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
        return [f"{where}: {text}" if where else text]


def _model_problems(cfg: RunConfig, *, adapters: bool | None) -> Iterator[str]:
    with torch.device("meta"):
        model = build(cfg.model)
    name, found = cfg.model[COMPONENT], bool(peft.get_adapter_params(model))
    if adapters and not found:
        yield (
            f"model: {name} has no adapters to train; name one of torchtune's lora_ or qlora_ models, or run "
            "full_finetune"
        )
    if adapters is False and found:
        yield (
            f"model: {name} has adapters, and this recipe trains all weights; run lora_finetune, or name a builder "
            "without adapters"
        )
    if cfg.save_adapter_weights_only and not found:
        yield (
            "save_adapter_weights_only: the model has no adapters, and nothing would be saved; remove the key, or run "
            "lora_finetune"
        )
    layers = sum(isinstance(each, TransformerSelfAttentionLayer) for each in model.modules())
    if layers and (cfg.ac_option or 0) > layers:
        yield f"ac_option={cfg.ac_option} is above the model's {layers} layers, so it checkpoints none; lower it"
    known = dict(model.named_modules())
    for wanted in cfg.custom_sharded_layers or ():
        if wanted not in known:
            yield f"custom_sharded_layers: the model has no {wanted!r}{did_you_mean(wanted, known)}"


def _checkpoint_problems(key: str, node: Mapping[str, Any]) -> Iterator[str]:
    """Yield missing files and unknown formats of a checkpointer node."""
    folder, kind, names = node.get("checkpoint_dir"), node.get("model_type"), node.get("checkpoint_files")
    if kind is not None:
        yield from message_from(require, kind, f"{key}.model_type", ModelType.__members__)
    if not isinstance(folder, str):
        return  # it is a node, which would write the files when it is built
    if not Path(folder).is_dir():
        yield f"{key}.checkpoint_dir={folder!r} is no folder; download the weights, or correct the path"
        return
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and not Path(folder, name).is_file():
            yield f"{key}.checkpoint_files: there is no {name!r} in {folder}"


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
