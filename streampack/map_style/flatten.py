"""The same tokens in other rows: a batch as one row of what is real in it, or rows without bounds between samples."""

from __future__ import annotations

from dataclasses import replace

import torch

from streampack.packing.batch import Batch
from streampack.types import IGNORE_INDEX
from streampack.validation import require_positive


def flatten_batch(batch: Batch, *, pad_to_multiple_of: int = 1, padding_idx: int = 0) -> Batch:
    """The sequences of all rows in one row, without the padding between them. Call it before `Batch.to`.

    Mini-batch flattening of a stream (the padding-free batches of Kundu et al. 2024, arXiv 2407.09105):
    ``strategy="next_fit"`` with ``max_seqs_per_pack`` gives packs of so many samples in the order of arrival, and
    this leaves out their padding. The optimizer sees what it sees with padded batches of so many samples.

    >>> from streampack import IterablePackedDataset, PackedDataLoader
    >>> rows = [{"tokens": [i] * n, "labels": [i] * n} for i, n in enumerate([3, 1, 2, 4], start=1)]
    >>> stream = IterablePackedDataset(
    ...     rows, max_seq_len=8, strategy="next_fit", max_seqs_per_pack=2, num_lanes=1
    ... )
    >>> for batch in PackedDataLoader(stream):
    ...     flat = flatten_batch(batch)
    ...     print(flat.tokens.tolist(), flat.seq_lens.tolist())
    [[1, 1, 1, 2]] [[3, 1]]
    [[3, 3, 4, 4, 4, 4]] [[2, 4]]

    Args:
        batch: of any rows, on the CPU.
        pad_to_multiple_of: pad the one row to a multiple of so many tokens, for tensor cores.
        padding_idx: the token of that padding.
    """
    require_positive(pad_to_multiple_of, "pad_to_multiple_of")
    real = [sum(fragment.stop - fragment.start for fragment in row) for row in batch.fragments]
    total = sum(real)
    # A batch of padding alone becomes one token of it: a model wants at least that.
    size = max(total + -total % pad_to_multiple_of, pad_to_multiple_of)
    seq_lens = [
        length
        for lengths, used in zip(batch.seq_lens, real, strict=True)
        for length in lengths[lengths.cumsum(0) <= used].tolist()
        if length
    ]
    filler = torch.arange(size - total)

    def joined(rows: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return torch.cat([*(row[:used] for row, used in zip(rows, real, strict=True)), padding])[None]

    return Batch(
        tokens=joined(batch.tokens, torch.full_like(filler, padding_idx)),
        labels=joined(batch.labels, torch.full_like(filler, IGNORE_INDEX)),
        input_pos=joined(batch.input_pos, filler),
        seq_lens=torch.tensor([[*seq_lens, *[size - total] * (size > total)]], dtype=torch.int32),
        fragments=(tuple(fragment for row in batch.fragments for fragment in row),),
    )


def join_documents(batch: Batch) -> Batch:
    """Each row as one sequence: every token sees all before it, and positions run on. Call it before `Batch.to`.

    That is how much pretraining was done: no document masking. Labels stay as they are, so the first token of a
    document is still not trained, and ``fragments`` still say what is whose. Padding stays apart.

    >>> from streampack import IterablePackedDataset, collate_packed
    >>> rows = [{"tokens": [i] * 3, "labels": [i] * 3} for i in (7, 8)]
    >>> batch = join_documents(collate_packed(list(IterablePackedDataset(rows, max_seq_len=7))))
    >>> batch.seq_lens.tolist(), batch.input_pos.tolist(), batch.labels.tolist()
    ([[6, 1]], [[0, 1, 2, 3, 4, 5, 0]], [[-100, 7, 7, -100, 8, 8, -100]])
    """
    size = batch.tokens.shape[1]
    real = torch.tensor([[sum(f.stop - f.start for f in row)] for row in batch.fragments])  # [batch, 1]
    places = torch.arange(size).expand(batch.tokens.shape)
    return replace(
        batch,
        input_pos=torch.where(places < real, places, places - real),
        # Zeros stand behind the last segment: a full row has no padding, a null pack nothing else.
        seq_lens=torch.where(real > 0, torch.cat([real, size - real], 1), torch.tensor([size, 0])).int(),
    )
