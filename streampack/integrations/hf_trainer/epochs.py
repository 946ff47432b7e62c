"""Turn Trainer's ``num_train_epochs`` into steps: counted for map-style data, estimated for streams."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from streampack.integrations.hf_trainer.opening import PROBED_ROWS
from streampack.lanes.lane_config import LaneConfig
from streampack.lanes.piece_reader import PieceReader
from streampack.loader.batching import Batching
from streampack.loader.data_loader import PackedDataLoader
from streampack.packing.planner import plan_samples
from streampack.sources import MapSource
from streampack.sources.source import UnknownSize
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.epoch_rows import tolerant

if TYPE_CHECKING:
    from transformers import TrainingArguments

log = logging.getLogger(__name__)


def require_epochs(packs: IterablePackedDataset, args: TrainingArguments) -> None:
    """Check that ``num_train_epochs`` can set the length of a training: packs that end, and are of a known size."""
    epochs = math.ceil(args.num_train_epochs)
    if packs.epochs is None or packs.epochs not in (1, epochs):
        raise ValueError(
            f"max_steps is {args.max_steps}, so num_train_epochs={args.num_train_epochs} says how often the data is "
            f"read, and the packs have epochs={packs.epochs}; give IterablePackedDataset epochs=1, or set max_steps"
        )
    if not packs.lane_config.source.map_style:
        try:
            packs.estimate()
        except UnknownSize as error:
            raise ValueError(
                f"max_steps is {args.max_steps}, and how many packs this stream makes is known at its end only "
                f"({error}); set max_steps in TrainingArguments"
            ) from None


def require_same_steps(loader: PackedDataLoader, state: Mapping[str, Any] | None) -> None:
    """Check that a step has the packs that it has in the run of ``state``, because Trainer counts steps from its start.

    With other packs they would not end where the data ends.
    """
    before = None if state is None else state.get("packs_per_step")
    if before not in (None, loader.packs_per_step):
        raise ValueError(
            f"the checkpoint's run has steps of {before} packs, and per_device_train_batch_size x "
            f"gradient_accumulation_steps x ranks is now {loader.packs_per_step}; set gradient_accumulation_steps so "
            f"that it is {before}, or set max_steps in place of epochs"
        )


@dataclass(frozen=True)
class Plan:
    """The number of steps that a training of some epochs takes."""

    steps: tuple[int, ...]  # steps of each complete epoch
    epochs: float  # num_train_epochs
    exact: bool  # False if the steps were estimated

    @property
    def total(self) -> int:
        """Steps of the training, which may read only a part of its last epoch."""
        whole = int(self.epochs)
        return max(1, sum(self.steps[:whole]) + math.ceil((self.epochs - whole) * self.steps[-1]))

    def position(self, epoch: int, step: int) -> float:
        """Return how many epochs are done after ``step`` steps of the epoch ``epoch``, counted from 0."""
        return epoch + min(1.0, step / self.steps[min(epoch, len(self.steps) - 1)])


def plan_epochs(loader: PackedDataLoader, epochs: float) -> Plan:
    """Collective: find how many steps this loader takes to read its data ``epochs`` times."""
    packs, ranks = loader.dataset, loader.rank_sync
    num_lanes = packs.lanes_for(ranks.world_size)
    config = packs.lane_config
    # The length of a row with images is known when they are decoded.
    if not config.source.map_style or config.reads_images:
        # All ranks take rank 0's estimate, because with different numbers of steps they would deadlock.
        estimate, *_ = ranks.gather_results(
            lambda: packs.estimate(rows=PROBED_ROWS, num_lanes=num_lanes), doing="estimating an epoch"
        )
        steps = math.ceil(estimate.at_most / loader.packs_per_step)
        plan = Plan((steps,) * math.ceil(epochs), epochs, exact=False)
        if ranks.rank == 0:
            log.warning(
                "max_steps is %d, where the learning rate's schedule ends: an epoch is at most %d steps of %d packs, "
                "estimated from %d samples; training ends with the data, or there",
                plan.total, steps, loader.packs_per_step, estimate.samples,
            )  # fmt: skip
        return plan
    size = config.source.size
    assert size is not None, "a map-style source knows its length"
    log.info("reading %d samples for their lengths, to count the steps of %s epochs", size, epochs)
    parts = ranks.gather_results(
        lambda: packed_lengths(config, range(ranks.rank, size, ranks.world_size)), doing="reading lengths"
    )
    lengths = [0] * size
    for rank, part in enumerate(parts):
        lengths[rank :: ranks.world_size] = part
    mine = range(ranks.rank, num_lanes, ranks.world_size)

    def count() -> list[int]:
        return [
            sum(count_packs(config, lengths, epoch=epoch, lane=lane, num_lanes=num_lanes) for lane in mine)
            for epoch in range(packs.epoch, packs.epoch + math.ceil(epochs))
        ]

    counts = ranks.gather_results(count, doing="counting packs")
    batching = Batching(loader.batch_size, loader.packs_per_step, ranks.world_size, num_lanes)
    of_epochs = tuple(max(1, batching.steps(packs)) for packs in zip(*counts, strict=True))
    return Plan(of_epochs, epochs, exact=True)


def packed_lengths(config: LaneConfig, rows: range) -> list[int]:
    """Return how many tokens are packed of every n-th row of map-style data, 0 for rows that are dropped."""
    quarantine = None if config.quarantine is None else tolerant(config).quarantine
    config = replace(config, endless=False, shuffle_window=0, quarantine=quarantine)
    reader = PieceReader(config, lane=rows.start, num_lanes=rows.step)
    reader.open(0)
    lengths = dict.fromkeys(rows, 0)
    for piece in iter(reader.next, None):
        lengths[piece.row_id[0]] += piece.length
    return list(lengths.values())


def count_packs(config: LaneConfig, lengths: list[int], *, epoch: int, lane: int, num_lanes: int) -> int:
    """Count the packs that one lane makes of an epoch of map-style data, from its `packed_lengths`."""
    rows = replace(config, source=MapSource(range(len(lengths)))).open(lane, num_lanes=num_lanes, epoch=epoch)
    numbers = (row.row_id[0] for row in rows)
    kept = ((number, lengths[number]) for number in numbers if lengths[number])
    return sum(1 for _ in plan_samples(kept, config.packing))
