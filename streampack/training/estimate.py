"""What is printed and used before a run: its number of steps, what is in effect, the cost of truncation."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from streampack.accounting import Ledger
from streampack.attention.prepare import Inputs
from streampack.loader.data_loader import PackedDataLoader
from streampack.streaming.estimate import Estimate
from streampack.training.config import RunConfig
from streampack.training.meters import stream_totals
from streampack.training.progress import dropped_tokens
from streampack.training.world import World

log = logging.getLogger(__name__)

PROBED_ROWS = 1024
"""Rows that are encoded for an estimate of an epoch or of what is cut off."""
FEW_ROWS = 256
"""Rows that are encoded where only the expected padding is asked for."""


def total_steps(
    config: RunConfig, loader: PackedDataLoader, *, world: World, run: Mapping[str, Any]
) -> tuple[int, int | None]:
    """Collective: return the steps that the learning rate's schedule is made for, and those of ``epochs``, if known.

    The first are ``max_steps``, or the steps of ``epochs`` if those are fewer. The steps of an epoch are
    estimated from a sample of the rows, and the run ends with the data. A run that goes on keeps both numbers, so that
    its schedule does not jump, unless it now makes more steps: the schedule would end before, and torchtune's cosine
    would rise again.

    Args:
        config: the run's.
        loader: of the training batches, with its state loaded if the run goes on.
        world: the ranks.
        run: what the checkpoint of the run holds; ``begun`` steps were made by an earlier phase.
    """
    before, step = run["steps"], run["step"]
    if config.epochs is None:
        assert config.max_steps is not None
        steps, by_epochs = config.max_steps, None
    else:
        by_epochs = run.get("by_epochs") if run.get("settings", {}).get("epochs") == config.epochs else None
        if by_epochs is None:
            by_epochs = _steps_of_epochs(config, loader, world)
            by_epochs = None if by_epochs is None else run["begun"] + by_epochs
        elif run["packs_per_step"] != loader.packs_per_step:
            left = max(0, by_epochs - step)
            by_epochs = step + math.ceil(left * run["packs_per_step"] / loader.packs_per_step)
        steps = max(before, min(each for each in (by_epochs, config.max_steps) if each is not None))
    if before and steps != before and config.lr_scheduler is not None and world.is_main:
        log.warning(
            "the schedule of the learning rate was made for %d steps, and the run now goes on to step %d: it is made "
            "anew for these, and the rate changes at once",
            before, steps,
        )  # fmt: skip
    return steps, by_epochs


def _steps_of_epochs(config: RunConfig, loader: PackedDataLoader, world: World) -> int | None:
    assert config.epochs is not None
    # Only rank 0 reads the sample, so that a thousand ranks do not all read the same rows.
    return world.run_on_main(lambda: _estimated_steps(config, loader, world), of="an estimate")


def _estimated_steps(config: RunConfig, loader: PackedDataLoader, world: World) -> int | None:
    """Return the steps of all epochs; None if the source cannot tell its size, and ``max_steps`` ends the run."""
    assert config.epochs is not None
    try:
        packs = loader.dataset.estimate(rows=PROBED_ROWS, num_lanes=_lanes(config, loader, world)).at_most
        return math.ceil(config.epochs * packs / loader.packs_per_step)
    except ValueError:
        if config.max_steps is None:
            raise
        return None


def _lanes(config: RunConfig, loader: PackedDataLoader, world: World) -> int:
    return loader.dataset.lanes_for(world.size * max(1, config.num_workers))


def opening(
    config: RunConfig, loader: PackedDataLoader, *, inputs: Inputs, world: World, done: int = 0
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
    config: RunConfig, loader: PackedDataLoader, inputs: Inputs, world: World, ledger: Ledger | None
) -> dict[str, str]:
    num_lanes = _lanes(config, loader, world)
    estimate = None
    # Streams of unknown length and endless mixtures have no estimate. The error of a bad row is not raised here, but
    # where training reads the row.
    packing = loader.dataset.lane_config.packing
    counts = config.epochs is not None or packing.overlong not in ("error", "split")
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
    if estimate.lost and packing.overlong not in ("error", "split"):
        lines["overlong"] = (
            f"overlong={packing.overlong} with max_seq_len={packing.max_seq_len} loses {estimate.lost:.1%} of the "
            f"tokens of {estimate.samples:,} samples looked at; streampack inspect says which"
        )
    return lines


def _data(
    config: RunConfig, loader: PackedDataLoader, world: World, estimate: Estimate | None, num_lanes: int
) -> str:
    """Say who reads the data, and how long an epoch is."""
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


def _packing(loader: PackedDataLoader, world: World, estimate: Estimate | None) -> str:
    """Say how packs are filled, and how much padding that leaves."""
    dataset = loader.dataset
    packing = dataset.lane_config.packing
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
