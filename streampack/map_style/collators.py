"""Collators for Hugging Face models: one flat row without padding, or padded rows with an attention mask."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from streampack.packing.samples import (
    BOUNDARY_COLUMNS,
    as_mapping,
    check_ids,
    sample_from_row,
    sequence_lengths,
)
from streampack.types import IGNORE_INDEX, IntArray, Sample
from streampack.validation import require, require_multiple, require_positive

log = logging.getLogger(__name__)

Feature = Mapping[str, Any]


@dataclass(kw_only=True, eq=False)
class FlatteningCollator:
    """Collates the samples of a batch into one row, end to end, as transformers' ``DataCollatorWithFlattening`` does.

    It makes the same tensors, bit for bit, and has the same options up to ``return_tensors``. A feature may be

    - a sample: ``input_ids``, or ``tokens`` and ``labels``;
    - a row of several samples, such as TRL packs, with ``seq_lengths`` (which a Trainer keeps only with
      ``remove_unused_columns=False``) or ``position_ids`` that restart;
    - a pack of an `IterablePackedDataset` or a `PackedDataset`, whose padding is left out.

    >>> collate = FlatteningCollator(return_flash_attn_kwargs=True)
    >>> batch = collate([{"input_ids": [10, 11, 12]}, {"input_ids": [20, 21]}])
    >>> for name, value in batch.items():
    ...     print(name, value.tolist() if hasattr(value, "tolist") else value)
    input_ids [[10, 11, 12, 20, 21]]
    labels [[-100, 11, 12, -100, 21]]
    position_ids [[0, 1, 2, 0, 1]]
    cu_seq_lens_q [0, 3, 5]
    cu_seq_lens_k [0, 3, 5]
    max_length_q 3
    max_length_k 3

    transformers' attention keeps the samples apart by ``position_ids`` only if the model makes no cache, and by default
    it makes one. Trainer and TRL switch it off. In your own loop::

        inputs = prepare_model_for_packing(model)
        loss = model(**inputs(batch)).loss  # for each batch

    Padding is a sequence of its own: label -100, positions from ``position_ids_start``, its own ``seq_idx``, the
    last entry of ``cu_seq_lens_*``. A kernel leaves rows that no sequence covers unwritten, and a NaN in them reaches
    the gradients in spite of the label.

    Args:
        return_position_ids: return ``position_ids``  # [1, tokens] int64
        separator_id: the first label of every sequence.
        return_flash_attn_kwargs: return ``cu_seq_lens_q``, ``cu_seq_lens_k``  # [sequences + 1] int32
            and ``max_length_q``, ``max_length_k``, Python integers.
        return_seq_idx: return ``seq_idx``, the number of each token's sequence  # [1, tokens] int32
        position_ids_start: position of every sequence's first token; RoBERTa-like models count from 2.
        return_tensors: ``"pt"`` or ``"np"``.
        padding_idx: the token of the padding.
        pad_to_multiple_of: pad the row to a multiple of this many tokens: for tensor cores, or with the budget of a
            `MultipackBatchSampler` for rows of one length.
        pad_seqs_to: pad every sequence to a multiple of this many tokens, inside the sequence, as context parallelism
            needs; ``pad_to_multiple_of`` must be a multiple of it.

    Raises:
        ValueError: for a setting or a batch that does not fit, naming the sample.
    """

    return_position_ids: bool = True
    separator_id: int = IGNORE_INDEX
    return_flash_attn_kwargs: bool = False
    return_seq_idx: bool = False
    position_ids_start: int = 0
    return_tensors: str = "pt"
    padding_idx: int = 0
    pad_to_multiple_of: int | None = None
    pad_seqs_to: int = 1

    def __post_init__(self) -> None:
        require(self.return_tensors, "return_tensors", ("pt", "np"))
        require_positive(self.pad_seqs_to, "pad_seqs_to")
        if self.pad_to_multiple_of is not None:
            require_positive(self.pad_to_multiple_of, "pad_to_multiple_of")
            require_multiple(self.pad_to_multiple_of, "pad_to_multiple_of", self.pad_seqs_to, "pad_seqs_to")

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Return the batch as keyword arguments of a model."""
        parts = [_read(feature, number) for number, feature in enumerate(_mappings(features))]
        lengths = np.array([length for _, seq_lens in parts for length in seq_lens], np.int64)
        if not lengths.size:
            raise ValueError("the packs of this batch hold no sequence; give at least one that does")
        padded = lengths + -lengths % self.pad_seqs_to
        starts = np.cumsum(padded) - padded
        used = int(padded.sum())
        total = used + -used % (self.pad_to_multiple_of or 1)
        tokens = np.concatenate([sample.tokens for sample, _ in parts], dtype=np.int64)
        labels = np.concatenate([sample.labels for sample, _ in parts], dtype=np.int64)
        if total > tokens.size:
            places = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(tokens.size)
            tokens, labels = _spread(tokens, places, total, self.padding_idx), _spread(labels, places, total)
        labels[starts] = self.separator_id
        _warn_of_untrained(labels)
        if total > used:  # the row's padding is one more sequence
            padded, starts = np.append(padded, total - used), np.append(starts, used)
        batch: dict[str, Any] = {"input_ids": tokens[None], "labels": labels[None]}
        if self.return_position_ids:
            positions = np.arange(total) - np.repeat(starts, padded)
            batch["position_ids"] = positions[None] + self.position_ids_start
        if self.return_seq_idx:
            batch["seq_idx"] = np.repeat(np.arange(padded.size, dtype=np.int32), padded)[None]
        if self.return_flash_attn_kwargs:
            batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = np.append(starts, total).astype(np.int32)
            batch["max_length_q"] = batch["max_length_k"] = int(padded.max())
        return _as_tensors(batch) if self.return_tensors == "pt" else batch


