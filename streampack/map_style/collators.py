"""Collators for Hugging Face models: one flat row without padding, or padded rows with an attention mask."""

from __future__ import annotations

import functools
import gc
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from streampack.map_style.features import Feature, FlatRow, flat_row, mappings_of, samples_of
from streampack.types import IGNORE_INDEX, IntArray
from streampack.validation import require, require_multiple, require_positive, warn_user

log = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class FlatteningCollator:
    """Collates the samples of a batch into one row, end to end, as transformers' ``DataCollatorWithFlattening`` does.

    It makes the same tensors, bit for bit, and has the same options up to ``return_tensors``. A feature may be

    - a sample: ``input_ids``, or ``tokens`` and ``labels``;
    - a row of several samples, such as TRL packs, with ``seq_lengths`` (which a Trainer keeps only with
      ``remove_unused_columns=False``) or ``position_ids`` that restart;
    - a pack of an `IterablePackedDataset` or a `PackedDataset`, whose padding is left out.

    The row may be padded, for tensor cores or static shapes.

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

    The first batch warns if this process holds a model with its cache on.

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
        pad_to_multiple_of: pad the row to a multiple of this many tokens.
        pad_seqs_to: pad every sequence to a multiple of this many tokens, inside the sequence, as context parallelism
            needs. The lengths of rows (``pad_to_multiple_of``, ``max_tokens``) must be multiples of it.
        max_tokens: pad every row to this many tokens.
        max_seqs: with ``max_tokens``: return ``cu_seq_lens_*`` for this many sequences and padding, missing ones being
            empty, and ``max_tokens`` as ``max_length_*``. Then no shape and no integer depends on the data, and a
            compiled model is compiled once.

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
    max_tokens: int | None = None
    max_seqs: int | None = None

    def __post_init__(self) -> None:
        require(self.return_tensors, "return_tensors", ("pt", "np"))
        for name in ("pad_to_multiple_of", "pad_seqs_to", "max_tokens", "max_seqs"):
            if getattr(self, name) is not None:
                require_positive(getattr(self, name), name)
        for name in ("pad_to_multiple_of", "max_tokens"):
            require_multiple(getattr(self, name) or 0, name, self.pad_seqs_to, "pad_seqs_to")
        if self.pad_to_multiple_of and self.max_tokens:
            raise ValueError(
                f"pad_to_multiple_of={self.pad_to_multiple_of} and max_tokens={self.max_tokens}: give one of the two"
            )
        if self.max_seqs and not self.max_tokens:
            raise ValueError(
                f"max_seqs={self.max_seqs} without max_tokens: the row's length would still vary; give both"
            )

    def __call__(
        self,
        features: Sequence[Feature],
        *,
        return_tensors: str | None = None,
        separator_id: int | None = None,
    ) -> dict[str, Any]:
        """Return the batch as keyword arguments of a model."""
        _warn_of_caches()
        return_tensors = self.return_tensors if return_tensors is None else return_tensors
        require(return_tensors, "return_tensors", ("pt", "np"))
        row = flat_row(features)
        row.labels[np.cumsum([0, *row.seq_lens[:-1]])] = (
            self.separator_id if separator_id is None else separator_id
        )
        _warn_of_untrained(row.labels)
        row = self._padded(self._with_padded_sequences(row))
        seq_lens = np.array(row.seq_lens)
        starts = np.cumsum(seq_lens) - seq_lens
        total = row.tokens.size
        batch: dict[str, Any] = {"input_ids": row.tokens[None], "labels": row.labels[None]}
        if self.return_position_ids:
            places = np.arange(total) - np.repeat(starts, seq_lens)
            batch["position_ids"] = places[None] + self.position_ids_start
        if self.return_seq_idx:
            batch["seq_idx"] = np.repeat(np.arange(seq_lens.size, dtype=np.int32), seq_lens)[None]
        if self.return_flash_attn_kwargs:
            ends = np.append(starts, total).astype(np.int32)
            if self.max_seqs is not None:
                ends = np.append(ends, np.full(self.max_seqs + 2 - ends.size, total, np.int32))
            batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = ends
            longest = total if self.max_seqs is not None else int(seq_lens.max())
            batch["max_length_q"] = batch["max_length_k"] = longest
        if return_tensors == "pt":
            return {
                name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                for name, value in batch.items()
            }
        return batch

    def _with_padded_sequences(self, row: FlatRow) -> FlatRow:
        """Pad each sequence at its end, where the settings ask for it."""
        if self.pad_seqs_to == 1:
            return row
        lengths = np.array(row.seq_lens)
        padded = lengths + -lengths % self.pad_seqs_to
        # Where each token goes: behind its place by the padding of the sequences before its own.
        places = np.arange(row.tokens.size) + np.repeat(
            np.cumsum(padded - lengths) - (padded - lengths), lengths
        )
        tokens = np.full(padded.sum(), self.padding_idx, row.tokens.dtype)
        labels = np.full(padded.sum(), IGNORE_INDEX, row.labels.dtype)
        tokens[places], labels[places] = row.tokens, row.labels
        return FlatRow(tokens, labels, padded.tolist())

    def _padded(self, row: FlatRow) -> FlatRow:
        """Append padding as one more sequence, where the settings ask for it."""
        used = row.tokens.size
        if self.max_seqs is not None and len(row.seq_lens) > self.max_seqs:
            raise ValueError(
                f"the batch has {len(row.seq_lens)} sequences, max_seqs is {self.max_seqs}; raise max_seqs, or give "
                "batches of fewer samples (max_seqs_per_pack)"
            )
        if self.max_tokens is not None and used > self.max_tokens:
            raise ValueError(
                f"the batch has {used} tokens, max_tokens is {self.max_tokens}; raise max_tokens, or give batches of "
                "fewer samples (MultipackBatchSampler keeps to a budget)"
            )
        size = self.max_tokens or used + -used % (self.pad_to_multiple_of or 1)
        if size == used:
            return row
        padding = size - used
        return FlatRow(
            np.pad(row.tokens, (0, padding), constant_values=self.padding_idx),
            np.pad(row.labels, (0, padding), constant_values=IGNORE_INDEX),
            [*row.seq_lens, padding],
        )


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
        ValueError: for a bad setting or sample, naming it, and for packs, whose boundaries an attention mask of rows
            cannot express.
    """

    def __init__(self, *, padding_idx: int = 0, pad_to_multiple_of: int | None = None) -> None:
        self.padding_idx = padding_idx
        self.pad_to_multiple_of = (
            1 if pad_to_multiple_of is None else require_positive(pad_to_multiple_of, "pad_to_multiple_of")
        )

    def __call__(self, features: Sequence[Feature]) -> dict[str, torch.Tensor]:
        """Return the batch as keyword arguments of a model."""
        features = mappings_of(features)
        if any("seq_lens" in feature for feature in features):
            raise ValueError(
                "a pack came where a sample was expected: an attention_mask of rows does not keep its sequences apart; "
                "use FlatteningCollator"
            )
        samples = samples_of(features)
        longest = max(sample.tokens.size for sample in samples)
        shape = (len(samples), longest + -longest % self.pad_to_multiple_of)
        tokens = np.full(shape, self.padding_idx, np.int64)
        labels = np.full(shape, IGNORE_INDEX, np.int64)
        mask = np.zeros(shape, np.int64)
        for i, sample in enumerate(samples):
            tokens[i, : sample.tokens.size] = sample.tokens
            labels[i, 1 : sample.tokens.size] = sample.labels[1:]
            mask[i, : sample.tokens.size] = 1
        _warn_of_untrained(labels)
        arrays = {"input_ids": tokens, "labels": labels, "attention_mask": mask}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


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


_checked_caches = False


def _warn_of_caches() -> None:
    """Warn once if this process holds a model whose cache is on: such a model takes a flat row for one sequence."""
    global _checked_caches
    library = sys.modules.get("transformers.modeling_utils")
    if _checked_caches or library is None:
        return
    _checked_caches = True
    for thing in gc.get_objects():
        if (
            issubclass(type(thing), library.PreTrainedModel)
            and getattr(getattr(thing, "config", None), "use_cache", False)
            and thing.can_generate()
            and "without_cache"
            not in [getattr(hook, "__name__", "") for hook in thing._forward_pre_hooks.values()]
        ):
            warn_user(
                f"a {type(thing).__name__} in this process has its cache on, and with one transformers ignores "
                "position_ids: the samples of a flat row would see one another; inputs = prepare_model_for_packing("
                "model), then model(**inputs(batch)), or set model.config.use_cache = False",
            )
            return
