"""What a prepared transformers model computes, beside and without its inputs; test_families.py has every family.

Also families of which nothing is known, which are tried, and mistakes of users, which must show.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from streampack import Batch, find_leaks, prepare_model_for_packing
from streampack.attention import dense_mask, varlen
from streampack.attention.families import PROVEN
from streampack.attention.probe_pack import pack_of
from tests.harness.hf_models import (
    EXPERTS,
    MAX_SEQ_LEN,
    VOCAB,
    WINDOW,
    WITHOUT,
    Wrapper,
    build,
    prepared,
    run_alone,
    run_packed,
)
from tests.harness.hybrid_models import HYBRIDS
from tests.harness.isolation import differences, own, placed, stream_and_batch
from tests.harness.other_families import sizes_of
from tests.harness.processes import run_ranks
from tests.oracle.attention import attend

pytest.importorskip("transformers")

OPT = {"ffn_dim": 48, "word_embed_proj_dim": 64}


def worst(model: Any, inputs: Any, alone: Any, stream: str = "overlong") -> float:
    """Return how far samples in packs are from samples alone: loss, logits or gradients, the worst of the three."""
    data, batch = stream_and_batch(stream)
    return max(differences(run_packed(model, batch, inputs), run_alone(alone, data, batch)).values())


@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_padding_at_the_ends_of_sequences_moves_nothing(attention: str) -> None:
    """Padding is attended by nothing before it, and has no gradient."""
    assert worst(*prepared("llama", attention), stream="padded wrap") < 1e-5


def test_positions_come_from_the_lengths() -> None:
    """For example, torchtune's own packs may begin a fragment at another position than 0."""
    data, batch = stream_and_batch("overlong")
    model, inputs, alone = prepared("gpt2", "dense")
    running = replace(batch, input_pos=torch.arange(MAX_SEQ_LEN).expand_as(batch.tokens))
    assert max(differences(run_packed(model, running, inputs), run_alone(alone, data, batch)).values()) < 1e-5
    without_padding = replace(
        batch,
        seq_lens=torch.nn.utils.rnn.pad_sequence(
            [torch.tensor([f.stop - f.start for f in pack], dtype=torch.int32) for pack in batch.fragments],
            batch_first=True,
        ),
    )
    assert torch.equal(inputs(without_padding)["position_ids"], batch.input_pos)


def test_the_last_of_several_preparations_counts() -> None:
    data, batch = stream_and_batch("overlong")
    model, alone = build("mistral"), build("mistral")
    right = run_alone(alone, data, batch)
    for attention in ("varlen", "varlen", "dense", "auto"):
        inputs = prepare_model_for_packing(model, attention=attention)
        assert max(differences(run_packed(model, batch, inputs), right).values()) < 1e-5
    assert model.config.use_cache, "or it would be saved so"
    assert all(len(module._forward_pre_hooks) <= 1 for module in model.modules())


@pytest.mark.parametrize(("family", "attention"), [("gpt2", "dense"), ("gemma3_text", "varlen")])
def test_a_prepared_model_is_saved_and_generates_as_before(
    family: str, attention: str, tmp_path: Path
) -> None:
    """A saved ``use_cache: false`` would silently slow down generation."""
    model, alone = build(family).eval(), build(family).eval()
    inputs = prepare_model_for_packing(model, attention=attention)
    _, batch = stream_and_batch("overlong")
    with torch.no_grad():
        assert model(**inputs(batch)).past_key_values is None
        arguments = {name: value for name, value in inputs(batch).items() if name != "use_cache"}
        assert model(**arguments).past_key_values is None
        asked = model(input_ids=batch.tokens[:, :4], use_cache=True)
        assert asked.past_key_values.get_seq_length() == 4
        again = model(input_ids=batch.tokens[:, 4:5], past_key_values=asked.past_key_values)
        assert again.past_key_values.get_seq_length() == 5, "a cache that was given is used"
    saved = []
    for name, each in (("ours", model), ("theirs", alone)):
        each.save_pretrained(tmp_path / name)
        saved.append(json.loads((tmp_path / name / "config.json").read_text()))
    assert saved[0] == saved[1]
    assert saved[0]["use_cache"] is True
    prompt = batch.tokens[:1, :5]
    ours, theirs = (each.generate(prompt, max_new_tokens=6, do_sample=False) for each in (model, alone))
    assert torch.equal(ours, theirs)


