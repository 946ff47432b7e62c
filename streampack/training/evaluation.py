"""Loss over held-out packs, by source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from streampack.attention import Inputs
from streampack.losses import label_weights, summed_cross_entropy
from streampack.packing.batch import Batch
from streampack.training.model import evaluating
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
    """Collective: return the losses over the packs of all ranks, with labels weighted as in training.

    ``validation_loss`` is the mean of the sources' losses, weighted by their fractions of the trained tokens; a
    mixture has ``validation_loss_<name>`` too.
    """
    totals = torch.zeros(len(held_out), 2, dtype=torch.float64, device=device)
    with evaluating(model):
        for total, (batches, _) in zip(totals, held_out.values(), strict=True):
            for batch in batches:
                weights = label_weights(batch, loss_norm=loss_norm)
                batch = batch.to(device)
                logits = model(**inputs(batch))
                total[0] += summed_cross_entropy(logits, batch.labels, weights=weights.to(device))
                total[1] += weights.sum()
    losses = [loss / weight if weight else 0.0 for loss, weight in world.all_reduce(totals).tolist()]
    fractions = [source.weight for source in held_out.values()]
    mean = math.fsum(weight * loss for weight, loss in zip(fractions, losses, strict=True)) / math.fsum(
        fractions
    )
    by_source = zip(held_out, losses, strict=True)
    return {"validation_loss": mean} | {f"validation_loss_{name}": loss for name, loss in by_source if name}
