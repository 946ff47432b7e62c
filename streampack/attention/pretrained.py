"""All that is private in transformers and must be used, and no other file uses; public names do the rest.

- ``config._attn_implementation``: which attention function a model calls. There is a public function that sets it
  (``set_attn_implementation``) and none that reads it.
- ``_supports_sdpa``, ``_supports_flex_attn``, ``_can_set_attn_implementation``: what can be set. Otherwise only the
  error, or the silence, of setting it would tell, and the model would be changed by then.
- ``_is_stateful``: whether layers carry a state from token to token. No config says so for all families.
"""

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


def current_attention(pretrained: Any) -> str:
    """Return transformers' name of the attention function that a model calls."""
    name: str = pretrained.config._attn_implementation
    return name


def stock_attention(pretrained: Any) -> str:
    """Return transformers' name of the masked attention: ``sdpa`` or ``eager``, whichever the model uses."""
    current = current_attention(pretrained)
    return current if current in ("sdpa", "eager") else "sdpa" if pretrained._supports_sdpa else "eager"


def why_not_settable(pretrained: Any, *, flex: bool) -> str | None:
    """Return why a model's attention cannot be set to a function of ours, or to flex attention; None if it can."""
    kind = pretrained.config.get_text_config().model_type
    if not pretrained._can_set_attn_implementation():
        return f"{kind} has its attention written into its layers"
    return (
        f"transformers has no flex attention for {kind}"
        if flex and not pretrained._supports_flex_attn
        else None
    )


def is_stateful(pretrained: Any) -> bool:
    """Return whether layers of a model carry a state from token to token."""
    return bool(pretrained._is_stateful)


def set_attention(pretrained: Any, name: str) -> None:
    """Set the attention function, without warnings about sub-configs that have no model of their own (dbrx's)."""
    if current_attention(pretrained) == name:
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
    prepared = current_attention(pretrained)
    set_attention(pretrained, stock_attention(pretrained))
    try:
        yield
    finally:
        set_attention(pretrained, prepared)


def disable_cache(model: nn.Module) -> None:
    """Let forward passes make no cache unless asked for one: a packed pass has no use for it.

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
