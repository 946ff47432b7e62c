"""The methods of batching that the literature compares, by name: lengths in, batches of rows out, and a loader of them.

Eight are from Table 1 of Kundu et al., "Enhancing Training Efficiency Using Packing with Flash Attention" (2024,
arXiv 2407.09105); ``exact_fit`` is this project's own. They differ only in which samples share a row, and which rows
share a batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from streampack.map_style.dataset import fragments_of
from streampack.map_style.samplers import PlannedSampler, plan_steps
from streampack.packing.assemble import assemble
from streampack.packing.batch import Batch, stack_packs
from streampack.packing.planner import Span, plan_samples, spans_of
from streampack.packing.samples import read_sample
from streampack.packing.settings import Packing
from streampack.sources.reading import permutation
from streampack.sources.torchtune_rows import null_safe
from streampack.types import Pack, Sample
from streampack.validation import require, require_positive, require_token_id, warn_user

Row = list[Span]
"""Sequences that lie end to end in a row. An empty row is all padding; it fills up batches."""

T = TypeVar("T")
LENGTH = operator.attrgetter("length")


class Method(NamedTuple):
    """A method of making batches."""

    rows: Callable[..., list[Row]]
    """Make rows from the pieces of samples, in a random order, and ``max_seq_len``, ``batch_size``, ``num_replicas``.
    Rows that follow each other share a batch, and batches that follow each other a step."""

    packed: bool = True
    """Whether a batch has ``batch_size`` rows of ``max_seq_len``. If not, its rows are as long as its longest."""

    cuts: bool = False
    """Whether a sample that crosses the end of a row is cut there, and continues in the next."""

    isolated: bool = True
    """Whether the samples of a row do not see one another."""

    one_row: bool = False
    """Whether a batch is a single row."""


def method_loader(
    ds: Any,
    *,
    method: str,
    max_seq_len: int,
    batch_size: int,
    lengths: Sequence[int] | None = None,
    overlong: str | None = None,
    padding_idx: int = 0,
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

    Iterating again is the next epoch; ``loader.sampler.set_epoch(epoch, done=...)`` sets another one, and how many of
    its batches all ranks together have trained already.

    Args:
        ds: samples by number, with ``tokens`` and ``labels``, or ``input_ids`` and optional ``labels``.
        method: one of `streampack.map_style.methods.METHODS`.
        max_seq_len: the length of a packed row; for the others, the longest that a sample may be.
        batch_size: rows of a batch; for ``minibatch_packing``, samples. Each rank gets as many batches: batches of
            padding fill up the epoch's last step. ``multipack`` plans the rows of all ranks together.
        lengths: tokens of each sample. By default every sample is read once to find out.
        overlong: what to do with a sample longer than ``max_seq_len``: ``"error"``, ``"drop"``, ``"truncate"``,
            ``"truncate_left"`` or ``"split"``. Default ``"error"``, or ``"split"`` if the method cuts samples.
        padding_idx: the token that fills a row's end.
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
    ds = null_safe(ds)
    if vocab_size is not None:
        vocab_size = require_positive(vocab_size, "vocab_size")
    padding_idx = require_token_id(padding_idx, "padding_idx", vocab_size=vocab_size)
    if lengths is None:
        lengths = [read_sample(ds, index, vocab_size=vocab_size).tokens.size for index in range(len(ds))]
    elif len(lengths) != len(ds):
        raise ValueError(f"there are {len(lengths)} lengths and {len(ds)} samples; give one for each")
    if not METHODS[method].isolated:
        warn_user(
            f"method={method!r} lets the samples of a row see one another, which makes a worse model; it is there "
            f"to be compared with. Train with {method + '_posid'!r}, or a method that cuts no sample",
        )
    sizes = {"max_seq_len": max_seq_len, "batch_size": batch_size}
    plan = partial(plan_batches, method, lengths, **sizes, overlong=overlong, seed=seed)
    sampler = PlannedSampler(plan, num_replicas=num_replicas, rank=rank)
    len(sampler)  # plans the first epoch, so that what cannot be planned is refused here
    packing = _packing(method, max_seq_len, overlong)
    return DataLoader(
        Rows(ds, METHODS[method], packing, lengths, padding_idx, vocab_size),
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
    padding_idx: int
    vocab_size: int | None

    def __getitem__(self, batch: list[Row]) -> Batch:
        isolated = self.method.isolated
        samples = {
            index: read_sample(self.ds, index, vocab_size=self.vocab_size, planned=self.lengths[index])
            for index in {span.index for row in batch for span in row}
        }
        packs = []
        for row in batch:
            sequences = [samples[index].cut(start, stop) for index, start, stop in row]
            if row and not isolated:
                sequences = [Sample(*map(np.concatenate, zip(*sequences, strict=True)))]
            seq_lens = tuple(sequence.tokens.size for sequence in sequences)
            size = self.packing.max_seq_len if self.method.packed else max(1, sum(seq_lens))
            tokens, labels = assemble(sequences, max_seq_len=size, padding_idx=self.padding_idx)
            fragments = fragments_of(row, samples, self.packing, isolated=isolated)
            packs.append(Pack(tokens, labels, seq_lens, fragments))
        return stack_packs(packs, padding_idx=self.padding_idx)


def plan_batches(
    method: str,
    lengths: Iterable[int],
    *,
    max_seq_len: int,
    batch_size: int,
    num_replicas: int = 1,
    overlong: str | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> list[list[Row]]:
    """Plan the batches of an epoch for all ranks: batch i is for rank ``i % num_replicas``.

    ``random_padding``: ``batch_size`` random samples, one in each row.
    ``group_by_length_padding``: the same with samples of similar lengths, as transformers' ``LengthGroupedSampler``.
    ``minibatch_packing``: ``batch_size`` random samples in one row, so that steps are those of padding.
    ``fixed_length``, ``fixed_length_posid``: samples in a random order, cut at the end of each row. With the
    first, samples of a row see one another.
    ``random_packing``: unsplit samples in a random order, a new row when the next does not fit.
    ``sorted_packing``: the same, from the longest sample to the shortest, over the whole epoch.
    ``multipack``: full rows that cost the ranks of a step the same; see `plan_steps`.
    ``exact_fit``: rows that exact sums fill, in a random order, as an `IterablePackedDataset` makes them.

    >>> plan_batches("minibatch_packing", [5, 4, 2, 3], max_seq_len=8, batch_size=2)
    [[[Span(index=2, start=0, stop=2), Span(index=0, start=0, stop=5)]], ...

    The arguments are those of `method_loader`.

    Raises:
        ValueError: for a bad setting, or a sample that is empty or too long.
    """
    require_positive(batch_size, "batch_size")
    chosen, packing = METHODS[method], _packing(method, max_seq_len, overlong)
    pieces = [*spans_of(enumerate(lengths), packing)]
    if not pieces:
        raise ValueError("there is no sample to make batches of; give at least one that is not dropped")
    shuffled = [pieces[i] for i in permutation(len(pieces), seed, epoch)]
    rows = chosen.rows(shuffled, packing.max_seq_len, batch_size, num_replicas)
    size = 1 if chosen.one_row else batch_size
    if chosen.packed:
        rows += [[] for _ in range(-len(rows) % size)]
    batches = _groups(rows, size)
    filler: list[Row] = [[] for _ in range(size if chosen.packed else 1)]
    return batches + [filler] * (-len(batches) % num_replicas)


def _padded(pieces: list[Span], *_sizes: int) -> list[Row]:
    return [[piece] for piece in pieces]


def _padded_by_length(pieces: list[Span], _max_seq_len: int, batch_size: int, _ranks: int) -> list[Row]:
    """Sort groups of 50 batches by length, the longest first, as transformers does; a quarter of the data if less."""
    size = max(1, min(len(pieces) // (batch_size * 4), 50)) * batch_size
    groups = [sorted(group, key=LENGTH, reverse=True) for group in _groups(pieces, size)]
    longest = max(groups, key=lambda group: group[0].length)
    groups[0][0], longest[0] = longest[0], groups[0][0]
    return [[piece] for group in groups for piece in group]


def _minibatches(pieces: list[Span], _max_seq_len: int, batch_size: int, _ranks: int) -> list[Row]:
    return _groups(pieces, batch_size)


def _packed(pieces: list[Span], max_seq_len: int, *_sizes: int, **settings: Any) -> list[Row]:
    """Pack the pieces in their order as a stream does."""
    packs = plan_samples(enumerate(map(LENGTH, pieces)), Packing(max_seq_len, **settings))
    return [
        [Span(pieces[i].index, pieces[i].start + start, pieces[i].start + stop) for i, start, stop in pack]
        for pack in packs
    ]


def _sorted(pieces: list[Span], max_seq_len: int, *_sizes: int) -> list[Row]:
    return _packed(sorted(pieces, key=LENGTH, reverse=True), max_seq_len, strategy="next_fit")


def _multipack(pieces: list[Span], max_seq_len: int, batch_size: int, ranks: int) -> list[Row]:
    """Rows of a step are ordered by cost, so assigning them in turn makes batches of even cost."""
    lengths = [piece.length for piece in pieces]
    steps = plan_steps(lengths, max_tokens=max_seq_len, packs_per_step=batch_size * ranks)
    return [
        [pieces[number] for number in row]
        for step in steps
        for rank in range(ranks)
        for row in step[rank::ranks]
    ]


METHODS = {
    "random_padding": Method(_padded, packed=False),
    "group_by_length_padding": Method(_padded_by_length, packed=False),
    "minibatch_packing": Method(_minibatches, packed=False, one_row=True),
    "fixed_length": Method(partial(_packed, split_across_pack=True), cuts=True, isolated=False),
    "fixed_length_posid": Method(partial(_packed, split_across_pack=True), cuts=True),
    "multipack": Method(_multipack),
    "sorted_packing": Method(_sorted),
    "random_packing": Method(partial(_packed, strategy="next_fit")),
    "exact_fit": Method(_packed),
}


def _groups(items: list[T], size: int) -> list[list[T]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _packing(method: str, max_seq_len: int, overlong: str | None) -> Packing:
    """Return the settings that decide how long samples are cut or dropped."""
    return Packing(max_seq_len, split_across_pack=METHODS[method].cuts, overlong=overlong)
