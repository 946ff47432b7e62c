"""An epoch by every way to make batches: each strategy, and padding: packs, padding, steps, attention."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from streampack.inspection.report import Outcome, RunShape
from streampack.loader.batching import Batching
from streampack.packing.settings import Packing
from streampack.packing.strategies import PADDED, STRATEGIES
from streampack.sources.reading import permutation
from streampack.streaming.epoch_rows import Epoch
from streampack.streaming.estimate import Plan, PlannedEpoch, padding_error, plan_epoch, plan_lanes
from streampack.types import IntArray

SIMULATED_WINDOWS = 4
"""So many windows of packs are handed out by each lane of the simulation, or an epoch if that is less."""


def plan_outcomes(
    epoch: Epoch, packing: Packing, shape: RunShape, *, seed: int
) -> tuple[list[Outcome], Plan]:
    """Return the outcome of every way to make batches, and the plan of the run's own."""
    ways = {name: replace(packing, split_across_pack=False, strategy=name) for name in STRATEGIES}
    if packing.max_media is None:  # samples with images are never split
        ways["split_across_pack"] = replace(packing, split_across_pack=True, strategy=None)
    planned = {name: plan_epoch(epoch, way) for name, way in ways.items()}
    own, batching = packing.strategy == PADDED, shape.batching(shape.ranks[0])
    plan = (
        plan_lanes([[sizes] for sizes, *_ in epoch.lanes], packing)
        if own
        else planned[packing.filled_by].plan
    )
    packed = [_packed(name, epoch, each, packing, batching) for name, each in planned.items()]
    padding = _padded(epoch, ways["next_fit"], batching, shape.padded_batch(packing), own=own, seed=seed)
    outcomes = [
        replace(
            each,
            chosen=each.name == packing.filled_by,
            samples_per_step=epoch.samples / max(1.0, each.steps),
            speedup=padding.tokens / each.tokens,
        )
        for each in (*packed, padding)
    ]
    return outcomes, plan


def _packed(name: str, epoch: Epoch, planned: PlannedEpoch, packing: Packing, batching: Batching) -> Outcome:
    packs, capacity = planned.packs, planned.packs * packing.max_seq_len
    scale = epoch.tokens / int(planned.plan.held.sum())
    media = None
    if epoch.rows.media is not None and packing.max_media is not None:
        media = float(epoch.weights @ epoch.rows.media) / (packs * packing.max_media)
    steps = steps_of(planned.plan.lanes, batching) if epoch.exact else packs / batching.packs_per_step
    return Outcome(
        name=name,
        packs=float(packs),
        padding=planned.padding,
        error=planned.error,
        steps=max(1.0, steps),
        tokens=capacity,
        pairs=float(planned.plan.pairs.sum()) * scale,
        last_packs=planned.last / capacity,
        sequence_ends=scale * planned.plan.ends / capacity,
        media=media,
    )


def _padded(
    epoch: Epoch, packing: Packing, batching: Batching, batch: int, *, own: bool, seed: int
) -> Outcome:
    """Pad batches of random samples, or pieces of the longest ones, to the longest of each.

    Steps are those of the run if it pads its ``own`` batches, and otherwise of as many batches as its packs are.
    """
    packing = replace(packing, overlong="split")
    pieces = array("q")
    for lane in epoch.lanes:
        for kept in lane[0]:
            pieces.extend(stop - start for start, stop in packing.pieces_of(kept))
    lengths = np.frombuffer(pieces, np.int64)[permutation(len(pieces), seed, 0)]
    longest = np.maximum.reduceat(lengths, np.arange(0, len(lengths), batch))
    longest += -longest % packing.pad_seqs_to if own else 0
    widths = np.repeat(longest, batch)[: len(lengths)]
    held, width, scale = int(lengths.sum()), int(widths.sum()), epoch.tokens / int(lengths.sum())
    at_once = batch * batching.world_size
    step = batching.packs_per_step if own else -(-batching.packs_per_step // at_once) * at_once
    steps = -(-len(lengths) // step)
    return Outcome(
        name=PADDED,
        packs=len(lengths) * scale,
        padding=1 - held / width,
        error=0.0 if epoch.exact else padding_error(lengths, widths, unknown=1 - held / width),
        steps=steps if epoch.exact else max(1.0, steps * scale),
        tokens=width * scale,
        pairs=float((widths * (widths + 1) // 2).sum()) * scale,  # the `attention_cost` of each
        last_packs=0.0,
        sequence_ends=0.0,
    )


def steps_of(packs: Sequence[int], batching: Batching) -> int:
    """Return the optimizer steps of an epoch whose lanes have these packs.

    >>> steps_of([5, 4], Batching(batch_size=1, packs_per_step=4, world_size=1, num_lanes=2))
    3
    >>> steps_of([5, 4], Batching(batch_size=1, packs_per_step=2, world_size=2, num_lanes=2))
    5
    """
    ranks, most, batching = batching.world_size, 0, replace(batching, num_lanes=len(packs))
    for rank in range(ranks):
        left, number = sum(packs[rank::ranks]), 0
        while left > 0:
            left -= batching.room(number, slot=0, rank=rank)
            number += 1
        most = max(most, number)
    return -(-most // batching.batches_per_step)


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

    Each lane of the simulation has a stretch of the planned packs that begins at random, and hands it out as a run
    does: as planned (``window=0``), or by the attention cost within windows, in a permutation that all lanes share.

    >>> costs = np.array([1, 3] * 100)
    >>> sizes = {"ranks": 2, "lanes": 2, "packs_per_rank": 1, "epoch_packs": 200, "seed": 0}
    >>> slowest_over_mean(costs, window=4, **sizes)
    1.0
    """
    rng = np.random.default_rng(seed)
    lanes = max(ranks, lanes - lanes % ranks)
    size = max(1, min(round(epoch_packs / lanes), SIMULATED_WINDOWS * max(window, 64)))
    handed = costs[(rng.integers(0, len(costs), (lanes, 1)) + np.arange(size)) % len(costs)]  # [lanes, packs]
    for start in range(0, size, window) if window else ():
        packs = np.sort(handed[:, start : start + window])
        handed[:, start : start + window] = packs[:, rng.permutation(packs.shape[1])]
    # A rank's packs: the first of each of its lanes, then the second of each, and so on. [ranks, packs]
    own = np.stack([handed[rank::ranks].T.ravel() for rank in range(ranks)])
    steps = max(1, own.shape[1] // packs_per_rank)
    work = own[:, : steps * packs_per_rank].reshape(ranks, steps, -1).sum(2)  # [ranks, steps]
    return float((work.max(0) / work.mean(0)).mean())
