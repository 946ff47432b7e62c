"""Layers that no packed mask keeps apart, called with the sequences of the packs instead of with the packs.

Convolutions, state-space layers and linear attention mix along a row without a mask. Within a packed forward pass such
a layer, a mixer, is either given boundaries for its kernels, with all packs laid end to end, or it is called with the
sequences, padded on the right: these layers are causal, so what a sequence is padded with changes none of its tokens.
All other layers see the packs as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from streampack.attention.layout import Packed
from streampack.packing.batch import Batch

LENGTHS = "packed_seq_lens"
"""Argument of a prepared model's ``forward``: what `host_lengths` returns, which no layer sees."""

KERNELS = frozenset(
    (
        *("Mamba2Mixer", "Zamba2MambaMixer", "BambaMixer", "FalconH1Mixer", "NemotronHMamba2Mixer"),
        *("GraniteMoeHybridMambaLayer", "Lfm2ShortConv", "Lfm2MoeShortConv"),
        *("InklingShortConvolution", "Inkling2ShortConvolution", "OlmoHybridGatedDeltaNet"),
        *("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
        *("Qwen4ExpTextGatedDeltaNet", "KimiLinearDeltaAttention", "BailingHybridDeltaAttention"),
    )
)
"""Mixers of transformers 5.23 that hand boundaries to kernels that use them; `make test-kernels` runs these."""

MIXERS = KERNELS | {
    *("MambaMixer", "FalconMambaMixer", "JambaMambaMixer", "ZambaMambaMixer", "RecurrentGemmaRecurrentBlock"),
    *("MiniMaxLightningAttention", "RwkvSelfAttention", "RwkvFeedForward", "xLSTMLayer", "Lfm3ShortConv"),
    *("Qwen4ExpTextPLELayer", "ZayaCCAProjection"),
}
"""Classes of transformers 5.23 that mix along a row and look at no mask. Tests show that each keeps samples apart."""

CHUNK, XLSTM_CHUNK = 16, 64
"""Sizes of longer sequences are multiples of it: of 64, loops over tokens took up to 1.2 times as long. xlstm scans 64
tokens at once, and computes what is left over token by token."""

_RENAMED = frozenset({"KimiLinearDeltaAttention", "BailingHybridDeltaAttention"})
"""Mixers that hand ``cu_seqlens`` to their kernels under that name, not as transformers' ``cu_seq_lens_q``."""

_NOT_INSTALLED = "can't keep packed sequences apart"
"""How transformers refuses boundaries where a kernel is not installed."""

_FOR_ATTENTION = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_MASKS = ("attention_mask", "conv_mask")


def find_mixers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that `MIXERS` names."""
    return [module for module in model.modules() if _names_of(type(module)) & MIXERS]


def split_mixers(model: nn.Module, mixers: list[nn.Module]) -> None:
    """Let the mixers of a model keep sequences apart where a ``forward`` is given `LENGTHS`.

    The model's may be, and that of each model in it, such as the decoder below the head. A model may be split again.
    """
    from transformers import PreTrainedModel

    boundaries: Any = getattr(mixers[0], "streampack_boundaries", None)
    if boundaries is not None:
        boundaries.kernels = True
        return
    boundaries = _Boundaries()
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.register_forward_pre_hook(boundaries.enter, with_kwargs=True)
            part.register_forward_hook(boundaries.leave, always_call=True)
    for mixer in mixers:
        mixer.streampack_boundaries = boundaries
        # Of the instance, where accelerate offloads its weights.
        mixer.streampack_forward = vars(mixer).get("forward")  # type: ignore[assignment]
        mixer.forward = MethodType(_forward_apart, mixer)


class _Boundaries:
    """The sequences of the pass that a model computes, shared by its mixers; None in a pass without `LENGTHS`.

    Activation checkpointing computes layers again in the backward pass, maybe after another forward pass. Gradients
    reach the outputs before that, so there the sequences of the pass are put back.
    """

    def __init__(self) -> None:
        self.sequences: _Sequences | None = None
        self.depth = 0  # of models that are in their forward
        self.kernels = True  # until one turns out not to be installed

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Take the lengths out of the arguments of the outermost model."""
        lengths = kwargs.get(LENGTHS)
        if lengths is not None or not self.depth:
            self.sequences = None if lengths is None else _Sequences(lengths)
            self.depth = 0
        self.depth += 1
        return args, {name: value for name, value in kwargs.items() if name != LENGTHS}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """End the pass, also if it failed, and let its outputs begin its backward pass."""
        self.depth = max(0, self.depth - 1)
        if self.depth:
            return
        sequences, self.sequences = self.sequences, None

        def put_back(_grad: torch.Tensor) -> None:
            self.sequences = sequences

        values = output.values() if isinstance(output, Mapping) else output
        for value in values if isinstance(values, Iterable) and not torch.is_tensor(values) else (values,):
            if torch.is_tensor(value) and value.requires_grad:
                value.register_hook(put_back)  # type: ignore[no-untyped-call]


def host_lengths(batch: Packed) -> np.ndarray:
    """Return the lengths of a batch's sequences, its packs laid end to end: ``[sequences]`` int64, padding included.

    It is an array because frameworks move tensors to the device, from where the host would read them back.
    """
    size = batch.tokens.shape[1]
    if isinstance(batch, Batch) and batch.longest is not None:
        packs = [[fragment.length for fragment in fragments] for fragments in batch.fragments]
    else:  # `seq_lens` were replaced, or a dict gave them
        packs = batch.seq_lens.tolist()
    lengths = np.array([length for pack in packs for length in (*pack, size - sum(pack))], np.int64)
    return lengths[lengths > 0]


class _Sequences:
    """The sequences of a batch with these `host_lengths`: where they are, for kernels and for calls by length."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths
        self._made: dict[str | int, Any] = {}

    def for_kernels(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``seq_idx`` ``[1, tokens]`` and ``cu_seqlens`` ``[sequences + 1]``, both int32.

        They are made once a pass: flash-linear-attention derives more from ``cu_seqlens``, and keeps that for as long
        as it gets the same tensor.
        """
        if "kernels" not in self._made:
            lengths = self._lengths
            seq_idx = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
            ends = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
            self._made["kernels"] = tuple(_moved(each, device) for each in (seq_idx[None], ends))
        made: tuple[torch.Tensor, torch.Tensor] = self._made["kernels"]
        return made

    def by_size(self, device: torch.device, *, least: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the tokens of the sequences, those of about one size together, and where each token is in them.

        Together are those up to the same power of two, or from `CHUNK` on up to the same multiple of it. Their size is
        that of the longest, as a multiple of ``least``, a power of two; shorter ones repeat their last token.

        Returns:
            for each size ``[sequences, size]``; and ``[tokens]``, of the places in these, laid end to end.
        """
        if least not in self._made:
            lengths = self._lengths
            starts = lengths.cumsum() - lengths
            powers = 1 << np.ceil(np.log2(lengths)).astype(np.int64)
            chunk = max(CHUNK, least)
            sizes = np.where(lengths > chunk, -(-lengths // chunk) * chunk, powers.clip(least))
            begin, places, groups = 0, np.empty_like(starts), []
            for bound in np.unique(sizes):
                (chosen,) = np.nonzero(sizes == bound)
                size = -(-lengths[chosen].max() // least) * least
                within = np.minimum(np.arange(size), lengths[chosen, None] - 1)
                groups.append(_moved(starts[chosen, None] + within, device))
                places[chosen] = begin + size * np.arange(len(chosen))
                begin += within.size
            order = np.repeat(places - starts, lengths) + np.arange(lengths.sum())
            self._made[least] = groups, _moved(order, device)
        made: tuple[list[torch.Tensor], torch.Tensor] = self._made[least]
        return made


def _moved(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # each pack has other lengths
def _forward_apart(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compute a mixer's ``forward`` for the sequences of the packs.

    Outputs with a value for each token are returned for all tokens of the packs, and None in place of the others,
    which are states and weights of single sequences.
    """
    forward: Any = self.streampack_forward or partial(type(self).forward, self)
    boundaries: Any = self.streampack_boundaries
    sequences: _Sequences | None = boundaries.sequences
    if sequences is None:
        return forward(*args, **kwargs)
    names = _argument_names(type(self))
    given = dict(zip(names, args, strict=False)) | kwargs
    given = {name: value for name, value in given.items() if name not in _FOR_ATTENTION}
    shape, device = given[names[0]].shape[:2], given[names[0]].device  # [batch, max_seq_len]

    def call(index: torch.Tensor | None, **handed: torch.Tensor) -> Any:
        return forward(
            **{name: _select(name, value, index, shape) for name, value in given.items()}, **handed
        )

    if boundaries.kernels and _names_of(type(self)) & KERNELS:
        seq_idx, ends = sequences.for_kernels(device)
        name = "cu_seqlens" if _names_of(type(self)) & _RENAMED else "cu_seq_lens_q"
        try:
            output = call(None, seq_idx=seq_idx, **{name: ends})
        except ValueError as error:
            if _NOT_INSTALLED not in str(error):
                raise
            boundaries.kernels = False
        else:
            return _joined([output], [seq_idx], None, shape)
    least = XLSTM_CHUNK if "xLSTMLayer" in _names_of(type(self)) else 1
    groups, order = sequences.by_size(device, least=least)
    return _joined([call(index) for index in groups], groups, order, shape)


def _names_of(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names of a class and its base classes: FSDP2 makes subclasses."""
    return frozenset(cls.__name__ for cls in kind.__mro__)


def _argument_names(kind: type[nn.Module]) -> list[str]:
    return list(inspect.signature(kind.forward).parameters)[1:]


def _select(name: str, value: Any, index: torch.Tensor | None, shape: torch.Size) -> Any:
    """Select tokens of an argument with a value for each, or of several such; return others as they are.

    Masks of padding are dropped, because a sequence has none. ``index`` ``[sequences, size]`` is of the tokens of the
    packs laid end to end; None: all of them, as one sequence.
    """
    if name in _MASKS:
        return None
    if isinstance(value, tuple):
        return tuple(_select(name, each, index, shape) for each in value)
    if isinstance(value, dict):
        return {key: _select(name, each, index, shape) for key, each in value.items()}
    if not torch.is_tensor(value) or value.ndim < 2 or value.shape[1] != shape[1]:
        return value
    if value.shape[0] not in (1, shape[0]):
        return value
    tokens = value.expand(*shape, *value.shape[2:]).flatten(0, 1)
    if index is None:
        return tokens[None]
    return tokens.index_select(0, index.flatten()).view(*index.shape, *tokens.shape[1:])


def _joined(
    outputs: list[Any], groups: list[torch.Tensor], order: torch.Tensor | None, shape: torch.Size
) -> Any:
    """Put the outputs of calls with tokens ``groups`` into the order of the packs."""
    if isinstance(outputs[0], tuple):
        return tuple(_joined(list(column), groups, order, shape) for column in zip(*outputs, strict=True))
    if any(
        not torch.is_tensor(each) or each.shape[:2] != index.shape
        for each, index in zip(outputs, groups, strict=True)
    ):
        return None
    tokens = torch.cat([each.flatten(0, 1) for each in outputs]) if order is not None else outputs[0][0]
    tokens = tokens if order is None else tokens.index_select(0, order)
    return tokens.view(*shape, *tokens.shape[1:])
