"""Cross-entropy of the next token, weighted, summed and computed in chunks, and the weights of labels."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from streampack.packing.batch import Batch
from streampack.types import IGNORE_INDEX
from streampack.validation import require, require_positive

LOSS_NORMS = ("token", "sample")


def label_weights(batch: Batch, *, loss_norm: str) -> torch.Tensor:
    """Return the weight of each label in the loss, ``[batch, max_seq_len]`` float64; 0 where nothing is trained.

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
    weights = (batch.labels != IGNORE_INDEX).double()
    weights[:, 0] = 0  # no logits come before it, and torchtune's own packs have a label there
    if loss_norm == "token":
        return weights
    for row, fragments in zip(weights, batch.fragments, strict=True):
        lengths = [fragment.length for fragment in fragments]
        spans = torch.split(row, [*lengths, len(row) - sum(lengths)])
        for span, fragment in zip(spans, fragments, strict=False):
            trained = float(span.sum()) if fragment.trained is None else fragment.trained
            span /= max(1, trained)  # in place, through the view
    return weights


def require_unshared(batch: Batch) -> None:
    """Check that no sequence of a batch continues another, as answers continue a prompt that they share.

    Cross-entropy over ``labels`` would leave out the first token of each answer, because another token than the one
    before it predicts it.

    Raises:
        ValueError: if one does, with what trains it.
    """
    if batch.groups is not None and any(
        parent >= 0 for parents in batch.groups.parents for parent in parents
    ):
        raise ValueError(
            "the batch has answers that share a prompt, and cross-entropy would leave out the first token of each "
            "answer; set share_prefix=False in the encoder, or train pairs with the dpo recipe, and groups with "
            "streampack.losses.token_logps"
        )


def summed_cross_entropy(
    logits: torch.Tensor | Sequence[torch.Tensor],
    labels: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    chunk_size: int = 512,
) -> torch.Tensor:
    """Return the sum of the cross-entropies of all trained tokens, in nats, as a tensor of 0 dimensions.

    The labels are given unshifted. Divide the sum once, by the weight of all trained tokens of the step (of all ranks
    and micro-batches), because means of batches with different numbers of trained tokens cannot be averaged.
    `token_losses` returns the summands.

    >>> logits, labels = torch.zeros(1, 3, 10), torch.tensor([[-100, 4, 7]])
    >>> summed_cross_entropy(logits, labels)  # two trained tokens, each ln(10)
    tensor(4.6052)
    >>> summed_cross_entropy(logits, labels, weights=torch.tensor([[1.0, 1.0, 0.5]]))
    tensor(3.4539)
    >>> summed_cross_entropy(logits, torch.full((1, 3), -100))  # nothing to train is 0, not NaN
    tensor(0.)

    The sum and its gradients are computed in fp32 (in fp64 for fp64 logits), ``chunk_size`` tokens at a time, and one
    number per token is kept for the backward pass. Besides the logits and their gradient, both in the logits' type,
    that takes memory for about ``2 * chunk_size * vocab`` fp32 numbers. A torchtune model makes an fp32 copy of the
    logits unless ``model.set_num_output_chunks(n)`` was called.

    Args:
        logits: ``[batch, seq, vocab]``, or a list of ``[batch, part, vocab]`` that follow each other along
            ``seq``, as a torchtune model with output chunks returns it.
        labels: ``[batch, seq]``, unshifted: the logits at token i are compared with label i + 1. A label of -100 is
            not trained.
        weights: ``[batch, seq]``, the weight of each label; a label of weight 0 is not trained. None: all weigh 1.
        chunk_size: how many tokens are computed at a time.

    Raises:
        ValueError: if the shapes do not agree, or for a ``chunk_size`` below 1.
    """
    return token_losses(logits, labels, weights=weights, chunk_size=chunk_size).sum()


