"""Cross-entropy of the next token, weighted, summed and computed in chunks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from streampack.types import IGNORE_INDEX
from streampack.validation import require_positive


def summed_cross_entropy(
    logits: torch.Tensor | Sequence[torch.Tensor],
    labels: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    chunk_size: int = 512,
) -> torch.Tensor:
    """Return the sum of the cross-entropies of all trained tokens, in nats, as a tensor of 0 dimensions.

    The labels are unshifted. Divide the sum once, by the weight of all trained tokens of the step (of all ranks
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
    output: Callable[[torch.Tensor], torch.Tensor] | None = None,
    compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `token_losses`, and the weighted squares of log(sum(exp(logits))) for the same labels: ``[batch, seq]``.

    The squares, times a small number, are the z-loss of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, section 5). It
    keeps the softmax's normalizer near 1, and so the logits in the range that bf16 resolves.

    >>> losses, squares = loss_terms(torch.zeros(1, 3, 10), torch.tensor([[-100, 4, 7]]))
    >>> losses.sum() + 1e-4 * squares.sum()
    tensor(4.6062)

    With ``output``, a model's output layer, the first argument is the hidden states before it, ``[batch, seq, dim]``.
    Then the logits of only ``chunk_size`` tokens exist at a time: the backward pass computes them again.

    ``compiled`` compiles what is computed for a chunk, by `torch.compile`: once for batches of all lengths, while
    compiling this function would compile again for each number of chunks.
    """
    losses, squares, _ = branch_terms(
        logits, labels, weights=weights, chunk_size=chunk_size, output=output, compiled=compiled
    )
    return losses, squares


def branch_terms(
    logits: torch.Tensor | Sequence[torch.Tensor],
    labels: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    branches: tuple[torch.Tensor, torch.Tensor] | None = None,
    chunk_size: int = 512,
    output: Callable[[torch.Tensor], torch.Tensor] | None = None,
    compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `loss_terms`, and the losses of more targets, which any token of their row predicts: ``[batch, targets]``.

    All are computed from the same chunks, so that the gradient of the logits is made once.

    ``branches`` are the index of the token that predicts each target, and the target's id or -100, both
    ``[batch, targets]``. A token may predict several.
    """
    require_positive(chunk_size, "chunk_size")
    parts = [logits] if isinstance(logits, torch.Tensor) else [part for part in logits if part.shape[1]]
    if output is not None:  # each part's logits are made for its loss, and again for its gradient
        size = max(1, chunk_size // len(labels))
        parts = [piece for part in parts for piece in torch.split(part, size, 1)]
    shape = [parts[0].shape[0], sum(part.shape[1] for part in parts)]
    if list(labels.shape) != shape:
        raise ValueError(
            f"labels have shape {list(labels.shape)} and the logits are for {shape}; labels are unshifted, one per "
            "token"
        )
    if weights is not None and weights.shape != labels.shape:
        raise ValueError(
            f"weights have shape {list(weights.shape)} and labels {list(labels.shape)}; give one weight per label"
        )
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    targets, weight = _counted(labels, weights, dtype)
    # At the index of the token that predicts them; the last token of a row predicts nothing.
    targets, weight = F.pad(targets[:, 1:], (0, 1)), F.pad(weight[:, 1:], (0, 1))
    predictors, ids = labels.new_empty(2, len(labels), 0) if branches is None else branches
    ids, counted = _counted(ids, None, dtype)
    losses, squares, of_branches = [], [], torch.zeros_like(counted)
    begin = 0
    for part in parts:
        rows, size, _ = part.shape
        here = slice(begin, begin + size)
        # A target whose predictor is in another part weighs 0 in this one.
        inside = (predictors >= begin) & (predictors < begin + size)
        places = torch.where(inside, predictors - begin, 0)
        places = places + size * torch.arange(rows, device=places.device)[:, None]
        asked = (
            torch.cat([targets[:, here].flatten(), ids.flatten()]),
            torch.cat([weight[:, here].flatten(), torch.where(inside, counted, 0).flatten()]),
            places.flatten(),
            chunk_size,
            compiled,
        )
        if output is None:
            terms = _terms_of(part, None, *asked)
        else:
            terms = checkpoint(_terms_of, part, output, *asked, use_reentrant=False, preserve_rng_state=False)
        losses.append(terms[0][: rows * size].view(rows, size))
        squares.append(terms[1][: rows * size].view(rows, size))
        of_branches = of_branches + terms[0][rows * size :].view_as(of_branches)
        begin += size
    # The loss at token i belongs to label i + 1.
    return *(F.pad(torch.cat(each, 1)[:, :-1], (1, 0)) for each in (losses, squares)), of_branches  # type: ignore[return-value]


def _terms_of(
    part: torch.Tensor, output: Callable[[torch.Tensor], torch.Tensor] | None, *asked: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = part if output is None else output(part)
    terms: tuple[torch.Tensor, torch.Tensor] = _CrossEntropy.apply(logits.flatten(0, 1), *asked)  # type: ignore[no-untyped-call]
    return terms


def _counted(
    labels: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids that an index may be, and weights, which are 0 where nothing is trained."""
    trained = labels != IGNORE_INDEX
    weights = trained.to(dtype) if weights is None else torch.where(trained, weights.to(dtype), 0)
    return torch.where(trained, labels, 0), weights


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy that keeps one logsumexp per token for the backward pass, and computes the softmax again there.

    Autograd would keep the softmax of every chunk, in fp32. The first targets belong to the rows of the logits, one
    each; later ones to the rows that ``branches`` names.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,  # [tokens, vocab]
        targets: torch.Tensor,  # [tokens + branches], ids of the vocabulary
        weights: torch.Tensor,  # [tokens + branches], 0 where not trained
        branches: torch.Tensor,  # [branches]: the rows that predict the later targets
        chunk_size: int,
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normalizers = weights.new_empty(len(logits))
        normalize = _compiled(_normalizers) if compiled else _normalizers
        for chunk in _slices(len(logits), chunk_size):
            normalizers[chunk] = normalize(logits[chunk], weights.dtype)
        predictors = torch.cat([torch.arange(len(logits), device=logits.device), branches])
        normalizers = normalizers[predictors]
        ctx.chunk_size, ctx.compiled = chunk_size, compiled
        ctx.save_for_backward(logits, targets, weights, branches, normalizers)
        # Multiplying by a weight of 0 is not enough: logits of untrained tokens may be infinite or NaN.
        is_trained = weights != 0
        losses = torch.where(is_trained, weights * (normalizers - logits[predictors, targets]), 0)
        return losses, torch.where(is_trained, weights * normalizers.square(), 0)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor, grad_square: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None, None]:
        logits, targets, weights, branches, normalizers = ctx.saved_tensors
        count, is_trained = len(logits), weights != 0
        at_target = torch.where(is_trained, weights * grad, 0)
        everywhere = at_target + torch.where(is_trained, 2 * weights * normalizers * grad_square, 0)
        # What a row predicts besides is added to it. index_put adds in the same order each time, index_add does not.
        everywhere = everywhere[:count].index_put((branches,), everywhere[count:], accumulate=True)
        used = is_trained[:count].int().index_put((branches,), is_trained[count:].int(), accumulate=True) > 0
        result = torch.empty_like(logits)
        for chunk in _slices(count, ctx.chunk_size):
            of_rows = (each[:count][chunk] for each in (normalizers, everywhere, targets, at_target))
            part = (_compiled(_gradient) if ctx.compiled else _gradient)(logits[chunk], *of_rows)
            if len(branches):
                inside = (branches >= chunk.start) & (branches < chunk.stop)
                at = torch.where(inside, branches - chunk.start, 0), targets[count:]
                part.index_put_(at, torch.where(inside, -at_target[count:], 0), accumulate=True)
            result[chunk] = part.masked_fill_(~used[chunk, None], 0)
        return result, None, None, None, None, None


def _normalizers(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return logits.to(dtype).logsumexp(1)


def _gradient(
    logits: torch.Tensor,  # [chunk, vocab]; the others are [chunk]
    normalizers: torch.Tensor,
    everywhere: torch.Tensor,
    targets: torch.Tensor,
    at_target: torch.Tensor,
) -> torch.Tensor:
    """Return the softmax times the weight of its token, less that weight at the target."""
    part = (logits - normalizers[:, None]).exp_()  # bf16 logits minus fp32 normalizers give fp32
    part *= everywhere[:, None]
    part[torch.arange(len(part), device=part.device), targets] -= at_target
    return part


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend=os.environ.get("TORCH_COMPILE_BACKEND", "inductor"))


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]
