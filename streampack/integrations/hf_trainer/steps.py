"""The training loader: batches on the device, and the stream's state after a step, also in checkpoints."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from streampack.accounting import Ledger
from streampack.loader.data_loader import PackedDataLoader
from streampack.loader.iteration import Iteration
from streampack.packing.batch import Batch
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.run_state import RunState

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

log = logging.getLogger(__name__)

ToDevice = Callable[[Batch], dict[str, Any]]

METERED = ("data_wait", "data_wait_mean", "cost_imbalance", "cost_imbalance_mean")
"""What the logs have of `PackedDataLoader.metrics`."""
STREAM_FILE = "stream.pt"
"""The stream's state as plain values, so that it can be read with ``weights_only=True``."""
TRAINER_FILE = "trainer_state.json"
PREFIX = "checkpoint-"


class Steps:
    """The training loader that a trainer iterates, and the stream's position after the steps that were made.

    A checkpoint resumes after the last step that was made, and the loader may be up to two steps past it: Trainer takes
    all batches of a step before it makes the step, and may save between the two. And the first batch of the next step
    is fetched and queued for the device before this step's backward. So the position before each fetch is kept.

    Args:
        loader: yields the batches.
        to_device: moves a batch to the device, as a dict that Trainer reads.
        trainer: is told to stop when the data ends.
        steps_before: steps that the run made before it was resumed.
    """

    def __init__(
        self,
        loader: PackedDataLoader,
        to_device: ToDevice,
        *,
        trainer: Trainer,
        steps_before: int,
    ) -> None:
        self.loader = loader
        self.to_device = to_device
        self.trainer = trainer
        self.step = steps_before  # of the newest batch
        self.epoch = 0  # of the newest batch, counted from the run's first epoch
        self._left = 0  # batches of this step that Trainer has not asked for
        self._batches: Iteration | None = None  # of the loader; None before the first batch
        # The first batch of the next step, None at the end of the data.
        self._next: list[dict[str, Any] | None] = []
        # The stream's position when `_next` was fetched last, or began, or was closed: after the step `_made`. And its
        # position at the fetch before.
        self._before, self._made = loader.position(), steps_before
        self._earlier = self._before
        self._first = steps_before

    def __iter__(self) -> Steps:
        # Trainer iterates again when a callback has ended an epoch; the stream then continues.
        return self

    def __next__(self) -> dict[str, Any]:
        if self._left:
            batch = self._take()
        elif self.trainer.state.global_step >= self.trainer.args.max_steps:
            batch = None  # otherwise Trainer would make one more step in a run that is resumed at its end
        else:
            batch = self.fetch()
            self._next = []
        if batch is None:
            self._end()
            raise StopIteration
        if not self._left:
            self.step, self._left = self.step + 1, self.loader.batches_per_step
        self._left -= 1
        self.epoch = self._epoch()
        return batch

    def _take(self) -> dict[str, Any] | None:
        assert self._batches is not None
        batch = next(self._batches, None)
        return None if batch is None else self.to_device(batch)

    def prefetch(self) -> None:
        """Collective: fetch the first batch of the next step, if Trainer has all batches of this one."""
        if self._batches is not None and not self._left and self.step < self.trainer.args.max_steps:
            self.fetch()

    def fetch(self) -> dict[str, Any] | None:
        """Collective, between the batches of two steps: return the first batch of the next step, None at the end.

        It is fetched once.
        """
        if not self._next:
            if self._batches is None:
                # An evaluation or a callback may have read the same data before. What it reads from now on does not
                # change this iteration.
                self.loader.dataset.position.command(self._before)
                self._batches = iter(self.loader)
            self._earlier, self._before, self._made = self._before, self._batches.handed, self.step
            self._next = [self._take()]
            if self._next[0] is None:
                self._before = self._batches.handed  # with what was dropped after the last pack
        return self._next[0]

    def _epoch(self) -> int:
        """Return the epoch of the last batch fetched, counted from the run's first epoch."""
        assert self._batches is not None, "no batch was fetched"
        return self._batches.epoch - self._batches.handed.epoch

    def ends_epoch(self) -> bool:
        """Collective: return whether the newest step ended an epoch and another epoch follows."""
        return self.fetch() is not None and self._epoch() > self.epoch

    def has_more(self) -> bool:
        """Collective: return whether there is data after the newest step."""
        return self.fetch() is not None

    def steps_in_epoch(self) -> int:
        """Count the steps made in this epoch, including those before a resume."""
        return self._after_last_step().slot // self.loader.packs_per_step

    def _after_last_step(self) -> RunState:
        """Return the stream's position after the last step that was made."""
        # With enable_jit_checkpoint, Trainer saves at once when it gets a SIGTERM, before it makes a step whose batches
        # it has.
        made = self.trainer.state.global_step
        if self._batches is None or made == self._made:
            return self._before
        return self._batches.handed if made > self._made else self._earlier

    def state_dict(self) -> dict[str, Any]:
        """Collective: return the stream's state after the last step that was made."""
        return self.loader.state_of(self._after_last_step())

    def ledger(self) -> Ledger:
        """Collective: return the ledger of all ranks after the last step that was made."""
        return Ledger.total(self.loader.rank_sync.gather(self._after_last_step().ledger))

    def totals(self, *, metered: bool) -> dict[str, float]:
        """Collective: return what is logged of all ranks: token totals, and if ``metered`` those of `METERED`.

        Of each metric the largest of the ranks is taken, a mean since it was asked for last. Metrics cover a step whose
        batches were prefetched, the ledger does not.
        """
        self.loader.require_trained()
        found = self.loader.metrics() if metered else {}
        ranks = self.loader.rank_sync.gather({name: found[name] for name in METERED if name in found})
        ledger = self.ledger()
        totals = {name: max(rank[name] for rank in ranks) for name in ranks[0]} | {
            "num_tokens": ledger.packed,
            "padding": ledger.padding,
            "untrained": ledger.untrained,
            "dropped_tokens": sum(ledger.dropped.values()),
            "bad_records": ledger.dropped_samples["bad"],
        }
        return totals | ({"num_images": ledger.images, "num_media": ledger.media} if ledger.media else {})

    def close(self) -> None:
        """End the worker processes. A checkpoint may still be saved, after an interrupt too."""
        self._before = self._after_last_step()
        self._batches, self._next, self._left = None, [], 0

    def _end(self) -> None:
        """Stop the trainer at the end of the data; otherwise it would begin another epoch.

        Ask for the log, evaluation and checkpoint that Trainer makes after the last step of ``max_steps``.
        """
        args, state, control = self.trainer.args, self.trainer.state, self.trainer.control
        control.should_training_stop = True
        steps = self.step
        if steps >= args.max_steps:
            return
        if self.loader.rank_sync.rank == 0:
            log.warning(
                "the data ended after step %d of max_steps=%d, and so does the training; num_train_epochs only "
                "estimates max_steps, and IterablePackedDataset(..., epochs=None) never ends",
                steps, args.max_steps,
            )  # fmt: skip
        if steps > self._first:
            control.should_log |= args.logging_strategy != "no"
            if args.eval_strategy == "steps" and args.eval_delay <= steps:
                control.should_evaluate |= steps % state.eval_steps != 0
            if args.save_strategy == "steps":
                control.should_save |= state.save_steps <= 0 or steps % state.save_steps != 0