def token_losses(
    logits: torch.Tensor | Sequence[torch.Tensor],
    labels: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    chunk_size: int = 512,
) -> torch.Tensor:
    """Return the summands of `summed_cross_entropy`, ``[batch, seq]``, each at the index of its label.

    >>> token_losses(torch.zeros(1, 3, 10), torch.tensor([[-100, 4, 7]]))
    tensor([[0.0000, 2.3026, 2.3026]])
    """
    return loss_terms(logits, labels, weights=weights, chunk_size=chunk_size)[0]


def loss_terms(
    logits: torch.Tensor | Sequence[torch.Tensor],
    labels: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    chunk_size: int = 512,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `token_losses`, and the weighted squares of log(sum(exp(logits))) for the same labels: ``[batch, seq]``.

    The squares, times a small number, are the z-loss of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5). It
    keeps the softmax's normalizer near 1, and so the logits in the range that bf16 resolves.

    >>> losses, squares = loss_terms(torch.zeros(1, 3, 10), torch.tensor([[-100, 4, 7]]))
    >>> losses.sum() + 1e-4 * squares.sum()
    tensor(4.6062)
    """
    parts = _parts(logits, labels, chunk_size)
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(
            f"weights have shape {list(weights.shape)} and labels {list(labels.shape)}; give one weight per label"
        )
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    trained = labels != IGNORE_INDEX
    # Untrained labels have weight 0.
    weight = trained.to(dtype) if weights is None else torch.where(trained, weights.to(dtype), 0)
    losses, squares, _ = _terms(parts, labels, weight, chunk_size)
    return losses, squares


def branch_terms(
    logits: torch.Tensor | Sequence[torch.Tensor],
    labels: torch.Tensor,
    *,
    predictors: Sequence[tuple[int, int]] = (),
    targets: torch.Tensor | None = None,
    chunk_size: int = 512,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `token_losses`, and those of tokens that other tokens than the one before them predict: ``[targets]``.

    Both are computed from the same chunks, so that the gradient of the logits is made once.

    Args:
        logits: as in `summed_cross_entropy`.
        labels: as in `summed_cross_entropy`; the label after a predictor must be -100.
        predictors: row and index of the token that predicts each target; a token may predict several.
        targets: ``[targets]``, their ids; -100 is not trained.
        chunk_size: how many tokens are computed at a time.

    Raises:
        ValueError: as `summed_cross_entropy`.
    """
    parts = _parts(logits, labels, chunk_size)
    weight = (labels != IGNORE_INDEX).to(torch.promote_types(parts[0].dtype, torch.float32))
    losses, _, others = _terms(parts, labels, weight, chunk_size, predictors=predictors, others=targets)
    return losses, others


def _parts(
    logits: torch.Tensor | Sequence[torch.Tensor], labels: torch.Tensor, chunk_size: int
) -> list[torch.Tensor]:
    """Return the logits as a list of parts, and check that the labels have their shape."""
    require_positive(chunk_size, "chunk_size")
    parts = [logits] if isinstance(logits, torch.Tensor) else list(logits)
    shape = [parts[0].shape[0], sum(part.shape[1] for part in parts)]
    if list(labels.shape) != shape:
        raise ValueError(
            f"labels have shape {list(labels.shape)} and the logits are for {shape}; labels are unshifted, one per "
            "token"
        )
    return parts


