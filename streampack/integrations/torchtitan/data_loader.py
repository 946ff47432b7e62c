"""`StreampackDataLoader`: a `PackedDataLoader` in the form that torchtitan's trainer and checkpoints expect."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from reprlib import repr as short_repr
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from torchtitan.components.dataloader import BaseDataLoader

from streampack.attention.layout import as_packed
from streampack.instantiate import COMPONENT, build
from streampack.loader.data_loader import PackedDataLoader
from streampack.losses import require_unshared
from streampack.packing.batch import Batch
from streampack.packing.encoders.tokenizer import padding_id
from streampack.streaming.dataset import IterablePackedDataset
from streampack.types import IGNORE_INDEX

STATE = "streampack"
"""Key of the state in a checkpoint: the same on any number of ranks, so that any number can load it."""

DECIDED = {
    "source": "dataloader.source",
    "encoder": "dataloader.encoder",
    "max_seq_len": "training.seq_len",
    "epochs": "dataloader.infinite",
}
"""Arguments of `IterablePackedDataset` that ``settings`` may not hold, and the field of a config that decides each."""


def _from_option(texts: list[str]) -> Any:
    """Return the value of an option of the command line: JSON, or a path."""
    try:
        return json.loads(texts[0])
    except ValueError:
        return texts[0]


# tyro would look for options in the arguments of an object's class, and fail at most sources.
_JSON_OR_PATH = tyro.constructors.PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON|PATH",
    instance_from_str=_from_option,
    is_instance=lambda value: True,
    str_from_instance=lambda value: [short_repr(value)],
)


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

    Each batch is as `trainer_batch` returns it. Packs have ``training.seq_len`` tokens, and
    a batch has ``training.local_batch_size`` of them (with pipeline parallelism, as many as a microbatch). Positions
    restart at each sequence, which is where the attention masks of torchtitan's language models separate documents.

    All ranks make the same number of batches, and an error on one is raised on all, as by `PackedDataLoader`. Ranks
    with the same ``dp_rank`` (of tensor, context and pipeline parallelism) are given the same batches.

    ``loader`` is the `PackedDataLoader`, with its ``metrics()`` and ``ledger()``.

    Args:
        config: see `Config`.
        dp_world_size: the number of data-parallel groups of ranks.
        dp_rank: which of them this rank belongs to.
        tokenizer: torchtitan's, which encoders that are given as nodes take.
        seq_len: tokens of a pack.
        local_batch_size: packs of a batch.
        snapshot_every_n_steps: ignored; a state can be taken after any batch.

    Raises:
        ValueError: for settings that `IterablePackedDataset` or `PackedDataLoader` refuses, and with simulated ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Where the packs come from. Sources and encoders are objects, or nodes with a ``_component_``.

        On the command line they are paths or JSON: ``--dataloader.source "corpus/*.jsonl"``. ``dataset`` and
        ``dataset_path``, which all loaders of torchtitan have, are refused.

        Raises:
            ValueError: without a source, or for values that another field decides.
        """

        source: Annotated[Any, _JSON_OR_PATH] = None
        """The corpus: any source that `IterablePackedDataset` takes, or a node of one."""

        encoder: Annotated[Any, _JSON_OR_PATH] = None
        """The function that turns a row into a sample, or a node of one; a node without a tokenizer is given
        torchtitan's."""

        settings: Annotated[dict[str, Any], _JSON_OR_PATH] = field(default_factory=dict)
        """The other arguments of `IterablePackedDataset`, such as ``shuffle``, ``seed`` and ``num_lanes``."""

        infinite: bool = True
        """Whether the data is read for ever. Otherwise it is read once, and then training ends."""

        num_workers: int = 0
        """Processes of each rank that read, encode and pack. 0: the rank does it itself."""

        pin_memory: bool = False
        """Whether batches lie in page-locked memory, from which copies to a GPU are faster."""

        timeout: float = 1800.0
        """Seconds that ranks wait in the loader for one another."""

        _built: Any = field(default=None, init=False, repr=False, compare=False)

        def __post_init__(self) -> None:
            for name, value in (("dataset", self.dataset), ("dataset_path", self.dataset_path)):
                if value:
                    raise ValueError(
                        f"dataloader.{name}={value!r} names data of torchtitan's own loaders; leave it out, and give "
                        "source, such as source='corpus/*.jsonl' or source=datasets.load_dataset(...)"
                    )
            if self.source is None:
                raise ValueError(
                    "dataloader.source is None; give StreampackDataLoader.Config a source, such as "
                    "source='corpus/*.jsonl'"
                )
            if not isinstance(self.settings, dict):
                raise ValueError(
                    f"dataloader.settings={self.settings!r} must be a dict of arguments, on the command line in JSON: "
                    '--dataloader.settings \'{"shuffle": true, "seed": 7}\''
                )
            for name in self.settings.keys() & DECIDED.keys():
                raise ValueError(
                    f"settings[{name!r}]={self.settings[name]!r}: remove it; {DECIDED[name]} decides it"
                )

        def build(self, **arguments: Any) -> StreampackDataLoader:
            """Return a loader; at its beginning, the one that was built before with the same arguments.

            torchtitan's validator builds a loader whenever it validates, and each new one would keep connections
            between all ranks until the process ends.
            """
            if self._built is None or self._built.built_with != arguments or self._built.resumed:
                self._built = BaseDataLoader.Config.build(self, **arguments)
                self._built.built_with = arguments
            else:
                self._built.loader.dataset.set_epoch(0)
            loader: StreampackDataLoader = self._built
            return loader

        def to_dict(self) -> dict[str, Any]:
            """Return the config for logs, with objects by their names."""
            # The base class calls to_dict of whatever has it: that of a Dataset reads all rows.
            named = replace(self, source=_named(self.source), encoder=_named(self.encoder))
            shown: dict[str, Any] = BaseDataLoader.Config.to_dict(named)
            return shown

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
        self.built_with: dict[str, Any] = {}
        self.resumed = False  # whether a state was loaded
        made_of = {"tokenizer": tokenizer}
        packs = IterablePackedDataset(
            _built(config.source, made_of),
            encoder=_built(config.encoder, made_of),
            max_seq_len=seq_len,
            epochs=None if config.infinite else 1,
            **{"padding_idx": padding_id(tokenizer), **config.settings},
        )
        self.loader = PackedDataLoader(
            packs,
            batch_size=local_batch_size,
            packs_per_step=local_batch_size * dp_world_size,  # one batch: torchtitan counts those of a step
            num_workers=config.num_workers,
            pin_memory=config.pin_memory,
            timeout=config.timeout,
            data_ranks=(dp_rank, dp_world_size),
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
                f"the state has the keys {sorted(state_dict)} and not {STATE!r}: another loader made it; begin the "
                "data anew with --checkpoint.exclude_from_loading dataloader"
            )
        self.resumed = True
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


def _built(value: Any, arguments: Mapping[str, Any]) -> Any:
    """Build a node; return anything else as it is."""
    return build(value, inject=arguments) if _is_node(value) else value


def _named(value: Any) -> Any:
    """Return nodes and paths as they are, and a short text for any other object."""
    return value if value is None or isinstance(value, str) or _is_node(value) else short_repr(value)


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping) and COMPONENT in value
