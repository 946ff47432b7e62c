"""Log-probabilities of sequences on a GPU equal those on a CPU, and are the same each time."""

from __future__ import annotations

import pytest
import torch

from streampack.losses import PreferenceLoss, pair_of, policy_losses, sequence_logps, token_logps
from streampack.packing.groups import Group
from tests.losses.test_policy import rollouts
from tests.losses.test_sequences import BATCH, logits_for, packed, preference_groups
from tests.support.groups import batch_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_sums_and_gradients_are_those_of_the_cpu(dtype: torch.dtype, limit: float) -> None:
    found = []
    for device in ("cpu", "cuda", "cuda"):
        logits = logits_for(BATCH, dtype=dtype).detach().to(device).requires_grad_()
        sums, counts = sequence_logps(list(logits.chunk(3, 1)), BATCH.to(device), chunk_size=7)
        (grad,) = torch.autograd.grad(
            (sums * torch.arange(sums.numel(), device=device).view_as(sums)).sum(), logits
        )
        found.append((sums.detach().cpu(), counts.cpu(), grad.cpu()))
    (sums, counts, grad), *others = found
    for a, b, c in others:
        assert torch.allclose(a, sums, rtol=limit)
        assert torch.equal(b, counts)
        assert torch.allclose(c, grad, rtol=limit, atol=limit)
    assert all(torch.equal(a, b) for a, b in zip(*others, strict=True))


def test_many_siblings_have_the_same_gradient_each_time() -> None:
    """Their first tokens share a predictor, at which gradients are added up."""
    size = 1 + 200
    group = Group([1] * size, [-100, *[3] * 200], lengths=[1] * size, parents=[-1, *[0] * 200])
    batch = batch_of([group], max_seq_len=256).to("cuda")
    grads = []
    for _ in range(3):
        logits = logits_for(batch.to("cpu"), dtype=torch.float32).detach().cuda().requires_grad_()
        sums, _ = sequence_logps(logits, batch)
        weights = torch.rand(sums.shape, generator=torch.Generator().manual_seed(0)).cuda()
        grads.append(torch.autograd.grad((sums * weights).sum(), logits)[0])
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def test_losses_of_pairs_and_of_policies_are_those_of_the_cpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        batch = packed(preference_groups()).to(device)
        sums = sequence_logps(logits_for(batch.to("cpu")).detach().to(device), batch)[0].flatten()
        chosen, rejected = pair_of(batch)
        losses, *_ = PreferenceLoss()(sums[chosen], sums[rejected], sums[chosen] * 0, sums[rejected] * 0)
        found.append(losses.cpu())
    assert torch.allclose(*found)
    batch = rollouts()
    logits = logits_for(batch).detach()
    ours, theirs = (
        policy_losses(token_logps(logits.to(device), batch.to(device)), batch.to(device), kl=0.1).cpu()
        for device in ("cpu", "cuda")
    )
    assert torch.allclose(ours, theirs)
