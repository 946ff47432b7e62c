"""Estimates printed and used before a run: its number of steps, the length of an epoch, the cost of truncation."""

from __future__ import annotations

import math
from contextlib import suppress

from streampack.distributed.world import World
from streampack.loader.data_loader import PackedDataLoader
from streampack.training.config import RunConfig
from streampack.training.methods import Loader, MethodLoader

PROBED_ROWS = 1024
"""Rows that are encoded for an estimate."""


def total_steps(config: RunConfig, loader: Loader, *, world: World, done: int = 0) -> int:
    """Collective: return the number of optimizer steps of a run, for schedules and progress bars.

    It is ``max_steps``, or the steps of ``epochs`` if that is less. For a stream, the steps of an epoch are estimated
    from a sample of the rows, and the run ends with the data. ``done`` steps were made before it, by an earlier phase.
    """
    if config.epochs is None:
        assert config.max_steps is not None
        return config.max_steps
    if isinstance(loader, MethodLoader):
        by_epochs = config.epochs * loader.steps_per_epoch
    else:
        # Only rank 0 reads the sample, so that a thousand ranks do not all read the same rows.
        by_epochs = world.run_on_main(lambda: _estimated_steps(config, loader, world), of="an estimate")
    return min(done + by_epochs, config.max_steps or done + by_epochs)


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
    return loader.dataset.lanes_for(world.size * max(1, config.num_workers))


def opening(config: RunConfig, loader: Loader, *, world: World) -> str:
    """Collective: format the first lines of a run: lanes, length of an epoch, cost of truncation.

    Returns an empty string on all ranks but 0.
    """
    with world.raise_on_all():
        return _opening(config, loader, world) if world.is_main else ""


def _opening(config: RunConfig, loader: Loader, world: World) -> str:
    dataset = loader.dataset
    packing = dataset.lane_config.packing
    by_method = isinstance(loader, MethodLoader)
    num_lanes = 1 if by_method else _lanes(config, loader, world)
    parts = [] if by_method else [f"{num_lanes} lane{'s' * (num_lanes > 1)}"]
    if not by_method and (window := dataset.settings.window_for(packing, world.size)):
        parts.append(f"balance_window={window}")
    loses_tokens = packing.overlong in ("truncate", "drop")
    estimate = None
    if config.epochs is not None or loses_tokens:
        # Streams of unknown length and endless mixtures have no estimate. The error of a bad row is not raised here,
        # but where training reads the row.
        with suppress(Exception):
            estimate = dataset.estimate(rows=PROBED_ROWS, num_lanes=num_lanes)
    if estimate is None:
        return f"data         {', '.join(parts) or config.data['method']}"
    if isinstance(loader, MethodLoader):
        parts.append(f"an epoch is {loader.steps_per_epoch:,} steps")
    elif estimate.error:
        parts.append(
            f"an epoch is about {estimate.packs:,.0f} packs (standard error {estimate.error / estimate.packs:.1%})"
        )
    else:
        parts.append(f"an epoch is {estimate.packs:,.0f} packs")
    lines = [f"data         {', '.join(parts)}"]
    if estimate.longer and loses_tokens:
        lines.append(
            f"overlong     {estimate.longer:.1%} of {estimate.samples:,} samples looked at are longer than "
            f"max_seq_len={packing.max_seq_len}: overlong={packing.overlong} loses {estimate.cut:.1%} of the tokens, "
            f"{estimate.cut_trained:.1%} of the trained ones"
        )
    if estimate.untrained:
        lines.append(f"untrained    {estimate.untrained:.1%} of them train nothing (data.untrained)")
    return "\n".join(lines)
