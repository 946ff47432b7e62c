"""An epoch by every way to make batches, each strategy, padding and mini-batches: packs, padding, steps, attention."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from streampack.inspection.reading import Epoch
from streampack.inspection.report import Outcome, RunShape
from streampack.loader.batching import Batching
from streampack.packing.groups import attention_cost
from streampack.packing.planner import plan_samples
from streampack.packing.settings import Packing
from streampack.packing.strategies import STRATEGIES
from streampack.sources.reading import permutation
from streampack.streaming.lane_config import LaneConfig

BLOCKS = 10
"""Consecutive stretches of a sample's packs, from whose differences the standard error is taken."""
ENOUGH_PACKS = 200
"""A sample with fewer packs is read again and again, because its last packs are not full."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """The rows of an epoch's batches: those of all lanes, or of a sample."""

    widths: Ints  # [rows] tokens of each, padding included
    held: Ints  # [rows] tokens of each, padding left out
    pairs: Ints  # [rows] cost of the attention
    lanes: tuple[int, ...]  # rows of each lane
    last: int = 0  # padding in the last row of each lane
    ends: int = 0  # padding at the ends of sequences


def plan_outcomes(
    config: LaneConfig, epoch: Epoch, shape: RunShape, *, chosen: str
) -> tuple[list[Outcome], Plan]:
    """Return the outcome of every way to make batches, and the plan of the ``chosen`` one."""
    batching, packing = shape.batching(shape.ranks[0]), config.packing
    plain, found = replace(packing, split_across_pack=False), []
    for name in (*STRATEGIES, "split_across_pack"):
        way = (
            replace(plain, strategy=name) if name in STRATEGIES else replace(packing, split_across_pack=True)
        )
        plan, outcome = _packed(name, epoch, way, batching)
        found.append(outcome)
        if name == chosen:
            own = plan
    found += _padded(config, epoch, shape)
    base, model, outcomes = found[-2], shape.model, []
    for each in found:
        flops = None
        if model is not None:
            flops = model.of(base.tokens, base.pairs) / model.of(each.tokens, each.pairs)
        outcomes.append(
            replace(
                each,
                chosen=each.name == chosen,
                samples_per_step=epoch.samples / max(1.0, each.steps),
                speedup=base.tokens / each.tokens,
                flops_speedup=flops,
            )
        )
    return outcomes, own