class PaddedCollator:
    """Collates each sample into a row of its own, padded to the longest; the baseline for flattening.

    >>> batch = PaddedCollator()([{"input_ids": [10, 11, 12]}, {"input_ids": [20, 21]}])
    >>> for name, value in batch.items():
    ...     print(name, value.tolist())
    input_ids [[10, 11, 12], [20, 21, 0]]
    labels [[-100, 11, 12], [-100, 21, -100]]
    attention_mask [[1, 1, 1], [1, 1, 0]]

    The first label of a row is -100, as in a flat row, so that samples have the same trained tokens either way. All
    tensors are ``[batch, longest]`` int64.

    Args:
        padding_idx: the token of the padding.
        pad_to_multiple_of: pad the rows to a multiple of this many tokens.

    Raises:
        ValueError: for a bad setting or sample, naming it, and for packs and rows of several samples, whose boundaries
            an attention mask of rows cannot express.
    """

    def __init__(self, *, padding_idx: int = 0, pad_to_multiple_of: int | None = None) -> None:
        self.padding_idx = padding_idx
        multiple = 1 if pad_to_multiple_of is None else pad_to_multiple_of
        self.pad_to_multiple_of = require_positive(multiple, "pad_to_multiple_of")

    def __call__(self, features: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return the batch as keyword arguments of a model."""
        rows = _mappings(features)
        if any("seq_lens" in row for row in rows):
            raise ValueError(
                "a pack came where a sample was expected: an attention_mask of rows does not keep its sequences apart; "
                "use FlatteningCollator"
            )
        samples = [_sample(row, number) for number, row in enumerate(rows)]
        longest = max(sample.tokens.size for sample in samples)
        shape = (len(samples), longest + -longest % self.pad_to_multiple_of)
        tokens = np.full(shape, self.padding_idx, np.int64)
        labels = np.full(shape, IGNORE_INDEX, np.int64)
        for i, sample in enumerate(samples):
            tokens[i, : sample.tokens.size] = sample.tokens
            labels[i, 1 : sample.tokens.size] = sample.labels[1:]
        _warn_of_untrained(labels)
        ends = np.array([[sample.tokens.size] for sample in samples])
        mask = (np.arange(shape[1]) < ends).astype(np.int64)
        return _as_tensors({"input_ids": tokens, "labels": labels, "attention_mask": mask})


def _mappings(features: Sequence[Any]) -> list[Feature]:
    """Return the features as mappings, and refuse what a model of rows has no place for."""
    found: list[Feature] = []
    for number, feature in enumerate(features):
        try:
            found.append(as_mapping(feature))
        except ValueError as error:
            raise ValueError(f"sample {number} of the batch: {error}") from None
        if "groups" in found[-1]:
            raise ValueError(
                f"pack {number} of the batch holds groups, whose answers share a prompt and a loss, and a "
                "flattened row has no place for them; use a PackedDataLoader, or streampack.collate_packed"
            )
        if "labels" in found[-1] and not {"tokens", "input_ids"} & set(found[-1]):
            raise ValueError(
                f"sample {number} of the batch has no 'tokens' and no 'input_ids'; its columns are "
                f"{', '.join(map(repr, sorted(found[-1])))}. A Trainer removes columns that the model's forward does "
                "not name: set remove_unused_columns=False in TrainingArguments, or name the column input_ids"
            )
    if not found:
        raise ValueError("the batch is empty; give at least one sample")
    return found


def _read(feature: Feature, number: int) -> tuple[Sample, list[int]]:
    """Return the tokens and labels of a sample, or of a row or a pack of several, and the lengths of its sequences."""
    if {"seq_lens", "num_seqs"} <= set(feature):  # a pack, which ends with padding
        lengths = [int(length) for length in feature["seq_lens"]][: feature["num_seqs"]]
        used = sum(lengths)
        return Sample(np.asarray(feature["tokens"])[:used], np.asarray(feature["labels"])[:used]), lengths
    sample = _sample({name: feature[name] for name in feature if name not in BOUNDARY_COLUMNS}, number)
    try:
        return sample, sequence_lengths(feature, sample.tokens.size)
    except ValueError as error:
        raise ValueError(f"sample {number} of the batch: {error}") from None


def _sample(feature: Feature, number: int) -> Sample:
    try:
        sample = sample_from_row(feature)
        check_ids([sample])
    except ValueError as error:
        raise ValueError(f"sample {number} of the batch: {error}") from None
    if not sample.tokens.size:
        raise ValueError(f"sample {number} of the batch has 0 tokens; remove it")
    return sample


def _spread(values: IntArray, places: IntArray, total: int, filler: int = IGNORE_INDEX) -> IntArray:
    spread = np.full(total, filler, np.int64)
    spread[places] = values
    return spread


def _as_tensors(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in arrays.items()
    }


def _warn_of_untrained(labels: IntArray) -> None:
    """Warn, once in a process, of a batch of which no label is trained."""
    if (labels == IGNORE_INDEX).all():
        _say_untrained()


@functools.cache
def _say_untrained() -> None:
    log.warning(
        "a batch trains nothing, and transformers' loss of it is NaN: look at the labels, and at the roles of messages "
        "(only the assistant's are trained); leave such samples out"
    )
