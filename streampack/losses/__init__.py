"""Losses: cross-entropy in chunks, log-probabilities of sequences, losses of preferences and of policies."""

from streampack.losses.cross_entropy import loss_terms, summed_cross_entropy, token_losses
from streampack.losses.policy import policy_losses
from streampack.losses.preference import PreferenceLoss, bradley_terry_losses
from streampack.losses.sequences import (
    LOSS_NORMS,
    label_weights,
    last_values,
    pair_of,
    require_unshared,
    sequence_logps,
    token_logps,
    trained_tokens,
)

__all__ = [
    "LOSS_NORMS",
    "PreferenceLoss",
    "bradley_terry_losses",
    "label_weights",
    "last_values",
    "loss_terms",
    "pair_of",
    "policy_losses",
    "require_unshared",
    "sequence_logps",
    "summed_cross_entropy",
    "token_logps",
    "token_losses",
    "trained_tokens",
]
