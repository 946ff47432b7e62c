"""Run a model without side effects on its state or on the random generators of the process."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def undisturbed(module: nn.Module | None, device: torch.device, *, eager: bool) -> Iterator[None]:
    """Run the block in eval mode without gradients, then restore the mode, buffers and random generators.

    With ``eager``, the model runs uncompiled. Otherwise a pack of another length than in training would make
    torch.compile compile again for dynamic lengths, and training would be slower from then on.
    """
    was_training = {part: part.training for part in module.modules()} if module is not None else {}
    # A forward pass in training mode may change buffers in place, as batch norm does, or replace them by others.
    buffers = [
        (part, name, buffer, buffer.detach().clone())
        for part in was_training
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    devices = [device.index or 0] if device.type != "cpu" else []
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type),
        torch.compiler.set_stance("force_eager") if eager else nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*flex_attention called without torch.compile")
        # activation checkpointing warns of it:
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        try:
            if module is not None:
                module.eval()
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002
            for part, name, buffer, saved in buffers:
                part._buffers[name] = buffer
                if not torch.equal(buffer, saved):
                    buffer.copy_(saved)
            for part, mode in was_training.items():
                part.training = mode
                if isinstance(part, FSDPModule):
                    part.reshard()  # no backward pass does it here


def seed_all(seed: int, device: torch.device) -> None:
    """Seed the generators that `undisturbed` restores; `torch.manual_seed` would seed those of all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def train_without_dropout(module: nn.Module) -> None:
    """Put a model into training mode, except its dropout layers."""
    module.train()
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.eval()
