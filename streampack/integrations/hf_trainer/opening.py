"""The line that `prepare_trainer_for_packing` prints: what computes attention, and what a step holds."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from streampack.packing.strategies import PADDED
from streampack.streaming.dataset import IterablePackedDataset
from streampack.streaming.estimate import TooLong

if TYPE_CHECKING:
    from transformers import TrainingArguments

log = logging.getLogger(__name__)

PROBED_ROWS = 4096
"""Rows whose lengths an estimate of packs needs."""
FEW_ROWS = 256
"""Rows that are read where each may be slow."""


def print_opening(args: TrainingArguments, packs: IterablePackedDataset, *, summary: str) -> None:
    """Print what is in effect, on one rank, and log what happens to samples that are too long for a pack.

    ``summary``: of the model's inputs.
    """
    if args.process_index:
        return
    parts, config = [summary], packs.lane_config
    if "float32 on cuda" in summary:
        parts.append("set bf16=True in TrainingArguments to compute in 16 bits, by the fastest backend")
    # Behind URLs each row is a request, and images are decoded.
    few = config.packing.overlong in ("error", "split") or config.reads_images
    # A stream may not know its length, and training raises the error of a bad row where it reads the row.
    with suppress(Exception):
        try:
            lanes = packs.lanes_for(args.world_size)
            estimate = packs.estimate(rows=FEW_ROWS if few else PROBED_ROWS, num_lanes=lanes)
            size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
            parts.append(f"a step is {estimate.step(config.packing, size)}")
            if config.packing.strategy != PADDED:
                parts.append(f"about {estimate.padding:.1%} padding expected")
            told = estimate.losses(config.packing)
        except TooLong as error:
            told = str(error)
        if told:
            log.warning("%s", told)
    print("; ".join(parts), flush=True)  # noqa: T201
