"""An epoch by every way to make batches: each strategy, padding, and mini-batches."""

from __future__ import annotations

from collections.abc import Iterator

from streampack.inspection.epoch import Epoch
from streampack.inspection.plans import (
    Plan,
    Totals,
    packings,
    plan_lanes,
    plan_padding,
    stretches,
    totals,
)
from streampack.inspection.report import Outcome
from streampack.inspection.shape import RunShape
from streampack.streaming.lane_config import LaneConfig


def plan_outcomes(
    config: LaneConfig, epoch: Epoch, shape: RunShape, *, chosen: str
) -> tuple[list[Outcome], Plan, Totals]:
    """Return the outcome of every way to make batches, and the plan and the numbers of the ``chosen`` one."""
    found: dict[str, Totals] = {}
    plans: dict[str, Plan] = {}  # of the chosen one only: padding has a row for each sample
    for name, plan, each in _planned(config, epoch, shape):
        found[name] = each
        if name == chosen:
            plans[name] = plan
    outcomes = [
        _outcome(name, each, found["padding"], epoch, shape, chosen=name == chosen)
        for name, each in found.items()
    ]
    return outcomes, plans[chosen], found[chosen]


def _planned(config: LaneConfig, epoch: Epoch, shape: RunShape) -> Iterator[tuple[str, Plan, Totals]]:
    batching = shape.batching(shape.ranks[0])
    for name, packing in packings(config.packing).items():
        given = stretches(epoch, packing)
        plan = plan_lanes(given.lanes, packing)
        groups = None if epoch.exact else plan_lanes(given.groups, packing)
        yield name, plan, totals(plan, epoch, batching, whole_lanes=given.whole, groups=groups)
    for name, batch in (("padding", shape.padded_batch), ("mini-batches", 1)):
        at_once = batch * batching.world_size
        step = -(-batching.packs_per_step // at_once) * at_once
        plan = plan_padding(epoch.lanes, config.packing, batch=batch, rows_per_step=step, seed=config.seed)
        yield name, plan, totals(plan, epoch, batching)


def _outcome(
    name: str, each: Totals, padding: Totals, epoch: Epoch, shape: RunShape, *, chosen: bool
) -> Outcome:
    model, flops = shape.model, None
    if model is not None:
        flops = model.of(padding.tokens, padding.pairs) / model.of(each.tokens, each.pairs)
    return Outcome(
        name=name,
        chosen=chosen,
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
