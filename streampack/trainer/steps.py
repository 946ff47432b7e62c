"""The batches of a training in progress, as the model's arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from streampack.collate import Batch
from streampack.loader import PackedDataLoader
from streampack.metrics import Ledger
from streampack.types import ReceiptNumbers

if TYPE_CHECKING:
    from transformers import Trainer

log = logging.getLogger(__name__)

AsInputs = Callable[[Batch], dict[str, Any]]


class Steps:
    """Training batches, and the stream's state as of the last step that the trainer has made."""

    def __init__(
        self, loader: PackedDataLoader, as_inputs: AsInputs, *, trainer: Trainer, first: int
    ) -> None:
        self.loader = loader
        self.as_inputs = as_inputs
        self.trainer = trainer
        self.first = first  # steps made before the first of these
        self.given = 0  # batches
        # Receipts and slot when the newest step began.
        self._before: tuple[dict[int, ReceiptNumbers], int] = ({}, 0)
        self._batches: Iterator[Batch] | None = None

    def __iter__(self) -> Steps:
        return self  # Trainer iterates anew where a callback ends its epoch; the stream goes on

    def __next__(self) -> dict[str, Any]:
        if self._batches is None:
            self._batches = iter(self.loader)
        if self.given % self.loader.batches_per_step == 0:
            self._before = dict(self.loader.receipts), self.loader.slot
        # A run resumed at its end: Trainer would make one step more.
        finished = self.trainer.state.global_step >= self.trainer.args.max_steps
        batch = None if finished else next(self._batches, None)
        if batch is None:
            self._end()
            raise StopIteration
        self.given += 1
        return self.as_inputs(batch)

    def state_dict(self) -> dict[str, Any]:
        """To be saved with the trainer as it is. A collective."""
        loader = self.loader
        receipts, slot = loader.receipts, loader.slot
        made = self.trainer.state.global_step - self.first
        if self.given > made * loader.batches_per_step:
            # Saved on SIGTERM (enable_jit_checkpoint): the batches of a step were given, and it was not made.
            receipts, slot = self._before
        return loader.state_of(receipts, slot)

    def ledger(self) -> Ledger:
        """Of all ranks. A collective."""
        return Ledger.total(self.loader.lockstep.gather(self.loader.ledger()))

    def close(self) -> None:
        """Let go of the worker processes."""
        self._batches = None

    def _end(self) -> None:
        """The data is used up. Trainer would ask again for every step up to max_steps, and then begin anew."""
        steps, wanted = self.first + self.given // self.loader.batches_per_step, self.trainer.args.max_steps
        if steps < wanted:
            log.warning(
                "the data ended after step %d of max_steps=%d, and so does the training; with "
                "IterablePackedDataset(..., epochs=None) it never ends",
                steps, wanted,
            )  # fmt: skip
        self.trainer.control.should_training_stop = True
