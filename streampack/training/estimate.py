"""Estimates printed and used before a run: its number of steps, the length of an epoch, the cost of truncation."""

from __future__ import annotations

import math
from contextlib import suppress

from streampack.distributed.world import World
from streampack.loader.data_loader import PackedDataLoader
from streampack.training.config import RunConfig
from streampack.training.methods import Loader, MethodLoader

PROBED_ROWS = 1024  # rows that are encoded for an estimate


def total_steps(config: RunConfig, loader: Loader, *, world: World) -> int:
    """Return the optimizer steps of a run, for schedules and progress bars; a collective.

    ``max_steps``, or for a stream by epochs an estimate from a sample of the rows: such a run ends with the data.
    """
    if config.epochs is None:
        assert config.max_steps is not None
        return config.max_steps
    if isinstance(loader, MethodLoader):
        by_epochs = config.epochs * loader.steps_per_epoch
    else:
        # A thousand ranks need not all read the sample.
        by_epochs = world.run_on_main(lambda: _estimated_steps(config, loader, world), of="an estimate")
    return min(by_epochs, config.max_steps or by_epochs)


def _estimated_steps(config: RunConfig, loader: PackedDataLoader, world: World) -> int:
    assert config.epochs is not None
    try:
        packs = loader.dataset.estimate(rows=PROBED_ROWS, num_lanes=_lanes(config, loader, world)).at_most
        return math.ceil(config.epochs * packs / loader.packs_per_step)
    except ValueError:
        if config.max_steps is None:
            raise
        return config.max_steps


def _lanes(config: RunConfig, loader: Loader, world: World) -> int:
    return loader.dataset._lanes_for(world.size * max(1, config.num_workers))


def opening(config: RunConfig, loader: Loader, *, world: World) -> str:
    """Format the first lines of a run: lanes, length of an epoch, cost of truncation; a collective.

    Empty on all ranks but 0.
    """
    with world.raise_on_all():
        return _opening(config, loader, world) if world.is_main else ""


def _opening(config: RunConfig, loader: Loader, world: World) -> str:
    dataset = loader.dataset
    packing = dataset.lane_config.packing
    by_method = isinstance(loader, MethodLoader)
    num_lanes = 1 if by_method else _lanes(config, loader, world)
    parts = [] if by_method else [f"{num_lanes} lane{'s' * (num_lanes > 1)}"]
    cuts = packing.overlong in ("truncate", "drop")
    known = None
    if config.epochs is not None or cuts:
        # Streams of unknown length and endless mixtures have no estimate. A bad row is reported where it is read.
        with suppress(Exception):
            known = dataset.estimate(rows=PROBED_ROWS, num_lanes=num_lanes)
    if known is None:
        return f"data         {', '.join(parts) or config.data['method']}"
    if isinstance(loader, MethodLoader):
        parts.append(f"an epoch is {loader.steps_per_epoch:,} steps")
    elif known.error:
        parts.append(
            f"an epoch is about {known.packs:,.0f} packs (standard error {known.error / known.packs:.1%})"
        )
    else:
        parts.append(f"an epoch is {known.packs:,.0f} packs")
    lines = [f"data         {', '.join(parts)}"]
    if known.longer and cuts:
        lines.append(
            f"overlong     {known.longer:.1%} of {known.samples:,} samples looked at are longer than "
            f"max_seq_len={packing.max_seq_len}: overlong={packing.overlong} loses {known.cut:.1%} of the tokens, "
            f"{known.cut_trained:.1%} of the trained ones"
        )
    if known.untrained:
        lines.append(f"untrained    {known.untrained:.1%} of them train nothing (data.untrained)")
    return "\n".join(lines)
