"""Samples that keep their rows, from which a function makes the batch, as torchtune's ``collate_fn``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from streampack.packing.columns import ids_from_column
from streampack.packing.media import MediaSample
from streampack.types import IGNORE_INDEX, Pack, Sample

Collate = Callable[[list[Any]], dict[str, Any]]


class RowSample(MediaSample):
    """A sample that keeps its row, with the function that makes a batch of several rows.

    Args:
        row: with ``tokens`` and ``labels``, unshifted, and further inputs of the model.
        collate: returns ``tokens`` and ``labels``, padded on the right, and further inputs for a list of rows.

    Raises:
        ValueError: for a row without ids.
    """

    row: Mapping[str, Any]
    collate: Collate

    def __new__(cls, row: Mapping[str, Any], *, collate: Collate) -> RowSample:
        """Copy the ids; the row itself is kept."""
        ids, labels = ids_from_column(row["tokens"], "tokens"), ids_from_column(row["labels"], "labels")
        if ids.size != labels.size:
            raise ValueError(
                f"the row has {ids.size} tokens and {labels.size} labels; give one for each token"
            )
        self = Sample.__new__(cls, ids, labels)
        self.media, self.positions, self.cost, self.images = {}, None, 1, 1
        self.row, self.collate = row, collate
        return self

    @property
    def nbytes(self) -> int:
        """Memory of the row's tensors."""
        return sum(tensor.nbytes for tensor in _tensors(self.row))


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [tensor for each in inner for tensor in _tensors(each)]


def collate_rows(packs: Sequence[Pack]) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]] | None:
    """Return tokens, labels and the model's further inputs for packs of one `RowSample` each; None for other packs.

    A null pack also has a row, without trained tokens. So all ranks run the same parts of the model.

    Raises:
        ValueError: for a batch that is not padded on the right.
    """
    samples: list[RowSample] = [pack.media[0] for pack in packs if pack.media]
    if not samples or not isinstance(samples[0], RowSample):
        return None
    made = dict(samples[0].collate([dict(sample.row) for sample in samples]))
    tokens, labels = made.pop("tokens"), made.pop("labels").clone()
    lengths = [sample.tokens.size for sample in samples]
    if tokens.shape != labels.shape or len(tokens) != len(lengths) or tokens.shape[1] < max(lengths):
        raise ValueError(
            f"collate_fn made tokens {list(tokens.shape)} and labels {list(labels.shape)} of {len(lengths)} rows with "
            f"{lengths} tokens; it must pad them on the right"
        )
    labels[:, 0] = IGNORE_INDEX
    labels[[number for number, pack in enumerate(packs) if not pack.fragments]] = IGNORE_INDEX
    return tokens, labels, made


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return dicts and lists of tensors with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: map_tensors(each, change) for name, each in value.items()}
    return [map_tensors(each, change) for each in value] if isinstance(value, list | tuple) else value
