"""Layers that carry a state from token to token, run one sequence at a time, so that no state crosses a boundary.

Convolutions, state-space layers and linear attention mix along a row without a mask. A mixer is such a module. Within a
packed forward pass it is called with the sequences of the packs instead of with the packs, those of equal length
together; all other layers see the packs as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

MIXERS = frozenset(
    (
        *("MambaMixer", "Mamba2Mixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer"),
        *("Zamba2MambaMixer", "BambaMixer", "FalconH1Mixer", "NemotronHMamba2Mixer"),
        *("GraniteMoeHybridMambaLayer", "Lfm2ShortConv", "Lfm2MoeShortConv", "RecurrentGemmaRecurrentBlock"),
        *("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
        *("OlmoHybridGatedDeltaNet", "KimiLinearDeltaAttention", "MiniMaxLightningAttention"),
        *("RwkvSelfAttention", "RwkvFeedForward", "xLSTMLayer"),
        *(
            "BailingHybridDeltaAttention",
            "Lfm3ShortConv",
            "InklingShortConvolution",
            "Inkling2ShortConvolution",
        ),
    )
)
"""Classes of transformers 5.23 that mix along a row and look at no mask. Tests show that each can be split."""

LENGTHS = "packed_seq_lens"
"""Argument of a prepared model's ``forward``: ``[batch, segments]``, which no layer sees."""

Lengths = list[list[int]]


class Boundaries:
    """The lengths of the sequences in the packs that a model computes, shared by its mixers.

    ``None`` outside of packed passes: the mixers then do what their authors wrote.
    """

    def __init__(self) -> None:
        self.lengths: Lengths | None = None

    def clear(self) -> None:
        """End a packed pass."""
        self.lengths = None


def find_mixers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that `MIXERS` names. FSDP2 makes subclasses, so base classes count."""
    return [
        module
        for module in model.modules()
        if any(cls.__name__ in MIXERS for cls in type(module).__mro__ if cls is not nn.Module)
    ]


def split_mixers(model: nn.Module, mixers: list[nn.Module]) -> None:
    """Let the mixers of a model run one sequence at a time where a ``forward`` is given `LENGTHS`.

    The model's may be, and that of each model in it, such as the decoder below the head. A model may be given again.

    Args:
        model: a PreTrainedModel.
        mixers: of the model, as `find_mixers` returns them.
    """
    from transformers import PreTrainedModel

    if hasattr(mixers[0], "streampack_boundaries"):
        return
    boundaries = Boundaries()
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            passes = _Passes(boundaries)
            part.register_forward_pre_hook(passes.enter, with_kwargs=True)
            part.register_forward_hook(passes.leave, always_call=True)
    for mixer in mixers:
        mixer.streampack_boundaries = boundaries  # type: ignore[assignment]
        mixer.forward = MethodType(_forward_split, mixer)


class _Passes:
    """Hooks of a model's ``forward``: the lengths that it is given hold until it ends, and in its backward pass.

    Activation checkpointing computes layers again in the backward pass, maybe after another forward pass. Gradients
    reach the outputs before that, so there the lengths are put back.
    """

    def __init__(self, boundaries: Boundaries) -> None:
        self.boundaries = boundaries
        self.packed = False  # whether this model's forward was given lengths; a model around it may have been

    def enter(self, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Take the lengths out of the arguments."""
        if self.packed:  # the last pass failed in another hook
            self.boundaries.clear()
        self.packed = LENGTHS in kwargs
        if self.packed:
            self.boundaries.lengths = kwargs[LENGTHS].tolist()
        return args, {name: value for name, value in kwargs.items() if name != LENGTHS}

    def leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """End the pass, also if it failed, and let its outputs begin its backward pass."""
        if not self.packed:
            return
        lengths, self.packed = self.boundaries.lengths, False
        self.boundaries.clear()

        def put_back(_grad: torch.Tensor) -> None:
            self.boundaries.lengths = lengths
            torch.autograd.Variable._execution_engine.queue_callback(self.boundaries.clear)

        for value in output.values() if isinstance(output, Mapping) else output or ():
            if torch.is_tensor(value) and value.requires_grad:
                value.register_hook(put_back)  # type: ignore[no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # each pack has other lengths
def _forward_split(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compute a mixer's ``forward`` for the sequences of each pack, those of equal length in one call."""
    forward: Callable[..., Any] = type(self).forward
    boundaries: Any = self.streampack_boundaries
    if (lengths := boundaries.lengths) is None:
        return forward(self, *args, **kwargs)
    hidden = (
        args[0]
        if args
        else next(kwargs[name] for name in ("hidden_states", "input_states", "x") if name in kwargs)
    )
    shape = hidden.shape[:2]  # [batch, max_seq_len]
    outputs, places = [], []
    extra: list[Any] = []
    for index in _by_length(lengths, max_seq_len=shape[1], device=hidden.device):

        def of_sequences(value: Any, index: torch.Tensor = index) -> Any:
            return _select(value, index, shape)

        out = forward(
            self,
            *map(of_sequences, args),
            **{
                name: None if name == "attention_mask" else of_sequences(value)
                for name, value in kwargs.items()
            },
        )
        if isinstance(out, tuple):
            out, *extra = out
        outputs.append(out.flatten(0, 1))
        places.append(index.flatten())
    order = torch.cat(places).argsort()
    whole = torch.cat(outputs)[order].view(*shape, *outputs[0].shape[1:])
    return (whole, *extra) if extra else whole


def _by_length(lengths: Lengths, *, max_seq_len: int, device: torch.device) -> list[torch.Tensor]:
    """Return for each length the tokens of the sequences that have it: ``[sequences, length]``, packs end to end."""
    starts: dict[int, list[int]] = {}
    for pack, of_pack in enumerate(lengths):
        start = pack * max_seq_len
        end = start + max_seq_len
        for length in of_pack:
            if length:
                starts.setdefault(length, []).append(start)
                start += length
        if start < end:  # the padding's length may be left out
            starts.setdefault(end - start, []).append(start)
    return [
        torch.tensor(found, device=device)[:, None] + torch.arange(length, device=device)
        for length, found in starts.items()
    ]


def _select(value: Any, index: torch.Tensor, shape: torch.Size) -> Any:
    """Select sequences of a tensor with a value for each token, of a tuple of such; return anything else as it is."""
    if isinstance(value, tuple):
        return tuple(_select(each, index, shape) for each in value)
    if not torch.is_tensor(value) or value.ndim < 2 or value.shape[1] != shape[1]:
        return value
    if value.shape[0] == shape[0]:
        return value.flatten(0, 1)[index]
    return value[0][index % shape[1]] if value.shape[0] == 1 else value
