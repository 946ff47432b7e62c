"""Training on preference pairs: the reference's log-probabilities, metrics, held-out pairs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torchtune import training
from torchtune.modules import peft

from streampack.attention import Inputs
from streampack.attention.prepare import prepare_model_for_packing
from streampack.instantiate import build
from streampack.lanes.lane_config import LaneConfig
from streampack.losses import PreferenceLoss, pair_of, sequence_logps
from streampack.packing.batch import Batch
from streampack.training.config import RunConfig
from streampack.training.evaluation import HeldOut, mean_losses
from streampack.training.model import build_model
from streampack.training.world import World

REFERENCE_FIELD = "ref_logps"
"""The field of a batch with the reference's log-probability of each answer, summed over its trained tokens."""

Pairs = tuple[torch.Tensor, torch.Tensor]
"""What `pair_of` returns: indices of the chosen and of the rejected answers."""


class Compared(NamedTuple):
    """What a preference loss says of the pairs of a batch, each ``[pairs]``; only ``losses`` has a gradient."""

    losses: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor
    chosen_logps: torch.Tensor
    rejected_logps: torch.Tensor


def require_pairs(lanes: LaneConfig) -> None:
    """Raise ValueError if an encoder of a run makes single samples; of a user's own encoder it is not known."""
    for encode in lanes.encoders:
        ours = type(encode).__module__.startswith("streampack.")
        if ours and not getattr(encode, "makes_groups", False):
            raise ValueError(
                f"the rows are no preference pairs: {type(encode).__name__} makes single samples, and dpo compares two "
                "answers; name streampack.AnswersEncoder, or one of torchtune's preference datasets"
            )


class Reference:
    """Log-probabilities of sequences under the model that the policy is compared with, without gradients.

    It is the frozen base of a model with adapters; otherwise a second, frozen model, of ``config.ref_checkpointer`` or
    of the ``weights`` from which the policy began; or, with ``reference: data``, the field ``ref_logps`` of the batch,
    and then there is no forward pass. A loss that is ``reference_free`` gets zeros. Making it is a collective.
    """

    def __init__(
        self,
        config: RunConfig,
        loss: nn.Module,
        *,
        model: nn.Module,
        inputs: Inputs,
        weights: Mapping[str, Any],
        device: torch.device,
        world: World,
    ) -> None:
        self.model, self.inputs, self.device = model, inputs, device
        self.adapted = bool(peft.get_adapter_params(model))
        self.from_data = config.reference == "data"
        self.free = isinstance(loss, PreferenceLoss) and loss.reference_free
        reasons = {
            "the loss is reference_free": self.free,
            "reference=data takes the data's numbers": self.from_data,
            "the frozen base of the adapters is the reference": self.adapted,
        }
        if why := [reason for reason, holds in reasons.items() if holds]:
            if config.ref_checkpointer is not None:
                raise ValueError(f"ref_checkpointer is not used: {why[0]}; remove the key")
            return
        if config.ref_checkpointer is not None:
            with world.main_first():
                checkpointer = build(config.ref_checkpointer)
            weights = checkpointer.load_checkpoint()[training.MODEL_KEY]
        self.model = build_model(config, weights=weights, device=device, world=world)
        self.model.requires_grad_(False).eval()
        self.inputs = prepare_model_for_packing(self.model, attention=config.attention)

    def given(self, batch: Batch, pairs: Pairs) -> torch.Tensor | None:
        """Return what is known without a forward pass, ``[batch, segments]``, or None; all on the CPU."""
        if self.free or not len(pairs[0]):  # a batch of padding only, as a rank without a pack gets
            return torch.zeros(batch.seq_lens.shape) if self.free or self.from_data else None
        values = None if batch.groups is None else batch.groups.fields.get(REFERENCE_FIELD)
        if not self.from_data:
            if values is not None:
                raise ValueError(
                    f"the data have {REFERENCE_FIELD}, and reference=model would compute them again; set "
                    "reference=data, or leave the field out of data.encoder"
                )
            return None
        if values is None or values.flatten()[torch.cat(pairs)].isnan().any():
            raise ValueError(
                f"reference=data, and a pair has no {REFERENCE_FIELD}: one number for each answer; name their columns "
                "in data.encoder.fields, or set reference=model"
            )
        return values

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return the sum of each sequence's log-probabilities, ``[batch, segments]``, by a forward pass."""
        with torch.no_grad(), peft.disable_adapter(self.model) if self.adapted else nullcontext():
            return sequence_logps(self.model(**self.inputs(batch)), batch)[0]


