"""The token loss of policy gradients with clipped ratios: PPO, GRPO and their kin."""

from __future__ import annotations

import torch

from streampack.losses.sequences import of_tokens, trained_tokens
from streampack.packing.batch import Batch


def policy_losses(
    logps: torch.Tensor, batch: Batch, *, clip: tuple[float, float] = (0.2, 0.2), kl: float = 0.0
) -> torch.Tensor:
    """Return the loss of each trained token, ``[batch, max_seq_len]``, 0 elsewhere; its sum is to be divided once.

    With the ratio ``r = exp(logp - old_logp)`` and the advantage A of the token's sequence, the loss is
    ``-min(r * A, clamp(r, 1 - clip[0], 1 + clip[1]) * A)`` (Schulman et al. 2017, arXiv 1707.06347; GRPO: Shao et al.
    2024, arXiv 2402.03300; unequal clips: DAPO, Yu et al. 2025, arXiv 2503.14476), plus ``kl`` times the estimate
    ``exp(d) - d - 1`` of the distance to the reference, with ``d = ref_logp - logp``.

    The batch carries the numbers (see `Group`): the field ``advantage``, one for each sequence; the token field
    ``old_logps``, log-probabilities under the policy that sampled; for ``kl`` the token field ``ref_logps``. Without
    ``old_logps``, the policy is taken to be the one that sampled: the ratio is 1 and has a gradient.

    Divide the sum by the trained tokens of the step, over all micro-batches and ranks::

        losses = policy_losses(token_logps(model(**inputs(batch)), batch), batch)
        (losses.sum() / trained_tokens_of_the_step).backward()

    Args:
        logps: `token_logps` of the policy.
        batch: on the device of ``logps``.
        clip: how far the ratio may fall below 1, and rise above it.
        kl: the weight of the distance to the reference.

    Raises:
        ValueError: if the batch lacks a field, or a clip is out of range.
    """
    if not (0 <= clip[0] <= 1 and clip[1] >= 0):
        raise ValueError(f"clip={clip} is no pair of distances from 1; give two such as (0.2, 0.2)")
    groups = batch.groups
    if groups is None:
        if any(batch.fragments):
            raise ValueError(
                "the batch has no groups, so no advantages; encode rows with AnswersEncoder, or return a Group with "
                "the field 'advantage'"
            )
        return logps * 0  # padding only, as a rank without a pack gets
    trained = trained_tokens(batch)
    advantages = of_tokens(
        _field(groups.fields, "advantage", "fields"), batch.seq_lens, max_seq_len=batch.tokens.shape[1]
    )
    old = logps.detach()
    if "old_logps" in groups.token_fields:
        old = groups.token_fields["old_logps"]
    # Before exp and products, or numbers of untrained tokens, which may be NaN, would reach the gradient.
    ratio = torch.where(trained, logps - old, 0).exp()
    advantages = torch.where(trained, advantages, 0)
    clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if kl:
        reference = _field(groups.token_fields, "ref_logps", "token_fields")
        distance = torch.where(trained, reference - logps, 0)
        losses = losses + kl * (distance.exp() - distance - 1)
    return losses


def _field(fields: dict[str, torch.Tensor], name: str, where: str) -> torch.Tensor:
    if name not in fields:
        raise ValueError(
            f"the batch has no {name!r} among its {where} ({', '.join(fields) or 'none'}); name its column in the "
            f"encoder's {where}"
        )
    return fields[name]
