"""Evaluation on packs, with a loss that is the mean over trained tokens of all batches and ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from streampack.integrations.hf_trainer.steps import ToDevice
from streampack.loader.data_loader import PackedDataLoader
from streampack.streaming.dataset import IterablePackedDataset

if TYPE_CHECKING:
    from transformers import Trainer

log = logging.getLogger(__name__)


def require_end(packs: IterablePackedDataset, name: str) -> None:
    """Check that a stream of packs, the argument ``name``, ends, because an evaluation reads all of it."""
    if packs.epochs is None:
        raise ValueError(f"{name} has epochs=None and would never end; give it epochs=1")


class Evaluation:
    """A loader of evaluation batches; every iteration yields the same ones."""

    # accelerate's GradientState reads these from the loader that is iterated.
    end_of_dataloader = False
    remainder = -1  # how many rows of the last batch are kept in predictions; -1 stands for all

    def __init__(self, loader: PackedDataLoader, to_device: ToDevice) -> None:
        self.loader = loader
        self.to_device = to_device
        self.packs = 0  # packs of this rank in the newest evaluation, without null packs
        self._epoch = loader.dataset.epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        from accelerate.state import GradientState

        self.packs, self.end_of_dataloader, self.remainder = 0, False, -1
        self.loader.dataset.set_epoch(self._epoch)
        state = GradientState()
        state._add_dataloader(self)  # Trainer looks there for the last batch, with batch_eval_metrics
        try:
            batches = iter(self.loader)
            batch = next(batches, None)
            while batch is not None:
                following = next(batches, None)
                self.end_of_dataloader = following is None
                packs = sum(map(bool, batch.fragments))
                if following is None and self.loader.rank_sync.alone:
                    # With one rank, the last batch ends with its null packs. With several they can be anywhere.
                    self.remainder = packs
                self.packs += packs
                yield self.to_device(batch)
                batch = following
        finally:
            state._remove_dataloader(self)

    def count_packs(self) -> int:
        """Collective: count the packs of all ranks, without null packs."""
        return sum(self.loader.rank_sync.gather(self.packs))


class TokenMean:
    """The mean loss of an evaluation over its trained tokens.

    In Trainer's mean over batches, a part-empty last batch weighs as much as a full one.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        # This rank's loss of each batch. The mean over the ranks is the loss of the batch.
        self._losses: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []  # trained tokens of each batch on all ranks

    def add(self, loss: torch.Tensor, count: torch.Tensor) -> None:
        """Add a batch: this rank's loss, and the trained tokens of all ranks."""
        self._losses.append(loss.detach())
        self._counts.append(count)

    def apply(self, metrics: dict[str, Any], name: str) -> None:
        """Collective: replace Trainer's mean over batches by the mean over tokens."""
        if name not in metrics or not self._counts:
            return
        counts = torch.stack(self._counts).double().cpu()
        losses = torch.stack(self._losses).double().cpu()
        if self.trainer.args.world_size > 1:
            mine = losses.float().to(self.trainer.args.device)
            losses = self.trainer.accelerator.reduce(mine, reduction="mean").double().cpu()
        metrics[name] = ((losses * counts).sum() / counts.sum()).item()
        if math.isnan(metrics[name]) and not counts.any():
            log.warning("%s is NaN: no token of the evaluation data is trained (all labels are -100)", name)