class Comparison:
    """Compares the pairs of batches: a forward pass of the policy, the reference's numbers, and the loss of each pair.

    The loss is torchtune's ``DPOLoss`` or ``RSOLoss``, a `PreferenceLoss`, or any that is called like these.
    """

    def __init__(self, loss: nn.Module, *, model: nn.Module, inputs: Inputs, reference: Reference) -> None:
        self.loss, self.model, self.inputs, self.reference = loss, model, inputs, reference
        self.mean = isinstance(loss, PreferenceLoss) and loss.length_normalized

    def __call__(self, batch: Batch, pairs: Pairs) -> Compared:
        """Compare the ``pairs`` (`pair_of`) of a batch, both on the CPU; the result is on the model's device."""
        device = self.reference.device
        given = self.reference.given(batch, pairs)
        batch = batch.to(device)
        pairs = pairs[0].to(device, non_blocking=True), pairs[1].to(device, non_blocking=True)
        # First, because the policy's activations wait for the backward pass.
        reference = self.reference(batch) if given is None else given.to(device, non_blocking=True)
        logps, counts = sequence_logps(self.model(**self.inputs(batch)), batch)
        if self.mean:
            logps, reference = (values / counts.clamp(min=1) for values in (logps, reference))
        chosen, rejected = (logps.flatten()[index] for index in pairs)
        result = self.loss(chosen, rejected, *(reference.flatten()[index] for index in pairs))
        losses, chosen_rewards, rejected_rewards = result
        return Compared(losses, chosen_rewards, rejected_rewards, chosen.detach(), rejected.detach())


@dataclass
class PairMeter:
    """Adds up rewards and log-probabilities of pairs, over all ranks; on ``device`` until `metrics` reads them."""

    world: World
    device: torch.device

    def __post_init__(self) -> None:
        self.sums = torch.zeros(6, dtype=torch.float64, device=self.device)

    def add(self, compared: Compared) -> None:
        """Count the pairs of one batch of this rank."""
        _, chosen, rejected, *logps = (values.detach().double() for values in compared)
        columns = (torch.ones_like(chosen), chosen, rejected, (chosen > rejected).double(), *logps)
        self.sums += torch.stack([column.sum() for column in columns])

    def metrics(self) -> dict[str, float]:
        """Collective: return means over the pairs since the last call, under torchtune's names; none without pairs."""
        pairs, *sums = self.world.all_reduce(self.sums).tolist()
        self.sums = torch.zeros_like(self.sums)
        if not pairs:
            return {}
        chosen, rejected, right, *logps = (value / pairs for value in sums)
        return {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": right,
            "log_probs/chosen": logps[0],
            "log_probs/rejected": logps[1],
        }


def evaluate_pairs(
    compare: Comparison, held_out: Mapping[str, HeldOut], *, device: torch.device, world: World
) -> dict[str, float]:
    """Collective: return the losses of the held-out pairs of all ranks (`mean_losses`), and their mean rewards."""
    meter = PairMeter(world, device)

    def measure(batch: Batch) -> tuple[torch.Tensor, int]:
        compared = compare(batch, pair_of(batch))
        meter.add(compared)
        return compared.losses.sum(), len(compared.losses)

    found = mean_losses(compare.model, held_out, measure, device=device, world=world)
    return found | {f"validation_{name}": value for name, value in meter.metrics().items()}


def at_first_token(values: torch.Tensor, batch: Batch, index: torch.Tensor) -> list[torch.Tensor]:
    """Put values ``[rows, pairs]`` at the first tokens of the sequences ``index``: each ``[batch, max_seq_len]``.

    Meters that count by token so count pairs. Other tokens get 0. ``batch`` and ``index`` are on the CPU.
    """
    packs, size = batch.tokens.shape
    starts = batch.seq_lens.long().cumsum(1) - batch.seq_lens + size * torch.arange(packs)[:, None]
    places = starts.flatten()[index].to(values.device, non_blocking=True)
    found = values.new_zeros(len(values), packs * size).index_copy(1, places, values)
    return list(found.view(-1, packs, size))
