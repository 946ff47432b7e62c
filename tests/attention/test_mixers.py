"""Layers that run one sequence at a time, or hand boundaries to their kernels: none begins in another's state.

That samples have the logits and gradients that they have alone is tested in test_packed_equals_alone.py. Here
boundaries begin and end with a pass, what drops one is found, and functions of torch stand in the place of kernels;
`make test-kernels` runs kernels themselves by Triton's interpreter.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from streampack import Batch, find_leaks, prepare_model_for_packing

# private: whether layers call kernels or run sequences one at a time shows nowhere but in their speed
from streampack.attention.mixers import find_mixers
from tests.harness.boundary_kernels import causal_conv1d_fn, one_by_one
from tests.harness.hf_models import MAX_SEQ_LEN, Wrapper, build
from tests.harness.isolation import Operations, stream_and_batch, worst

pytest.importorskip("transformers")


@pytest.fixture
def hybrid() -> Any:
    return build("qwen3_next")


def test_lengths_do_not_outlive_their_pass(hybrid: Any) -> None:
    """Neither a forward pass, nor one that fails, nor a backward pass leaves lengths to what is called next."""
    _, batch = stream_and_batch("overlong")

    def plain() -> torch.Tensor:
        hidden: torch.Tensor = hybrid.base_model(input_ids=batch.tokens, use_cache=False).last_hidden_state
        return hidden

    expected = plain()
    inputs = prepare_model_for_packing(hybrid)
    packed = hybrid(**inputs(batch)).logits
    assert torch.equal(plain(), expected)
    packed.sum().backward()
    assert torch.equal(plain(), expected)
    with pytest.raises(TypeError):
        hybrid(**inputs(batch), labels="none")
    assert torch.equal(plain(), expected)


def test_prepared_twice_copied_and_wrapped(hybrid: Any) -> None:
    _, batch = stream_and_batch("overlong")
    logits = hybrid(**prepare_model_for_packing(hybrid)(batch)).logits
    inputs = prepare_model_for_packing(hybrid)
    assert torch.equal(hybrid(**inputs(batch)).logits, logits)
    other = copy.deepcopy(hybrid)
    with torch.no_grad():
        for parameter in hybrid.parameters():
            parameter.zero_()
    inputs = prepare_model_for_packing(Wrapper(other))
    assert torch.equal(Wrapper(other)(**inputs(batch)).logits, logits), "a copy has its own weights"


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize(("together", "as_dict"), [(False, True), (True, True), (False, False)])
def test_two_forward_passes_before_their_backward_passes_with_checkpointing(
    hybrid: Any, together: bool, as_dict: bool
) -> None:
    """Layers are computed again in the backward pass, with the boundaries of their own forward pass."""
    _, batch = stream_and_batch("overlong")
    inputs = prepare_model_for_packing(hybrid)
    rows = {"tokens", "labels", "input_pos", "seq_lens", "fragments"}
    halves = [
        replace(batch, **{name: getattr(batch, name)[number : number + 1] for name in rows})
        for number in (0, 1)
    ]

    def gradients(*, checkpointing: bool) -> torch.Tensor:
        hybrid.train()
        if checkpointing:
            hybrid.gradient_checkpointing_enable({"use_reentrant": False})
        logits = [hybrid(**inputs(half), return_dict=as_dict) for half in halves]
        sums = [(out.logits if as_dict else out[0]).square().sum() for out in logits]
        for each in [sum(sums)] if together else sums:
            each.backward()
        found = torch.cat([parameter.grad.flatten() for parameter in hybrid.parameters()])
        hybrid.zero_grad()
        return found

    assert not torch.equal(halves[0].seq_lens, halves[1].seq_lens)
    plain = gradients(checkpointing=False)
    torch.testing.assert_close(gradients(checkpointing=True), plain, rtol=1e-5, atol=1e-6)


# zaya's projection returns a vector for each head.
@pytest.mark.parametrize("family", ["mamba", "qwen3_next", "zaya"])
def test_a_boundary_that_is_dropped_is_found(family: str) -> None:
    model = build(family)
    inputs = prepare_model_for_packing(model)

    def dropped(batch: Batch) -> dict[str, Any]:
        made = inputs(batch)
        lengths = made["packed_seq_lens"]
        return {**made, "packed_seq_lens": np.array([lengths[0], lengths[1:3].sum(), *lengths[3:]])}

    assert find_leaks(model, inputs=inputs, max_seq_len=MAX_SEQ_LEN).ok
    report = find_leaks(model, inputs=dropped, max_seq_len=MAX_SEQ_LEN)
    assert {(leak.source, leak.sample) for leak in report.leaks if leak.kind == "sample"} == {(1, 2)}


# Kernels that take boundaries.


class Kernels:
    """Kernels of transformers' qwen3_next."""

    def __init__(self, modeling: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.modeling: Any = modeling
        self.monkeypatch = monkeypatch
        self.rows: list[int] = []  # of each call to the rule
        self.modeling_rule: Callable[..., Any] = self.modeling.torch_chunk_gated_delta_rule
        self.rule = one_by_one(self.modeling_rule)

    def install(self, rule: Callable[..., Any] | None = None) -> None:
        """Let the layers call a rule, the right one by default, and a convolution that takes boundaries."""
        rule = rule or self.rule

        def counted(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.rows.append(len(query))
            return rule(query, *args, **kwargs)

        self.monkeypatch.setattr(self.modeling, "torch_chunk_gated_delta_rule", counted)
        self.monkeypatch.setattr(self.modeling, "causal_conv1d_fn", self.convolve)

    @staticmethod
    def convolve(*args: Any, **kwargs: Any) -> torch.Tensor:
        """Convolve, and leave out arguments for others, as transformers does."""
        return causal_conv1d_fn(
            *args, **{name: each for name, each in kwargs.items() if name in ("seq_idx", "activation")}
        )


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    from transformers.models.qwen3_next import modeling_qwen3_next

    return Kernels(modeling_qwen3_next, monkeypatch)


def by_kernels(model: Any) -> bool:
    found: bool = find_mixers(model)[0].streampack_boundaries.kernels  # type: ignore[union-attr, assignment]
    return found


ROUTED = {"output_router_logits": True}  # then boundaries are keyword arguments, which reach the mixers too


@pytest.mark.parametrize(
    ("attention", "changes"), [("dense", {}), ("varlen", ROUTED)], ids=["dense", "varlen, router"]
)
@pytest.mark.parametrize("installed", ["nothing", "convolutions", "everything"])
def test_all_packs_go_to_the_kernels_in_one_row_if_all_layers_have_them(
    kernels: Kernels, installed: str, attention: str, changes: dict[str, Any]
) -> None:
    """Nothing is said of layers without kernels, for which the user can do nothing."""
    model: Any = build("qwen3_next", **changes)
    if installed == "convolutions":
        kernels.monkeypatch.setattr(kernels.modeling, "causal_conv1d_fn", kernels.convolve)
    elif installed == "everything":
        kernels.install()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs = prepare_model_for_packing(model, attention=attention)
        assert worst(model, inputs, build("qwen3_next")) < 1e-5
    assert by_kernels(model) == (installed == "everything")
    _, batch = stream_and_batch("overlong")
    assert len(batch.tokens) > 1
    kernels.rows.clear()
    given = inputs(batch)
    with Operations() as passes:
        model(**given)
    assert kernels.rows == [1] * (installed == "everything")
    assert (passes.counts["index_select"] == 0) == (installed == "everything"), "views, not copies"


def ignores(kernels: Kernels, *args: Any, cu_seqlens: Any, seq_idx: Any = None, **settings: Any) -> Any:
    return kernels.modeling_rule(*args, **settings)


def mixes_gradients(kernels: Kernels, query: Any, *args: Any, cu_seqlens: Any, **settings: Any) -> Any:
    """Compute what is right; in the backward pass, every token receives of every other."""
    mean = query.mean(1, keepdim=True)
    query = query if cu_seqlens is None else query + (mean - mean.detach())
    return kernels.rule(query, *args, cu_seqlens=cu_seqlens, **settings)


@pytest.mark.parametrize(
    ("faulty", "why"),
    [
        (ignores, "changing sample 0 moved sample 2"),
        (mixes_gradients, "in training mode, sample 3 has gradients at other tokens"),
    ],
)
def test_a_model_whose_kernel_will_not_do_is_refused(
    kernels: Kernels, faulty: Callable[..., Any], why: str
) -> None:
    model = build("qwen3_next")
    kernels.install(
        lambda *args, cu_seqlens=None, **given: faulty(kernels, *args, cu_seqlens=cu_seqlens, **given)
    )
    inputs = prepare_model_for_packing(model)
    _, batch = stream_and_batch("overlong")
    for _ in range(2):
        with pytest.raises(ValueError, match=f"(?s)qwen3_next .* mixes samples: .*{why}"):
            inputs(batch)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_hooks_of_accelerate_run_beside_the_sequences() -> None:
    """With a hook in the place of a layer's ``forward``, accelerate loads offloaded weights."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = build("lfm2")
    shapes: list[torch.Size] = []

    class Hook(hooks.ModelHook):  # type: ignore[misc, name-defined]
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            shapes.append(kwargs["hidden_states"].shape[:2])
            return args, kwargs

    hooks.add_hook_to_module(find_mixers(model)[0], Hook())
    inputs = prepare_model_for_packing(model)
    assert worst(model, inputs, build("lfm2")) < 1e-5
    assert len({*shapes}) > 2, "sequences of several sizes"


# Kernels of flash-linear-attention and mamba-ssm. mamba-ssm cannot be installed without CUDA; where its sources lie on
# the path, its kernels are tried too.


MAMBA = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")


OTHERS = (
    "bailing_hybrid", "inkling2_text", "inkling_text", "kimi_linear", "lfm2", "lfm2_moe", "olmo_hybrid",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text",
)  # fmt: skip


@pytest.fixture
def models_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let names mean transformers' models: flash-linear-attention puts its own in the place of mamba and mamba2."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {})
    monkeypatch.setattr(AutoModelForCausalLM._model_mapping, "_extra_content", {})


@pytest.mark.skipif(
    "tests.harness.kernels_on_cpu" not in sys.modules, reason="needs the kernels: make test-kernels"
)
@pytest.mark.filterwarnings("ignore")  # the interpreter computes what the kernels then mask
@pytest.mark.usefixtures("models_of_transformers")
@pytest.mark.parametrize("family", [*OTHERS, *(MAMBA if "mamba_ssm" in sys.modules else ())])
def test_interpreted_kernels_keep_samples_apart(family: str) -> None:
    model: Any = build(family)
    inputs = prepare_model_for_packing(model, attention="dense")
    assert worst(model, inputs, build(family)) < 1e-5
    assert by_kernels(model)
