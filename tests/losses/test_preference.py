"""Preference losses against torchtune's classes and against the formulas of the papers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from streampack.losses import PreferenceLoss, bradley_terry_losses

GENERATOR = torch.Generator().manual_seed(0)
LOGPS = [-20 * torch.rand(50, generator=GENERATOR, dtype=torch.float64) for _ in range(4)]


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("DPOLoss", {"beta": 0.3}, {"beta": 0.3}),
        ("DPOLoss", {"beta": 0.3, "label_smoothing": 0.2}, {"beta": 0.3, "label_smoothing": 0.2}),
        ("RSOLoss", {"gamma": 0.3}, {"beta": 0.3, "form": "hinge"}),
    ],
)
def test_losses_and_rewards_are_torchtunes(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    losses = pytest.importorskip("torchtune.rlhf.loss")
    found, expected = [], []
    for module, results in ((PreferenceLoss(**ours), found), (getattr(losses, name)(**theirs), expected)):
        logps = [each.clone().requires_grad_() for each in LOGPS]
        values = module(*logps)
        results += [*values, *torch.autograd.grad(values[0].sum(), logps)]
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)
    assert not found[1].requires_grad
    assert not found[2].requires_grad


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("settings", "formula"),
    [
        ({"form": "ipo", "beta": 0.4}, lambda c, r, rc, rr: ((c - rc) - (r - rr) - 1 / 0.8) ** 2),
        (
            {"form": "ipo", "beta": 0.4, "label_smoothing": 0.1},
            lambda c, r, rc, rr: (
                0.9 * ((c - rc) - (r - rr) - 1 / 0.8) ** 2 + 0.1 * ((r - rr) - (c - rc) - 1 / 0.8) ** 2
            ),
        ),
        (
            {"beta": 2.0, "margin": 0.5, "reference_free": True},  # SimPO, of means
            lambda c, r, rc, rr: -math.log(sigmoid(2 * (c - r) - 0.5)),
        ),
        (
            {"form": "hinge", "beta": 0.2, "margin": 0.5},
            lambda c, r, rc, rr: max(0.0, 1.5 - 0.2 * ((c - rc) - (r - rr))),
        ),
    ],
)
def test_other_forms_are_those_of_their_papers(settings: dict[str, Any], formula: Any) -> None:
    losses, chosen, rejected = PreferenceLoss(**settings)(*(each / 4 for each in LOGPS))
    rows = list(zip(*((each / 4).tolist() for each in LOGPS), strict=True))
    assert losses.tolist() == pytest.approx([formula(*row) for row in rows])
    free = settings.get("reference_free", False)
    beta = settings["beta"]
    assert chosen.tolist() == pytest.approx([beta * (c - (0 if free else rc)) for c, _, rc, _ in rows])
    assert rejected.tolist() == pytest.approx([beta * (r - (0 if free else rr)) for _, r, _, rr in rows])


def test_equal_policies_lose_ln_2() -> None:
    losses, chosen, rejected = PreferenceLoss()(*LOGPS[:2], *LOGPS[:2])
    assert losses.tolist() == pytest.approx([math.log(2)] * 50)
    assert not chosen.any()
    assert not rejected.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "dpo"}, "form='dpo' is unknown; choose one of 'sigmoid', 'ipo', 'hinge'"),
        ({"beta": 0}, "beta=0 is no weight; give a number above 0"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5 is no fraction of wrong pairs; give a number from 0"),
        ({"margin": -1.0}, "margin=-1.0 with form='sigmoid'; give 0, or a positive number"),
        ({"margin": 1.0, "form": "ipo"}, "margin=1.0 with form='ipo'; give 0, or a positive number with"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PreferenceLoss(**settings)


def test_bradley_terry_is_the_odds_of_the_right_order() -> None:
    chosen, rejected, margins = LOGPS[:3]
    for margin in (0.0, -margins):
        losses = bradley_terry_losses(chosen, rejected, margin=margin)
        differences = (chosen - rejected - margin).tolist()
        assert losses.tolist() == pytest.approx([-math.log(sigmoid(each)) for each in differences])
