"""Layers that run one sequence at a time: boundaries begin and end with a pass, and what drops one is found.

That each sample has the logits and gradients that it has alone is tested in test_mixers_families.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from streampack import Batch, find_leaks, prepare_model_for_packing
from streampack.attention.mixers import LENGTHS, _by_length
from tests.support.hf_models import MAX_SEQ_LEN, Wrapper, build
from tests.support.hybrid_models import HYBRIDS
from tests.support.isolation import stream_and_batch

pytest.importorskip("transformers")


@pytest.fixture
def hybrid() -> Any:
    return build("qwen3_next", **HYBRIDS["qwen3_next"])


def test_without_inputs_a_prepared_model_computes_what_it_did(hybrid: Any) -> None:
    tokens = torch.arange(1, 25)[None] % 60
    before = hybrid(input_ids=tokens, use_cache=False).logits
    inputs = prepare_model_for_packing(hybrid)
    _, batch = stream_and_batch("overlong")
    packed = hybrid(**inputs(batch)).logits
    assert torch.equal(hybrid(input_ids=tokens, use_cache=False).logits, before)
    assert torch.equal(hybrid(**inputs(batch)).logits, packed)
    generated = hybrid.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    fresh = build("qwen3_next", **HYBRIDS["qwen3_next"])
    assert torch.equal(generated, fresh.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0))


@pytest.mark.parametrize("family", ["lfm2", "mamba", "qwen3_next"])
def test_the_decoder_below_the_head_keeps_samples_apart(family: str) -> None:
    """As called by a loop that computes the head and the loss by itself."""
    model: Any = build(family, **HYBRIDS[family])
    _, batch = stream_and_batch("overlong")
    inputs = prepare_model_for_packing(model)
    hidden = model.base_model(**inputs(batch)).last_hidden_state
    logits = model(**inputs(batch)).logits
    assert torch.equal(model.get_output_embeddings()(hidden), logits)


def test_lengths_do_not_outlive_their_pass(hybrid: Any) -> None:
    """Neither a forward pass, nor one that fails, nor a backward pass leaves lengths to what is called next."""
    _, batch = stream_and_batch("overlong")
    plain = {"input_ids": batch.tokens, "use_cache": False}
    expected = hybrid.base_model(**plain).last_hidden_state
    inputs = prepare_model_for_packing(hybrid)
    packed = hybrid(**inputs(batch)).logits
    assert torch.equal(hybrid.base_model(**plain).last_hidden_state, expected)
    packed.sum().backward()
    assert torch.equal(hybrid.base_model(**plain).last_hidden_state, expected)
    with pytest.raises(TypeError):
        hybrid(**inputs(batch), labels="none")
    assert torch.equal(hybrid.base_model(**plain).last_hidden_state, expected)


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
    halves = [
        Batch(each.tokens, each.labels, each.input_pos, each.seq_lens, each.fragments)
        for each in (first(batch, 0), first(batch, 1))
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


def first(batch: Batch, number: int) -> Batch:
    part = slice(number, number + 1)
    return Batch(
        batch.tokens[part],
        batch.labels[part],
        batch.input_pos[part],
        batch.seq_lens[part],
        batch.fragments[part],
    )


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("mamba", "backbone.layers.0.mixer (MambaMixer)"),
        ("lfm2", "model.layers.0.conv (Lfm2ShortConv)"),
        ("qwen3_next", "model.layers.0.linear_attn (Qwen3NextGatedDeltaNet)"),
        ("bloom", "transformer.h.0.self_attention (BloomAttention)"),
        ("falcon, alibi", "transformer.h.0.self_attention (FalconAttention)"),
        ("mpt", "transformer.blocks.0.attn (MptAttention)"),
        (
            "zaya",
            "model.layers.0.self_attn (ZayaAttention)",
        ),  # whose projection returns a vector for each head
        ("deepseek_v4", "model.layers.1.self_attn (DeepseekV4Attention)"),  # the first has no blocks of keys
    ],
)
def test_a_boundary_that_is_dropped_is_found_and_the_layer_named(family: str, module: str) -> None:
    model = build(family, **HYBRIDS[family])
    inputs = prepare_model_for_packing(model)

    def dropped(batch: Batch) -> dict[str, Any]:
        made = inputs(batch)
        lengths = made[LENGTHS].clone()
        lengths[:, 1] += lengths[:, 2]
        lengths[:, 2] = 0
        return {**made, LENGTHS: lengths}

    assert find_leaks(model, inputs=inputs, max_seq_len=MAX_SEQ_LEN).ok
    report = find_leaks(model, inputs=dropped, max_seq_len=MAX_SEQ_LEN)
    assert {(leak.source, leak.sample) for leak in report.leaks if leak.kind == "sample"} == {(1, 2)}
    assert report.module == module
    assert f"first in: {module}" in str(report)


@pytest.mark.parametrize("wrap", [lambda logits: logits, lambda logits: (logits,)])
def test_a_model_that_returns_no_output_object(wrap: Callable[[torch.Tensor], Any]) -> None:
    """In its backward pass too, where checkpointed layers are computed again."""
    _, batch = stream_and_batch("exact_fit")
    gradients = []
    for bare in (False, True):
        model: Any = build("mamba", **HYBRIDS["mamba"])
        inputs = prepare_model_for_packing(model)
        if bare:
            forward = type(model).forward
            model.forward = lambda **given: wrap(forward(model, **given).logits)  # noqa: B023
        model.train()
        model.activation_checkpointing_enable({"use_reentrant": True})
        output = model(**inputs(batch))
        logits = output if torch.is_tensor(output) else output[0]
        logits.square().sum().backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(*gradients)


class Averages(nn.Module):
    """Mixes along the row: each token gets the mean of those before it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor) -> Any:
        counts = torch.arange(1, hidden_states.shape[1] + 1)[None, :, None]
        return self.inner(hidden_states + hidden_states.cumsum(1) / counts)


