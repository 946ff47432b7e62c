"""An epoch by every way to make batches, each strategy, padding and mini-batches: packs, padding, steps, attention."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from streampack.inspection.epoch import Epoch
from streampack.inspection.report import Outcome
from streampack.inspection.shape import RunShape
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


@dataclass(frozen=True)
class Totals:
    """Numbers of an epoch, counted or scaled up from a sample."""

    rows: float
    tokens: float  # padding included
    padding: float  # fraction
    error: float  # standard error of the padding
    last: float  # fraction of the tokens that is padding of last packs
    ends: float  # fraction of the tokens that is padding at the ends of sequences
    pairs: float
    steps: float


def plan_outcomes(
    config: LaneConfig, epoch: Epoch, shape: RunShape, *, chosen: str
) -> tuple[list[Outcome], Plan, Totals]:
    """Return the outcome of every way to make batches, and the plan and the numbers of the ``chosen`` one."""
    found: dict[str, Totals] = {}
    for name, plan, each in _planned(config, epoch, shape):
        found[name] = each
        if name == chosen:
            own = plan
    padding, model, outcomes = found["padding"], shape.model, []
    for name, each in found.items():
        flops = None
        if model is not None:
            flops = model.of(padding.tokens, padding.pairs) / model.of(each.tokens, each.pairs)
        outcomes.append(
            Outcome(
                name=name,
                chosen=name == chosen,
                packs=each.rows,
                padding=each.padding,
                error=each.error,
                steps=each.steps,
                samples_per_step=epoch.samples / max(1.0, each.steps),
                tokens=each.tokens,
                speedup=padding.tokens / each.tokens,
                flops_speedup=flops,
                last_packs=each.last,
                sequence_ends=each.ends,
            )
        )
    return outcomes, own, found[chosen]


def _planned(config: LaneConfig, epoch: Epoch, shape: RunShape) -> Iterator[tuple[str, Plan, Totals]]:
    batching, packing = shape.batching(shape.ranks[0]), config.packing
    plain = replace(packing, split_across_pack=False)
    for name in (*STRATEGIES, "split_across_pack"):
        own = (
            replace(plain, strategy=name) if name in STRATEGIES else replace(packing, split_across_pack=True)
        )
        yield name, *plan_packs(epoch, own, batching)
    for name, batch in (("padding", shape.padded_batch), ("mini-batches", 1)):
        at_once = batch * batching.world_size
        step = -(-batching.packs_per_step // at_once) * at_once
        plan = plan_padding(epoch.lanes, packing, batch=batch, seed=config.seed)
        starts = np.linspace(0, len(plan.held), min(BLOCKS, len(plan.held)) + 1).astype(np.int64).tolist()
        error = _error(plan, [slice(*bounds) for bounds in pairwise(starts)])
        scale = epoch.tokens / int(plan.held.sum())
        steps = -(-len(plan.held) // step) * scale
        yield (
            name,
            plan,
            _scaled(plan, scale, 0.0 if epoch.exact else error, steps if epoch.exact else max(1.0, steps)),
        )


def plan_packs(epoch: Epoch, packing: Packing, batching: Batching) -> tuple[Plan, Totals]:
    """Plan the packs of an epoch, or those of a sample, from which its numbers are scaled up."""
    if epoch.exact:
        plan = plan_lanes(epoch.lanes, packing)
        return plan, _scaled(plan, 1.0, 0.0, steps_of(plan.lanes, batching))
    # A sample: stretches of it that are as long as a lane, if it has so many lengths; or else one that is so long that
    # its beginning and its end do not count, and a last pack for each lane that is half empty.
    [lengths] = epoch.lanes
    of_lane = math.ceil(epoch.samples / epoch.num_lanes)
    whole = 0 < of_lane <= len(lengths)
    starts = range(0, len(lengths) - of_lane + 1, of_lane)
    times = max(1, math.ceil(ENOUGH_PACKS * packing.max_seq_len / max(1, sum(lengths))))
    plan = plan_lanes(
        [lengths[start : start + of_lane] for start in starts] if whole else [lengths * times], packing
    )
    # The last pack of each block is left out. How full those of an epoch's lanes are is chance.
    each = -(-len(lengths) // BLOCKS) if len(lengths) >= 2 * BLOCKS else len(lengths)
    blocks = plan_lanes([lengths[start : start + each] for start in range(0, len(lengths), each)], packing)
    bounds = np.cumsum([0, *blocks.lanes]).tolist()
    error = _error(blocks, [slice(start, stop - 1) for start, stop in pairwise(bounds)])
    scale, width = epoch.tokens / int(plan.held.sum()), packing.max_seq_len
    found = _scaled(plan, scale, 0.0, 0.0)
    if not whole:
        last = epoch.num_lanes * width / 2
        tokens = scale * (len(plan.held) * width - plan.last) + last
        found = replace(
            found,
            rows=tokens / width,
            tokens=tokens,
            padding=1 - epoch.tokens / tokens,
            last=last / tokens,
            ends=scale * plan.ends / tokens,
        )
    error = math.hypot(error, math.sqrt(epoch.num_lanes / 12) / found.rows)
    return plan, replace(found, error=error, steps=max(1.0, found.rows / batching.packs_per_step))


def _scaled(plan: Plan, scale: float, error: float, steps: float) -> Totals:
    """Return the numbers of ``scale`` times as many rows."""
    width, held = int(plan.widths.sum()), int(plan.held.sum())
    return Totals(
        rows=len(plan.held) * scale,
        tokens=width * scale,
        padding=1 - held / width,
        error=error,
        last=plan.last / width,
        ends=plan.ends / width,
        pairs=float(plan.pairs.sum()) * scale,
        steps=steps,
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


def _error(plan: Plan, blocks: Sequence[slice]) -> float:
    """Return the standard error of a plan's padding, from the differences between blocks of its rows."""
    full = [plan.held[block].sum() / plan.widths[block].sum() for block in blocks if block.stop > block.start]
    return float(np.std(full, ddof=1) / math.sqrt(len(full))) if len(full) > 1 else 0.0
