"""Loss over held-out packs, by source."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from streampack.attention import Inputs
from streampack.losses import label_weights, summed_cross_entropy
from streampack.packing.batch import Batch
from streampack.training.world import World


class HeldOut(NamedTuple):
    """Held-out batches of one source."""

    batches: Sequence[Batch]  # this rank's batches; every rank has the same number of them
    weight: float = 1.0  # the source's target fraction of the trained tokens


def evaluate(
    model: nn.Module,
    held_out: Mapping[str, HeldOut],
    *,
    inputs: Inputs,
    loss_norm: str,
    device: torch.device,
    world: World,
) -> dict[str, float]:
    """Collective: return the losses over the packs of all ranks, with labels weighted as in training."""

    def measure(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        batch = batch.to(device)
        weights = label_weights(batch, loss_norm=loss_norm)
        loss = summed_cross_entropy(model(**inputs(batch)), batch.labels, weights=weights)
        return loss, weights.sum(dtype=torch.float64)

    return mean_losses(model, held_out, measure, device=device, world=world)


def mean_losses(
    model: nn.Module,
    held_out: Mapping[str, HeldOut],
    measure: Callable[[Batch], tuple[torch.Tensor, torch.Tensor | int]],
    *,
    device: torch.device,
    world: World,
) -> dict[str, float]:
    """Collective: return ``validation_loss``, and of a mixture ``validation_loss_<name>`` too.

    The first is the mean of the sources' losses, weighted by their fractions of the trained tokens. ``measure`` returns
    the summed loss of a batch, and its divisor. Afterwards the model is in training mode.
    """
    totals = torch.zeros(len(held_out), 2, dtype=torch.float64, device=device)
    model.eval()
    with torch.no_grad():
        for total, (batches, _) in zip(totals, held_out.values(), strict=True):
            for loss, weight in map(measure, batches):
                total[0] += loss
                total[1] += weight
    model.train()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # With reshard_after_forward=False, layers would stay gathered until the next backward pass.
            module.reshard()
    losses = [loss / weight if weight else 0.0 for loss, weight in world.all_reduce(totals).tolist()]
    fractions = [source.weight for source in held_out.values()]
    weighted = (weight * loss for weight, loss in zip(fractions, losses, strict=True))
    mean = math.fsum(weighted) / math.fsum(fractions)
    by_source = zip(held_out, losses, strict=True)
    return {"validation_loss": mean} | {f"validation_loss_{name}": loss for name, loss in by_source if name}
