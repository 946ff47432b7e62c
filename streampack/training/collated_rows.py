"""Batches that a config's ``collate_fn`` makes, as for images: whole rows travel through the stream, one a pack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from typing_extensions import override

from streampack.attention.prepare import Inputs, prepare_model_for_packing
from streampack.instantiate import resolve
from streampack.packing.batch import Batch
from streampack.packing.collated import Collate, RowSample, map_tensors
from streampack.packing.encoders import padding_id
from streampack.packing.encoders.base import Encoder
from streampack.sources.examples import EXAMPLES, Example
from streampack.sources.memory import MapSource
from streampack.training.config import RunConfig
from streampack.types import IGNORE_INDEX


class WholeRows(MapSource):
    """A map-style dataset of samples with further inputs of the model, such as images.

    Its examples, by which two runs are compared and an epoch is estimated, have none of these: the last bits of pixels
    differ between machines, and a row has megabytes of them.
    """

    @override
    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """Return at most 64: each takes the time of its images."""
        return MapSource(_Texts(self.dataset)).examples(min(count, 64))


class _Texts:
    """The tokens and labels of a dataset's rows."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.dataset[index]
        return {name: row[name] for name in ("tokens", "labels")}


class RowEncoder(Encoder):
    """Encoder of such rows: its samples keep them, and ``collate`` makes the batches."""

    reads_images = True

    def __init__(self, collate: Collate) -> None:
        self.collate = collate

    def __call__(self, row: Mapping[str, Any], /) -> RowSample:
        """See `Encoder`."""
        return RowSample(row, collate=self.collate)


@dataclass(frozen=True)
class CollatedInputs:
    """Arguments of a model for the padded batches of a ``collate_fn``: attention is causal in each row.

    In place of what `prepare_model_for_packing` returns, for models that take images.
    """

    model: nn.Module
    attention: str = "padded"
    summary: str = "attention=padded: causal in each row"

    def __call__(self, batch: Batch) -> dict[str, Any]:
        """Return ``tokens`` and the further inputs of a batch on the model's device, floats in the model's dtype."""
        dtype = next(self.model.parameters()).dtype
        extra = map_tensors(batch.extra, lambda each: each.to(dtype) if each.is_floating_point() else each)
        return {"tokens": batch.tokens, **(extra or {})}


def own_collate(name: str | None) -> bool:
    """Return whether a config's ``collate_fn`` makes the batches, and not the padding of this package."""
    return name is not None and name.rpartition(".")[2] not in ("padded_collate_sft", "padded_collate_dpo")


def prepare_inputs(model: nn.Module, config: RunConfig) -> Inputs:
    """Prepare a model for the batches of a config, packed or padded, or made by its ``collate_fn``."""
    if own_collate(config.collate_fn):
        return CollatedInputs(model)  # type: ignore[return-value]
    return prepare_model_for_packing(model, attention=config.attention)


def vocab_size_of(model: nn.Module) -> int:
    """Return the number of ids that a torchtune model embeds; a model with images has some beside its text's."""
    decoder: Any = getattr(model, "decoder", model)
    inner = [module for module in decoder.tok_embeddings.modules() if isinstance(module, nn.Embedding)]
    return sum(module.num_embeddings for module in inner)


def collate_of(name: str | None, *, tokenizer: Any) -> Collate | None:
    """Return a config's ``collate_fn`` as torchtune's recipes call it; None where it does what is done without it."""
    if not own_collate(name):
        return None
    try:
        return partial(resolve(str(name)), padding_idx=padding_id(tokenizer), ignore_idx=IGNORE_INDEX)
    except (ValueError, ImportError) as error:
        raise ValueError(f"collate_fn: {error}") from None
