"""A DataLoader of batches made by any of the literature's methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from streampack.map_style.methods import METHODS, Method, Row, plan_batches
from streampack.map_style.multipack import resolve_packs_per_step
from streampack.map_style.read_sample import read_sample
from streampack.map_style.samplers import PlannedSampler, digest_lengths, resolve_rank
from streampack.packing.assemble import assemble
from streampack.packing.batch import Batch, stack_packs
from streampack.packing.cut_samples import trained_if_split
from streampack.packing.settings import Packing
from streampack.sources.torchtune_rows import refusing_nulls
from streampack.types import Fragment, Pack, Sample
from streampack.validation import require, require_multiple, require_positive, require_token_id, warn_user


def method_loader(
    ds: Any,
    *,
    method: str,
    max_seq_len: int,
    batch_size: int,
    lengths: Sequence[int] | None = None,
    packs_per_step: int | None = None,
    overlong: str | None = None,
    padding_idx: int = 0,
    pad_pack_to: int = 1,
    vocab_size: int | None = None,
    seed: int = 0,
    num_workers: int = 0,
    pin_memory: bool = False,
    num_replicas: int | None = None,
    rank: int | None = None,
) -> DataLoader[Batch]:
    """Load this rank's batches of a map-style dataset, made by the named method.

    >>> rows = [{"tokens": [i] * n, "labels": [i] * n} for i, n in enumerate([5, 4, 2, 3])]
    >>> for method in ("random_padding", "minibatch_packing", "exact_fit"):
    ...     loader = method_loader(rows, method=method, max_seq_len=8, batch_size=2)
    ...     print(method, [tuple(batch.tokens.shape) for batch in loader])
    random_padding [(2, 5), (2, 4)]
    minibatch_packing [(1, 7), (1, 7)]
    exact_fit [(2, 8)]

    `streampack.map_style.methods.plan_batches` describes the methods. The batches of each go through
    ``prepare_model_for_packing`` and the same loop. All methods but ``fixed_length`` keep samples apart; that one is
    there to be compared with, and warns. A row of ``minibatch_packing`` may have ``batch_size * max_seq_len`` tokens,
    so a torchtune model needs a ``max_seq_len`` of its own as high.

    ``loader.sampler`` is a `PlannedSampler`: iterating again is the next epoch, its ``set_epoch`` sets another one, and
    from its ``state_dict`` any number of ranks can resume.

    Args:
        ds: samples by number, with ``tokens`` and ``labels``, or ``input_ids`` and optional ``labels``.
        method: one of `streampack.map_style.methods.METHODS`.
        max_seq_len: see `plan_batches`, as for ``batch_size``, ``overlong`` and ``seed``.
        batch_size: rows of a batch; for ``minibatch_packing``, samples.
        lengths: tokens of each sample. By default every sample is read once to find out.
        packs_per_step: see `plan_batches`.
        overlong: what to do with a sample longer than ``max_seq_len``.
        padding_idx: the token that fills a row's end.
        pad_pack_to: a number of which the length of every row is a multiple. ``max_seq_len`` must be one, and other
            rows are padded to one.
        vocab_size: if given, token ids must be below it.
        seed: seed of the random order, with the epoch.
        num_workers: processes that read samples and make batches.
        pin_memory: put batches into page-locked memory, for faster copies to a GPU.
        num_replicas: number of ranks. Default: the process group's size, 1 without one.
        rank: this rank. Default: its rank in the process group.

    Raises:
        ValueError: for a bad setting, data without numbers or without lengths, or a bad sample.
    """
    require(method, "method", METHODS)
    if not (hasattr(ds, "__len__") and hasattr(ds, "__getitem__")):
        raise ValueError(
            f"method={method!r} must know all lengths, and a {type(ds).__name__} has no samples by number (it needs "
            "__len__ and __getitem__); stream it with IterablePackedDataset, whose strategy 'exact_fit' needs none"
        )
    ds = refusing_nulls(ds)
    if vocab_size is not None:
        vocab_size = require_positive(vocab_size, "vocab_size")
    if lengths is None:
        lengths = [read_sample(ds, index, vocab_size=vocab_size).tokens.size for index in range(len(ds))]
    elif len(lengths) != len(ds):
        raise ValueError(f"there are {len(lengths)} lengths and {len(ds)} samples; give one for each")
    if not METHODS[method].isolated:
        warn_user(
            f"method={method!r} lets the samples of a row see one another, which makes a worse model; it is there "
            f"to be compared with. Train with {method + '_posid'!r}, or a method that cuts no sample",
        )
    rows = Rows(
        ds,
        METHODS[method],
        METHODS[method].packing(max_seq_len=max_seq_len, overlong=overlong),
        lengths,
        pad_pack_to=pad_pack_to,
        padding_idx=require_token_id(padding_idx, "padding_idx", vocab_size=vocab_size),
        vocab_size=vocab_size,
    )
    require_multiple(
        rows.packing.max_seq_len, "max_seq_len", require_positive(pad_pack_to, "pad_pack_to"), "pad_pack_to"
    )
    num_replicas, rank = resolve_rank(num_replicas, rank)
    packs_per_step = resolve_packs_per_step(packs_per_step, batch_size * num_replicas)

    options: dict[str, Any] = {
        "method": method,
        "max_seq_len": max_seq_len,
        "batch_size": batch_size,
        "overlong": overlong,
        "seed": seed,
    }

    def plan(epoch: int) -> list[list[Row]]:
        return plan_batches(
            lengths=lengths, num_replicas=num_replicas, packs_per_step=packs_per_step, epoch=epoch, **options
        )

    settings = options | {"lengths": digest_lengths(np.array(lengths))}
    if method == "multipack":
        settings["packs_per_step"] = packs_per_step
    sampler = PlannedSampler(plan, settings=settings, num_replicas=num_replicas, rank=rank)
    len(sampler)  # plans the first epoch, so that what cannot be planned is refused here
    return DataLoader(
        rows,
        batch_size=None,  # the sampler's items are whole batches
        sampler=sampler,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator().manual_seed(seed),  # by default it would draw from the global one
    )


@dataclass(eq=False)
class Rows(Dataset[Batch]):
    """Turns the planned rows of a batch into a `Batch`."""

    ds: Any
    method: Method
    packing: Packing
    lengths: Sequence[int]
    pad_pack_to: int
    padding_idx: int
    vocab_size: int | None

    def width(self, batch: list[Row]) -> int:
        """Return the length of the batch's rows, padding included."""
        if self.method.packed:
            return self.packing.max_seq_len
        longest = max(1, *(sum(stop - start for _, start, stop in row) for row in batch))
        return longest + -longest % self.pad_pack_to

    def __getitem__(self, batch: list[Row]) -> Batch:
        width = self.width(batch)
        samples = {index: self._read(index) for index in {span.index for row in batch for span in row}}
        return stack_packs([self._pack(row, samples, width) for row in batch])

    def _read(self, index: int) -> Sample:
        sample = read_sample(self.ds, index, vocab_size=self.vocab_size)
        if sample.tokens.size != self.lengths[index]:
            raise ValueError(
                f"sample {index} has {sample.tokens.size} tokens and {self.lengths[index]} were planned; make the "
                "dataset give the same sample each time, or correct lengths"
            )
        return sample

    def _pack(self, row: Row, samples: dict[int, Sample], width: int) -> Pack:
        sequences = [samples[index].cut(start, stop) for index, start, stop in row]
        trained = partial(trained_if_split, packing=self.packing, isolated=self.method.isolated)
        fragments = [
            Fragment((index,), start, stop, trained(samples[index], start, stop))
            for index, start, stop in row
        ]
        if not self.method.isolated and row:
            tokens, labels = zip(*sequences, strict=True)
            sequences = [Sample(np.concatenate(tokens), np.concatenate(labels))]
        return Pack(
            *assemble(sequences, max_seq_len=width, padding_idx=self.padding_idx),
            seq_lens=tuple(sequence.tokens.size for sequence in sequences),
            fragments=tuple(fragments),
        )