def _packed(name: str, epoch: Epoch, packing: Packing, batching: Batching) -> tuple[Plan, Outcome]:
    """Plan the packs of an epoch, or those of a sample, from which its numbers are scaled up."""
    if epoch.exact:
        plan = plan_lanes(epoch.lanes, packing)
        return plan, _outcome(name, plan, 1.0, 0.0, steps_of(plan.lanes, batching))
    # The sample is planned as often as it takes for its end not to count, and each lane has a last pack that is half
    # empty. How full those of an epoch's lanes are is chance.
    [lengths] = epoch.lanes
    times = max(1, math.ceil(ENOUGH_PACKS * packing.max_seq_len / max(1, sum(lengths))))
    plan = plan_lanes([[*lengths] * times], packing)
    width, scale = packing.max_seq_len, epoch.tokens / int(plan.held.sum())
    last = epoch.num_lanes * width / 2
    rows = (scale * (int(plan.widths.sum()) - plan.last) + last) / width
    found = _outcome(name, plan, scale, 0.0, max(1.0, rows / batching.packs_per_step))
    # The error is that of parts of the sample, planned each on its own; the last pack of each is left out.
    each = -(-len(lengths) // BLOCKS)
    parts = plan_lanes([lengths[start : start + each] for start in range(0, len(lengths), each)], packing)
    padding = 1 - epoch.tokens / (rows * width)
    error = _error(parts, np.cumsum([0, *parts.lanes]).tolist(), without=1, unknown=padding)
    error = math.hypot(error, math.sqrt(epoch.num_lanes / 12) / rows)
    return plan, replace(
        found,
        packs=rows,
        tokens=rows * width,
        padding=padding,
        error=error,
        last_packs=last / (rows * width),
        sequence_ends=scale * plan.ends / (rows * width),
    )


def _padded(config: LaneConfig, epoch: Epoch, shape: RunShape) -> Iterator[Outcome]:
    """Yield what comes of padding to the longest sample of a batch, and of mini-batches of one sample."""
    batching = shape.batching(shape.ranks[0])
    for name, batch in (("padding", shape.padded_batch), ("mini-batches", 1)):
        at_once = batch * batching.world_size
        step = -(-batching.packs_per_step // at_once) * at_once
        plan = plan_padding(epoch.lanes, config.packing, batch=batch, seed=config.seed)
        scale = epoch.tokens / int(plan.held.sum())
        steps = -(-len(plan.held) // step) * scale
        bounds = np.linspace(0, len(plan.held), min(BLOCKS, len(plan.held)) + 1).astype(np.int64).tolist()
        unknown = 1 - int(plan.held.sum()) / int(plan.widths.sum())
        error = 0.0 if epoch.exact else _error(plan, bounds, unknown=unknown)
        yield _outcome(name, plan, scale, error, steps if epoch.exact else max(1.0, steps))


def _outcome(name: str, plan: Plan, scale: float, error: float, steps: float) -> Outcome:
    """Return the numbers of ``scale`` times as many rows, without those that compare it with others."""
    width, held = int(plan.widths.sum()), int(plan.held.sum())
    return Outcome(
        name=name,
        chosen=False,
        packs=len(plan.held) * scale,
        padding=1 - held / width,
        error=error,
        steps=steps,
        samples_per_step=0.0,
        tokens=width * scale,
        pairs=float(plan.pairs.sum()) * scale,
        speedup=1.0,
        flops_speedup=None,
        last_packs=plan.last / width,
        sequence_ends=plan.ends / width,
    )


def plan_lanes(lanes: Iterable[Sequence[int]], packing: Packing) -> Plan:
    """Plan the packs of each lane from the tokens that its samples keep.

    >>> plan = plan_lanes([[5, 4, 2, 3, 4]], Packing(8))
    >>> plan.held.tolist(), plan.lanes, plan.last
    ([8, 8, 2], (3,), 6)
    """
    held, pairs, counts, last, ends = array("q"), array("q"), [], 0, 0
    for lane in lanes:
        before = len(held)
        for pack in plan_samples(enumerate(lane), packing):
            lengths = [stop - start for _, start, stop in pack]
            padded = [packing.padded(length) for length in lengths]
            held.append(sum(lengths))
            pairs.append(attention_cost(padded))
            ends += sum(padded) - held[-1]
        counts.append(len(held) - before)
        last += packing.max_seq_len - sum(padded) if counts[-1] else 0
    widths = np.full(len(held), packing.max_seq_len, np.int64)
    return Plan(widths, np.array(held, np.int64), np.array(pairs, np.int64), tuple(counts), last, ends)


def plan_padding(
    lanes: Iterable[Sequence[int]],
    packing: Packing,
    *,
    batch: int,
    seed: int,
) -> Plan:
    """Plan batches of ``batch`` random samples, padded to the longest; with 1, mini-batches without padding.

    >>> plan = plan_padding([[5, 4, 2, 3]], Packing(8), batch=2, seed=0)
    >>> plan.held.tolist(), plan.widths.tolist()
    ([2, 5, 4, 3], [5, 5, 4, 4])
    """
    lengths = _pieces(lanes, packing)
    lengths = lengths[permutation(len(lengths), seed, 0)]
    starts = np.arange(0, len(lengths), batch)
    longest = np.maximum.reduceat(lengths, starts) if len(lengths) else lengths
    widths = np.repeat(longest, batch)[: len(lengths)]
    pairs = widths * (widths + 1) // 2  # the `attention_cost` of each
    return Plan(widths, lengths, pairs, (len(lengths),))


def _pieces(lanes: Iterable[Sequence[int]], packing: Packing) -> Ints:
    """Return the lengths of the pieces of all samples, none longer than a pack."""
    lengths = np.concatenate(
        [np.zeros(0, np.int64), *map(np.asarray, lanes)], dtype=np.int64, casting="unsafe"
    )
    limit = packing.max_seq_len
    if not len(lengths) or lengths.max() <= limit:
        return lengths
    times = -(-lengths // limit)
    pieces = np.repeat(np.int64(limit), int(times.sum()))
    pieces[np.cumsum(times) - 1] = lengths - (times - 1) * limit
    return pieces


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


def _error(plan: Plan, bounds: Sequence[int], *, without: int = 0, unknown: float) -> float:
    """Return the standard error of a plan's padding, from the differences between parts of its rows.

    Where fewer than half of the parts have a row, so few tell nothing, and it is ``unknown``.
    """
    parts = [slice(start, stop - without) for start, stop in pairwise(bounds) if stop - without > start]
    full = [plan.held[part].sum() / plan.widths[part].sum() for part in parts]
    return float(np.std(full, ddof=1) / math.sqrt(len(full))) if 2 * len(full) > BLOCKS else unknown
