"""Scores on a GPU are those on a CPU; with every backend, and in 16 bits as near as one sample at a time is."""

from __future__ import annotations

import pytest
import torch

from streampack import prepare_model_for_packing
from tests.harness import hf_models
from tests.scoring.test_score import alone, check, requests, scored

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("attention", ["dense", "flex"])
def test_scores_are_those_of_the_cpu(attention: str) -> None:
    pairs = requests()
    expected = [alone(hf_models.build("llama"), pair) for pair in pairs]
    model = hf_models.build("llama").to("cuda")
    inputs = prepare_model_for_packing(model, attention=attention)
    check(scored(model, pairs, inputs=inputs, per_token=True), expected, tolerance=1e-4)


@pytest.mark.parametrize("attention", ["varlen", "dense"])
def test_scores_in_bf16_are_near_those_in_fp32(attention: str) -> None:
    pairs = requests()
    plain = hf_models.build("llama", torch.bfloat16).float()
    expected = [alone(plain, pair) for pair in pairs]
    model = hf_models.build("llama", torch.bfloat16).to("cuda")
    inputs = prepare_model_for_packing(model, attention=attention)
    for one, other in zip(scored(model, pairs, inputs=inputs), expected, strict=True):
        assert one.logp == pytest.approx(other.logp, rel=0.03, abs=0.1)