def _terms(
    parts: Sequence[torch.Tensor],
    labels: torch.Tensor,
    weight: torch.Tensor,
    chunk_size: int,
    *,
    predictors: Sequence[tuple[int, int]] = (),
    others: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the losses and squares of `loss_terms`, and the losses of other targets of `branch_terms`."""
    sizes = [part.shape[1] for part in parts]
    # From here on, labels and weights are at the index of the token that predicts them. The last token of a row
    # predicts nothing.
    target = F.pad(torch.where(labels != IGNORE_INDEX, labels, 0)[:, 1:], (0, 1))
    weight = F.pad(weight[:, 1:], (0, 1))
    terms: list[tuple[torch.Tensor, ...]] = []
    order: list[int] = []
    begin = 0
    for part, targets, weights in zip(
        parts, torch.split(target, sizes, 1), torch.split(weight, sizes, 1), strict=True
    ):
        size = part.shape[1]
        # The predictors in this part, by their place in it, which `_CrossEntropy` needs ascending.
        found = sorted(
            (row * size + index - begin, number)
            for number, (row, index) in enumerate(predictors)
            if begin <= index < begin + size
        )
        begin += size
        numbers = [number for _, number in found]
        order += numbers
        terms.append(
            _CrossEntropy.apply(  # type: ignore[no-untyped-call]
                part.flatten(0, 1),
                targets.flatten(),
                weights.flatten(),
                chunk_size,
                tuple(place for place, _ in found),
                None if others is None or not found else others[numbers],
            )
        )
    losses, squares = (
        torch.cat([term.view(len(labels), size) for term, size in zip(column, sizes, strict=True)], 1)
        for column in list(zip(*terms, strict=True))[:2]
    )
    of_others = torch.cat([term[2] for term in terms])
    if order:
        of_others = of_others[torch.tensor(order, device=labels.device).argsort()]
    # The loss at token i belongs to label i + 1.
    return F.pad(losses[:, :-1], (1, 0)), F.pad(squares[:, :-1], (1, 0)), of_others


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy that keeps one logsumexp per token for the backward pass, and computes the softmax again there.

    Autograd would keep the softmax of every chunk, in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,  # [tokens, vocab]
        targets: torch.Tensor,  # [tokens], ids of the vocabulary
        weights: torch.Tensor,  # [tokens], 0 where not trained
        chunk_size: int,
        places: tuple[int, ...],  # [others], ascending: tokens that predict other targets
        others: torch.Tensor | None,  # [others], ids of the vocabulary or IGNORE_INDEX
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        normalizers = torch.empty_like(weights)
        for chunk in _slices(len(logits), chunk_size):
            normalizers[chunk] = logits[chunk].to(weights.dtype).logsumexp(1)
        picked = logits.gather(1, targets[:, None])[:, 0]
        ctx.chunk_size, ctx.places = chunk_size, places
        # Multiplying by a weight of 0 is not enough: logits of untrained tokens may be infinite or NaN.
        is_trained = weights != 0
        losses = torch.where(is_trained, weights * (normalizers - picked), 0)
        of_others = normalizers.new_empty(0)
        if others is not None:
            index = torch.tensor(places, device=logits.device)
            counted = others != IGNORE_INDEX
            others = torch.where(counted, others, 0)
            of_others = torch.where(counted, normalizers[index] - logits[index, others], 0)
            ctx.save_for_backward(logits, targets, weights, normalizers, index, others, counted)
        else:
            ctx.save_for_backward(logits, targets, weights, normalizers)
        return losses, torch.where(is_trained, weights * normalizers.square(), 0), of_others

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor, grad_square: torch.Tensor, grad_others: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None, None]:
        logits, targets, weights, normalizers, *more = ctx.saved_tensors
        at_target = weights * grad
        everywhere = at_target + 2 * weights * normalizers * grad_square
        used = weights != 0
        if more:
            index, others, counted = more
            at_other = torch.where(counted, grad_others, 0)
            everywhere = everywhere.index_put((index,), at_other, accumulate=True)
            used = used.to(grad.dtype).index_put((index,), counted.to(grad.dtype), accumulate=True) != 0
        result = torch.empty_like(logits)
        for chunk in _slices(len(logits), ctx.chunk_size):
            # The gradient is the softmax times the weight of its token, less that weight at the target. bf16 logits
            # minus fp32 normalizers give fp32.
            part = (logits[chunk] - normalizers[chunk, None]).exp_()
            part *= everywhere[chunk, None]
            part[torch.arange(len(part), device=part.device), targets[chunk]] -= at_target[chunk]
            if more:
                first, end = (bisect_left(ctx.places, place) for place in (chunk.start, chunk.stop))
                at = index[first:end] - chunk.start, others[first:end]
                part.index_put_(at, -at_other[first:end], accumulate=True)
            result[chunk] = part.masked_fill_(~used[chunk, None], 0)
        return result, None, None, None, None, None


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]
