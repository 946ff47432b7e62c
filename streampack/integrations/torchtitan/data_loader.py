"""`StreampackDataLoader`: a `PackedDataLoader` in the form that torchtitan's trainer and checkpoints expect."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from torchtitan.components.dataloader import BaseDataLoader

from streampack.attention.layout import as_packed
from streampack.distributed.rank_sync import shared_sync
from streampack.instantiate import COMPONENT, build
from streampack.loader.data_loader import PackedDataLoader
from streampack.losses import require_unshared
from streampack.packing.batch import Batch
from streampack.packing.encoders.shaped import SHAPE_KEYS, with_encoders
from streampack.packing.encoders.tokenizer import padding_id
from streampack.sources.as_source import as_source
from streampack.streaming.dataset import IterablePackedDataset
from streampack.types import IGNORE_INDEX
from streampack.validation import require_duration

STATE = "streampack"
"""Key of the state in a checkpoint: the same on any number of ranks, so that any number can load it."""


class StreampackDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Packs for torchtitan's trainer, from any source of streampack.

    In a config registry, in place of torchtitan's own loader::

        def llama3_8b_packed() -> Trainer.Config:
            config = llama3_8b()
            config.dataloader = StreampackDataLoader.Config(
                source="corpus/*.jsonl",
                encoder={"_component_": "streampack.TextEncoder"},
                settings={"split_across_pack": True, "shuffle": True},
                num_workers=2,
            )
            return config

    Each batch is as `trainer_batch` returns it. It has ``training.local_batch_size`` packs (with pipeline parallelism,
    those of a microbatch) of ``training.seq_len`` tokens.

    All ranks make the same number of batches, and an error on one is raised on all, as by `PackedDataLoader`. Ranks
    with the same ``dp_rank`` (of tensor, context and pipeline parallelism) get the same batches.

    ``loader`` is the `PackedDataLoader`, with its ``metrics()`` and ``ledger()``.

    Args:
        config: see `Config`.
        dp_world_size: the number of data-parallel groups of ranks.
        dp_rank: which of them this rank belongs to.
        tokenizer: torchtitan's; encoders that are nodes take it.
        seq_len: tokens of a pack.
        local_batch_size: packs of a batch.
        snapshot_every_n_steps: ignored; a state can be taken after any batch.

    Raises:
        ValueError: for settings that `IterablePackedDataset` or `PackedDataLoader` refuses, and with simulated ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Where the packs come from, and how they are read.

        Sources and encoders are objects, or nodes with a ``_component_``. They and ``settings`` are set in a config
        registry, as torchtitan's ``model_spec``; the other fields are options of the command line, too.

        Raises:
            ValueError: without a source, or with data of torchtitan's own loaders.
        """

        # Without `| None`, tyro would look for options in the classes of objects here, and fail at most of them.
        source: Annotated[Any | None, tyro.conf.Suppress] = None
        """The corpus: any source that `IterablePackedDataset` takes, or a node of one."""

        encoder: Annotated[Any | None, tyro.conf.Suppress] = None
        """The function that turns a row into a sample, or a node of one. A node without a tokenizer receives
        torchtitan's. Default: found by the shape of the rows, see `encoder_for`."""

        settings: Annotated[dict[str, Any] | None, tyro.conf.Suppress] = None
        """The other arguments of `IterablePackedDataset`, such as ``shuffle`` and ``num_lanes``, and without an
        encoder ``columns``, ``roles``, ``answers`` and ``ignore`` of `encoder_for`. Not ``max_seq_len``, which is
        ``training.seq_len``, nor ``epochs``, which follow from ``infinite``."""

        infinite: bool = True
        """Whether to read the data for ever. Otherwise it is read once, and then training ends."""

        num_workers: int = 0
        """Processes of each rank that read, encode and pack. 0: the rank does it itself."""

        timeout: float = 1800.0
        """Seconds that ranks wait in the loader for one another."""

        def __post_init__(self) -> None:
            given = {"dataset": self.dataset, "dataset_path": self.dataset_path}
            if self.source is None or any(given.values()):
                raise ValueError(
                    f"dataloader has source={self.source!r} and, for torchtitan's own loaders, {given}; give "
                    "StreampackDataLoader.Config only a source, such as source='corpus/*.jsonl'"
                )
            if not isinstance(self.source, str) and not (
                isinstance(self.source, Mapping) and COMPONENT in self.source
            ):
                # torchtitan logs a config by to_dict, which would copy the rows of a list or a Dataset.
                self.source = as_source(self.source)

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
    ) -> None:
        if dist.is_initialized() and dist.get_backend() == "fake":
            raise ValueError(
                "comm.mode simulates ranks, and the loader would wait for them; run on real ranks, or simulate with "
                "torchtitan's own loader"
            )
        inject, settings = (
            {"tokenizer": tokenizer},
            {"padding_idx": padding_id(tokenizer), **(config.settings or {})},
        )
        source, encoder = with_encoders(
            as_source(build(config.source, inject=inject)),
            build(config.encoder, inject=inject),
            tokenizer,
            settings={name: settings.pop(name) for name in SHAPE_KEYS if name in settings},
            strict=not settings.get("skip_bad"),
            pairs=False,
        )
        packs = IterablePackedDataset(
            source, encoder=encoder, max_seq_len=seq_len, epochs=None if config.infinite else 1, **settings
        )
        # torchtitan's validator builds a loader whenever it validates: all of them use the same connections.
        limit = timedelta(seconds=require_duration(config.timeout, "dataloader.timeout", "seconds"))
        ranks = shared_sync(timeout=limit, place=(dp_rank, dp_world_size))
        self.loader = PackedDataLoader(
            packs,
            batch_size=local_batch_size,
            packs_per_step=local_batch_size * dp_world_size,  # one batch: torchtitan counts those of a step
            num_workers=config.num_workers,
            pin_memory=torch.cuda.is_available(),
            process_group=ranks,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Collective: iterate over the batches that follow the loaded state."""
        if self.loader.batches_per_step > 1:
            raise ValueError(
                f"{self.loader.rank_sync.data_world_size} data-parallel ranks do not divide the "
                f"num_lanes={self.loader.dataset.lanes_for(1)} of the run: batches would have fewer packs, and so "
                "would torchtitan's steps; use a number of ranks that divides the lanes, or in a new run another "
                "num_lanes"
            )
        for batch in self.loader:
            yield trainer_batch(batch)

    def state_dict(self) -> dict[str, bytes]:
        """Collective: return the state after the last batch, of all ranks.

        It is one value, because torchtitan's checkpoints load only keys that the new run has, too.
        """
        file = io.BytesIO()
        torch.save(self.loader.state_dict(), file)
        return {STATE: file.getvalue()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Collective: let the next iteration continue after the batch of a state, on any number of ranks."""
        if STATE not in state_dict:
            raise ValueError(
                f"the state has the keys {sorted(state_dict)} and not {STATE!r}: another loader made it; start the "
                "data again with --checkpoint.exclude_from_loading dataloader"
            )
        self.loader.load_state_dict(torch.load(io.BytesIO(state_dict[STATE]), weights_only=True))


def trainer_batch(batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a batch as torchtitan's trainer takes it: inputs by name, and the labels, each ``[batch, seq_len]`` int64.

    ``input`` are the tokens, ``positions`` restart at 0 in every sequence and in the padding, and the label at each
    place is the token to predict there. It is -100 where nothing is trained: also at the last token of each sequence,
    since nothing predicts the next one's first.

    Raises:
        ValueError: if sequences of the batch share a prefix, which positions cannot express, or have images.
    """
    require_unshared(batch)
    as_packed(batch)  # which refuses images
    labels = torch.full_like(batch.labels, IGNORE_INDEX)
    labels[:, :-1] = batch.labels[:, 1:]
    return {"input": batch.tokens, "positions": batch.input_pos}, labels
