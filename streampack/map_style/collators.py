"""`FlatteningCollator`: one flat row for Hugging Face models."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
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
from streampack.types import IGNORE_INDEX, Sample
from streampack.validation import require_positive

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class FlatteningCollator:
    """Collates the samples of a batch into one row, end to end, as transformers' ``DataCollatorWithFlattening`` does.

    It makes the same tensors, bit for bit. A feature may be

    - a sample: ``input_ids``, or ``tokens`` and ``labels``;
    - a row of several samples, such as TRL packs, with ``seq_lengths`` (which a Trainer keeps only with
      ``remove_unused_columns=False``) or ``position_ids`` that restart;
    - a pack of an `IterablePackedDataset` or a `PackedDataset`, without its padding.

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

    Padding is a sequence of its own: label -100, positions from 0, its own ``seq_idx``, the last entry of
    ``cu_seq_lens_*``. A kernel leaves rows that no sequence covers unwritten, and a NaN in them reaches the gradients
    in spite of the label.

    Args:
        return_position_ids: return ``position_ids``  # [1, tokens] int64
        return_flash_attn_kwargs: return ``cu_seq_lens_q``, ``cu_seq_lens_k``  # [sequences + 1] int32
            and ``max_length_q``, ``max_length_k``, Python integers.
        return_seq_idx: return ``seq_idx``, the number of each token's sequence  # [1, tokens] int32
        padding_idx: the token of the padding.
        pad_to_multiple_of: pad the row to a multiple of this many tokens: for tensor cores, or with the budget of a
            `MultipackBatchSampler` for rows of one length.

    Raises:
        ValueError: for a setting or a batch that does not fit, naming the sample.
    """

    return_position_ids: bool = True
    return_flash_attn_kwargs: bool = False
    return_seq_idx: bool = False
    padding_idx: int = 0
    pad_to_multiple_of: int = 1

    def __post_init__(self) -> None:
        require_positive(self.pad_to_multiple_of, "pad_to_multiple_of")

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Return the batch as keyword arguments of a model."""
        parts = [_read(feature, number) for number, feature in enumerate(features)]
        lengths = np.array([length for _, seq_lens in parts for length in seq_lens], np.int64)
        if not lengths.size:
            raise ValueError("the batch holds no sequence; give at least one sample")
        used = int(lengths.sum())
        filler = np.full(-used % self.pad_to_multiple_of, self.padding_idx)
        tokens = np.concatenate([*(sample.tokens for sample, _ in parts), filler], dtype=np.int64)
        labels = np.concatenate([*(sample.labels for sample, _ in parts), filler], dtype=np.int64)
        labels[used:] = IGNORE_INDEX
        if filler.size:  # the row's padding is one more sequence
            lengths = np.append(lengths, filler.size)
        ends = lengths.cumsum()
        labels[ends - lengths] = IGNORE_INDEX
        if (labels == IGNORE_INDEX).all():
            _warn_of_untrained()
        batch: dict[str, Any] = {"input_ids": tokens[None], "labels": labels[None]}
        if self.return_position_ids:
            batch["position_ids"] = (np.arange(tokens.size) - np.repeat(ends - lengths, lengths))[None]
        if self.return_seq_idx:
            batch["seq_idx"] = np.repeat(np.arange(lengths.size, dtype=np.int32), lengths)[None]
        batch = {name: torch.from_numpy(array) for name, array in batch.items()}
        if self.return_flash_attn_kwargs:
            cu_seq_lens = torch.from_numpy(np.append(0, ends).astype(np.int32))
            batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = cu_seq_lens
            batch["max_length_q"] = batch["max_length_k"] = int(lengths.max())
        return batch


def _read(feature: Any, number: int) -> tuple[Sample, list[int]]:
    """Return the tokens and labels of a sample, or of a row or a pack of several, and the lengths of its sequences."""
    try:
        row = as_mapping(feature)
        if "groups" in row or "segment_lens" in row:
            raise ValueError(
                "it is a pack of groups, whose answers share a prompt and a loss, or one with images, and a flattened "
                "row has no place for them; use a PackedDataLoader, or streampack.collate_packed"
            )
        if {"seq_lens", "num_seqs"} <= set(row):  # a pack, which ends with padding
            lengths = [int(length) for length in row["seq_lens"]][: row["num_seqs"]]
            used = sum(lengths)
            return Sample(np.asarray(row["tokens"])[:used], np.asarray(row["labels"])[:used]), lengths
        if "labels" in row and not {"tokens", "input_ids"} & set(row):
            raise ValueError(
                f"it has no 'tokens' and no 'input_ids'; its columns are {', '.join(map(repr, sorted(row)))}. A "
                "Trainer removes columns that the model's forward does not name: set remove_unused_columns=False in "
                "TrainingArguments, or name the column input_ids"
            )
        sample = sample_from_row({name: row[name] for name in row if name not in BOUNDARY_COLUMNS})
        check_ids([sample])
        if not sample.tokens.size:
            raise ValueError("it has 0 tokens; remove it")
        return sample, sequence_lengths(row, sample.tokens.size)
    except ValueError as error:
        raise ValueError(f"sample {number} of the batch: {error}") from None


@functools.cache
def _warn_of_untrained() -> None:
    """Warn, once in a process, of a batch without a trained label."""
    log.warning(
        "a batch trains nothing, and transformers' loss of it is NaN: look at the labels, and at the roles of messages "
        "(only the assistant's are trained); leave such samples out"
    )
