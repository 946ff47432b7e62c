"""Mutants of losses."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from streampack import losses
from tests.mutants.attention import chained
from tests.mutants.registry import mutant, patch, patch_function


@mutant
def samples_weighed_by_pack() -> None:
    """With ``loss_norm="sample"``, a sample that is split over packs weighs 1 in each of them."""

    def make(good: Any) -> Any:
        def label_weights(batch: Any, *, loss_norm: str) -> Any:
            whole = [[f._replace(trained=None) for f in fragments] for fragments in batch.fragments]
            return good(replace(batch, fragments=whole), loss_norm=loss_norm)

        return label_weights

    patch_function(losses.label_weights, make)


@mutant
def label_lost_between_chunks_of_logits() -> None:
    """Where a model returns its logits in chunks, the first label of each chunk but the first is not trained."""

    def make(good: Any) -> Any:
        def loss_terms(logits: Any, labels: Any, **settings: Any) -> Any:
            if not torch.is_tensor(logits):
                labels = labels.clone()
                labels[:, list(accumulate(part.shape[1] for part in logits))[:-1]] = -100
            return good(logits, labels, **settings)

        return loss_terms

    patch_function(losses.loss_terms, make)


@mutant
def weights_of_the_label_before() -> None:
    """A label gets the weight of the label before it: weights are shifted where labels are not."""

    def make(good: Any) -> Any:
        def loss_terms(logits: Any, labels: Any, *, weights: Any = None, **settings: Any) -> Any:
            if weights is not None and weights.shape == labels.shape:
                weights = weights.roll(1, 1)
            return good(logits, labels, weights=weights, **settings)

        return loss_terms

    patch_function(losses.loss_terms, make)


@mutant
def gradient_of_a_sum_whatever_follows() -> None:
    """The backward pass of a loss does not multiply by the gradient that comes in, which a sum makes 1."""

    def make(good: Any) -> Any:
        def loss_terms(*args: Any, **settings: Any) -> Any:
            found, squares = good(*args, **settings)
            return _SignOfGradient.apply(found), squares

        return loss_terms

    patch_function(losses.loss_terms, make)


class _SignOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.sign()


@mutant
def answers_predicted_by_the_one_before() -> None:
    """The first token of a second answer is predicted by the last token of the first, not by the prompt's."""

    def make(good: Any) -> Any:
        return lambda logits, batch, **settings: good(logits, chained(batch), **settings)

    patch_function(losses.token_logps, make)


@mutant
def pairs_counted_without_padding() -> None:
    """``pair_of`` counts the sequences of a pack without its padding: pairs of later packs are of others' answers."""

    def make(good: Any) -> Any:
        def pair_of(batch: Any) -> Any:
            width, real = batch.seq_lens.shape[1], max(map(len, batch.fragments))
            return tuple(each // width * real + each % width for each in good(batch))

        return pair_of

    patch_function(losses.pair_of, make)


@mutant
def value_of_the_padding() -> None:
    """``last_values`` takes the value at the padding behind a sequence (``pad_seqs_to``), not at its last token."""

    def make(good: Any) -> Any:
        def last_values(values: Any, batch: Any) -> Any:
            fragments = tuple(tuple(f._replace(padding=0) for f in pack) for pack in batch.fragments)
            return good(values, replace(batch, fragments=fragments))

        return last_values

    patch_function(losses.last_values, make)


@mutant
def label_smoothing_of_one_order() -> None:
    """Label smoothing leaves out the pairs whose order is wrong, and so only scales the loss."""

    def make(good: Any) -> Any:
        def forward(self: Any, *logps: Any) -> Any:
            smoothing, self.label_smoothing = self.label_smoothing, 0.0
            found, *rewards = good(self, *logps)
            self.label_smoothing = smoothing
            return (1 - smoothing) * found, *rewards

        return forward

    patch(losses.PreferenceLoss, "forward", make)


@mutant
def clips_in_the_other_order() -> None:
    """How far a policy's ratio may fall is how far it may rise, and the other way round."""

    def make(good: Any) -> Any:
        def policy_losses(logps: Any, batch: Any, *, clip: Any = (0.2, 0.2), **settings: Any) -> Any:
            return good(logps, batch, clip=(clip[1], clip[0]), **settings)

        return policy_losses

    patch_function(losses.policy_losses, make)
