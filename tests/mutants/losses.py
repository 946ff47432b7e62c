"""Mutants of losses."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from streampack import losses
from tests.mutants.attention import chained
from tests.mutants.registry import replaces


@replaces(losses.label_weights)
def samples_weighed_by_pack(good, batch, *, loss_norm):
    """With ``loss_norm="sample"``, a sample that is split over packs weighs 1 in each of them."""
    whole = [[f._replace(trained=None) for f in fragments] for fragments in batch.fragments]
    return good(replace(batch, fragments=whole), loss_norm=loss_norm)


@replaces(losses.label_weights)
def weights_sent_to_the_device(good, batch, *, loss_norm):
    """Weights of labels are made on the host, in fp64, and copied unpinned. No number changes."""
    torch.zeros(batch.labels.shape, dtype=torch.float64).to(batch.labels.device, non_blocking=True)
    return good(batch, loss_norm=loss_norm)


@replaces(losses.loss_terms)
def label_lost_between_chunks_of_logits(good, logits, labels, **settings):
    """Where a model returns its logits in chunks, the first label of each chunk but the first is not trained."""
    if not torch.is_tensor(logits):
        labels = labels.clone()
        labels[:, list(accumulate(part.shape[1] for part in logits))[:-1]] = -100
    return good(logits, labels, **settings)


@replaces(losses.loss_terms)
def weights_of_the_label_before(good, logits, labels, *, weights=None, **settings):
    """A label gets the weight of the label before it: weights are shifted where labels are not."""
    if weights is not None and weights.shape == labels.shape:
        weights = weights.roll(1, 1)
    return good(logits, labels, weights=weights, **settings)


@replaces(losses.loss_terms)
def gradient_of_a_sum_whatever_follows(good, *args, **settings):
    """The backward pass of a loss does not multiply by the gradient that comes in, which a sum makes 1."""
    found, squares = good(*args, **settings)
    return _SignOfGradient.apply(found), squares


class _SignOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.sign()


@replaces(losses.token_logps)
def answers_predicted_by_the_one_before(good, logits, batch, **settings):
    """The first token of a second answer is predicted by the last token of the first, not by the prompt's."""
    return good(logits, chained(batch), **settings)


@replaces(losses.pair_of)
def pairs_counted_without_padding(good, batch):
    """``pair_of`` counts the sequences of a pack without its padding: pairs of later packs are of others' answers."""
    width, real = batch.seq_lens.shape[1], max(map(len, batch.fragments))
    return tuple(each // width * real + each % width for each in good(batch))


@replaces(losses.last_values)
def value_of_the_padding(good, values, batch):
    """``last_values`` takes the value at the padding behind a sequence (``pad_seqs_to``), not at its last token."""
    fragments = tuple(tuple(f._replace(padding=0) for f in pack) for pack in batch.fragments)
    return good(values, replace(batch, fragments=fragments))


@replaces(losses.PreferenceLoss, "forward")
def label_smoothing_of_one_order(good, self, *logps):
    """Label smoothing leaves out the pairs whose order is wrong, and so only scales the loss."""
    smoothing, self.label_smoothing = self.label_smoothing, 0.0
    found, *rewards = good(self, *logps)
    self.label_smoothing = smoothing
    return (1 - smoothing) * found, *rewards


@replaces(losses.policy_losses)
def clips_in_the_other_order(good, logps, batch, *, clip=(0.2, 0.2), **settings):
    """How far a policy's ratio may fall is how far it may rise, and the other way round."""
    return good(logps, batch, clip=(clip[1], clip[0]), **settings)
