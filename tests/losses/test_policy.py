"""The loss of policies, token by token, against a loop over single numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from streampack import IGNORE_INDEX, Batch, IterablePackedDataset, collate_packed
from streampack.losses import policy_losses, token_logps, trained_tokens
from streampack.packing.batch import null_pack, stack_packs
from streampack.packing.groups import Group
from tests.support.groups import segments

DRAW = np.random.default_rng(5)


def rollouts(**without: bool) -> Batch:
    """A prompt with three answers and one with two, with advantages and log-probabilities of two older policies."""
    groups = []
    for lengths in ([4, 3, 5, 1], [2, 6, 2]):
        size = sum(lengths)
        tokens = DRAW.integers(1, 16, size)
        labels = np.where(np.arange(size) < lengths[0], IGNORE_INDEX, tokens)
        masked = np.arange(size) < lengths[0]
        fields = {"advantage": [math.nan, *DRAW.normal(size=len(lengths) - 1)]}
        token_fields = {
            name: np.where(masked, np.nan, -5 * DRAW.random(size)) for name in ("old_logps", "ref_logps")
        }
        groups.append(
            Group(
                tokens,
                labels,
                lengths=lengths,
                parents=[-1, *[0] * (len(lengths) - 1)],
                fields={} if without.get("advantage") else fields,
                token_fields={k: v for k, v in token_fields.items() if not without.get(k)},
            )
        )
    rows = [{"group": group} for group in groups]
    data = IterablePackedDataset(rows, max_seq_len=30, num_lanes=1, encoder=lambda row: row["group"])
    return collate_packed(list(data))


def naive(logps: torch.Tensor, batch: Batch, low: float, high: float, kl: float) -> torch.Tensor:
    assert batch.groups is not None
    losses = torch.zeros_like(logps)
    old, ref = (batch.groups.token_fields.get(name) for name in ("old_logps", "ref_logps"))
    trained = trained_tokens(batch)
    for pack, segment, path in segments(batch):
        advantage = float(batch.groups.fields["advantage"][pack, segment])
        for token in range(*path[-1]):
            if not trained[pack, token]:
                continue
            logp = logps[pack, token]
            before = logp.detach() if old is None else old[pack, token]
            ratio = torch.exp(logp - before)
            bound = ratio.clamp(1 - low, 1 + high)
            loss = -min(ratio * advantage, bound * advantage)
            if kl:
                assert ref is not None
                distance = ref[pack, token] - logp
                loss = loss + kl * (distance.exp() - distance - 1)
            losses[pack, token] = loss
    return losses


@pytest.mark.parametrize("kl", [0.0, 0.1])
@pytest.mark.parametrize("sampled_now", [False, True])
def test_each_token_has_the_loss_of_the_formula(kl: float, sampled_now: bool) -> None:
    batch = rollouts(old_logps=sampled_now)
    logits = torch.randn(*batch.tokens.shape, 16, generator=torch.Generator().manual_seed(1)).double()
    logits.requires_grad_()
    logps = token_logps(logits, batch)
    ours = policy_losses(logps, batch, clip=(0.2, 0.3), kl=kl)
    theirs = naive(logps, batch, 0.2, 0.3, kl)
    assert torch.allclose(ours, theirs)
    assert (ours != 0).sum() == trained_tokens(batch).sum() == 17
    grads = [torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (ours, theirs)]
    assert torch.allclose(*grads)
    assert grads[0].isfinite().all()
    assert grads[0].any()


def test_padding_alone_has_no_loss_but_a_gradient() -> None:
    batch = stack_packs([null_pack(8)])
    logits = torch.randn(1, 8, 5, requires_grad=True)
    losses = policy_losses(token_logps(logits, batch), batch)
    losses.sum().backward()
    assert not losses.any()
    assert logits.grad is not None


@pytest.mark.parametrize(
    ("without", "settings", "message"),
    [
        (
            {"advantage": True},
            {},
            r"no 'advantage' among its fields \(none\); name its column in the encoder's",
        ),
        ({"ref_logps": True}, {"kl": 0.1}, r"no 'ref_logps' among its token_fields \(old_logps\); name its"),
        ({}, {"clip": (1.5, 0.2)}, r"clip=\(1.5, 0.2\) is no pair of distances from 1; give two such as"),
    ],
)
def test_what_is_missing_is_named(without: dict[str, bool], settings: dict[str, Any], message: str) -> None:
    batch = rollouts(**without)
    logps = torch.zeros(batch.tokens.shape)
    with pytest.raises(ValueError, match=message):
        policy_losses(logps, batch, **settings)


def test_plain_samples_have_no_advantages() -> None:
    plain = collate_packed(list(IterablePackedDataset([{"input_ids": [1, 2]}], max_seq_len=4)))
    with pytest.raises(
        ValueError, match="the batch has no groups, so no advantages; encode rows with RolloutEnc"
    ):
        policy_losses(torch.zeros(1, 4), plain)
