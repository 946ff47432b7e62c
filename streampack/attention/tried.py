"""Try a prepared model on a small pack, first with the boundaries that its mixers' kernels may take."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from streampack.attention.mixers import hand_to_kernels
from streampack.attention.probe import find_leaks, vocabulary_of
from streampack.attention.probe_pack import make_pack, sample_slices
from streampack.attention.undisturbed import train_without_dropout, undisturbed
from streampack.packing.batch import Batch

_NO_KERNEL = (
    "can't keep packed sequences apart"  # how transformers refuses boundaries where a kernel is not installed
)

DEVICE_ERRORS = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors that say nothing of what a model or a kernel can do. After an illegal access, a GPU computes nothing more."""

_GRADIENTS = 0.05
"""The largest norm of a sample's gradients at other samples, in units of the norm at its own, that rounding in bf16
may cause; a leak causes more."""


def why_mixed(
    model: nn.Module, inputs: Callable[[Batch], dict[str, Any]], mixers: list[nn.Module]
) -> str | None:
    """Return what went wrong when a model was tried on a pack; None if it keeps samples apart.

    Mixers whose kernels may take boundaries are tried with those, forward and backward. Where that fails, the model is
    tried with its mixers split, and a warning says why, unless the kernels are not installed.

    Args:
        model: with weights.
        inputs: makes the arguments of its ``forward``.
        mixers: of the model, after `split_mixers`.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return "it has no weights yet; prepare it when they are loaded"
    if hand_to_kernels(mixers, on=True):
        why = _tried(lambda: _leaks(model, inputs) or _stray_gradients(model, inputs))
        if why is None:
            return None
        hand_to_kernels(mixers, on=False)
        if _NO_KERNEL not in why:
            names = ", ".join(sorted({type(mixer).__name__ for mixer in mixers}))
            warnings.warn(
                f"{names}: these layers compute sequences one at a time, which is slower, because with boundaries for "
                f"their kernels the model failed a try: {why}",
                stacklevel=2,
            )
    return _tried(lambda: _leaks(model, inputs))


def _tried(run: Callable[[], str | None]) -> str | None:
    try:
        return run()
    except DEVICE_ERRORS:
        raise
    except Exception as error:  # third-party code may raise anything
        return f"{type(error).__name__}: {error}"


def _leaks(model: nn.Module, inputs: Callable[[Batch], dict[str, Any]]) -> str | None:
    report = find_leaks(model, inputs=inputs)
    return None if report.ok else str(report)


def _stray_gradients(model: Any, inputs: Callable[[Batch], dict[str, Any]]) -> str | None:
    """Return which sample's logits have gradients at the embeddings of others, or None if none has.

    `find_leaks` makes forward passes only, and kernels have a backward pass of their own. Sharded models are not tried.
    """
    parameters = list(model.parameters())
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        return None
    device = parameters[0].device
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    pack = make_pack(64, vocabulary_of(model), torch.Generator().manual_seed(0)).to(device)
    embedded: list[torch.Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    trained = [parameter for parameter in parameters if parameter.requires_grad]
    hook = embedding.register_forward_hook(keep)
    try:
        # backward() fills .grad of whatever requires a gradient; torch.autograd.grad of chosen tensors only would not
        # work with reentrant checkpointing.
        for parameter in trained:
            parameter.requires_grad_(False)
        # Uncompiled, because a graph made before ignores hooks.
        with undisturbed(model, device, eager=True), torch.enable_grad():
            train_without_dropout(model)
            for number, place in enumerate(sample_slices(pack)):
                output = model(**inputs(pack))
                getattr(output, "logits", output)[0, place].float().square().sum().backward()
                assert embedded[-1].grad is not None
                sizes = embedded[-1].grad[0].float().norm(dim=-1)
                own = sizes[place].norm()
                stray = torch.cat([sizes[: place.start], sizes[place.stop :]]).norm()
                if not stray <= _GRADIENTS * own:
                    return f"logits of sample {number} have gradients at other samples: {stray:.2g} beside {own:.2g}"
    finally:
        hook.remove()
        for parameter in trained:
            parameter.requires_grad_()
    return None
