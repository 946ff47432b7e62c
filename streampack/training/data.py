"""Training batches and held-out packs of a run, from its config."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from streampack.instantiate import COMPONENT, build
from streampack.loader.data_loader import PackedDataLoader
from streampack.packing.assemble import trains
from streampack.packing.batch import Batch, stack_packs
from streampack.packing.encoders import check_tokenizer, padding_id
from streampack.packing.encoders.shaped import AUTO, SHAPE_KEYS, with_encoders
from streampack.sources.as_source import as_source
from streampack.sources.bad_records import BAD_RECORDS_FOLDER, quarantine_for
from streampack.sources.holdout import Holdout, hold_out
from streampack.sources.mixture import Mix
from streampack.sources.mixture_reader import Entry
from streampack.sources.reading import Reading
from streampack.storage.corpus import listed_by
from streampack.streaming.dataset import IterablePackedDataset
from streampack.training.conditions import CROSS_ENTROPIES
from streampack.training.config import RunConfig
from streampack.training.evaluation import HeldOut
from streampack.training.torchtune_data import RunRows, torchtune_rows
from streampack.training.world import World
from streampack.types import Pack


@dataclass(frozen=True)
class Datasets:
    """The training dataset of a run, and a held-out dataset for each of its sources."""

    train: IterablePackedDataset
    held_out: dict[str, IterablePackedDataset]  # by the source's name, in one lane and not shuffled
    weights: dict[str, float]  # target fraction of the trained tokens, by the source's name


def build_data(
    config: RunConfig,
    *,
    tokenizer: Any,
    vocab_size: int,
    world: World | None = None,
    positions: int | None = None,
) -> tuple[IterablePackedDataset, dict[str, HeldOut]]:
    """Build the training dataset, and the held-out batches of every source, if there are any.

    The held-out rows of a source are packed by themselves, in one lane and without shuffling, so the packs are the same
    in every run and on any number of ranks. They are divided among the ranks, and null packs give every rank the same
    number of batches. A source that is no mixture has an empty name.

    ``vocab_size`` and ``positions`` are the model's; ``positions`` limit the samples of ``dataset``.
    """
    world = world or World()
    datasets = build_datasets(
        config, tokenizer=tokenizer, vocab_size=vocab_size, world=world, positions=positions
    )
    found, most = {}, config.validation.max_packs if config.validation else None
    for name, dataset in datasets.held_out.items():
        packs = held_out_packs(dataset, name=name, max_packs=most)
        size = config.batch_size_val or config.batch_size
        batches = _batches_of_rank(packs, dataset, batch_size=size, world=world)
        if not config.document_masking:
            batches = [join_documents(batch) for batch in batches]
        found[name] = HeldOut(batches, weight=datasets.weights[name])
    return datasets.train, found


def build_datasets(
    config: RunConfig, *, tokenizer: Any, vocab_size: int | None, world: World, positions: int | None = None
) -> Datasets:
    """Build the datasets of `build_data`, without reading rows, except for a few of torchtune's."""
    build_rows = partial(_rows_of, config, tokenizer=tokenizer, positions=positions, world=world)
    rows, held_out = build_rows("data" if config.dataset is None else "dataset"), None
    kept = quarantine_for(
        (config.data or {}).get("skip_bad"), folder=Path(config.output_dir, BAD_RECORDS_FOLDER)
    )
    common: dict[str, Any] = {
        "padding_idx": padding_id(tokenizer),
        "vocab_size": vocab_size,
        "seed": config.seed or 0,
        **rows.settings,
        "skip_bad": kept,
    }
    source, validation = rows.source, config.validation
    if config.dataset_val is not None:
        held_out = build_rows("dataset_val")
    elif validation is not None and validation.source is not None:
        held_out = build_rows("validation.source")
    elif validation is not None:
        source, part = hold_out(source, fraction=validation.fraction)
        held_out = replace(rows, source=part)
    train = IterablePackedDataset(source, encoder=rows.encoder, epochs=config.epochs, **common)
    if common.get("corpus_lists") is None:
        train.keep_corpus_lists(Path(config.output_dir, "corpus_lists"))
    if held_out is None:
        return Datasets(train, {}, {})
    # All ranks read the held-out rows, so only rank 0 lists their bad records, in a folder of their own. They need no
    # limit: a held-out dataset reads only until it has enough packs.
    if kept is not None:
        kept = replace(kept.within("validation"), limit=sys.maxsize)
        kept = kept if world.is_main else replace(kept, folder=None)
    apart = held_out.source
    entries = apart.entries if isinstance(apart, Mix) else [Entry("", apart, 1.0)]
    fixed = common | held_out.settings | {"shuffle": False, "num_lanes": 1, "balance_window": 0}
    datasets = {
        entry.name: IterablePackedDataset(
            entry.source,
            encoder=entry.encoder or held_out.encoder or train.lane_config.encode,
            **fixed | {"skip_bad": kept and kept.within(entry.name)},
        )
        for entry in entries
    }
    return Datasets(train, datasets, {entry.name: entry.weight for entry in entries})


