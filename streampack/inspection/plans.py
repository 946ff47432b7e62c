"""An epoch by every way to make batches: each strategy, and padding. Also how long ranks wait for the slowest one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from streampack.inspection.report import Outcome, RunShape
from streampack.loader.batching import Batching
from streampack.packing.settings import Packing
from streampack.packing.strategies import PADDED, STRATEGIES
from streampack.sources.reading import permutation
from streampack.streaming.epoch_rows import Epoch
from streampack.streaming.estimate import Packs, padding_error, plan_epoch, plan_lanes
from streampack.types import IntArray

SIMULATED_PACKS = 256
"""Packs of each lane that are simulated, or four balance windows, or an epoch if that is less."""


def plan_outcomes(
    epoch: Epoch, packing: Packing, shape: RunShape, *, seed: int
) -> tuple[list[Outcome], Packs]:
    """Return the outcome of every way to make batches, and the packs of the run's own."""
    ways = {name: replace(packing, split_across_pack=False, strategy=name) for name in STRATEGIES}
    if packing.max_media is None:  # samples with images are never split
        ways["split_across_pack"] = replace(packing, split_across_pack=True, strategy=None)
    batching = shape.batching(shape.ranks[0])
    padding, packs = _padded(epoch, packing, batching, shape.padded_batch(packing), seed=seed)
    outcomes = []
    for name, way in ways.items():
        outcome, planned = _packed(name, epoch, way, batching, seed=seed)
        outcomes.append(outcome)
        packs = planned if name == packing.filled_by else packs
    outcomes = [
        replace(
            each,
            chosen=each.name == packing.filled_by,
            samples_per_step=epoch.samples / max(1.0, each.steps),
            speedup=padding.tokens / each.tokens,
        )
        for each in (*outcomes, padding)
    ]
    return outcomes, packs


def _packed(
    name: str, epoch: Epoch, packing: Packing, batching: Batching, *, seed: int
) -> tuple[Outcome, Packs]:
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
    outcome = Outcome(
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
    return outcome, packs


def _padded(
    epoch: Epoch, packing: Packing, batching: Batching, batch: int, *, seed: int
) -> tuple[Outcome, Packs]:
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
    outcome = Outcome(
        name=PADDED,
        packs=len(packs) * scale,
        padding=padding,
        error=padding_error(held, widths, times=times, unknown=padding),
        steps=steps if epoch.exact else max(1.0, steps * scale),
        tokens=float(widths.sum()) * scale,
    )
    return outcome, packs


def slowest_over_mean(
    costs: IntArray,
    *,
    ranks: int,
    lanes: int,
    packs_per_rank: int,
    epoch_packs: float,
    window: int,
    seed: int,
) -> float:
    """Return the cost of the slowest rank of a step over the mean of the ranks: a mean over steps.

    Each lane of the simulation has packs drawn at random. It emits them in this order (``window=0``), or sorted by cost
    within windows, in a permutation that all lanes share, as a run does.

    >>> costs = np.array([1, 3] * 100)
    >>> sizes = {"ranks": 2, "lanes": 2, "packs_per_rank": 1, "epoch_packs": 200, "seed": 0}
    >>> slowest_over_mean(costs, window=100, **sizes) < 1.1 < slowest_over_mean(costs, window=0, **sizes)
    True
    """
    rng = np.random.default_rng(seed)
    lanes = max(ranks, lanes - lanes % ranks)
    size = max(1, min(round(epoch_packs / lanes), max(SIMULATED_PACKS, 4 * window)))
    emitted = rng.choice(costs, (lanes, size))
    for start in range(0, size, window) if window else ():
        packs = np.sort(emitted[:, start : start + window])
        emitted[:, start : start + window] = packs[:, rng.permutation(packs.shape[1])]
    # A rank's packs: the first of each of its lanes, then the second of each, and so on. [ranks, packs]
    own = np.stack([emitted[rank::ranks].T.ravel() for rank in range(ranks)])
    steps = max(1, own.shape[1] // packs_per_rank)
    work = own[:, : steps * packs_per_rank].reshape(ranks, steps, -1).sum(2)  # [ranks, steps]
    return float((work.max(0) / work.mean(0)).mean())
