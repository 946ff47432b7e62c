"""The training loader: batches as the model's arguments, and the stream's state as of the last step made."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from streampack.accounting import Ledger
from streampack.integrations.hf_trainer.trained_steps import TrainedSteps
from streampack.loader.data_loader import PackedDataLoader
from streampack.packing.batch import Batch
from streampack.streaming.lane_state import LaneState
from streampack.streaming.round_robin import total_ledger

if TYPE_CHECKING:
    from transformers import Trainer

log = logging.getLogger(__name__)

AsInputs = Callable[[Batch], dict[str, Any]]


class Steps:
    """The training loader that a trainer iterates.

    Args:
        loader: yields the batches.
        as_inputs: turns a batch into the model's arguments.
        trainer: stopped when the data ends.
        first: steps that a resumed run made before.
        planned_epochs: epochs that the training reads, if ``num_train_epochs`` sets its length; None if
            ``max_steps`` does.
    """

    def __init__(
        self,
        loader: PackedDataLoader,
        as_inputs: AsInputs,
        *,
        trainer: Trainer,
        first: int,
        planned_epochs: int | None = None,
    ) -> None:
        self.loader = loader
        self.as_inputs = as_inputs
        self.trainer = trainer
        self.first = first
        self.planned_epochs = planned_epochs
        self.given = 0  # batches handed out
        self.epoch = 0  # of the newest batch, counted from the run's first
        # Lane states and slot when the newest step began.
        self._before: tuple[dict[int, LaneState], int] = ({}, 0)
        self._batches: Any = None  # the loader's iteration
        self.trained = TrainedSteps(loader.dataset.lane_config)
        self._fetched = False  # the first batch of the next step is in `_next`, None at the end of the data
        self._next: Batch | None = None

    def __iter__(self) -> Steps:
        return self  # after a callback has ended an epoch, Trainer iterates again and the stream goes on

    def __next__(self) -> dict[str, Any]:
        if self.given % self.loader.batches_per_step:
            batch = next(self._batches, None)
        elif self.trainer.state.global_step >= self.trainer.args.max_steps:
            batch = None  # for a run resumed at its end Trainer would make one more step
        else:
            batch = self._fetch()
            self._next, self._fetched = None, False
        if batch is None:
            self._end()
            raise StopIteration
        self.given += 1
        self.trained.add(batch, ends=self.given % self.loader.batches_per_step == 0)
        self.epoch = self._epoch()
        return self.as_inputs(batch)

    def _fetch(self) -> Batch | None:
        """Fetch the first batch of the next step; None at the end of the data. Between steps, a collective."""
        if not self._fetched:
            if self._batches is None:
                self._batches = iter(self.loader)
            self._before = dict(self.loader._lane_states), self.loader.slot
            self._next, self._fetched = next(self._batches, None), True
        return self._next

    def _epoch(self) -> int:
        return int(self._batches.epoch - self.loader.dataset.epoch)

    def ends_epoch(self) -> bool:
        """Return whether the newest step ended an epoch and another epoch follows. A collective."""
        return self._fetch() is not None and self._epoch() > self.epoch

    def has_more(self) -> bool:
        """Return whether there is data after the newest step. A collective."""
        return self._fetch() is not None

    def steps_in_epoch(self) -> int:
        """Count the steps made in this epoch, including those before a resume."""
        return self._after_last_step()[1] // self.loader.packs_per_step

    def _after_last_step(self) -> tuple[dict[int, LaneState], int]:
        """Return the lane states and the slot as of the last step made."""
        made = self.trainer.state.global_step - self.first
        # On SIGTERM (enable_jit_checkpoint) Trainer may save after a step's batches are given and before it is made.
        if self._fetched or self.given > made * self.loader.batches_per_step:
            return self._before
        return self.loader._lane_states, self.loader.slot

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's state as of the last step made. A collective."""
        return self.loader._state_of(*self._after_last_step())

    def ledger(self) -> Ledger:
        """Return the ledger of all ranks. A collective."""
        return Ledger.total(self.loader.rank_sync.gather(total_ledger(self._after_last_step()[0])))

    def check_trained(self) -> None:
        """Check that each step since the last check trained something. A collective.

        Raises:
            ValueError: if a step trained nothing; on all ranks.
        """
        self.trained.check(self.loader.rank_sync.gather(self.trained.take()))

    def close(self) -> None:
        """End the worker processes."""
        self._batches, self._next, self._fetched = None, None, False

    def _end(self) -> None:
        """End the training with the data, as Trainer does at max_steps; otherwise it would begin another epoch."""
        args, state, control = self.trainer.args, self.trainer.state, self.trainer.control
        control.should_training_stop = True
        steps = self.first + self.given // self.loader.batches_per_step
        if steps >= args.max_steps:
            return
        self._warn_of_end(steps)
        if self.given:
            control.should_log |= args.logging_strategy != "no"
            if args.eval_strategy == "steps" and args.eval_delay <= steps:
                control.should_evaluate |= steps % state.eval_steps != 0
            if args.save_strategy == "steps":
                control.should_save |= state.save_steps <= 0 or steps % state.save_steps != 0

    def _warn_of_end(self, steps: int) -> None:
        if self.loader.rank_sync.rank != 0:
            return
        max_steps = self.trainer.args.max_steps
        if self.planned_epochs is None:
            log.warning(
                "the data ended after step %d of max_steps=%d, and so does the training; with "
                "IterablePackedDataset(..., epochs=None) it never ends",
                steps, max_steps,
            )  # fmt: skip
        else:
            log.warning(
                "all %d epochs were read after step %d, and the training ends; max_steps=%d, where the learning "
                "rate's schedule ends, was estimated",
                self.planned_epochs, steps, max_steps,
            )  # fmt: skip