def _rows_of(config: RunConfig, key: str, *, tokenizer: Any, positions: int | None, world: World) -> RunRows:
    """Build the rows of a key of the config: torchtune's nodes, or our own sources."""
    if key.startswith("dataset"):
        built = torchtune_rows(
            getattr(config, key), key=key, tokenizer=tokenizer, world=world, positions=positions,
            collate_fn=config.collate_fn,
        )  # fmt: skip
        return replace(built, settings={**built.settings, "shuffle": bool(config.shuffle)})
    tokenizer = check_tokenizer(tokenizer)
    inject = {"tokenizer": tokenizer, "model_transform": tokenizer}
    settings = dict(config.data or {})
    node, encoder = settings.pop("source", None), settings.pop("encoder", None)
    shapes = {name: settings.pop(name) for name in SHAPE_KEYS if name in settings}
    if key == "validation.source":
        node = config.validation.source  # type: ignore[union-attr]
    with listed_by(world.run_on_main):
        source = as_source(build(node, inject=inject))
    encoder = build(encoder, inject=inject)
    if key == "validation.source" and encoder not in (None, AUTO):
        return RunRows(source, None, settings)
    source, encoder = with_encoders(
        source,
        encoder,
        tokenizer,
        settings=shapes,
        strict=not settings.get("skip_bad"),
        pairs=config.loss is not None and config.loss[COMPONENT] not in CROSS_ENTROPIES,
    )
    return RunRows(source, encoder, settings)


def _batches_of_rank(
    packs: list[Pack], dataset: IterablePackedDataset, *, batch_size: int, world: World
) -> list[Batch]:
    """Collate this rank's packs; null packs give all ranks the same number of batches."""
    config, number = dataset.lane_config, math.ceil(len(packs) / (world.data_size * batch_size)) * batch_size
    mine = packs[world.data_rank :: world.data_size]
    mine += [config.null_pack()] * (number - len(mine))
    return [
        stack_packs(
            mine[first : first + batch_size],
            segments=config.packing.max_segments,
            padding_idx=config.padding_idx,
        )
        for first in range(0, number, batch_size)
    ]


def join_documents(batch: Batch) -> Batch:
    """Join each row's samples to one sequence, without document masking, on the batch's device.

    Every token attends to all before it in the row, and positions continue from sample to sample. Labels and
    ``fragments`` stay, so the first token of a document is still not trained. Padding remains a segment of its own.

    >>> from streampack import IterablePackedDataset, collate_packed
    >>> rows = [{"tokens": [i] * 3, "labels": [i] * 3} for i in (7, 8)]
    >>> batch = join_documents(collate_packed(list(IterablePackedDataset(rows, max_seq_len=7))))
    >>> batch.seq_lens.tolist(), batch.input_pos.tolist(), batch.labels.tolist()
    ([[6, 1]], [[0, 1, 2, 3, 4, 5, 0]], [[-100, 7, 7, -100, 8, 8, -100]])
    """
    if any(fragment.padding for row in batch.fragments for fragment in row):
        raise ValueError(
            "the sequences of the batch are padded to a multiple, and without document masking the samples after "
            "them would attend to that padding; leave pad_seqs_to out, or keep document_masking"
        )
    size, device = batch.tokens.shape[1], batch.tokens.device
    real = torch.tensor([[sum(f.stop - f.start for f in row)] for row in batch.fragments])  # [batch, 1]
    real = real.to(device, non_blocking=True)
    places = torch.arange(size, device=device).expand(batch.tokens.shape)
    first = torch.where(real > 0, real, size)  # a null pack is one segment of padding
    return replace(
        batch,
        input_pos=torch.where(places < real, places, places - real),
        seq_lens=torch.cat([first, size - first], 1).int(),
        longest=None,
    )


def held_out_packs(dataset: IterablePackedDataset, *, name: str, max_packs: int | None) -> list[Pack]:
    """Return the first packs of a held-out dataset, or all (None); ``name`` is the source's, for messages."""
    of = f" of source {name!r}" if name else ""
    source = dataset.lane_config.source
    try:
        packs = list(islice(dataset.stream(), max_packs))
    except ValueError as error:
        if isinstance(source, Holdout) and next(iter(source.read(Reading())), None) is None:
            raise ValueError(
                f"validation.fraction={source.fraction} holds out none of the rows{of}: there are too few, and each is "
                "chosen with that chance, by its content; give a larger fraction, fractions by source without this "
                "one, or rows of their own (validation.source)"
            ) from None
        raise ValueError(f"validation rows{of}: {error}") from error
    if not any(map(trains, packs)):
        raise ValueError(
            f"the validation rows{of} train nothing in {len(packs)} pack(s): every label is masked; hold out other rows"
        )
    return packs


def build_loader(
    config: RunConfig,
    dataset: IterablePackedDataset,
    *,
    device: torch.device,
    world: World | None = None,
    packs_per_step: int | None = None,
) -> PackedDataLoader:
    """Build the loader of this rank's batches; ``packs_per_step`` are the config's if they are not given."""
    world = world or World()
    return PackedDataLoader(
        dataset,
        batch_size=config.batch_size,
        num_workers=config.num_workers,
        packs_per_step=packs_per_step or config.packs_of_rank * world.data_size,
        pin_memory=device.type == "cuda",
        timeout=config.collective_timeout,
        data_ranks=(world.data_rank, world.data_size) if world.tensor_parallel > 1 else None,
    )
