"""Caches of keys and values: forward passes make none, and the config that is saved stays as it was."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def make_no_cache(model: nn.Module) -> None:
    """Let forward passes make no cache unless asked for one: with it, transformers ignores packed positions.

    ``config.use_cache`` stays as it is: it would be saved with the model, for all who generate with it.
    """
    for module in model.modules():
        takes_it = hasattr(module, "config") and "use_cache" in inspect.signature(module.forward).parameters
        if takes_it and without_cache not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(without_cache, with_kwargs=True)


def without_cache(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of prepared models: no cache where none is asked for, or given."""
    if kwargs.get("use_cache") is None and kwargs.get("past_key_values") is None:
        kwargs = {**kwargs, "use_cache": False}
    return args, kwargs


def restore_cache_setting(model: Any) -> None:
    """Undo in a prepared model's config what Trainer's constructor wrote there: no cache, for whoever loads it.

    The model's generation config tells that it was on; what the config said before, nobody knows by then.
    """
    generation = getattr(model, "generation_config", None)
    off = getattr(model.config, "use_cache", None) is False
    if off and generation is not None and getattr(generation, "use_cache", None) is not False:
        model.config.use_cache = True
