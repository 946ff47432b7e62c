"""An epoch by every way to make batches: each strategy, and padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from streampack.inspection.report import Outcome, RunShape
from streampack.loader.batching import Batching
from streampack.packing.settings import Packing
from streampack.packing.strategies import PADDED, STRATEGIES
from streampack.sources.reading import permutation
from streampack.streaming.epoch_rows import Epoch
from streampack.streaming.estimate import padding_error, plan_epoch, plan_lanes


def plan_outcomes(epoch: Epoch, packing: Packing, shape: RunShape, *, seed: int) -> list[Outcome]:
    """Return the outcome of every way to make batches."""
    ways = {name: replace(packing, split_across_pack=False, strategy=name) for name in STRATEGIES}
    if packing.max_media is None:  # samples with images are never split
        ways["split_across_pack"] = replace(packing, split_across_pack=True, strategy=None)
    outcomes = [_packed(name, epoch, way, shape.batching, seed=seed) for name, way in ways.items()]
    padding = _padded(epoch, packing, shape.batching, shape.padded_batch(packing), seed=seed)
    return [
        replace(
            each,
            chosen=each.name == packing.filled_by,
            samples_per_step=epoch.samples / max(1.0, each.steps),
            speedup=padding.tokens / each.tokens,
        )
        for each in (*outcomes, padding)
    ]


def _packed(name: str, epoch: Epoch, packing: Packing, batching: Batching, *, seed: int) -> Outcome:
    packs, number, padding, error, last = plan_epoch(epoch, packing, seed=seed)
    steps, ranks = number / batching.packs_per_step, batching.world_size
    if epoch.exact:
        lanes = np.bincount(packs.lane, minlength=epoch.num_lanes)
        own = [int(lanes[rank::ranks].sum()) for rank in range(ranks)]
        steps = replace(batching, num_lanes=epoch.num_lanes).steps(own)
    capacity, media = number * packing.max_seq_len, None
    if packing.max_media is not None:
        media = float(epoch.weights @ epoch.rows.media) / (number * packing.max_media)
    ends = float((packs.used - packs.held).sum()) * epoch.tokens / float(packs.held.sum())
    return Outcome(
        name=name,
        packs=float(number),
        padding=padding,
        error=error,
        steps=max(1.0, steps),
        tokens=capacity,
        last_packs=last / capacity,
        sequence_ends=ends / capacity,
        media=media,
    )


def _padded(epoch: Epoch, packing: Packing, batching: Batching, batch: int, *, seed: int) -> Outcome:
    """Pad batches of random samples, or pieces of the longest ones, to the longest of each batch.

    Steps are those of the run if it pads its own batches. Otherwise a step has as many batches as its packs are.
    """
    own = packing.strategy == PADDED
    pieces = Packing(
        packing.max_seq_len,
        strategy=PADDED,
        overlong="split",
        pad_seqs_to=packing.pad_seqs_to if own else 1,
    )
    lanes, times = epoch.lanes(packing, seed=seed)
    packs = plan_lanes(lanes, pieces)
    shuffled = packs[permutation(len(packs), seed, 0)]
    starts = np.arange(0, len(packs), batch)
    held = np.add.reduceat(shuffled.held, starts)
    widths = np.maximum.reduceat(shuffled.used, starts) * np.diff(starts, append=len(packs))
    padding, scale = float(1 - held.sum() / widths.sum()), epoch.tokens / float(held.sum())
    at_once = batch * batching.world_size
    step = batching.packs_per_step if own else -(-batching.packs_per_step // at_once) * at_once
    steps = -(-len(packs) // step)
    return Outcome(
        name=PADDED,
        packs=len(packs) * scale,
        padding=padding,
        error=padding_error(held, widths, times=times, unknown=padding),
        steps=steps if epoch.exact else max(1.0, steps * scale),
        tokens=float(widths.sum()) * scale,
    )
