"""Forward passes over packs of requests, whose output layer computes only what is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule

from streampack.attention import Inputs
from streampack.attention.torchtune import TorchtuneInputs
from streampack.attention.transformers import TransformersInputs
from streampack.packing.batch import Batch
from streampack.scoring.pack import RequestPack

CHUNK = 256
"""Rows of logits that are converted to fp32 at a time: 128 MiB for a vocabulary of 128k."""


class Values(NamedTuple):
    """The answer to one request."""

    logps: npt.NDArray[np.float64]  # [scored]: log-probabilities of the ids asked for, in nats
    greedy: npt.NDArray[np.bool_]  # [scored]: whether each is the model's most likely one


class ForwardPass:
    """Computes packs of requests with a prepared model, in eval mode and without gradients.

    Args:
        model: of torchtune or Hugging Face.
        inputs: of the model.
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model, self.inputs = model, inputs
        self.device = next(model.parameters()).device
        # The last layer before the output layer of a torchtune model, if only some tokens are to come by it.
        self.norm: nn.Module | None = None
        self.selects = (
            False  # whether the model's forward has an argument for the tokens whose logits are wanted
        )
        self.vocab_size: int | None = None
        if isinstance(inputs, TransformersInputs):
            self.selects = "logits_to_keep" in inspect.signature(inputs.model.forward).parameters
            self.vocab_size = inputs.model.config.get_text_config().vocab_size
        elif isinstance(inputs, TorchtuneInputs):
            if not _compiled_with(model, inputs.model.norm):
                self.norm = inputs.model.norm
            self.vocab_size = inputs.model.tok_embeddings.num_embeddings

    def __call__(self, pack: RequestPack) -> list[Values]:
        """Return the answers to the requests of a pack, in the order of ``pack.asked``."""
        places, rows = np.unique(np.concatenate([each.places for each in pack.asked]), return_inverse=True)
        targets = torch.from_numpy(np.concatenate([each.targets for each in pack.asked]).astype(np.int64))
        logits = self._logits(pack.batch, torch.from_numpy(places))
        logps, greedy = _look_up(logits, torch.from_numpy(rows), targets)
        bounds = np.cumsum([each.places.size for each in pack.asked])[:-1]
        return [Values(*each) for each in zip(np.split(logps, bounds), np.split(greedy, bounds), strict=True)]

    def take_part(self, batch: Batch) -> None:
        """Make a forward pass whose result nobody needs, because the other ranks of a sharded model make one."""
        self._logits(batch, torch.tensor([0]))

    def _logits(self, batch: Batch, places: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits behind some tokens, in parts, ``[places, vocab]`` in all."""
        places = places.to(self.device)
        batch = batch.to(self.device)
        with without_training(self.model), self._only_at(places) as arguments:
            output = self.model(**self.inputs(batch), **arguments)
        output = getattr(output, "logits", output)
        parts = [output] if isinstance(output, torch.Tensor) else list(output)
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
    """Return whether a layer is part of a compiled module, whose graph may leave out or keep the layer's hook."""
    return any(
        (isinstance(module, OptimizedModule) or module._compiled_call_impl is not None)
        and any(inner is layer for inner in module.modules())
        for module in model.modules()
    )


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


def _look_up(
    parts: list[torch.Tensor], rows: torch.Tensor, targets: torch.Tensor
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return the log-probability of each target in its row of logits, and whether it is the most likely one.

    Args:
        parts: of the logits, ``[rows, vocab]`` in all.
        rows: ``[targets]``, on the CPU.
        targets: ``[targets]``, on the CPU.
    """
    order = rows.argsort(stable=True)  # targets in the order of the rows
    found, chosen = [], []
    begin, done = 0, 0
    sorted_rows, sorted_targets = rows[order], targets[order]
    for part in parts:
        for chunk in torch.split(part, CHUNK):
            end = int(torch.searchsorted(sorted_rows, begin + len(chunk)))
            local = (sorted_rows[done:end] - begin).to(chunk.device)
            wanted = sorted_targets[done:end].to(chunk.device)
            logits = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
            found.append(logits[local, wanted] - logits.logsumexp(1)[local])
            chosen.append(logits.argmax(1)[local] == wanted)
            begin, done = begin + len(chunk), end
    back = order.argsort()
    return torch.cat(found).cpu().double()[back].numpy(), torch.cat(chosen).cpu()[back].numpy()
