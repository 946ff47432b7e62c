"""The training batches and the held-out packs of a run."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from streampack.distributed.world import World
from streampack.instantiate import build
from streampack.loader.data_loader import PackedDataLoader
from streampack.map_style.methods import METHODS
from streampack.packing.batch import Batch, null_pack, stack_packs
from streampack.packing.encoders import check_tokenizer, padding_id
from streampack.sources.as_source import as_source
from streampack.sources.bad_records import BAD_RECORDS_FOLDER
from streampack.sources.base import Reading
from streampack.sources.holdout import Holdout
from streampack.sources.mixture import Leaf, Mix
from streampack.sources.mixture_parts import hold_out
from streampack.sources.source import Source
from streampack.streaming.dataset import IterablePackedDataset
from streampack.training.config import RunConfig
from streampack.training.evaluation import HeldOut
from streampack.training.hints import hint_for
from streampack.training.methods import Loader, MethodLoader
from streampack.types import IGNORE_INDEX, Pack, Sample

PROBED = 1024  # rows that are encoded to estimate the length of a run


@dataclass(frozen=True)
class Datasets:
    """What a run trains on, and of every source of it what is held out."""

    train: IterablePackedDataset
    held_out: dict[str, IterablePackedDataset]  # by the source's name; read in one lane, without shuffling
    weights: dict[str, float]  # fraction of the trained tokens, of each of them
    settings: dict[str, Any]  # of all of them, but for the encoder and epochs


def build_data(
    config: RunConfig, *, tokenizer: Any, vocab_size: int, world: World | None = None
) -> tuple[IterablePackedDataset, dict[str, HeldOut]]:
    """The training dataset, and of every source of it what is held out (nothing without a ``validation`` section).

    The held-out rows are defined once, by their content (``fraction``; of a mixture, of each source) or as a ``source``
    of their own, which may be a mixture too. Those of every source are packed by themselves, in one lane and without
    shuffling: the same packs in every run and on any topology. They are shared out over the ranks, and
    null packs fill up, so that every rank has as many batches as the others. Without a mixture there is one
    source, and its name is empty.

    Raises:
        ValueError: for a data or validation section that does not fit.
    """
    world = world or World()
    datasets = build_datasets(config, tokenizer=tokenizer, vocab_size=vocab_size, world=world)
    found = {}
    for name, dataset in datasets.held_out.items():
        batches = _fixed_batches(
            dataset,
            name=name,
            max_packs=(config.validation or {}).get("max_packs", 32),
            batch_size=config.batch_size,
            world=world,
        )
        found[name] = HeldOut(batches, weight=datasets.weights[name])
    return datasets.train, found


def build_datasets(config: RunConfig, *, tokenizer: Any, vocab_size: int | None, world: World) -> Datasets:
    """Those of `build_data`, before a row is read.

    Raises:
        ValueError: for a data or validation section that does not fit.
    """
    tokenizer = check_tokenizer(tokenizer)
    inject = {"tokenizer": tokenizer, "model_transform": tokenizer, "once": world.once}
    settings = dict(config.data)
    method = settings.pop("method", None)  # is `build_loader`'s
    if method is not None and METHODS[method].cuts:
        settings.setdefault("overlong", "split")
    if "source" not in settings:
        raise ValueError("data.source is missing; name where the rows come from")
    source = as_source(build(settings.pop("source"), inject=inject), once=world.once)
    encoder = build(settings.pop("encoder", None), inject=inject)
    if settings.get("on_bad_record") == "skip" and settings.get("quarantine") is None:
        settings["quarantine"] = Path(config.output_dir, BAD_RECORDS_FOLDER)
    common: dict[str, Any] = {
        "padding_idx": padding_id(tokenizer),
        "vocab_size": vocab_size,
        "seed": config.seed,
        **settings,
    }
    held_out = None
    validation = config.validation or {}
    if "source" in validation:
        held_out = as_source(build(validation["source"], inject=inject), once=world.once)
    elif "fraction" in validation:
        source, held_out = hold_out(source, fraction=validation["fraction"])
    epochs = None if config.max_steps is not None and config.epochs is None else config.epochs
    train = _dataset(source, encoder=encoder, epochs=epochs, **common)
    if held_out is None:
        return Datasets(train, {}, {}, common)
    fixed = dict(common)
    # The limit is for a lane of training; one lane reads it all here, until there are packs enough.
    fixed["max_bad_records"] = sys.maxsize
    if folder := settings.get("quarantine"):  # a list of its own, that one rank keeps
        fixed["quarantine"] = Path(folder, "validation") if world.is_main else None
    leaves = leaves_of(held_out, train.lane_config.encode)
    datasets = {leaf.name: first_rows(leaf, fixed) for leaf in leaves}
    return Datasets(train, datasets, {leaf.name: leaf.weight for leaf in leaves}, common)


def leaves_of(source: Source, encoder: Callable[[Mapping[str, Any]], Sample]) -> list[Leaf]:
    """The sources that have rows: those of a mixture, or the source itself, without a name."""
    return source.leaves(encoder) if isinstance(source, Mix) else [Leaf("", source, encoder, 1.0)]


def first_rows(leaf: Leaf, settings: Mapping[str, Any]) -> IterablePackedDataset:
    """The packs of one source's rows in their order, by themselves."""
    own: dict[str, Any] = {"shuffle": False, "num_lanes": 1, "encoder": leaf.encoder}
    if folder := settings.get("quarantine"):
        own["quarantine"] = Path(folder, leaf.name)
    return _dataset(leaf.source, **{**settings, **own})