@pytest.mark.parametrize("attention", ["dense", "varlen", "auto"])
def test_an_unknown_mixer_is_refused_by_name(attention: str) -> None:
    """In a model of a family that is known: it is probed because the module is nobody's that we know."""
    model: Any = build("llama")
    model.model.layers[1].mlp = Averages(model.model.layers[1].mlp)
    with pytest.raises(ValueError, match=r"first in: model\.layers\.1\.mlp \(Averages\)"):
        prepare_model_for_packing(model, attention=attention)


def groups_of(lengths: list[list[int]], multiple: int, max_seq_len: int) -> list[Any]:
    """Return the groups as lists, after a look at the order: it must lead from every token of the packs to itself."""
    groups, order = _by_length(lengths, multiple, max_seq_len=max_seq_len, device=torch.device("cpu"))
    tokens = torch.cat([index.flatten() for index in groups])[order]
    assert tokens.tolist() == list(range(len(lengths) * max_seq_len))
    return [index.tolist() for index in groups]


def test_sequences_of_equal_length_run_together() -> None:
    assert groups_of([[3, 2, 3], [2, 6]], 1, max_seq_len=8) == [
        [[0, 1, 2], [5, 6, 7]],
        [[3, 4], [8, 9]],
        [[10, 11, 12, 13, 14, 15]],
    ]
    rest = groups_of([[3, 0]], 1, max_seq_len=6)
    assert rest == [[[0, 1, 2], [3, 4, 5]]], "the padding's length may be left out"


def test_sequences_are_lengthened_to_whole_chunks() -> None:
    assert groups_of([[3, 2, 4], [1, 8]], 4, max_seq_len=9) == [
        [[0, 1, 2, 2], [3, 4, 4, 4], [5, 6, 7, 8], [9, 9, 9, 9]],
        [[10, 11, 12, 13, 14, 15, 16, 17]],
    ]
