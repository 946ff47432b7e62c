"""Shared prefixes on CUDA: a segment has the logits and gradients that it has behind its own copy of the prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streampack import prepare_model_for_packing
from tests.support import hf_models, tiny_torchtune
from tests.support.groups import batch_of, run_alone, run_packed, trees
from tests.support.isolation import differences


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["dense", "flex", "varlen", "flash"])
@pytest.mark.parametrize(
    ("build", "family"),
    [
        *((tiny_torchtune.build, family) for family in tiny_torchtune.FAMILIES),
        *((hf_models.build, family) for family in ("llama", "mistral", "gemma3_text")),
    ],
)
def test_shared_equals_alone_in_bf16_on_cuda(build: Any, family: str, attention: str) -> None:
    """Within twice the rounding error of the same model in bf16 against fp32."""
    batch = batch_of(trees()).to("cuda")
    exact = run_alone(build(family).cuda(), batch)
    model = build(family, dtype=torch.bfloat16).cuda()
    alone = run_alone(model, batch)
    try:
        inputs = prepare_model_for_packing(model, attention=attention)
        found = differences(run_packed(model, batch, inputs), alone)
    except ImportError as error:
        pytest.skip(str(error))
    except ValueError as error:
        assert family == "gemma2"
        assert "softcap" in str(error) or "window" in str(error)
        return
    rounding = differences(alone, exact)
    assert found["logits"] < 2 * rounding["logits"]
    assert found["gradient"] < 2 * rounding["gradient"]