def _fixed_batches(
    dataset: IterablePackedDataset, *, name: str, max_packs: int, batch_size: int, world: World
) -> list[Batch]:
    """Of the first packs of a dataset, those of this rank."""
    packs = held_out_packs(dataset, name=name, max_packs=max_packs)
    batches = math.ceil(len(packs) / (world.size * batch_size))
    mine = packs[world.rank :: world.size]
    config = dataset.lane_config
    filler = null_pack(config.packing.max_seq_len, padding_idx=config.padding_idx)
    mine += [filler] * (batches * batch_size - len(mine))
    return [
        stack_packs(mine[first : first + batch_size], segments=config.packing.segments)
        for first in range(0, len(mine), batch_size)
    ]


def held_out_packs(dataset: IterablePackedDataset, *, name: str, max_packs: int) -> list[Pack]:
    """The first packs of what is held out of the source ``name``.

    Raises:
        ValueError: if there are none, or they train nothing.
    """
    of = f" of source {name!r}" if name else ""
    try:
        packs = list(islice(dataset.stream(), max_packs))
    except ValueError as error:
        if _holds_out_none(dataset.lane_config.source):
            fraction = dataset.lane_config.source.fraction  # type: ignore[attr-defined]
            raise ValueError(
                f"validation.fraction={fraction} holds out none of the rows{of}, of which there are too few: each is "
                "chosen with that chance, by its content; give a larger fraction, rows of their own "
                "(validation.source), or leave validation out"
            ) from None
        raise ValueError(f"validation rows{of}: {error}") from error
    if not packs:
        raise ValueError(f"the validation rows{of} make no pack; hold out a larger fraction")
    if not any((pack.labels != IGNORE_INDEX).any() for pack in packs):
        raise ValueError(
            f"the validation rows{of} train nothing in {len(packs)} pack(s): every label is masked; hold out other rows"
        )
    return packs


def _holds_out_none(source: Source) -> bool:
    """Whether a source has rows, and none is in the fraction of them that is held out."""
    if not isinstance(source, Holdout):
        return False
    try:
        return next(iter(source.read(Reading())), None) is None and bool(source.source.probe(1)[0])
    except ValueError:  # rows that cannot be read are there
        return False


def _dataset(source: Any, **settings: Any) -> IterablePackedDataset:
    known = inspect.signature(IterablePackedDataset).parameters
    for key in settings:
        if key not in known:
            raise ValueError(f"data: unknown key {key!r}: {hint_for(key, [*known, 'method'])}")
    try:
        return IterablePackedDataset(source, **settings)
    except TypeError as error:
        raise ValueError(f"data: {error}") from None


