"""The loss: a sum of cross-entropies, weighted and computed in chunks, and the weights of its labels."""

from __future__ import annotations

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
    """
    require(loss_norm, "loss_norm", LOSS_NORMS)
    weights = (batch.labels != IGNORE_INDEX).double()
    weights[:, 0] = 0  # no logits come before it, and torchtune's own packs have a label there
    if loss_norm == "token":
        return weights
    for row, fragments in zip(weights, batch.fragments, strict=True):
        lengths = [fragment.stop - fragment.start for fragment in fragments]
        spans = torch.split(row, [*lengths, len(row) - sum(lengths)])
        for span, fragment in zip(spans, fragments, strict=False):
            trained = float(span.sum()) if fragment.trained is None else fragment.trained
            span /= max(1, trained)  # in place, through the view
    return weights


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
    require_positive(chunk_size, "chunk_size")
    parts = [logits] if isinstance(logits, torch.Tensor) else list(logits)
    sizes = [part.shape[1] for part in parts]
    if labels.shape != (parts[0].shape[0], sum(sizes)):
        raise ValueError(
            f"labels have shape {list(labels.shape)} and the logits are for "
            f"{[parts[0].shape[0], sum(sizes)]}; labels are unshifted, one per token"
        )
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(
            f"weights have shape {list(weights.shape)} and labels {list(labels.shape)}; give one weight per label"
        )
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    trained = labels != IGNORE_INDEX
    # From here on, labels and weights are at the index of the token that predicts them. Untrained labels have weight 0,
    # and so has the last token of a row, which predicts nothing.
    weight = trained.to(dtype) if weights is None else torch.where(trained, weights.to(dtype), 0)
    weight = F.pad(weight[:, 1:], (0, 1))
    target = F.pad(torch.where(trained, labels, 0)[:, 1:], (0, 1))
    terms = [
        _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            part.flatten(0, 1), targets.flatten(), part_weights.flatten(), chunk_size
        )
        for part, targets, part_weights in zip(
            parts, torch.split(target, sizes, 1), torch.split(weight, sizes, 1), strict=True
        )
    ]
    losses, squares = (
        torch.cat([term.view(len(labels), size) for term, size in zip(column, sizes, strict=True)], 1)
        for column in zip(*terms, strict=True)
    )
    # The loss at token i belongs to label i + 1.
    return F.pad(losses[:, :-1], (1, 0)), F.pad(squares[:, :-1], (1, 0))


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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normalizers = torch.empty_like(weights)
        for chunk in _slices(len(logits), chunk_size):
            normalizers[chunk] = logits[chunk].to(weights.dtype).logsumexp(1)
        picked = logits.gather(1, targets[:, None])[:, 0]
        ctx.save_for_backward(logits, targets, weights, normalizers)
        ctx.chunk_size = chunk_size
        # Multiplying by a weight of 0 is not enough: logits of untrained tokens may be infinite or NaN.
        is_trained = weights != 0
        losses = torch.where(is_trained, weights * (normalizers - picked), 0)
        return losses, torch.where(is_trained, weights * normalizers.square(), 0)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor, grad_square: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        logits, targets, weights, normalizers = ctx.saved_tensors
        at_target = weights * grad
        everywhere = at_target + 2 * weights * normalizers * grad_square
        result = torch.empty_like(logits)
        for chunk in _slices(len(logits), ctx.chunk_size):
            # The gradient is the softmax times the weight of its token, less that weight at the target. bf16 logits
            # minus fp32 normalizers give fp32.
            part = (logits[chunk] - normalizers[chunk, None]).exp_()
            part *= everywhere[chunk, None]
            part[torch.arange(len(part), device=part.device), targets[chunk]] -= at_target[chunk]
            result[chunk] = part.masked_fill_((weights[chunk] == 0)[:, None], 0)
        return result, None, None, None


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]
