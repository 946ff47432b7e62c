"""Log-probabilities of tokens and of sequences, also where a sequence continues another; pairs of answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from streampack.losses.cross_entropy import branch_terms
from streampack.packing.batch import Batch
from streampack.packing.groups import ROOT, paths_of
from streampack.types import IGNORE_INDEX, RowId


def token_logps(
    logits: torch.Tensor | Sequence[torch.Tensor], batch: Batch, *, chunk_size: int = 512
) -> torch.Tensor:
    """Return the log-probability of each trained token, ``[batch, max_seq_len]``, at its own index; 0 elsewhere.

    A token is predicted by the one before it in its sequence. The first token of a sequence that continues another,
    such as an answer behind a shared prompt, is predicted by that sequence's last token, wherever it lies in the pack.

    Computed as `summed_cross_entropy`: in fp32 (fp64 for fp64 logits), in chunks, without a copy of all logits, with
    exact gradients.

    Args:
        logits: ``[batch, max_seq_len, vocab]``, or a list of chunks along ``max_seq_len``.
        batch: on the device of the logits.
        chunk_size: how many tokens are computed at a time.

    Raises:
        ValueError: if logits and batch differ in shape.
    """
    branches = _branches(batch)
    if branches is None:
        return 0 - branch_terms(logits, batch.labels, chunk_size=chunk_size)[0]
    losses, first = branch_terms(
        logits, batch.labels, predictors=branches.predictors, targets=branches.labels, chunk_size=chunk_size
    )
    return 0 - losses.index_put(branches.starts, first)


def trained_tokens(batch: Batch) -> torch.Tensor:
    """Return which tokens are trained, ``[batch, max_seq_len]`` bool: those of which `token_logps` has a number."""
    trained = batch.labels != IGNORE_INDEX
    trained[:, 0] = False  # nothing predicts it
    if (branches := _branches(batch)) is not None:
        trained[branches.starts] = branches.labels != IGNORE_INDEX
    return trained


def sequence_logps(
    logits: torch.Tensor | Sequence[torch.Tensor], batch: Batch, *, chunk_size: int = 512
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each sequence the sum of the log-probabilities of its trained tokens, and how many they are.

    Both are ``[batch, segments]``, as wide as ``batch.seq_lens``, and 0 at padding. The trained tokens of the sequences
    that a sequence continues count too: the number of an answer is that of its whole path from the root on, whether
    the prompt is shared or not.

    >>> from streampack import IterablePackedDataset, collate_packed
    >>> from streampack.packing.groups import Group
    >>> pair = Group([5, 6, 7, 8, 9], [-100, -100, 7, 8, 9], lengths=[2, 2, 1], parents=[-1, 0, 0])
    >>> batch = collate_packed(list(IterablePackedDataset([0], encoder=lambda _: pair, max_seq_len=6)))
    >>> sums, counts = sequence_logps(torch.zeros(1, 6, 10), batch)  # ln(10) for each trained token
    >>> sums, counts
    (tensor([[ 0.0000, -4.6052, -2.3026,  0.0000]]), tensor([[0, 2, 1, 0]]))

    Args:
        logits: ``[batch, max_seq_len, vocab]``, or a list of chunks along ``max_seq_len``.
        batch: on the device of the logits.
        chunk_size: how many tokens are computed at a time.

    Returns:
        Sums in fp32 (in fp64 for fp64 logits), in nats; counts in int64.

    Raises:
        ValueError: if logits and batch differ in shape.
    """
    logps = token_logps(logits, batch, chunk_size=chunk_size)
    return _along_paths(logps, batch).to(logps.dtype), _along_paths(trained_tokens(batch), batch).long()


