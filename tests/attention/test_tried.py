"""Mixers that hand boundaries to their kernels, in whose place functions of torch stand here.

Kernels themselves are tried in test_tried_triton.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from streampack import prepare_model_for_packing
from streampack.attention import mixers
from streampack.attention.mixer_tables import find_mixers
from streampack.attention.mixers import Boundaries
from tests.support.boundary_kernels import causal_conv1d_fn, one_by_one
from tests.support.hf_models import build, run_alone, run_packed
from tests.support.hybrid_models import HYBRIDS
from tests.support.isolation import differences, stream_and_batch

pytest.importorskip("transformers")

SIZES = HYBRIDS["qwen3_next"]
SLOWER = "Qwen3NextGatedDeltaNet: these layers compute sequences one at a time, which is slower"


class Kernels:
    """Kernels of transformers' qwen3_next."""

    def __init__(self, modeling: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.modeling: Any = modeling
        self.monkeypatch = monkeypatch
        self.rows: list[int] = []  # of each call to the rule
        self.rule: Callable[..., Any] = one_by_one(self.modeling.torch_chunk_gated_delta_rule)

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
    found: bool = find_mixers(model)[0].streampack_boundaries.by_kernels  # type: ignore[union-attr, assignment]
    return found


def worst(model: Any, inputs: Any) -> float:
    """Return how far samples in packs are from what they are alone, in a model without kernels for boundaries."""
    data, batch = stream_and_batch("overlong")
    alone = run_alone(build("qwen3_next", **SIZES), data, batch)
    return max(differences(run_packed(model, batch, inputs), alone).values())


@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_all_packs_go_to_the_kernels_in_one_row(kernels: Kernels, attention: str) -> None:
    model: Any = build("qwen3_next", **SIZES)
    kernels.install()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs = prepare_model_for_packing(model, attention=attention)
    assert by_kernels(model)
    _, batch = stream_and_batch("overlong")
    assert len(batch.tokens) > 1
    kernels.rows.clear()
    model(**inputs(batch))
    assert kernels.rows == [1]
    assert worst(model, inputs) < 1e-5


def test_a_kernel_that_ignores_boundaries_is_found(kernels: Kernels) -> None:
    model = build("qwen3_next", **SIZES)
    plain = kernels.modeling.torch_chunk_gated_delta_rule

    def ignores(*args: Any, cu_seqlens: Any, **kwargs: Any) -> Any:
        return plain(*args, **{name: each for name, each in kwargs.items() if name != "seq_idx"})

    kernels.install(ignores)
    with pytest.warns(UserWarning, match=rf"{SLOWER}.*failed a try: (?s:.*)linear_attn"):
        inputs = prepare_model_for_packing(model)
    assert not by_kernels(model)
    assert worst(model, inputs) < 1e-5


class _AddsNothing(torch.autograd.Function):
    """Returns its input, with a gradient that every token receives of every other."""

    @staticmethod
    def forward(_ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(_ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] + grads[0].mean(1, keepdim=True)


def test_a_kernel_that_mixes_gradients_is_found(kernels: Kernels) -> None:
    model = build("qwen3_next", **SIZES)

    def mixes(query: torch.Tensor, *args: Any, cu_seqlens: Any = None, **kwargs: Any) -> Any:
        if cu_seqlens is not None:
            query = _AddsNothing.apply(query)  # type: ignore[no-untyped-call]
        return kernels.rule(query, *args, cu_seqlens=cu_seqlens, **kwargs)

    kernels.install(mixes)
    with pytest.warns(UserWarning, match=rf"{SLOWER}.*logits of sample 0 have gradients at other samples"):
        inputs = prepare_model_for_packing(model)
    assert not by_kernels(model)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert worst(model, inputs) < 1e-5


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError, MemoryError])
def test_errors_of_the_device_are_no_verdict_on_a_kernel(kernels: Kernels, error: type[Exception]) -> None:
    def fails(*_args: Any, **_kwargs: Any) -> Any:
        raise error("of the device")

    model: Any = build("qwen3_next", **SIZES)
    kernels.install(fails)
    with pytest.raises(error, match="of the device"):
        prepare_model_for_packing(model)


