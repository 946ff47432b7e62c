"""Packed equals alone on CUDA, for every family of torchtune models and every attention."""

from __future__ import annotations

import pytest
import torch

from streampack import prepare_model_for_packing
from tests.attention.test_torchtune import KINDS_OF_LAYERS, count_graphs, packed_and_alone, run, stream
from tests.support.isolation import differences, run_alone
from tests.support.tiny_torchtune import FAMILIES, build


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("attention", ["dense", "flex"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_samples_match_samples_alone_on_cuda(family: str, attention: str, lora: bool) -> None:
    assert max(packed_and_alone(build(family, lora=lora).cuda(), attention, "cuda").values()) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["dense", "flex", "varlen", "flash"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_samples_match_samples_alone_in_bf16_on_cuda(family: str, attention: str) -> None:
    """Within twice the rounding error of the same model in bf16 against fp32."""
    data, batch = stream()
    batch = batch.to("cuda")
    exact = run_alone(build(family).cuda(), data, batch)
    model = build(family, dtype=torch.bfloat16).cuda()
    alone = run_alone(model, data, batch)
    try:
        inputs = prepare_model_for_packing(model, attention=attention)
    except ImportError as error:
        pytest.skip(str(error))
    except ValueError as error:
        assert family == "gemma2"
        assert "softcap" in str(error)
        return
    found = differences(run(model, inputs, batch), alone)
    rounding = differences(alone, exact)
    assert found["logits"] < 2 * rounding["logits"]
    assert found["gradient"] < 2 * rounding["gradient"]


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["flex", "varlen"])
@pytest.mark.parametrize("family", KINDS_OF_LAYERS)
def test_packs_of_other_lengths_reuse_the_graph_on_cuda(attention: str, family: str) -> None:
    if (attention, family) == ("varlen", "gemma2"):
        pytest.skip("torch's kernel has no softcap")
    graphs = count_graphs(attention, device="cuda", backend="inductor", dtype=torch.bfloat16, family=family)
    assert graphs == KINDS_OF_LAYERS[family]


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["dense", "flex", "varlen"])
def test_no_host_sync(attention: str) -> None:
    """Neither making masks nor the passes read a number from the device: torch would raise."""
    _, batch = stream()
    batch = batch.to("cuda")
    model = build("llama3", dtype=torch.bfloat16).cuda()
    inputs = prepare_model_for_packing(model, attention=attention)
    model(**inputs(batch)).sum().backward()  # what is compiled, is compiled by now
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**inputs(batch)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