def last_values(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the value at the last token of each sequence, ``[batch, segments]``, 0 at padding.

    For the head of a reward model, whose number at an answer's last token is its score.

    Args:
        values: ``[batch, max_seq_len]``.
        batch: on the device of the values.
    """
    starts = batch.seq_lens.long().cumsum(1) - batch.seq_lens
    ends = starts + batch.unpadded_lens - 1
    real = torch.zeros(ends.shape, dtype=torch.bool)
    for row, fragments in zip(real, batch.fragments, strict=True):
        row[: len(fragments)] = True
    return values.gather(1, ends.clamp(min=0)).masked_fill(~real.to(values.device), 0)


def pair_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the first and the second answer of each group are: the chosen and the rejected one.

    Both are ``[pairs]`` int64 on the batch's device, indices into ``[batch * segments]``, such as the flattened sums of
    `sequence_logps`. An answer is a sequence that no other continues.

    >>> from streampack import IterablePackedDataset, collate_packed
    >>> from streampack.packing.groups import Group
    >>> pair = Group([5, 6, 7, 8, 9], [-100, -100, 7, 8, 9], lengths=[2, 2, 1], parents=[-1, 0, 0])
    >>> batch = collate_packed(list(IterablePackedDataset([0], encoder=lambda _: pair, max_seq_len=6)))
    >>> pair_of(batch)
    (tensor([1]), tensor([2]))

    Raises:
        ValueError: for a group of more or fewer than two answers, naming its row.
    """
    pairs = []
    for row_id, answers in _groups(batch):
        if len(answers) != 2:
            raise ValueError(
                f"row {row_id} has {len(answers)} answer{'s' * (len(answers) != 1)} and a pair has 2, the chosen one "
                "first; encode rows with AnswersEncoder, or return a Group with two sequences that no other "
                "continues"
            )
        pairs.append(answers)
    index = torch.tensor(pairs, dtype=torch.int64, device=batch.tokens.device).view(-1, 2)
    return index[:, 0], index[:, 1]


class _Branches(NamedTuple):
    """The first tokens of the sequences that continue another."""

    starts: tuple[torch.Tensor, torch.Tensor]  # [branches] each: the pack, and the index in it
    labels: torch.Tensor  # [branches]
    predictors: list[tuple[int, int]]  # the pack, and the index in it of the token that predicts it


def _branches(batch: Batch) -> _Branches | None:
    """Return the branches of a batch; None if no sequence continues another."""
    if batch.groups is None:
        return None
    places, predictors = [], []
    for pack, (parents, fragments) in enumerate(zip(batch.groups.parents, batch.fragments, strict=True)):
        ends = list(accumulate((each.length for each in fragments), initial=0))
        for sequence, parent in enumerate(parents):
            if parent != ROOT:
                places.append((pack, sequence, ends[sequence]))
                predictors.append((pack, ends[parent + 1] - 1))
    if not places:
        return None
    packs, sequences, starts = torch.tensor(places, device=batch.labels.device).unbind(1)
    return _Branches((packs, starts), batch.groups.first_labels[packs, sequences], predictors)


def _along_paths(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sum values of tokens over each sequence and those that it continues: ``[batch, segments]``, in fp64.

    In fp64 the order in which a GPU adds does not show in the result.
    """
    width, size = batch.seq_lens.shape[1], values.shape[1]
    dtype = torch.float32 if values.device.type == "mps" else torch.float64
    ends = batch.seq_lens.long().cumsum(1)
    places = torch.arange(size, device=values.device).repeat(len(values), 1)
    numbers = torch.searchsorted(ends, places, right=True)  # of the sequence of each token
    own = torch.zeros(len(values), width + 1, dtype=dtype, device=values.device)
    own = own.scatter_add(1, numbers, values.to(dtype))
    paths = _paths(batch)
    if paths is None:
        return own[:, :width]
    return own.gather(1, paths.flatten(1).to(values.device)).view(paths.shape).sum(2)


def _paths(batch: Batch) -> torch.Tensor | None:
    """Return the path of each sequence, ``[batch, segments, depth]``, filled up with the number of segments; or None.

    None if no sequence continues another.
    """
    width = batch.seq_lens.shape[1]
    packs = [] if batch.groups is None else [paths_of(parents) for parents in batch.groups.parents]
    depth = max((len(path) for found in packs for path in found), default=0)
    if depth < 2:
        return None
    filled = [
        [[*path, *[width] * (depth - len(path))] for path in [*found, *[[]] * (width - len(found))]]
        for found in packs
    ]
    return torch.tensor(filled)


def _groups(batch: Batch) -> Iterator[tuple[RowId, list[int]]]:
    """Yield the row of each group and its answers' indices into ``[batch * segments]``; a plain sample has one answer.

    A group begins where its first token is: at a fragment with ``start == 0``; a part of a split sample is one too.
    """
    width = batch.seq_lens.shape[1]
    for pack, fragments in enumerate(batch.fragments):
        parents = (ROOT,) * len(fragments) if batch.groups is None else batch.groups.parents[pack]
        continued = set(parents)
        before = [None, *(each.row_id for each in fragments)]
        begins = [i for i, each in enumerate(fragments) if each.start == 0 or each.row_id != before[i]]
        for begin, end in pairwise([*begins, len(fragments)]):
            answers = [pack * width + number for number in range(begin, end) if number not in continued]
            yield fragments[begin].row_id, answers
