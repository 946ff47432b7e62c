"""Forward passes over packs of requests, whose output layer computes only what is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from streampack.attention import Inputs
from streampack.attention.calls import is_compiled
from streampack.attention.torchtune import TorchtuneInputs
from streampack.attention.transformers import TransformersInputs
from streampack.packing.batch import Batch
from streampack.packing.groups import ROOT
from streampack.scoring.prefixes import batch_of
from streampack.types import IntArray

CHUNK = 256
"""Rows of logits that are converted to fp32 at a time: 128 MiB for a vocabulary of 128k."""


class Values(NamedTuple):
    """Answers to what is asked."""

    logps: npt.NDArray[np.float64]  # [asked]: log-probabilities of the ids, in nats
    greedy: npt.NDArray[np.bool_]  # [asked]: whether each is the model's most likely one


@dataclass(frozen=True)
class Pending:
    """The answers of a pack that the device may still be computing."""

    logps: torch.Tensor  # [asked], on its way to the CPU
    greedy: torch.Tensor
    order: IntArray  # [asked]: which question each answers
    copied: Any  # the event after the copies; None: the host waited for them

    def values(self) -> Values:
        """Wait for this pack, and for none that was started later."""
        if self.copied is not None:
            self.copied.synchronize()
        found = Values(np.empty(len(self.order)), np.empty(len(self.order), np.bool_))
        found.logps[self.order] = self.logps.numpy()
        found.greedy[self.order] = self.greedy.numpy()
        return found


class ForwardPass:
    """Computes packs of requests with a prepared model, in eval mode and without gradients."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model, self.inputs = model, inputs
        self.device = next(model.parameters()).device
        self.norm: nn.Module | None = (
            None  # whose hook selects tokens before a torchtune model's output layer
        )
        self.selects = False  # whether the model's forward has an argument for it
        self.vocab_size: int | None = None
        if isinstance(inputs, TransformersInputs):
            self.selects = "logits_to_keep" in inspect.signature(inputs.model.forward).parameters
            self.vocab_size = inputs.model.config.get_text_config().vocab_size
        elif isinstance(inputs, TorchtuneInputs):
            if not _compiled_with(model, inputs.model.norm):
                self.norm = inputs.model.norm
            self.vocab_size = inputs.model.tok_embeddings.num_embeddings

    def __call__(self, batch: Batch, places: IntArray, targets: IntArray) -> Pending:
        """Start to compute the answers to all that is asked of a batch of one row.

        Args:
            batch: a pack without padding.
            places: ``[asked]``, of the tokens after which an id is asked for; they may repeat.
            targets: ``[asked]``, the ids.
        """
        unique, rows = np.unique(places, return_inverse=True)
        return _look_up(self._logits(batch, torch.from_numpy(unique)), rows, targets)

    def take_part(self) -> None:
        """Make a forward pass whose result nobody needs, because the other ranks of a sharded model make one."""
        self._logits(batch_of([np.zeros(1, np.int64)], [ROOT]), torch.tensor([0]))

    def _logits(self, batch: Batch, places: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits after some tokens, in parts, ``[places, vocab]`` in all."""
        if self.device.type == "cuda":  # from other memory, a copy would wait for the pack before
            places, batch = places.pin_memory(), batch.pin_memory()
        places = places.to(self.device, non_blocking=True)
        batch = batch.to(self.device)
        with without_training(self.model), self._only_at(places) as arguments:
            output = self.model(**self.inputs(batch), **arguments)
        output = getattr(output, "logits", output)
        parts = [output] if isinstance(output, torch.Tensor) else [part for part in output if part.shape[1]]
        if sum(part.shape[1] for part in parts) != len(places):  # the model computed the logits of all tokens
            return [torch.cat(parts, 1)[0, places]]
        return [part[0] for part in parts]

    @contextmanager
    def _only_at(self, places: torch.Tensor) -> Iterator[dict[str, Any]]:
        """Let the output layer of the model see some tokens only; yield an argument for its forward."""
        if self.norm is None:
            yield {"logits_to_keep": places} if self.selects else {}
            return
        hook = self.norm.register_forward_hook(lambda module, args, hidden: hidden[:, places])
        try:
            yield {}
        finally:
            hook.remove()


def _compiled_with(model: nn.Module, layer: nn.Module) -> bool:
    """Return whether a layer is part of a compiled module, whose graph may ignore or keep the layer's hook."""
    compiled = (module for module in model.modules() if is_compiled(module))
    return any(inner is layer for module in compiled for inner in module.modules())


@contextmanager
def without_training(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode within the block, without gradients.

    ``torch.inference_mode`` is not used: what a model keeps of a forward pass, such as longer tables of positions,
    could not be used in training afterwards.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # no backward pass does it here


def _look_up(parts: list[torch.Tensor], rows: IntArray, targets: IntArray) -> Pending:
    """Look up each target in its row of the logits, whose ``parts`` are ``[rows, vocab]`` in total."""
    order = np.argsort(rows, kind="stable")
    asked = torch.from_numpy(np.stack([rows, targets])[:, order]).to(parts[0].device, non_blocking=True)
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    logps, greedy, begin = [], [], 0
    for chunk in (chunk for part in parts for chunk in torch.split(part, CHUNK)):
        first, last = np.searchsorted(rows[order], [begin, begin + len(chunk)])
        row, target = asked[0, first:last] - begin, asked[1, first:last]
        logits = chunk.to(dtype)
        logps.append(logits[row, target] - logits.logsumexp(1)[row])
        greedy.append(logits.argmax(1)[row] == target)
        begin += len(chunk)
    on_host, greedy_on_host = (torch.cat(each).to("cpu", non_blocking=True) for each in (logps, greedy))
    copied = None
    if parts[0].device.type != "cpu":
        copied = torch.get_device_module(parts[0].device).Event()
        copied.record()
    return Pending(on_host, greedy_on_host, order, copied)