def make_loader(
    args: TrainingArguments,
    packs: IterablePackedDataset,
    batch_size: int,
    accumulation_steps: int = 1,
    *,
    state: dict[str, Any] | None = None,
) -> PackedDataLoader:
    """Return a loader whose steps have ``accumulation_steps`` batches on each rank, also in the run of ``state``."""
    lanes = (state or {}).get("num_lanes")  # fewer than ranks in a run that has grown
    ranks = min(args.world_size, lanes) if type(lanes) is int and lanes > 0 else args.world_size
    loader = PackedDataLoader(
        packs,
        batch_size=batch_size,
        num_workers=args.dataloader_num_workers,
        packs_per_step=batch_size * accumulation_steps * ranks,
        pin_memory=args.dataloader_pin_memory and args.device.type not in ("cpu", "mps"),
        timeout=args.ddp_timeout,
    )
    assert loader.rank_sync.world_size == args.world_size, "ranks are not in one torch.distributed group"
    return loader


def write_stream(state: dict[str, Any], folder: Path) -> None:
    """Write the stream's state as the first file of a checkpoint.

    This makes an older checkpoint in the folder incomplete, so that a mixture of the two never looks complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRAINER_FILE).unlink(missing_ok=True)
    torch.save(state, folder / STREAM_FILE)


def read_stream(folder: Path) -> dict[str, Any]:
    """Read the state that `write_stream` wrote."""
    try:
        state: dict[str, Any] = torch.load(folder / STREAM_FILE, weights_only=True)
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {STREAM_FILE}: it was saved without prepare_trainer_for_packing, and which packs were "
            "trained is unknown; load its weights into the model and call train() without resume_from_checkpoint"
        ) from None
    return state


def read_trainer(folder: Path) -> dict[str, Any]:
    """Read Trainer's own state. Trainer writes it last, so a checkpoint with it is complete."""
    try:
        state: dict[str, Any] = json.loads((folder / TRAINER_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} was not written to its end; resume_from_checkpoint=True resumes from the newest checkpoint that "
            f"was: {type(error).__name__}: {error}"
        ) from None
    return state


def newest_checkpoint(output_dir: str) -> str | None:
    """Return the newest complete checkpoint, or None if a run was killed while it wrote its first one."""
    steps = {
        int(number): path
        for path in Path(output_dir).glob(f"{PREFIX}*")
        if (number := path.name.removeprefix(PREFIX)).isdigit()
    }
    if not steps:
        raise ValueError(
            f"there is no whole checkpoint in {output_dir} to resume from; call train() to begin, or name a folder"
        )
    for _, folder in sorted(steps.items(), reverse=True):
        try:
            read_trainer(folder)
        except ValueError:
            log.warning("%s was not written to its end; trying an earlier checkpoint", folder)
            continue
        return str(folder)
    log.warning("no checkpoint in %s was written to its end; training begins at step 0", output_dir)
    return None
