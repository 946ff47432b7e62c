"""Mixers that hand boundaries to kernels of flash-linear-attention and mamba-ssm, run by Triton's interpreter on a CPU.

`make test-kernels` installs and runs them; in any other run these tests are skipped. mamba-ssm cannot be installed
without CUDA; where its sources lie on the path, its kernels are tried too.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest

from streampack import prepare_model_for_packing
from streampack.attention.mixer_tables import find_mixers
from tests.support.hf_models import build, run_alone, run_packed
from tests.support.hybrid_models import HYBRIDS
from tests.support.isolation import differences, stream_and_batch

pytestmark = [
    pytest.mark.skipif(
        "tests.support.kernels_on_cpu" not in sys.modules, reason="needs the kernels: make test-kernels"
    ),
    pytest.mark.filterwarnings("ignore"),  # the interpreter computes what the kernels then mask
]
MAMBA = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
OTHERS = (
    *("bailing_hybrid", "inkling2_text", "inkling_text", "kimi_linear", "lfm2", "lfm2_moe", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text"),
)


@pytest.fixture(autouse=True)
def _models_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let names mean transformers' models: flash-linear-attention puts its own in the place of mamba and mamba2."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {})
    monkeypatch.setattr(AutoModelForCausalLM._model_mapping, "_extra_content", {})


@pytest.mark.parametrize("family", [*OTHERS, *(MAMBA if "mamba_ssm" in sys.modules else ())])
def test_packed_equals_alone(family: str) -> None:
    data, batch = stream_and_batch("overlong")
    model: Any = build(family, **HYBRIDS[family])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*one at a time")
        inputs = prepare_model_for_packing(model, attention="dense")
    assert find_mixers(model)[0].streampack_boundaries.by_kernels  # type: ignore[union-attr]
    found = differences(
        run_packed(model, batch, inputs), run_alone(build(family, **HYBRIDS[family]), data, batch)
    )
    assert max(found.values()) < 1e-5, found
