"""Functions that rearrange a batch: they flatten its rows to one without padding, or join the samples of each row."""

from __future__ import annotations

from dataclasses import replace

import torch

from streampack.packing.batch import Batch
from streampack.types import IGNORE_INDEX
from streampack.validation import require_positive


def flatten_batch(batch: Batch, *, pad_pack_to: int = 1, padding_idx: int = 0) -> Batch:
    """Flatten a batch to one padding-free row. Call it before `Batch.to`.

    Together with ``strategy="next_fit"`` and ``max_seqs_per_pack=n``, whose packs hold n samples in the order of
    arrival, this is the mini-batch flattening of Kundu et al. (2024, arXiv 2407.09105) for a stream: the optimizer
    steps are those of padded batches of n samples.

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
        batch: any batch on the CPU.
        pad_pack_to: pad the row to a multiple of this many tokens, for tensor parallelism and FP8.
        padding_idx: the token of that padding.

    Raises:
        ValueError: for a batch with groups.
    """
    require_positive(pad_pack_to, "pad_pack_to")
    if batch.groups is not None:
        raise ValueError(
            "the batch has groups, and flatten_batch would part answers from their prompts; train its packs as they "
            "are, which have little padding"
        )
    real = [sum(fragment.length for fragment in row) for row in batch.fragments]
    total = sum(real)
    # A batch of padding alone becomes one token of padding, because models need at least one.
    size = max(total + -total % pad_pack_to, pad_pack_to)
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
    """Join each row's samples to one sequence, without document masking. Call it before `Batch.to`.

    Every token attends to all before it in the row, and positions continue from sample to sample, as was common in
    pretraining. Labels and ``fragments`` stay as they are, so the first token of a document is still not trained.
    Padding remains a segment of its own.

    >>> from streampack import IterablePackedDataset, collate_packed
    >>> rows = [{"tokens": [i] * 3, "labels": [i] * 3} for i in (7, 8)]
    >>> batch = join_documents(collate_packed(list(IterablePackedDataset(rows, max_seq_len=7))))
    >>> batch.seq_lens.tolist(), batch.input_pos.tolist(), batch.labels.tolist()
    ([[6, 1]], [[0, 1, 2, 3, 4, 5, 0]], [[-100, 7, 7, -100, 8, 8, -100]])

    Raises:
        ValueError: for a batch of sequences that are padded (``pad_seqs_to``): samples after it would attend to it.
    """
    if any(fragment.padding for row in batch.fragments for fragment in row):
        raise ValueError(
            "the sequences of the batch are padded to a multiple, and without document masking the samples after "
            "them would attend to that padding; leave pad_seqs_to out, or keep document_masking"
        )
    size = batch.tokens.shape[1]
    real = torch.tensor([[sum(f.stop - f.start for f in row)] for row in batch.fragments])  # [batch, 1]
    places = torch.arange(size).expand(batch.tokens.shape)
    return replace(
        batch,
        input_pos=torch.where(places < real, places, places - real),
        # A full row has no padding and a null pack only padding; zeros stand after the last segment.
        seq_lens=torch.where(real > 0, torch.cat([real, size - real], 1), torch.tensor([size, 0])).int(),
    )
