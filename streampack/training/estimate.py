"""What is printed and used before a run: its number of steps, what is in effect, the cost of truncation."""

from __future__ import annotations

import math
from contextlib import suppress

from streampack.accounting import Ledger
from streampack.attention.prepare import Inputs
from streampack.distributed.world import World
from streampack.loader.data_loader import PackedDataLoader
from streampack.streaming.estimate import Estimate
from streampack.training.config import RunConfig
from streampack.training.meters import stream_totals
from streampack.training.methods import Loader, MethodLoader
from streampack.training.progress import dropped_tokens

PROBED_ROWS = 1024
"""Rows that are encoded for an estimate of an epoch or of what is cut off."""
FEW_ROWS = 256
"""Rows that are encoded where only the expected padding is asked for."""


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


def opening(
    config: RunConfig, loader: Loader, *, inputs: Inputs, world: World, done: int = 0
) -> dict[str, str]:
    """Collective: say what is in effect in a run, by name, for its first lines: lanes, packing, attention.

    Args:
        config: the run's.
        loader: of the training batches, with its state loaded if the run goes on.
        inputs: of the prepared model.
        world: the ranks.
        done: steps that were made before.

    Returns:
        An empty dict on all ranks but 0.
    """
    ledger = stream_totals(loader, world)[0] if done else None
    with world.raise_on_all():
        return _opening(config, loader, inputs, world, ledger) if world.is_main else {}


def _opening(
    config: RunConfig, loader: Loader, inputs: Inputs, world: World, ledger: Ledger | None
) -> dict[str, str]:
    num_lanes = 1 if isinstance(loader, MethodLoader) else _lanes(config, loader, world)
    estimate = None
    # Streams of unknown length and endless mixtures have no estimate. The error of a bad row is not raised here, but
    # where training reads the row.
    packing = loader.dataset.lane_config.packing
    counts = config.epochs is not None or packing.overlong in ("truncate", "drop")
    with suppress(Exception):
        estimate = loader.dataset.estimate(rows=PROBED_ROWS if counts else FEW_ROWS, num_lanes=num_lanes)
    lines = {
        "data": _data(config, loader, world, estimate, num_lanes),
        "packing": _packing(loader, world, estimate),
        "attention": _attention(config, inputs),
    }
    if ledger is not None:
        lines["so far"] = f"{ledger.tokens_in:,} tokens read, {dropped_tokens(ledger)}"
    if estimate is None:
        return lines
    if estimate.longer and packing.overlong in ("truncate", "drop"):
        lines["overlong"] = (
            f"{estimate.longer:.1%} of {estimate.samples:,} samples looked at are longer than "
            f"max_seq_len={packing.max_seq_len}: overlong={packing.overlong} loses {estimate.cut:.1%} of the tokens, "
            f"{estimate.cut_trained:.1%} of the trained ones"
        )
    if estimate.untrained:
        lines["untrained"] = (
            f"{estimate.untrained:.1%} of {estimate.samples:,} samples looked at train nothing (data.untrained)"
        )
    return lines


def _data(config: RunConfig, loader: Loader, world: World, estimate: Estimate | None, num_lanes: int) -> str:
    """Say who reads the data, and how long an epoch is."""
    if isinstance(loader, MethodLoader):
        return f"every rank reads all of it; an epoch is {loader.steps_per_epoch:,} steps"
    consumers = world.size * max(1, config.num_workers)
    text = f"{num_lanes} lane{'s' * (num_lanes > 1)} for {consumers} consumer{'s' * (consumers > 1)}"
    if estimate is None:
        return text
    if estimate.error:
        return (
            f"{text}, an epoch is about {estimate.packs:,.0f} packs "
            f"(standard error {estimate.error / estimate.packs:.1%})"
        )
    return f"{text}, an epoch is {estimate.packs:,.0f} packs"


def _packing(loader: Loader, world: World, estimate: Estimate | None) -> str:
    """Say how packs are filled, and how much padding that leaves."""
    dataset = loader.dataset
    packing = dataset.lane_config.packing
    if isinstance(loader, MethodLoader):
        return f"method={loader.method}, max_seq_len={packing.max_seq_len}"
    parts = [
        "split_across_pack" if packing.split_across_pack else f"strategy={packing.strategy}",
        f"max_seq_len={packing.max_seq_len}",
        f"balance_window={dataset.settings.window_for(packing, world.size)}",
    ]
    if estimate is not None:
        parts.append(f"about {estimate.padding:.1%} padding expected")
    return ", ".join(parts)


def _attention(config: RunConfig, inputs: Inputs) -> str:
    """Say which backend computes the attention, and why it was chosen."""
    if config.attention != "auto":
        return f"{inputs.attention}, as the config says"
    if not inputs.refused:
        return f"{inputs.attention}, the first choice of attention=auto on this device"
    return f"{inputs.attention}; " + "; ".join(
        f"{backend} will not do: {why}" for backend, why in inputs.refused.items()
    )