def test_a_prepared_model_without_inputs_computes_what_it_did_before() -> None:
    """Padded batches and generating still work, windows, softcaps, cache and all."""
    model, _, alone = prepared("gemma2", "varlen")
    tokens = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    with torch.no_grad():
        ours, theirs = (m(input_ids=tokens, attention_mask=mask).logits for m in (model, alone))
        torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()])
        settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
        assert model.generate(tokens, **settings).equal(alone.generate(tokens, **settings))


def test_a_router_loss() -> None:
    """It reads a mask of tokens, so boundaries must not take the mask's place."""
    _, batch = stream_and_batch("overlong")
    model, inputs, alone = prepared("mixtral", "varlen", output_router_logits=True)
    assert model(**inputs(batch)).aux_loss > 0
    assert worst(model, inputs, alone) < 1e-5


def test_checkpointed_layers_and_a_wrapped_model() -> None:
    model, inputs, alone = prepared("qwen3", "varlen")
    model.train().activation_checkpointing_enable()
    assert worst(model, inputs, alone) < 1e-5
    wrapped = Wrapper(build("llama"))
    inputs = prepare_model_for_packing(wrapped)
    assert inputs.attention == "varlen"
    assert worst(wrapped, inputs, build("llama")) < 1e-5


def test_packs_of_other_lengths_reuse_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of 1 to 20 samples of 1 to 30 tokens; the graph is right for each of them."""
    torch._dynamo.reset()
    monkeypatch.setattr(varlen, "_attend_sequences", attend)
    counter = CompileCounterWithBackend("eager")
    model = torch.compile(build("gemma3_text"), backend=counter, fullgraph=True)
    inputs = prepare_model_for_packing(model, attention="varlen")
    generator = torch.Generator().manual_seed(0)
    shapes = set()
    for number in range(12):
        lengths = [1 + 3 * number % 30] if number % 2 else [1] * (1 + number % 20)
        batch = pack_of(torch.randint(3, VOCAB, (1, MAX_SEQ_LEN), generator=generator), lengths)
        shapes.add(batch.seq_lens.shape)
        model(**inputs(batch)).logits.sum().backward()
    assert len(shapes) > 5
    assert counter.frame_count == 1
    assert worst(model, inputs, build("gemma3_text")) < 1e-5


def gradient_of(model: nn.Module, logits: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    logits.square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return torch.cat(
        [g.full_tensor().flatten() if isinstance(g, DTensor) else g.flatten() for g in gradients]
    )


def sharded(family: str, batch: Batch) -> tuple[list[float], bool, bool]:
    """On one of several ranks, which all have the same packs: packed against alone, of logits and gradient.

    Also whether the probe, which must shard layers again, finds the model right with its inputs and leaking without.
    """
    torch.distributed.init_process_group("gloo")
    try:
        model = build(family)
        tokens = [batch.tokens[p, s : s + f.stop - f.start] for p, s, f in placed(batch)]
        right = torch.cat([model(input_ids=each[None], use_cache=False).logits[0] for each in tokens])
        gradient = gradient_of(model, right)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        inputs = prepare_model_for_packing(model, attention="varlen")
        plain = {"max_seq_len": MAX_SEQ_LEN, "inputs": lambda batch: {"input_ids": batch.tokens}}
        verdicts = [find_leaks(model, **(plain | changes)).ok for changes in ({"inputs": inputs}, {})]
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        logits = model(**inputs(batch)).logits
        packed = torch.cat([logits[p, s : s + f.stop - f.start] for p, s, f in placed(batch)])
        pairs = [(packed, right), (gradient_of(model, packed), gradient)]
        return [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs], *verdicts
    finally:
        torch.distributed.destroy_process_group()


def test_sharded_over_two_ranks() -> None:
    _, batch = stream_and_batch("overlong")
    for found, right, wrong in run_ranks(sharded, 2, "gemma3_text", batch):
        assert max(found) < 1e-5, found
        assert (right, wrong) == (True, False)


# Families of which nothing is known.


@pytest.mark.parametrize(
    ("family", "attention", "sizes"),
    [
        ("cohere2", "varlen", WINDOW | {"layer_norm_eps": 1e-5}),
        ("olmoe", "dense", EXPERTS),
        ("opt", "dense", OPT),
    ],
    ids=["cohere2", "olmoe", "opt"],
)
def test_an_unknown_family_is_tried(family: str, attention: str, sizes: dict[str, Any]) -> None:
    """One that passes also gives the logits and gradients of each sample alone; opt leaks without masks."""
    assert family not in PROVEN
    model, inputs, alone = prepared(family, attention, **sizes)
    assert worst(model, inputs, alone) < 1e-5
    assert inputs.masks or family != "opt"
    assert find_leaks(model).ok, "the inputs are made again in the same way"


def test_a_family_that_selects_keys_is_given_masks() -> None:
    """Without them it would attend to all keys, which only packs longer than ``index_topk`` show."""
    sizes = sizes_of("deepseek_v32") | {"index_topk": 1024}
    with pytest.raises(
        ValueError, match="deepseek_v32 selects keys under a mask, which varlen does not read"
    ):
        prepare_model_for_packing(build("deepseek_v32", **sizes), attention="varlen")
    assert prepare_model_for_packing(build("deepseek_v32", **sizes)).attention == "dense"


def test_an_unknown_family_that_leaks_is_refused() -> None:
    model = build("bert", is_decoder=False)
    before = model.config._attn_implementation
    with pytest.raises(ValueError) as error:
        prepare_model_for_packing(model)
    message = str(error.value)
    for part in (
        "bert attends to tokens ahead (is_causal=False), and a pack's masks hide them; ",
        "attention='dense' will not do: nothing is known of bert, and it failed a try: ",
        "changing sample 1 moved sample 0 by",
        "a token sees what comes after it",
        "; use padded batches, one sample a row",
    ):
        assert part in message
    assert model.config._attn_implementation == before, "left as it was found"


def test_an_unknown_family_that_fails_is_refused() -> None:
    model = build("opt", **OPT)
    with (
        patch.object(type(model), "forward", lambda self, input_ids: input_ids),
        pytest.raises(ValueError, match="it failed a try: TypeError: .*unexpected keyword argument"),
    ):
        prepare_model_for_packing(model, attention="varlen")
    assert model.config._attn_implementation == "sdpa", "left as it was found"


@pytest.mark.parametrize(("family", "attention"), [("falcon", "dense"), ("llama", "varlen")])
def test_the_probe_calls_models_as_they_were_prepared(family: str, attention: str) -> None:
    model = build(family)
    report = find_leaks(model)
    assert "sample" in {leak.kind for leak in report.leaks}, (
        "a falcon needs more than positions, a llama no cache"
    )
    prepare_model_for_packing(model, attention=attention)
    assert find_leaks(model).ok
    for wrapped in (Wrapper(model), torch.compile(model, backend="eager")):
        assert find_leaks(wrapped).ok  # type: ignore[arg-type]
    report = find_leaks(model, inputs=lambda batch: {"input_ids": batch.tokens})
    assert not report.ok, "inputs that are given hold"


def test_the_probe_calls_a_model_without_positions() -> None:
    report = find_leaks(build("bloom", **HYBRIDS["bloom"]))
    assert "sample" in {leak.kind for leak in report.leaks}


REFUSED: list[tuple[Callable[[], Any], str, str]] = [
    (
        lambda: build("llama", attention_dropout=0.1),
        "varlen",
        r"the model drops out attention weights \(0.1\), which varlen cannot; use 'dense'",
    ),
    (
        lambda: build("gpt_oss", output_router_logits=True),
        "dense",
        "its router's loss .output_router_logits. cannot read",
    ),
    (
        lambda: Wrapper(build("llama"), prompt_learning=True),
        "auto",
        "prompt tuning trains tokens before each row",
    ),
    (lambda: build("llama").model.norm, "auto", "LlamaRMSNorm holds no PreTrainedModel, so nothing is known"),
    (
        lambda: build("opt", **OPT).to("meta"),
        "auto",
        "it has no weights yet; prepare it when they are loaded",
    ),
]


@pytest.mark.parametrize(("make", "attention", "message"), REFUSED, ids=range(len(REFUSED)))
def test_models_that_are_refused(make: Callable[[], Any], attention: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_model_for_packing(make(), attention=attention)


def test_dropout_of_the_attention_is_kept_by_dense() -> None:
    assert prepare_model_for_packing(build("llama", attention_dropout=0.1)).attention == "dense"


def test_attention_sinks_are_refused_by_name() -> None:
    from transformers import AttentionInterface

    model = build("llama")
    prepare_model_for_packing(model, attention="varlen")
    attend = AttentionInterface()["streampack_varlen"]
    heads = torch.randn(1, 2, 4, 8)
    boundaries = torch.tensor([[0, 4]], dtype=torch.int32)
    with pytest.raises(
        ValueError, match="^attention='varlen' has no attention sinks; use attention='dense' or"
    ):
        attend(model, heads, heads, heads, boundaries, s_aux=torch.ones(2))


def cache_left_on(_model: nn.Module, batch: Batch, inputs: Any) -> dict[str, Any]:
    return inputs(batch) | {"use_cache": True}


def mask_given(_model: nn.Module, batch: Batch, inputs: Any) -> dict[str, Any]:
    return inputs(batch) | {"attention_mask": torch.ones_like(batch.tokens)}


def positions_run_on(_model: nn.Module, batch: Batch, inputs: Any) -> dict[str, Any]:
    return inputs(batch) | {"position_ids": torch.arange(MAX_SEQ_LEN).expand_as(batch.tokens)}


def fragment_begins_at_1(_model: nn.Module, batch: Batch, inputs: Any) -> dict[str, Any]:
    """A sample of one token, then a fragment whose positions go on from 1: transformers sees one sequence."""
    positions, seq_lens = inputs(batch)["position_ids"].clone(), batch.seq_lens.tolist()
    hits = 0
    for row, lengths in enumerate(seq_lens):
        for number in range(len(lengths) - 1):
            if lengths[number] == 1 and lengths[number + 1] > 1:
                start = sum(lengths[: number + 1])
                positions[row, start : start + lengths[number + 1]] += 1
                hits += 1
    assert hits
    return inputs(batch) | {"position_ids": positions}


def one_mask_for_all_layers(_model: nn.Module, batch: Batch, inputs: Any) -> dict[str, Any]:
    """It has no window."""
    return inputs(batch) | {"attention_mask": dense_mask(batch.seq_lens, max_seq_len=MAX_SEQ_LEN)[:, None]}


MISTAKES = [
    (cache_left_on, "mistral", "dense"),
    (mask_given, "mistral", "dense"),
    (positions_run_on, "mistral", "dense"),
    (positions_run_on, "gpt2", "varlen"),
    (fragment_begins_at_1, "mistral", "dense"),
    (one_mask_for_all_layers, "mistral", "dense"),
]


@pytest.mark.parametrize(("mistake", "family", "attention"), MISTAKES)
def test_a_planted_mistake_changes_logits_and_gradients(mistake: Any, family: str, attention: str) -> None:
    """By orders of magnitude in logits and gradients; and the probe finds each of them."""
    data, batch = stream_and_batch("overlong")
    model, inputs, alone = prepared(family, attention)
    wrong = run_packed(model, batch, lambda batch: mistake(model, batch, inputs))
    found = differences(wrong, run_alone(alone, data, batch))
    assert found["logits"] > 1e-2
    assert found["gradient"] > 1e-2
    report = find_leaks(model, inputs=lambda batch: mistake(model, batch, inputs), max_seq_len=MAX_SEQ_LEN)
    kinds = {"alone"} if mistake in (one_mask_for_all_layers,) or family == "gpt2" else {"sample"}
    assert kinds <= {leak.kind for leak in report.leaks}, report
    assert report.worst > 100 * report.limit


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["dense", "flex", "varlen"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "gpt_oss"])
def test_packed_samples_match_samples_alone_on_cuda(family: str, attention: str) -> None:
    """In fp32 as on a CPU; varlen, which has 16 bits only, within what bf16 itself does to the sample alone."""
    if (family, attention) in WITHOUT or (family, attention) == ("gemma2", "varlen"):
        pytest.skip("refused")
    data, batch = stream_and_batch("overlong")
    batch, alone = batch.to("cuda"), build(family).cuda()
    with torch.no_grad():
        theirs = [
            alone(input_ids=own(data, f, "tokens")[None].cuda(), use_cache=False).logits[0]
            for _, _, f in placed(batch)
        ]
        right = torch.cat(theirs)
        dtype = torch.bfloat16 if attention == "varlen" else torch.float32
        model = build(family).cuda().to(dtype)
        logits = model(**prepare_model_for_packing(model, attention=attention)(batch)).logits
        packed = [logits[pack, start : start + f.stop - f.start] for pack, start, f in placed(batch)]
        limit = 1e-5
        if dtype == torch.bfloat16:
            low = alone.to(dtype)
            theirs = [
                low(input_ids=own(data, f, "tokens")[None].cuda(), use_cache=False).logits[0]
                for _, _, f in placed(batch)
            ]
            limit = 2 * float((torch.cat(theirs).float() - right).norm() / right.norm())
    assert float((torch.cat(packed).float() - right).norm() / right.norm()) < limit
