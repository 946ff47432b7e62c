"""An epoch by every way to make batches: each strategy, and padding: packs, padding, steps, attention."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from streampack.inspection.report import Outcome, RunShape
from streampack.inspection.rows import Epoch, Sizes
from streampack.loader.batching import Batching
from streampack.packing.groups import attention_cost
from streampack.packing.planner import plan_samples
from streampack.packing.settings import Packing
from streampack.packing.strategies import PADDED, STRATEGIES
from streampack.sources.reading import permutation
from streampack.types import IntArray

BLOCKS = 10
"""Consecutive stretches of a sample's packs, from whose differences the standard error is taken."""
ENOUGH_PACKS = 200
"""A sample with fewer packs is read again and again, because its last packs are not full."""
SIMULATED_WINDOWS = 4
"""So many windows of packs are handed out by each lane of the simulation, or an epoch if that is less."""


@dataclass(frozen=True)
class Plan:
    """The packs of some lanes."""

    held: IntArray  # [packs] tokens of each, padding left out
    pairs: IntArray  # [packs] cost of the attention
    lanes: tuple[int, ...]  # packs of each lane
    last: int  # padding in the last pack of each lane
    ends: int  # padding at the ends of sequences (`pad_seqs_to`)


def plan_outcomes(
    epoch: Epoch, packing: Packing, shape: RunShape, *, seed: int
) -> tuple[list[Outcome], Plan]:
    """Return the outcome of every way to make batches, and the plan of the run's own."""
    ways = {name: replace(packing, split_across_pack=False, strategy=name) for name in STRATEGIES}
    if packing.max_media is None:  # samples with images are never split
        ways["split_across_pack"] = replace(packing, split_across_pack=True, strategy=None)
    planned = {name: _packed(name, epoch, way, shape) for name, way in ways.items()}
    own = packing.strategy == PADDED
    plan = (
        plan_lanes([[sizes] for sizes, *_ in epoch.lanes], packing) if own else planned[packing.filled_by][0]
    )
    batch = shape.padded_batch(packing)
    padding = _padded(epoch, ways["next_fit"], shape.batching(shape.ranks[0]), batch, own=own, seed=seed)
    outcomes = [
        replace(
            each,
            chosen=each.name == packing.filled_by,
            samples_per_step=epoch.samples / max(1.0, each.steps),
            speedup=padding.tokens / each.tokens,
        )
        for each in (*(outcome for _, outcome in planned.values()), padding)
    ]
    return outcomes, plan


def _packed(name: str, epoch: Epoch, packing: Packing, shape: RunShape) -> tuple[Plan, Outcome]:
    """Plan the packs of an epoch, or those of a sample, from which its numbers are scaled up."""
    width, batching = packing.max_seq_len, shape.batching(shape.ranks[0])
    # A sample is planned as often as it takes for its end not to count, and each lane has a last pack that is half
    # empty. How full those of an epoch's lanes are is chance.
    again = 1 if epoch.exact else -(-ENOUGH_PACKS * width // max(1, sum(epoch.lanes[0][0])))
    plan = plan_lanes([[sizes * again for sizes in lane] for lane in epoch.lanes], packing)
    scale = epoch.tokens / int(plan.held.sum())
    if epoch.exact:
        packs, last, steps = float(len(plan.held)), float(plan.last), float(steps_of(plan.lanes, batching))
    else:
        last = epoch.num_lanes * width / 2
        packs = (scale * (len(plan.held) * width - plan.last) + last) / width
        steps = max(1.0, packs / batching.packs_per_step)
    padding, media = 1 - epoch.tokens / (packs * width), None
    if epoch.rows.media is not None and packing.max_media is not None:
        media = float(epoch.weights @ epoch.rows.media) / (packs * packing.max_media)
    error = 0.0
    if not epoch.exact:
        differs = _error(plan.held[:-1], np.full(len(plan.held) - 1, width), unknown=padding, again=again)
        error = math.hypot(differs, math.sqrt(epoch.num_lanes / 12) / packs)
    return plan, Outcome(
        name=name,
        packs=packs,
        padding=padding,
        error=error,
        steps=steps,
        tokens=packs * width,
        pairs=float(plan.pairs.sum()) * scale,
        last_packs=last / (packs * width),
        sequence_ends=scale * plan.ends / (packs * width),
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
        error=0.0 if epoch.exact else _error(lengths, widths, unknown=1 - held / width),
        steps=steps if epoch.exact else max(1.0, steps * scale),
        tokens=width * scale,
        pairs=float((widths * (widths + 1) // 2).sum()) * scale,  # the `attention_cost` of each
        last_packs=0.0,
        sequence_ends=0.0,
    )


def plan_lanes(lanes: Iterable[Sizes], packing: Packing) -> Plan:
    """Plan the packs of each lane from the sizes of its samples.

    >>> plan = plan_lanes([[array("i", [5, 4, 2, 3, 4])]], Packing(8))
    >>> plan.held.tolist(), plan.lanes, plan.last
    ([8, 8, 2], (3,), 6)
    """
    held, pairs, counts, last, ends = array("q"), array("q"), [], 0, 0
    for lane in lanes:
        before = len(held)
        for pack in plan_samples(zip(count(), *lane), packing):
            lengths = [stop - start for _, start, stop in pack]
            padded = [packing.padded(length) for length in lengths]
            held.append(sum(lengths))
            pairs.append(attention_cost(padded))
            ends += sum(padded) - held[-1]
        counts.append(len(held) - before)
        last += packing.max_seq_len - sum(padded) if counts[-1] else 0
    return Plan(np.array(held, np.int64), np.array(pairs, np.int64), tuple(counts), last, ends)


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


def _error(held: IntArray, widths: IntArray, *, unknown: float, again: int = 1) -> float:
    """Return the standard error of the padding, from the differences between parts of the rows of batches.

    The rows are those of a sample that was read so many times ``again``. Fewer than ten of them tell nothing, nor do
    parts that each hold more than half of the sample, and so hardly differ: the error is ``unknown`` then.
    """
    if len(held) < BLOCKS * again or again > BLOCKS / 2:
        return unknown
    parts = zip(np.array_split(held, BLOCKS), np.array_split(widths, BLOCKS), strict=True)
    full = [own.sum() / width.sum() for own, width in parts]
    return float(np.std(full, ddof=1) * math.sqrt(again / BLOCKS))


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
