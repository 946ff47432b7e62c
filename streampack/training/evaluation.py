"""The loss over held-out packs."""

from __future__ import annotations

import torch
from torch import nn

from streampack.attention import Inputs
from streampack.collate import Batch
from streampack.training.distributed import World
from streampack.training.loss import label_weights, summed_cross_entropy
from streampack.training.model import evaluating


def evaluate(
    model: nn.Module,
    batches: list[Batch],
    *,
    inputs: Inputs,
    loss_norm: str,
    device: torch.device,
    world: World,
) -> float:
    """The loss over the packs of all ranks, weighted as in training. A collective: all ranks have as many batches."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    with evaluating(model):
        for batch in batches:
            weights = label_weights(batch, loss_norm=loss_norm)
            batch = batch.to(device)
            logits = model(**inputs(batch))
            total[0] += summed_cross_entropy(logits, batch.labels, weights=weights.to(device))
            total[1] += weights.sum()
    loss, weight = world.add_up(total).tolist()
    return loss / weight if weight else 0.0
