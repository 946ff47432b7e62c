"""A cache for Hugging Face models that records what a packed forward pass gives it. Importing it needs transformers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from streampack.scoring.padded_rows import Name


class _States:
    """Records the states at the ends of a pack's sequences, of which a mixer computes those of equal length at once."""

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)  # type: ignore[call-arg]
        self.recorded: dict[Name, list[torch.Tensor]] = {}

    def update_conv_state(self, states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Record the last inputs of a convolution; return those that it is to see."""
        alone = LinearAttentionLayer(state_idx + 1)
        full: torch.Tensor = alone.update_conv_state(states, state_idx, **kwargs)
        self.recorded.setdefault(("conv", state_idx), []).append(alone.conv_states[state_idx])
        return full

    def update_recurrent_state(self, states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Record the states of a recurrence."""
        self.recorded.setdefault(("recurrent", state_idx), []).append(states)
        return states


class _Recurrent(_States, LinearAttentionLayer):  # type: ignore[misc]
    pass


class _RecurrentAndAttention(_States, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    pass


# No layer has a window: it would keep the last tokens of the pack, not those of each sequence.
_RECORDED: dict[type, type] = {
    DynamicLayer: DynamicLayer,
    DynamicSlidingWindowLayer: DynamicLayer,
    LinearAttentionLayer: _Recurrent,
    LinearAttentionAndFullAttentionLayer: _RecurrentAndAttention,
    LinearAttentionAndSlidingWindowAttentionLayer: _RecurrentAndAttention,
    DummyLayer: DummyLayer,
}


class PackCache(Cache):  # type: ignore[misc]
    """A cache for one forward pass over a pack of one row, whose layers keep what they are given.

    Args:
        config: of the model.

    Raises:
        ValueError: if the model has caches that cannot be cut at the ends of sequences.
    """

    def __init__(self, config: Any) -> None:
        layers = DynamicCache(config=config).layers
        if unknown := sorted({type(layer).__name__ for layer in layers if type(layer) not in _RECORDED}):
            raise ValueError(f"its cache has layers of the type {', '.join(unknown)}")
        if not any(isinstance(layer, DynamicLayer) for layer in layers):
            raise ValueError(
                "its cache has states only, which do not tell generate how many tokens they are of"
            )
        super().__init__([_make_layer(layer) for layer in layers])

    def parts(self, lengths: Sequence[int]) -> list[dict[Name, torch.Tensor]]:
        """Return what each layer keeps.

        That is keys and values ``[1, kv_heads, tokens, head_dim]``, and states ``[sequences, ...]``.

        Args:
            lengths: of the pack's sequences.

        Raises:
            ValueError: if a layer was not given something for each token or sequence.
        """
        by_length: dict[int, list[int]] = {}  # as mixers are called
        for number, length in enumerate(lengths):
            by_length.setdefault(length, []).append(number)
        order = torch.tensor([number for numbers in by_length.values() for number in numbers]).argsort()
        return [_parts_of(layer, sum(lengths), order) for layer in self.layers]


@contextmanager
def record(model: PreTrainedModel, cache: PackCache) -> Iterator[None]:
    """Hand a cache to the layers of a model within the block.

    The model itself is not given it: with a cache, transformers would look for no boundaries in positions, and masks
    that are made for it elsewhere may differ from its own (moshi's have no window, though its config has one). A
    compiled model runs uncompiled within the block, because a graph made before ignores hooks.
    """
    handles = []
    for module in model.modules():
        names = [*inspect.signature(type(module).forward).parameters][1:]  # a mixer's own forward is replaced
        found = [name for name in names if name in _ARGUMENTS]
        if found and not isinstance(module, PreTrainedModel):
            give = partial(_give, cache, found[0], names.index(found[0]))
            handles.append(module.register_forward_pre_hook(give, with_kwargs=True))
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()


_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "cache_params")


def _give(
    cache: PackCache, name: str, index: int, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put a cache into the arguments of a layer; a forward pre-hook."""
    if index < len(args):
        return (*args[:index], cache, *args[index + 1 :]), kwargs
    return args, {**kwargs, name: cache}


def _make_layer(layer: Any) -> Any:
    """Make the layer that records what this one would keep."""
    kind = _RECORDED[type(layer)]
    return kind(number_of_states=layer.number_of_states) if issubclass(kind, _States) else kind()


def _parts_of(layer: Any, tokens: int, order: torch.Tensor) -> dict[Name, torch.Tensor]:
    """Return what a layer recorded of a pack, states in the order of its sequences."""
    parts: dict[Name, torch.Tensor] = {}
    if isinstance(layer, _States):
        recorded = {name: torch.cat(states) for name, states in layer.recorded.items()}
        if not recorded or any(len(states) != len(order) for states in recorded.values()):
            raise ValueError("it does not give its cache the state of each sequence")
        parts = {name: states[order.to(states.device)] for name, states in recorded.items()}
    if isinstance(layer, DynamicLayer):
        if layer.keys is None or layer.keys.shape[2] != tokens:
            raise ValueError("it does not give its cache the keys of each token")
        parts |= {("keys", 0): layer.keys, ("values", 0): layer.values}
    return parts