def test_a_kernel_that_does_not_support_a_model_is_left_out(kernels: Kernels) -> None:
    def refuses(*args: Any, cu_seqlens: Any = None, **kwargs: Any) -> Any:
        if cu_seqlens is not None:
            raise NotImplementedError("no boundaries on this device")
        return kernels.rule(*args, **kwargs)

    model = build("qwen3_next", **SIZES)
    kernels.install(refuses)
    with pytest.warns(UserWarning, match=rf"{SLOWER}.*NotImplementedError: no boundaries on this device"):
        inputs = prepare_model_for_packing(model)
    assert worst(model, inputs) < 1e-5


def test_a_compiled_model_that_ran_before_is_tried_too(kernels: Kernels) -> None:
    torch._dynamo.reset()
    model: Any = build("qwen3_next", **SIZES)
    kernels.install()
    model.compile(backend="eager")
    model(torch.tensor([[1, 2, 3]]))
    model(torch.tensor([[1, 2, 3, 4]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_model_for_packing(model)
    assert by_kernels(model)


def test_without_kernels_nothing_is_said() -> None:
    model = build("qwen3_next", **SIZES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_model_for_packing(model)
    assert not by_kernels(model)


def test_with_kernels_for_convolutions_only_layers_are_split(kernels: Kernels) -> None:
    model = build("qwen3_next", **SIZES)
    kernels.monkeypatch.setattr(kernels.modeling, "causal_conv1d_fn", kernels.convolve)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs = prepare_model_for_packing(model)
    assert not by_kernels(model)
    assert worst(model, inputs) < 1e-5


@pytest.mark.parametrize("installed", [False, True])
def test_the_loss_of_a_router(kernels: Kernels, installed: bool) -> None:
    """Then the attention's boundaries are keyword arguments, which reach the mixers too."""
    model = build("qwen3_next", **SIZES, output_router_logits=True)
    if installed:
        kernels.install()
    inputs = prepare_model_for_packing(model, attention="varlen")
    assert by_kernels(model) == installed
    assert worst(model, inputs) < 1e-5


def test_gradient_checkpointing(kernels: Kernels) -> None:
    model: Any = build("qwen3_next", **SIZES)
    kernels.install()
    model.activation_checkpointing_enable({"use_reentrant": True})
    inputs = prepare_model_for_packing(model)
    assert by_kernels(model)
    _, batch = stream_and_batch("overlong")
    model.train()
    model(**inputs(batch)).logits.sum().backward()
    plain: Any = build("qwen3_next", **SIZES)
    plain(**prepare_model_for_packing(plain)(batch)).logits.sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "argument"), [("Lfm2ShortConv", "seq_idx"), ("Qwen3NextGatedDeltaNet", "cu_seq_lens_q")]
)
def test_a_layer_is_handed_the_boundaries_that_it_takes(name: str, argument: str) -> None:
    """A layer for causal-conv1d takes the number of each token's sequence only."""
    found: dict[str, Any] = {}

    def forward(self: Any, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        found.update(kwargs)
        return hidden

    mixer = type(name, (torch.nn.Module,), {"forward": forward})()
    mixer.streampack_boundaries = boundaries = Boundaries()
    boundaries.lengths, boundaries.by_kernels = [[2, 1], [3, 0]], True
    mixers._forward_split(mixer, torch.zeros(2, 4, 1))
    expected = {"seq_idx": [[0, 0, 1, 2, 3, 3, 3, 4]]}
    if argument != "seq_idx":
        expected[argument] = [0, 2, 3, 4, 7, 8]  # type: ignore[assignment]
    assert {key: value.tolist() for key, value in found.items()} == expected
