"""Hugging Face models: find them inside wrappers, switch their attention function, keep them from making caches."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def find_pretrained(model: nn.Module) -> Any:
    """Return the outermost ``PreTrainedModel`` in a model and its wrappers, or None."""
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)


def stock_attention(pretrained: Any) -> str:
    """Return transformers' name of the masked attention: ``sdpa`` or ``eager``, whichever the model uses."""
    current: str = pretrained.config._attn_implementation
    return current if current in ("sdpa", "eager") else "sdpa" if pretrained._supports_sdpa else "eager"


def set_attention(pretrained: Any, name: str) -> None:
    """Set the attention function, without warnings about sub-configs that have no model of their own (dbrx's)."""
    if pretrained.config._attn_implementation == name:
        return
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        pretrained.set_attn_implementation(name)
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def unprepared(pretrained: Any) -> Iterator[None]:
    """Let a prepared model use transformers' own attention within the block."""
    prepared = pretrained.config._attn_implementation
    set_attention(pretrained, stock_attention(pretrained))
    try:
        yield
    finally:
        set_attention(pretrained, prepared)


def disable_cache(model: nn.Module) -> None:
    """Let forward passes make no cache unless asked for one; with a cache, transformers ignores packed positions.

    ``config.use_cache`` is not changed, because it is saved with the model, and generating would be slow without a
    cache.
    """
    for module in model.modules():
        takes_it = hasattr(module, "config") and "use_cache" in inspect.signature(module.forward).parameters
        if takes_it and without_cache not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(without_cache, with_kwargs=True)


def without_cache(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Switch the cache off where none is asked for or given; a forward pre-hook of prepared models."""
    if kwargs.get("use_cache") is None and kwargs.get("past_key_values") is None:
        kwargs = {**kwargs, "use_cache": False}
    return args, kwargs
