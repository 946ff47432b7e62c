"""Find the sequences in batches that are dicts, as collators for Hugging Face models make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from streampack.attention.dense import document_ids
from streampack.types import IGNORE_INDEX

BOUNDARY_KEYS = (
    "seq_lens, cu_seq_lens_q, seq_idx, position_ids, input_pos or an attention_mask of 2 dimensions"
)


class Packed(Protocol):
    """The part of a batch that masks are made from. A `Batch` is one."""

    @property
    def tokens(self) -> torch.Tensor:
        """``[batch, max_seq_len]``; only the shape and device are used."""

    @property
    def input_pos(self) -> torch.Tensor:
        """``[batch, max_seq_len]``: positions, counted from 0 in every sequence."""

    @property
    def seq_lens(self) -> torch.Tensor:
        """``[batch, segments]`` int32: lengths of the segments, and zeros at the end of packs with fewer."""


@dataclass(frozen=True)
class PackedRows:
    """A dict's rows as `Packed`."""

    tokens: torch.Tensor  # [batch, max_seq_len]
    input_pos: torch.Tensor  # [batch, max_seq_len]
    seq_lens: torch.Tensor  # [batch, sequences] int32, padding included, zeros at the end


def as_packed(batch: Packed | Mapping[str, Any]) -> Packed:
    """Return a dict as `Packed` by finding its sequences; anything else is returned as it is.

    Boundaries are read from the first of these keys that the dict has: ``seq_lens``, ``cu_seq_lens_q``, ``seq_idx``
    (where it changes), ``position_ids`` or ``input_pos`` (where they do not increase by one). A change in an
    ``attention_mask`` of 2 dimensions is a boundary too, beside one of the last three keys or alone.

    >>> flat = {"input_ids": torch.tensor([[7, 8, 9, 4, 5]]), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    >>> as_packed(flat).seq_lens
    tensor([[3, 2]], dtype=torch.int32)

    Raises:
        ValueError: for a dict without token ids, without anything that says where its sequences begin, or
            with tensors of other shapes than its tokens.
    """
    if not isinstance(batch, Mapping):
        return batch
    tokens = batch.get("input_ids", batch.get("tokens"))
    if not torch.is_tensor(tokens) or tokens.ndim != 2:
        raise ValueError(
            "the batch has no tensor of 2 dimensions 'input_ids' (or 'tokens'); give one, [batch, tokens]"
        )
    seq_lens = batch.get("seq_lens")
    if seq_lens is None:
        seq_lens = _lengths_between(_mark_starts(batch, tokens))
    elif not torch.is_tensor(seq_lens) or seq_lens.ndim != 2:
        raise ValueError(
            "seq_lens must be a tensor of 2 dimensions, [batch, sequences], zeros at the end of each row"
        )
    positions = positions_of(seq_lens, max_seq_len=tokens.shape[1])
    return PackedRows(tokens, positions, seq_lens)


def labels_of(batch: Mapping[str, Any], packed: Packed) -> torch.Tensor | None:
    """Return a dict's labels with -100 at the beginning of every sequence, or None if it has none."""
    labels = batch.get("labels")
    if labels is None:
        return None
    positions = positions_of(packed.seq_lens, max_seq_len=packed.tokens.shape[1])
    masked: torch.Tensor = labels.masked_fill(positions == 0, IGNORE_INDEX)
    return masked


def positions_of(seq_lens: torch.Tensor, *, max_seq_len: int) -> torch.Tensor:
    """Return positions that restart at 0 in every sequence and in the padding: ``[batch, max_seq_len]`` int64.

    >>> positions_of(torch.tensor([[3, 1]]), max_seq_len=6)
    tensor([[0, 1, 2, 0, 0, 1]])
    """
    ids = document_ids(seq_lens, max_seq_len=max_seq_len)
    starts = nn.functional.pad(seq_lens.cumsum(1), (1, 0)).gather(1, ids)
    return torch.arange(max_seq_len, device=ids.device) - starts


def _mark_starts(batch: Mapping[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Mark the tokens at which a sequence begins: ``[batch, tokens]`` bool."""
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[:, :1] = True
    has_boundaries = False
    if (ends := batch.get("cu_seq_lens_q")) is not None:
        if int(ends[-1]) != tokens.numel():
            raise ValueError(
                f"cu_seq_lens_q ends at {int(ends[-1])} and the batch has {tokens.numel()} tokens"
            )
        flat = torch.zeros(tokens.numel() + 1, dtype=torch.bool, device=tokens.device)
        flat[ends.long()] = True
        return starts | flat[:-1].view_as(starts)
    for name, step_within in (("seq_idx", 0), ("position_ids", 1), ("input_pos", 1)):
        if (values := batch.get(name)) is not None:
            starts[:, 1:] |= _expand_rows(values, name, tokens).diff(dim=1) != step_within
            has_boundaries = True
            break
    if (mask := batch.get("attention_mask")) is not None:
        starts[:, 1:] |= _expand_rows(mask, "attention_mask", tokens).long().diff(dim=1) != 0
        has_boundaries = True
    if not has_boundaries:
        raise ValueError(
            f"nothing in the batch says where its sequences begin (it has {', '.join(map(repr, batch))}); "
            f"give {BOUNDARY_KEYS} (FlatteningCollator returns position_ids unless told not to)"
        )
    return starts


def _expand_rows(values: torch.Tensor, name: str, tokens: torch.Tensor) -> torch.Tensor:
    """Repeat the one row of ``[1, tokens]`` for every row of the batch, and check the shape."""
    if values.ndim != 2 or values.shape[1] != tokens.shape[1] or values.shape[0] not in (1, len(tokens)):
        raise ValueError(
            f"{name} has the shape {list(values.shape)} and the tokens have {list(tokens.shape)}; give {BOUNDARY_KEYS}"
        )
    return values.expand_as(tokens)


def _lengths_between(starts: torch.Tensor) -> torch.Tensor:
    """Turn the marks of `_mark_starts` into lengths: ``[batch, sequences]`` int32, zeros where a row has fewer."""
    ids = starts.cumsum(1) - 1
    lengths = torch.zeros(len(starts), int(ids.max()) + 1, dtype=torch.int32, device=starts.device)
    return lengths.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.int32))
