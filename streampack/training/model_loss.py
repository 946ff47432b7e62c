"""The cross-entropy of a torchtune model's logits, with or without all of them in memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from streampack.attention.torchtune import find
from streampack.instantiate import COMPONENT
from streampack.losses import loss_terms
from streampack.training.conditions import LINEAR_LOSS
from streampack.training.config import RunConfig


def model_loss(
    model: nn.Module,
    arguments: Mapping[str, Any],
    labels: torch.Tensor,
    *,
    weights: torch.Tensor,
    config: RunConfig,
    activations: AbstractContextManager[Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `loss_terms` of a model called with ``arguments``, within ``activations``.

    With the loss ``LinearCrossEntropyLoss``, the model computes them itself, where it would compute logits: FSDP has
    the weights of the output layer there. Then the logits of only some tokens are in memory at a time.
    """
    if (config.loss or {}).get(COMPONENT) != LINEAR_LOSS:
        with activations:
            logits = model(**arguments)
        return loss_terms(logits, labels, weights=weights, compiled=config.compile)
    decoder: Any = find(model)

    def terms(hidden: torch.Tensor) -> list[torch.Tensor]:
        return [*loss_terms(hidden, labels, weights=weights, output=decoder.output, compiled=config.compile)]

    decoder.chunked_output = terms  # in place of its method
    try:
        with activations:
            losses, squares = model(**arguments)
    finally:
        del decoder.chunked_output
    return losses, squares
