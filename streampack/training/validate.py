"""Check a config before it trains: what can be known without its files, then a run that stops before its first step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streampack.attention import Inputs
from streampack.attention.probe import find_leaks, probe_length
from streampack.instantiate import COMPONENT, build
from streampack.training.checks import CROSS_ENTROPIES, loss_problems, read_config
from streampack.training.config import RunConfig
from streampack.training.model import find_adapters
from streampack.validation import did_you_mean

SCHEDULE_STEPS = 100  # number of training steps given to the schedule that is built


class Checked(Exception):
    """Ends a run that was to be checked only, before its first step."""


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

    try:
        cfg = read_config(config)
    except ValueError as error:
        return str(error).splitlines()
    pairs = (
        cfg.loss is not None and cfg.loss[COMPONENT] not in CROSS_ENTROPIES
        if recipe is None
        else recipe == "dpo"
    )
    problems = _recipe_problems(
        cfg, pairs=pairs, adapters=recipe == "lora_finetune", files=train_of is not None
    )
    found: list[bool] = []
    wanted = None if recipe is None or pairs else recipe == "lora_finetune"
    problems += _caught("model", lambda: found.append(require_adapters(cfg, wanted=wanted)))
    if train_of is None or problems:
        return problems
    train = train_of(recipe or ("dpo" if pairs else "lora_finetune" if found[0] else "full_finetune"))
    with tempfile.TemporaryDirectory() as scratch:
        scratched = OmegaConf.merge(config, {"output_dir": scratch, "checkpointer": {"output_dir": scratch}})
        try:
            return _caught("run", lambda: train(scratched, check=True))
        except Checked:
            return []


def _caught(where: str, act: Callable[[], Any]) -> list[str]:
    """Return the message of the error that a function raises, as a line that begins with a key."""
    try:
        act()
    except Checked:
        raise
    except Exception as error:  # tokenizers and sources of users may raise anything
        text = " ".join(str(error).split())
        text = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
        return [
            text if where == "run" or text.startswith((f"{where}:", "save_adapter")) else f"{where}: {text}"
        ]
    return []


def _recipe_problems(cfg: RunConfig, *, adapters: bool | None, pairs: bool, files: bool) -> list[str]:
    """Return what of a config does not fit a recipe, besides its model. ``files``: look for those of its weights, too.

    Optimizer and schedule are built for a model of one parameter.
    """
    problems = [*loss_problems(cfg, pairs=pairs, adapters=adapters)]
    made: list[Any] = []
    parameters = [torch.nn.Parameter(torch.zeros(1))]
    problems += _caught("optimizer", lambda: made.append(build(cfg.optimizer, parameters)))
    if made:
        inject = {"optimizer": made[0], "num_training_steps": SCHEDULE_STEPS}
        problems += _caught("lr_scheduler", lambda: build(cfg.lr_scheduler, inject=inject))
    return problems + [*_checkpoint_problems(cfg.checkpointer)] * files


def require_recipe(cfg: RunConfig, *, adapters: bool | None, pairs: bool) -> bool:
    """Refuse a config that does not fit a recipe, before it reads weights; return whether adapters are trained.

    ``adapters`` and ``pairs`` are what the recipe trains, see `streampack.training.run.open_run`.
    """
    if problems := _recipe_problems(cfg, adapters=adapters, pairs=pairs, files=True):
        raise ValueError("\n".join(problems))
    return require_adapters(cfg, wanted=adapters)


def require_adapters(cfg: RunConfig, *, wanted: bool | None) -> bool:
    """Return whether a config's model has adapters; refuse one that has not what is ``wanted``, None: either."""
    found = find_adapters(cfg, wanted=wanted)
    if cfg.save_adapter_weights_only and not found:
        raise ValueError(
            "save_adapter_weights_only: the model has no adapters, and nothing would be saved; remove the key, or run "
            "lora_finetune"
        )
    return found


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
