"""Plans of an epoch by each way to make batches, and their packs, padding, steps and attention pairs."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streampack.inspection.epoch import Epoch
from streampack.loader.batching import Batching
from streampack.packing.groups import attention_cost
from streampack.packing.planner import plan_samples
from streampack.packing.settings import Packing
from streampack.packing.strategies import STRATEGIES
from streampack.sources.reading import permutation

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
    last: int  # padding in the last row of each lane
    ends: int = 0  # padding at the ends of sequences
    steps: float | None = None  # of an epoch, where rows do not say so


def packings(packing: Packing) -> dict[str, Packing]:
    """Return the settings of each strategy, and of ``split_across_pack``, which are otherwise those given."""
    plain = replace(packing, split_across_pack=False)
    found = {name: replace(plain, strategy=name) for name in STRATEGIES}
    return found | {"split_across_pack": replace(packing, split_across_pack=True)}


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
    rows_per_step: int,
    seed: int,
) -> Plan:
    """Plan batches of ``batch`` random samples, padded to the longest; with 1, mini-batches without padding.

    >>> plan = plan_padding([[5, 4, 2, 3]], Packing(8), batch=2, rows_per_step=2, seed=0)
    >>> plan.held.tolist(), plan.widths.tolist(), plan.steps
    ([2, 5, 4, 3], [5, 5, 4, 4], 2)
    """
    lengths = _pieces(lanes, packing)
    lengths = lengths[permutation(len(lengths), seed, 0)]
    starts = np.arange(0, len(lengths), batch)
    longest = np.maximum.reduceat(lengths, starts) if len(lengths) else lengths
    widths = np.repeat(longest, batch)[: len(lengths)]
    pairs = widths * (widths + 1) // 2  # the `attention_cost` of each
    return Plan(widths, lengths, pairs, (len(lengths),), 0, steps=-(-len(lengths) // rows_per_step))


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


class Stretches(NamedTuple):
    """The lengths to plan."""

    lanes: Sequence[Sequence[int]]
    whole: bool  # each list is as long as a lane
    groups: Sequence[Sequence[int]]  # the same lengths in several parts, whose packs differ by chance


def stretches(epoch: Epoch, packing: Packing) -> Stretches:
    """Return the lanes of an epoch, or stretches of a sample that are as long as a lane, if it has so many lengths."""
    if epoch.exact:
        return Stretches(epoch.lanes, True, [])
    [lengths] = epoch.lanes
    of_lane = math.ceil(epoch.samples / epoch.num_lanes)
    each = -(-len(lengths) // BLOCKS) if len(lengths) >= 2 * BLOCKS else len(lengths)
    groups = [lengths[start : start + each] for start in range(0, len(lengths), each)]
    if 0 < of_lane <= len(lengths):
        starts = range(0, len(lengths) - of_lane + 1, of_lane)
        return Stretches([lengths[start : start + of_lane] for start in starts], True, groups)
    packs = sum(lengths) / packing.max_seq_len
    times = math.ceil(ENOUGH_PACKS / packs) if packs else 1
    return Stretches([lengths * times], False, groups)


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


def totals(
    plan: Plan, epoch: Epoch, batching: Batching, *, whole_lanes: bool = True, groups: Plan | None = None
) -> Totals:
    """Return an epoch's numbers.

    Args:
        plan: of the whole epoch, or of a sample.
        epoch: which of the two it is, and how large an epoch is.
        batching: how packs are divided into steps, where the plan does not say.
        whole_lanes: whether the plan has a last pack for as many samples as a lane has.
        groups: of a sample's packs: a plan of parts of the sample, from whose differences the standard error is taken.
            None for rows that are no packs, of which no last one is part-empty.
    """
    rows, width, held = len(plan.held), int(plan.widths.sum()), int(plan.held.sum())
    if not rows:
        return Totals(0, 0, 0, 0, 0, 0, 0, 0)
    pairs, last, ends = float(plan.pairs.sum()), plan.last / width, plan.ends / width
    if epoch.exact:
        steps = steps_of(plan.lanes, batching) if plan.steps is None else plan.steps
        return Totals(rows, width, 1 - held / width, 0.0, last, ends, pairs, steps)
    scale = epoch.tokens / held
    tokens, planned = scale * width, scale * rows
    if not whole_lanes:
        # The plan is a stretch of a lane. Its own last pack is left out, and each lane has one that is half empty.
        mean = width / rows
        last_tokens = epoch.num_lanes * mean / 2
        tokens = scale * (width - plan.last) + last_tokens
        planned, last, ends = tokens / mean, last_tokens / tokens, scale * plan.ends / tokens
    if groups is None:
        starts = np.linspace(0, rows, min(BLOCKS, rows) + 1).astype(np.int64).tolist()
        error = _error(plan, [slice(*bounds) for bounds in pairwise(starts)])
    else:
        ends_of_groups = np.cumsum([0, *groups.lanes]).tolist()
        # The last pack of each group is left out. How full those of an epoch's lanes are is chance.
        error = _error(groups, [slice(start, stop - 1) for start, stop in pairwise(ends_of_groups)])
        error = math.hypot(error, math.sqrt(epoch.num_lanes / 12) / planned)
    steps = planned / batching.packs_per_step if plan.steps is None else plan.steps * scale
    return Totals(
        planned, tokens, 1 - epoch.tokens / tokens, error, last, ends, pairs * scale, max(1.0, steps)
    )


def _error(plan: Plan, blocks: Sequence[slice]) -> float:
    """Return the standard error of a plan's padding, from the differences between blocks of its rows."""
    full = [plan.held[block].sum() / plan.widths[block].sum() for block in blocks if block.stop > block.start]
    return float(np.std(full, ddof=1) / math.sqrt(len(full))) if len(full) > 1 else 0.0