def build_loader(
    config: RunConfig, dataset: IterablePackedDataset, *, device: torch.device, world: World
) -> Loader:
    """The batches of this rank: packed as they stream, or by ``data.method``.

    Raises:
        ValueError: for settings that do not fit.
    """
    method = config.data.get("method")
    if method is None:
        return PackedDataLoader(
            dataset,
            batch_size=config.batch_size,
            num_workers=config.num_workers,
            packs_per_step=config.packs_per_step,
            pin_memory=device.type == "cuda",
            timeout=config.collective_timeout,
        )
    return MethodLoader(
        dataset,
        method=method,
        batch_size=config.batch_size,
        num_workers=config.num_workers,
        packs_per_step=config.packs_per_step,
        pin_memory=device.type == "cuda",
        world=world,
    )


def total_steps(config: RunConfig, loader: Loader, *, world: World) -> int:
    """Optimizer steps of the run: ``max_steps``, or, of a stream, an estimate from a sample of the rows. A collective.

    For schedules and progress bars; a run by epochs ends when the data does, not at this number.
    """
    if config.epochs is None:
        assert config.max_steps is not None
        return config.max_steps
    if isinstance(loader, MethodLoader):
        by_epochs = config.epochs * loader.steps_per_epoch
    else:
        with world.together():  # a thousand ranks need not all read the sample
            by_epochs = _estimated_steps(config, loader, world) if world.is_main else 0
        by_epochs = world.from_main(by_epochs)
    return min(by_epochs, config.max_steps or by_epochs)


def _estimated_steps(config: RunConfig, loader: PackedDataLoader, world: World) -> int:
    assert config.epochs is not None
    try:
        packs = loader.dataset.estimate(rows=PROBED, num_lanes=_lanes(config, loader, world)).at_most
        return math.ceil(config.epochs * packs / loader.packs_per_step)
    except ValueError:
        if config.max_steps is None:
            raise
        return config.max_steps


def _lanes(config: RunConfig, loader: Loader, world: World) -> int:
    return loader.dataset.lanes_for(world.size * max(1, config.num_workers))


def opening(config: RunConfig, loader: Loader, *, world: World) -> str:
    """Say how data is divided, how long an epoch is, what truncation costs; empty but on rank 0. A collective."""
    with world.together():
        return _opening(config, loader, world) if world.is_main else ""


def _opening(config: RunConfig, loader: Loader, world: World) -> str:
    dataset = loader.dataset
    packing = dataset.lane_config.packing
    num_lanes = 1 if isinstance(loader, MethodLoader) else _lanes(config, loader, world)
    parts = [] if isinstance(loader, MethodLoader) else [f"{num_lanes} lane{'s' * (num_lanes > 1)}"]
    known = None
    if config.epochs is not None or packing.overlong in ("truncate", "drop"):
        # A stream without a length has none, nor a mixture without an end. A bad row is reported where it is read.
        with suppress(Exception):
            known = dataset.estimate(rows=PROBED, num_lanes=num_lanes)
    if known is None:
        return f"data         {', '.join(parts) or config.data['method']}"
    if not isinstance(loader, MethodLoader):
        about = f"about {known.packs:,.0f} packs (standard error {known.error / known.packs:.1%})"
        parts.append(f"an epoch is {about if known.error else f'{known.packs:,.0f} packs'}")
    else:
        parts.append(f"an epoch is {loader.steps_per_epoch:,} steps")
    lines = [f"data         {', '.join(parts)}"]
    if known.longer and packing.overlong in ("truncate", "drop"):
        lines.append(
            f"overlong     {known.longer:.1%} of {known.samples:,} samples looked at are longer than "
            f"max_seq_len={packing.max_seq_len}: overlong={packing.overlong} loses {known.cut:.1%} of the tokens, "
            f"{known.cut_trained:.1%} of the trained ones"
        )
    if known.untrained:
        lines.append(f"untrained    {known.untrained:.1%} of them train nothing (data.untrained)")
    return "\n".join(lines)
