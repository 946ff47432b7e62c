"""Numbers of sequences, also where one continues another: log-probabilities, weights of labels, pairs of answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from streampack.attention import document_ids
from streampack.losses.cross_entropy import branch_terms, token_losses
from streampack.packing.batch import Batch
from streampack.packing.groups import ROOT
from streampack.types import IGNORE_INDEX, RowId
from streampack.validation import require

LOSS_NORMS = ("token", "sample")


def label_weights(batch: Batch, *, loss_norm: str) -> torch.Tensor:
    """Return the weight of each label in the loss, ``[batch, max_seq_len]`` float32; 0 where nothing is trained.

    With ``"token"`` every trained label weighs 1; with ``"sample"`` it weighs 1 / (trained labels of its sample), so
    that a sample weighs 1 in all, also if it is split over several packs. The loss of a step is the weighted sum over
    all batches and ranks, divided by the sum of these weights.

    >>> from streampack import IterablePackedDataset, collate_packed
    >>> rows = [{"tokens": [7, 8, 9], "labels": [7, 8, 9]}, {"tokens": [4, 5], "labels": [4, 5]}]
    >>> batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=6)))
    >>> label_weights(batch, loss_norm="sample").tolist()
    [[0.0, 0.5, 0.5, 0.0, 1.0, 0.0]]

    Raises:
        ValueError: for an unknown ``loss_norm``, and for a batch in which a sequence continues another.
    """
    require(loss_norm, "loss_norm", LOSS_NORMS)
    require_unshared(batch)
    weights = (batch.labels != IGNORE_INDEX).float()
    weights[:, 0] = 0  # no logits come before it, and torchtune's own packs have a label there
    if loss_norm == "token":
        return weights
    lengths = fragment_lens(batch)
    known = torch.full(lengths.shape, torch.nan)
    for pack, fragments in enumerate(batch.fragments):
        for number, fragment in enumerate(fragments):
            if fragment.trained is not None:
                known[pack, 2 * number] = fragment.trained  # of the entire sample
    known = known.to(weights.device, non_blocking=True)
    counts = torch.where(known.isnan(), by_sequence(weights, lengths), known).clamp(min=1).float()
    return weights / of_tokens(counts, lengths, max_seq_len=weights.shape[1])


def fragment_lens(batch: Batch) -> torch.Tensor:
    """Return for each fragment its tokens and the padding after it, in turn: ``[batch, 2 * fragments + 1]`` int64.

    The last number of a pack is its rest. Where attention sees several fragments as one sequence, as with
    ``strategy="fixed_length"``, `Batch.seq_lens` tells less.
    """
    size = batch.tokens.shape[1]
    lengths = np.zeros((len(batch.fragments), 2 * max(map(len, batch.fragments)) + 1), np.int64)
    for row, fragments in zip(lengths, batch.fragments, strict=True):
        of_pack = [length for each in fragments for length in (each.stop - each.start, each.padding)]
        row[: len(of_pack) + 1] = [*of_pack, size - sum(of_pack)]
    return torch.from_numpy(lengths).to(batch.labels.device, non_blocking=True)


def require_unshared(batch: Batch) -> None:
    """Check that no sequence of a batch continues another, as answers continue a prompt that they share.

    Cross-entropy over ``labels`` would skip the first token of each answer, because another token than the one
    before it predicts it.

    Raises:
        ValueError: if one does, with what trains it.
    """
    if batch.groups is not None and batch.groups.paths.shape[2] > 1:
        raise ValueError(
            "the batch has answers that share a prompt, and cross-entropy would skip the first token of each "
            "answer; set share_prefix=False in the encoder, or train pairs with the dpo recipe, and groups with "
            "streampack.losses.token_logps"
        )


def token_logps(
    logits: torch.Tensor | Sequence[torch.Tensor], batch: Batch, *, chunk_size: int = 512
) -> torch.Tensor:
    """Return the log-probability of each trained token, ``[batch, max_seq_len]``, at its own index; 0 elsewhere.

    A token is predicted by the one before it in its sequence. The first token of a sequence that continues another,
    such as an answer after a shared prompt, is predicted by that sequence's last token, wherever it is in the pack.

    Computed as `summed_cross_entropy`: in fp32 (fp64 for fp64 logits), in chunks, without a copy of all logits, with
    exact gradients.

    Args:
        logits: ``[batch, max_seq_len, vocab]``, or a list of chunks along ``max_seq_len``.
        batch: on the device of the logits.
        chunk_size: how many tokens are computed at a time.

    Raises:
        ValueError: if logits and batch differ in shape.
    """
    if batch.groups is None or batch.groups.paths.shape[2] == 1:  # no sequence continues another
        return 0 - token_losses(logits, batch.labels, chunk_size=chunk_size)
    parents = batch.groups.paths[:, :, -2]
    ends = F.pad(batch.seq_lens.long().cumsum(1), (0, 1))  # of a sequence without a parent: 0
    branches = (ends.gather(1, parents) - 1).clamp(min=0), batch.groups.first_labels
    losses, _, of_firsts = branch_terms(logits, batch.labels, branches=branches, chunk_size=chunk_size)
    return 0 - (losses + _at_first_tokens(of_firsts, batch))


def trained_tokens(batch: Batch) -> torch.Tensor:
    """Return which tokens are trained, ``[batch, max_seq_len]`` bool: those that `token_logps` has a number for."""
    trained = batch.labels != IGNORE_INDEX
    trained[:, 0] = False  # nothing predicts it
    if batch.groups is None:
        return trained
    return trained | (_at_first_tokens((batch.groups.first_labels != IGNORE_INDEX).int(), batch) > 0)


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

    The arguments are those of `token_logps`; the sums are in its type, in nats, and the counts int64.
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
    ends = batch.seq_lens.long().cumsum(1) - batch.seq_lens + batch.unpadded_lens - 1
    real = torch.zeros(ends.shape, dtype=torch.bool)
    for row, fragments in zip(real, batch.fragments, strict=True):
        row[: len(fragments)] = True
    real = real.to(values.device, non_blocking=True)
    return values.gather(1, ends.clamp(min=0)).masked_fill(~real, 0)


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
    index = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).to(batch.tokens.device, non_blocking=True)
    return index[:, 0], index[:, 1]


def of_tokens(values: torch.Tensor, seq_lens: torch.Tensor, *, max_seq_len: int) -> torch.Tensor:
    """Spread a value for each of ``seq_lens`` over its tokens: ``[batch, max_seq_len]``."""
    return values.gather(1, document_ids(seq_lens, max_seq_len=max_seq_len))


def _at_first_tokens(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Put values of sequences ``[batch, segments]`` at their first tokens, ``[batch, max_seq_len]``; elsewhere 0."""
    starts = batch.seq_lens.long().cumsum(1) - batch.seq_lens
    zeros = values.new_zeros(batch.tokens.shape)
    # Only segments without tokens, whose values are 0, would start after the row's last token.
    return zeros.scatter_add(1, starts.clamp(max=zeros.shape[1] - 1), values)


def by_sequence(values: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Sum values of tokens ``[batch, max_seq_len]`` over each sequence: ``[batch, segments]``, in fp64.

    In fp64 the order in which a GPU adds does not show in the result.
    """
    dtype = torch.float32 if values.device.type == "mps" else torch.float64
    numbers = document_ids(seq_lens, max_seq_len=values.shape[1])
    return torch.zeros_like(seq_lens, dtype=dtype).scatter_add(1, numbers, values.to(dtype))


def _along_paths(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sum values of tokens over each sequence and those that it continues: ``[batch, segments]``."""
    own = by_sequence(values, batch.seq_lens)
    if batch.groups is None:
        return own
    paths = batch.groups.paths
    return F.pad(own, (0, 1)).gather(1, paths.flatten(1)).view(paths.shape).sum(2)


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
