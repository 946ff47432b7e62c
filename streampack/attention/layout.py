"""Where the sequences of a batch lie, and which of them continue others: what masks and boundaries are made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import nn

from streampack.packing.batch import Batch, stack_packs
from streampack.packing.groups import path_starts
from streampack.types import IGNORE_INDEX, Fragment, Pack, PackGroups

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
    longest: int | None  # tokens of the longest sequence, if the dict says so


def document_ids(seq_lens: torch.Tensor, *, max_seq_len: int) -> torch.Tensor:
    """Return the number of each token's sequence in its pack, ``[batch, max_seq_len]`` int64, from 0.

    Padding is a sequence of its own. ``seq_lens`` ``[batch, segments]`` may have zeros at the end of a row, and may
    lack the padding's length.

    >>> document_ids(torch.tensor([[3, 2, 1], [4, 2, 0]], dtype=torch.int32), max_seq_len=6)
    tensor([[0, 0, 0, 1, 1, 2],
            [0, 0, 0, 0, 1, 1]])
    """
    ends = seq_lens.cumsum(1)  # [batch, segments]: the index after each segment's last token
    indices = torch.arange(max_seq_len, device=seq_lens.device).repeat(len(seq_lens), 1)
    return torch.searchsorted(ends, indices, right=True)  # counts the segments that end before a token


def positions_of(seq_lens: torch.Tensor, *, max_seq_len: int) -> torch.Tensor:
    """Return positions that restart at 0 in every sequence and in the padding: ``[batch, max_seq_len]`` int64.

    >>> positions_of(torch.tensor([[3, 1]]), max_seq_len=6)
    tensor([[0, 1, 2, 0, 0, 1]])
    """
    ids = document_ids(seq_lens, max_seq_len=max_seq_len)
    starts = nn.functional.pad(seq_lens.cumsum(1), (1, 0)).gather(1, ids)
    return torch.arange(max_seq_len, device=ids.device) - starts


def as_packed(batch: Packed | Mapping[str, Any]) -> Packed:
    """Return a dict as `Packed` by finding its sequences; a batch of text is returned as it is.

    Boundaries are read from ``seq_lens``, else for a single row from ``cu_seq_lens_q``. Without these they are where
    ``position_ids`` or ``input_pos`` do not increase by one, and where ``seq_idx`` or an ``attention_mask`` of 2
    dimensions changes.

    >>> flat = {"input_ids": torch.tensor([[7, 8, 9, 4, 5]]), "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    >>> as_packed(flat).seq_lens
    tensor([[3, 2]], dtype=torch.int32)

    Raises:
        ValueError: for a dict without token ids, without anything that says where its sequences begin, or
            with tensors of other shapes than its tokens; and for a batch with images, which would get lost.
    """
    if not isinstance(batch, Mapping):
        if isinstance(batch, Batch) and batch.media is not None:
            raise ValueError(
                "the batch has images, and text alone is expected here; only Hugging Face models take images, by "
                "prepare_model_for_packing"
            )
        return batch
    tokens = batch.get("input_ids", batch.get("tokens"))
    if not torch.is_tensor(tokens) or tokens.ndim != 2:
        raise ValueError(
            "the batch has no tensor of 2 dimensions 'input_ids' (or 'tokens'); give one, [batch, tokens]"
        )
    seq_lens, ends = batch.get("seq_lens"), batch.get("cu_seq_lens_q")
    if seq_lens is None and torch.is_tensor(ends) and len(tokens) == 1:
        seq_lens = ends.diff()[None].to(tokens.device, non_blocking=True)
    elif seq_lens is None:
        ids = _mark_starts(batch, tokens).cumsum(1) - 1
        # Counting sequences on another device would make the host wait. There are no more than tokens.
        most = int(ids.max()) + 1 if ids.device.type == "cpu" else ids.shape[1]
        seq_lens = torch.zeros(len(ids), most, dtype=torch.int32, device=ids.device)
        seq_lens.scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.int32))
    elif not torch.is_tensor(seq_lens) or seq_lens.ndim != 2:
        raise ValueError(
            "seq_lens must be a tensor of 2 dimensions, [batch, sequences], zeros at the end of each row"
        )
    positions = positions_of(seq_lens, max_seq_len=tokens.shape[1])
    return PackedRows(tokens, positions, seq_lens, batch.get("max_length_q"))


def labels_of(batch: Mapping[str, Any], packed: Packed) -> dict[str, torch.Tensor]:
    """Return a dict's ``labels`` with -100 at the beginning of every sequence; nothing if it has none."""
    labels = batch.get("labels")
    if labels is None:
        return {}
    positions = positions_of(packed.seq_lens, max_seq_len=packed.tokens.shape[1])
    return {"labels": labels.masked_fill(positions == 0, IGNORE_INDEX)}


def _mark_starts(batch: Mapping[str, Any], tokens: torch.Tensor) -> torch.Tensor:
    """Mark the tokens at which a sequence begins: ``[batch, tokens]`` bool."""
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[:, :1] = True
    # By how much each grows within a sequence.
    steps = {"seq_idx": 0, "position_ids": 1, "input_pos": 1, "attention_mask": 0}
    found = {name: batch[name] for name in steps if batch.get(name) is not None}
    for name, values in found.items():
        if values.ndim != 2 or values.shape[1] != tokens.shape[1] or values.shape[0] not in (1, len(tokens)):
            raise ValueError(
                f"{name} has the shape {list(values.shape)} and the tokens have {list(tokens.shape)}; give "
                f"{BOUNDARY_KEYS}"
            )
        starts[:, 1:] |= values.long().expand_as(tokens).diff(dim=1) != steps[name]
    if not found:
        raise ValueError(
            f"nothing in the batch says where its sequences begin (it has {', '.join(map(repr, batch))}); "
            f"give {BOUNDARY_KEYS} (FlatteningCollator returns position_ids unless told not to)"
        )
    return starts


def untrained_batch(
    tokens: torch.Tensor, lengths: Sequence[int], parents: Sequence[int] | None = None
) -> Batch:
    """Return a pack of sequences of these ``lengths``, then padding, as a batch on the device of ``tokens``.

    ``parents`` are those of `PackGroups`; None: no sequence continues another.
    """
    ids = tokens.numpy(force=True)
    groups = None if parents is None else PackGroups(tuple(parents), (IGNORE_INDEX,) * len(lengths), {}, {})
    fragments = tuple(Fragment((number,), 0, length) for number, length in enumerate(lengths))
    pack = Pack(ids, np.full(ids.size, IGNORE_INDEX), tuple(lengths), fragments, groups=groups)
    return stack_packs([pack]).to(tokens.device)


def shares_prefixes(batch: Packed) -> TypeGuard[Batch]:
    """Return whether a sequence of a batch continues another."""
    return isinstance(batch, Batch) and batch.groups is not None and batch.groups.paths.shape[2] > 1


def visible_of(batch: Packed) -> torch.Tensor | None:
    """Return ``[batch, segments + 1, segments + 1]`` bool: whether a segment sees another, as it or its prefix.

    The numbers are those of `document_ids`, which may be as large as ``segments`` for padding. None if no sequence
    continues another.
    """
    if not shares_prefixes(batch):
        return None
    assert batch.groups is not None
    size = batch.seq_lens.shape[1] + 1
    table = torch.zeros(len(batch.seq_lens), size, size, dtype=torch.bool, device=batch.seq_lens.device)
    table[:, :-1].scatter_(2, batch.groups.paths, True)
    table[:, :, -1] = False  # fills the paths before a root
    table.diagonal(dim1=1, dim2=2).fill_(True)
    return table


def prefix_keys(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the keys of each sequence, from its root on, made on the device; padding is a sequence of its own.

    Returns:
        ``cu_seqlens`` of the queries and of the keys, each ``[batch * segments + 1]`` int32, and the tokens that are
        the keys, ``[keys]`` int32, counted over all packs laid end to end. The last keys of a sequence are its own
        tokens. Every key belongs to a sequence, because kernels leave the gradients of other keys uninitialised.
    """
    assert batch.groups is not None
    size, lengths, paths = batch.tokens.shape[1], batch.seq_lens.long(), batch.groups.paths.clone()
    paths[:, :, -1] = torch.arange(lengths.shape[1], device=paths.device)  # padding continues nothing
    starts = lengths.cumsum(1) - lengths + size * torch.arange(len(lengths), device=lengths.device)[:, None]
    # Of each sequence of each path; 0 in front of a root.
    counts, begins = (
        nn.functional.pad(each, (0, 1)).gather(1, paths.flatten(1)) for each in (lengths, starts)
    )
    # The device cannot say how many keys there are without making the host wait.
    shared = [
        path_starts([fragment.length for fragment in fragments], parents)
        for fragments, parents in zip(batch.fragments, batch.groups.parents, strict=True)
    ]
    total = batch.tokens.numel() + sum(map(sum, shared))
    counts = counts.flatten()
    offsets = begins.flatten() - counts.cumsum(0) + counts
    index = offsets.repeat_interleave(counts, output_size=total) + torch.arange(total, device=counts.device)
    ends = (lengths.flatten(), counts.view(-1, paths.shape[2]).sum(1))
    queries, keys = (nn.functional.pad(each.cumsum(0), (1, 0)).int() for each in ends)
    index = index.int()
    for tensor in (queries, keys, index):  # else torch.compile would compile again for each new length
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return queries, keys, index
