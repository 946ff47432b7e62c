"""Layers that no packed mask keeps apart, run one sequence at a time, so that nothing crosses a boundary.

Convolutions, state-space layers and linear attention mix along a row without a mask; ALiBi counts its bias from the
beginning of a row. A mixer is such a module. Within a packed forward pass it is called with the sequences of the packs
instead of with the packs, those of equal length together; all other layers see the packs as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from streampack.attention.mixer_tables import (
    ALIBI,
    ALL_OUTPUTS,
    BLOCKS,
    CHUNKED,
    TAKES_BOUNDARIES,
    names_of,
)

LENGTHS = "packed_seq_lens"
"""Argument of a prepared model's ``forward``: ``[batch, segments]``, which no layer sees."""

Lengths = list[list[int]]


class Boundaries:
    """The lengths of the sequences in the packs that a model computes, shared by its mixers.

    ``None`` outside of packed passes: the mixers then do what their authors wrote.
    """

    def __init__(self) -> None:
        self.lengths: Lengths | None = None
        self.by_kernels = False  # whether the mixers of `TAKES_BOUNDARIES` hand them on to their kernels
        self._handed: tuple[Lengths, torch.Tensor, torch.Tensor] | None = None

    def clear(self) -> None:
        """End a packed pass."""
        self.lengths = self._handed = None

    def for_kernels(self, *, max_seq_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the boundaries of all packs, laid end to end, as kernels take them.

        They are made once a pass: flash-linear-attention derives more from ``cu_seqlens``, and keeps that for as long
        as it is given the same tensor.

        Returns:
            ``seq_idx`` of int32, ``[1, batch * max_seq_len]``, and ``cu_seqlens`` of int32, ``[sequences + 1]``.
        """
        assert self.lengths is not None
        if self._handed is None or self._handed[0] is not self.lengths:
            lengths = [length for pack in self.lengths for length in _filled(pack, max_seq_len)]
            ends = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
            numbers = torch.arange(len(lengths), dtype=torch.int32, device=device)
            seq_idx = numbers.repeat_interleave(ends.diff(), output_size=sum(lengths))
            self._handed = self.lengths, seq_idx[None], ends
        return self._handed[1:]


def _filled(lengths: list[int], max_seq_len: int) -> list[int]:
    """Return the lengths of a pack's sequences that are not empty; the padding's may have been left out."""
    return [length for length in (*lengths, max_seq_len - sum(lengths)) if length]


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


def hand_to_kernels(mixers: list[nn.Module], *, on: bool) -> bool:
    """Let mixers that were split hand boundaries to their kernels, or no longer; return whether any of them can."""
    if not mixers or not any(names_of(mixer) & TAKES_BOUNDARIES.keys() for mixer in mixers):
        return False
    cast(Boundaries, mixers[0].streampack_boundaries).by_kernels = on
    return True


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

        values = output.values() if isinstance(output, Mapping) else output
        for value in values if isinstance(values, Iterable) and not torch.is_tensor(values) else (values,):
            if torch.is_tensor(value) and value.requires_grad:
                value.register_hook(put_back)  # type: ignore[no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # each pack has other lengths
def _forward_split(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compute a mixer's ``forward`` for the sequences of each pack, those of equal length in one call.

    A mixer whose kernels keep sequences apart is called once, with all packs laid end to end.

    Of several outputs the first is returned for all tokens (all those of `ALL_OUTPUTS`), and None in place of the
    others, which are states and weights of single sequences.
    """
    forward: Callable[..., Any] = type(self).forward
    boundaries: Any = self.streampack_boundaries
    if (lengths := boundaries.lengths) is None:
        return forward(self, *args, **kwargs)
    names = list(inspect.signature(forward).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    for name in (
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    ):  # the attention's boundaries
        given.pop(name, None)
    shape = given[names[0]].shape[:2]  # [batch, max_seq_len]
    device = given[names[0]].device
    select = _selection(names_of(self))
    handed: dict[str, torch.Tensor] = {}
    if boundaries.by_kernels and (argument := _takes(self)):
        seq_idx, cu_seqlens = boundaries.for_kernels(max_seq_len=shape[1], device=device)
        # Where kernels take no cu_seqlens, the argument is "seq_idx", and the later entry holds.
        handed = {argument: cu_seqlens, "seq_idx": seq_idx}
        order = torch.arange(shape.numel(), device=device)
        groups = [order[None]]
    else:
        chunk = cast(Any, self.config).chunk_size if names_of(self) & CHUNKED else 1
        groups, order = _by_length(lengths, chunk, max_seq_len=shape[1], device=device)
    parts = [
        forward(self, **{name: select(name, value, index, shape) for name, value in given.items()}, **handed)
        for index in groups
    ]

    def whole(outputs: Iterable[torch.Tensor]) -> torch.Tensor:
        tokens = torch.cat([output.flatten(0, 1) for output in outputs])[order]
        return tokens.view(*shape, *tokens.shape[1:])

    if not isinstance(parts[0], tuple):
        return whole(parts)
    columns = list(zip(*parts, strict=True))
    count = len(columns) if names_of(self) & ALL_OUTPUTS else 1
    return (*map(whole, columns[:count]), *[None] * (len(columns) - count))


def _takes(mixer: nn.Module) -> str | None:
    """Return the argument for boundaries that a mixer takes beside ``seq_idx``, or None if it takes none."""
    return next((TAKES_BOUNDARIES[name] for name in names_of(mixer) if name in TAKES_BOUNDARIES), None)


def _selection(names: set[str]) -> Callable[..., Any]:
    """Return the function that selects sequences of the arguments of a mixer whose class and base classes these are."""
    if names & ALIBI:
        return _select_with_bias
    return _select_with_mask if names & BLOCKS else _select


def _by_length(
    lengths: Lengths, multiple: int, *, max_seq_len: int, device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the tokens of the sequences, those of equal length together, and where each token of the packs is in them.

    Lengths are rounded up to a multiple: behind a sequence its last token is repeated.

    Returns:
        for each length ``[sequences, length]``, packs end to end; and ``[batch * max_seq_len]``, of the places in these
        when they are laid end to end.
    """
    sequences: dict[int, list[tuple[int, int]]] = {}  # by length: each one's first and last token
    for pack, of_pack in enumerate(lengths):
        start = pack * max_seq_len
        for length in _filled(of_pack, max_seq_len):
            found = sequences.setdefault(-(-length // multiple) * multiple, [])
            found.append((start, start + length - 1))
            start += length
    groups, real = [], []
    for length, found in sequences.items():
        first, last = torch.tensor(found, device=device).T[:, :, None]
        tokens = first + torch.arange(length, device=device)
        groups.append(tokens.minimum(last))
        real.append((tokens <= last).flatten())
    places = torch.cat(real).nonzero()[:, 0]
    return groups, places[torch.cat([index.flatten() for index in groups])[places].argsort()]


def _select(name: str, value: Any, index: torch.Tensor, shape: torch.Size) -> Any:
    """Select sequences of an argument with a value for each token, or of several such; return others as they are.

    A mask of padding is left out, because a sequence has none.
    """
    if name in ("attention_mask", "conv_mask"):
        return None
    if isinstance(value, tuple):
        return tuple(_select(name, each, index, shape) for each in value)
    if isinstance(value, dict):
        return {key: _select(name, each, index, shape) for key, each in value.items()}
    if not torch.is_tensor(value) or value.ndim < 2 or value.shape[1] != shape[1]:
        return value
    if value.shape[0] == shape[0]:
        return value.flatten(0, 1)[index]
    return value[0][index % shape[1]] if value.shape[0] == 1 else value


def _select_with_bias(name: str, value: Any, index: torch.Tensor, shape: torch.Size) -> Any:
    """Select sequences of an argument of attention with ALiBi: of masks and biases, what a row of their length has.

    mpt's bias, ``position_bias``, is given for more keys than there are, and cut by the module itself.
    """
    sequences, length = index.shape
    if name == "attention_mask":  # [batch or 1, heads or 1, max_seq_len, max_seq_len], causal
        return value[:1, :, :length, :length]
    if name == "alibi":  # [batch * heads, 1, max_seq_len] or [batch, heads, 1, max_seq_len]
        of_row = value[: len(value) // shape[0], ..., :length]
        return of_row.repeat(sequences, *[1] * (of_row.ndim - 1))
    return value if name == "position_bias" else _select(name, value, index, shape)


def _select_with_mask(name: str, value: Any, index: torch.Tensor, shape: torch.Size) -> Any:
    """Select sequences of an argument of attention with blocks of keys: of a mask, what a sequence sees of itself."""
    if name != "attention_mask" or value is None:
        return _select(name, value, index, shape)
    packs, tokens = index[:, :1] // shape[1], index % shape[1]
    heads = torch.arange(value.shape[1], device=index.device)
    rows = packs if len(value) > 1 else torch.zeros_like(packs)
    return value[
        rows[:, :, None, None], heads[:, None, None], tokens[:, None, :, None], tokens[:, None, None, :]
    ]
