"""Packed equals alone, for every family of Hugging Face models and every attention, or a refusal with the reason.

Packs come from a stream and hold samples of one token, fragments and padding. The packed side is a prepared model; the
other side is an unprepared one, which gets one unpadded sequence at a time. `make test` runs one family for each
mechanism; `make test-slow` and `make models` run all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
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

from streampack import (
    Batch,
    find_leaks,
    prepare_model_for_packing,
)
from streampack.attention import dense_mask, varlen
from streampack.attention.probe_pack import pack_of
from tests.support.compiled import attend_in_graph
from tests.support.hf_models import (
    FAMILIES,
    MAX_SEQ_LEN,
    VOCAB,
    WITHOUT,
    Wrapper,
    build,
    fp64_throughout,
    prepared,
    run_alone,
    run_packed,
)
from tests.support.hybrid_models import HYBRIDS
from tests.support.isolation import differences, is_padding, own, placed, stream_and_batch
from tests.support.models_table import EVERY, LIMITS, PAGE, VARIABLE, figures, over_the_limit, read_page
from tests.support.other_families import ISOLATED
from tests.support.quick import MECHANISMS, sweep
from tests.support.ranks import run_ranks
from tests.support.vision_models import VISION_FAMILIES

pytest.importorskip("transformers")

ATTENTIONS = ("dense", "flex", "varlen")
Record = Callable[[str, str, str, str], None]

# Uncompiled: compiling takes a minute a family.
uncompiled_flex = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile:UserWarning",
    "ignore::DeprecationWarning",
)


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("family", sweep(FAMILIES, MECHANISMS))
def test_packed_samples_match_samples_alone(family: str, attention: str, record_model: Record) -> None:
    if why := WITHOUT.get((family, attention)):
        refuses(family, attention, why, record_model)
        return
    data, batch = stream_and_batch("overlong")
    seen = {}
    for dtype in (torch.float32, torch.float64):
        model, inputs, alone = prepared(family, attention, dtype)
        assert inputs.attention == attention
        with fp64_throughout() if dtype == torch.float64 else nullcontext():
            found = differences(run_packed(model, batch, inputs), run_alone(alone, data, batch))
        if dtype == torch.float32:
            seen = {name: found[name] for name in ("logits", "gradient")}
        else:
            seen["fp64"] = found["gradient"]
    seen["gradients"] = seen.pop("gradient")
    seen["fp64"] = seen.pop("fp64")
    assert all(seen[name] < LIMITS[name] for name in seen), seen
    on_cpus = ", on a CPU; on CUDA use another" if (family, attention) == ("gemma2", "varlen") else ""
    record_model("transformers", family, attention, figures(**seen) + on_cpus)


@uncompiled_flex
@pytest.mark.parametrize("stream", ["padded", "padded wrap"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padded_samples_match_samples_alone(attention: str, stream: str) -> None:
    """Padding at the ends of sequences is attended by nothing before it, and has no gradient."""
    data, batch = stream_and_batch(stream)
    model, inputs, alone = prepared("llama", attention)
    if attention == "flex":  # it has no backward pass on a CPU
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            packed = model(**inputs(batch)).logits[~is_padding(batch)]
            each = [
                alone(input_ids=own(data, fragment, "tokens")[None], use_cache=False).logits[0]
                for _, _, fragment in placed(batch)
            ]
        assert float((packed - torch.cat(each)).norm() / packed.norm()) < 1e-5
    else:
        found = differences(run_packed(model, batch, inputs), run_alone(alone, data, batch))
        assert max(found.values()) < 1e-5, found


def refuses(family: str, attention: str, why: str, record_model: Record) -> None:
    model = build(family)
    before = model.config._attn_implementation
    with pytest.raises(ValueError) as error:
        prepare_model_for_packing(model, attention=attention)
    assert str(error.value).startswith(f"attention='{attention}' will not do: {why}; use 'dense'")
    assert model.config._attn_implementation == before
    record_model("transformers", family, attention, f"refused: {why}")


@uncompiled_flex
@pytest.mark.parametrize("family", sweep(FAMILIES, MECHANISMS))
def test_flex_packed_samples_match_samples_alone(family: str, record_model: Record) -> None:
    """The forward pass, which is all that torch's flex attention has on a CPU."""
    if why := WITHOUT.get((family, "flex")):
        refuses(family, "flex", why, record_model)
        return
    data, batch = stream_and_batch("overlong")
    model, inputs, alone = prepared(family, "flex")
    if family == "gpt_oss":
        with (
            torch.compiler.set_stance("force_eager"),
            pytest.raises(ValueError, match="cannot be run on CPU"),
        ):
            model(**inputs(batch))
        record_model("transformers", family, "flex", "on CUDA only")
        return
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logits = model(**inputs(batch)).logits
        packed = [
            logits[pack, start : start + fragment.stop - fragment.start]
            for pack, start, fragment in placed(batch)
        ]
        ours = torch.cat(packed)
        theirs = torch.cat(
            [
                alone(input_ids=own(data, f, "tokens")[None], use_cache=False).logits[0]
                for _, _, f in placed(batch)
            ]
        )
    difference = float((ours - theirs).norm() / theirs.norm())
    assert difference < LIMITS["logits"]
    record_model("transformers", family, "flex", figures(logits=difference))


@pytest.mark.parametrize(
    ("family", "attention"),
    [pytest.param(family, "dense", marks=pytest.mark.slow) for family in FAMILIES]
    + [
        pytest.param(*family.values, "varlen", marks=family.marks)
        for family in sweep(FAMILIES, MECHANISMS)
        if (family.values[0], "varlen") not in WITHOUT
    ],
)
def test_the_probe_finds_no_leak(family: str, attention: str) -> None:
    model, inputs, _ = prepared(family, attention)
    report = find_leaks(model, inputs=inputs, max_seq_len=MAX_SEQ_LEN)
    assert report.ok, report
    assert not report.blind


def test_attention_dropout_needs_the_dense_backend() -> None:
    model = build("llama", attention_dropout=0.1)
    assert prepare_model_for_packing(model).attention == "dense"
    with pytest.raises(
        ValueError, match=r"the model drops out attention weights \(0.1\), which varlen cannot; use 'dense'"
    ):
        prepare_model_for_packing(model, attention="varlen")


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


@pytest.mark.parametrize("family", ["mistral", "gemma2"])
def test_a_prepared_model_without_inputs_computes_what_it_did_before(family: str) -> None:
    """Padded batches and generating still work, windows, softcaps, cache and all."""
    model, _, alone = prepared(family, "varlen")
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
    data, batch = stream_and_batch("overlong")
    model, inputs, alone = prepared("mixtral", "varlen", output_router_logits=True)
    assert model(**inputs(batch)).aux_loss > 0
    assert max(differences(run_packed(model, batch, inputs), run_alone(alone, data, batch)).values()) < 1e-5
    with pytest.raises(ValueError, match="its router's loss .output_router_logits. cannot read"):
        prepare_model_for_packing(build("gpt_oss", output_router_logits=True), attention="dense")


def test_checkpointed_layers() -> None:
    data, batch = stream_and_batch("overlong")
    model, inputs, alone = prepared("qwen3", "varlen")
    model.train().activation_checkpointing_enable()
    assert max(differences(run_packed(model, batch, inputs), run_alone(alone, data, batch)).values()) < 1e-5


def test_a_wrapped_model() -> None:
    data, batch = stream_and_batch("overlong")
    model = Wrapper(build("llama"))
    inputs = prepare_model_for_packing(model)
    assert inputs.attention == "varlen"
    assert (
        max(differences(run_packed(model, batch, inputs), run_alone(build("llama"), data, batch)).values())
        < 1e-5
    )
    with pytest.raises(ValueError, match="prompt tuning trains tokens before each row"):
        prepare_model_for_packing(Wrapper(build("llama"), prompt_learning=True))
    with pytest.raises(ValueError, match="LlamaRMSNorm holds no PreTrainedModel, so nothing is known"):
        prepare_model_for_packing(build("llama").model.norm)


def test_packs_of_other_lengths_reuse_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of 1 to 20 samples of 1 to 30 tokens; the graph is right for each of them."""
    torch._dynamo.reset()
    monkeypatch.setattr(varlen, "_attend_sequences", attend_in_graph)
    data, real = stream_and_batch("overlong")
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
    found = differences(run_packed(model, real, inputs), run_alone(build("gemma3_text"), data, real))
    assert max(found.values()) < 1e-5


def gradient_of(model: nn.Module, logits: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    logits.square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return torch.cat(
        [g.full_tensor().flatten() if isinstance(g, DTensor) else g.flatten() for g in gradients]
    )


def sharded(family: str, attention: str, batch: Batch) -> list[float]:
    """On one of several ranks, which all have the same packs: packed against alone, of logits and gradient."""
    torch.distributed.init_process_group("gloo")
    try:
        model = build(family)
        tokens = [batch.tokens[p, s : s + f.stop - f.start] for p, s, f in placed(batch)]
        right = torch.cat([model(input_ids=each[None], use_cache=False).logits[0] for each in tokens])
        gradient = gradient_of(model, right)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        logits = model(**prepare_model_for_packing(model, attention=attention)(batch)).logits
        packed = torch.cat([logits[p, s : s + f.stop - f.start] for p, s, f in placed(batch)])
        pairs = [(packed, right), (gradient_of(model, packed), gradient)]
        return [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs]
    finally:
        torch.distributed.destroy_process_group()


def test_sharded_over_two_ranks() -> None:
    _, batch = stream_and_batch("overlong")
    for found in run_ranks(sharded, 2, "gemma3_text", "varlen", batch):
        assert max(found) < 1e-5, found


# Mistakes of users that must show: each is a wrong call of a right model.


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


def test_a_window_that_only_masks_have() -> None:
    """transformers passes no window to qwen2_moe's attention function, and varlen gets no masks."""
    data, batch = stream_and_batch("overlong")
    model, inputs, alone = prepared("qwen2_moe", "varlen")
    with patch("streampack.attention.registered.window_of", lambda *_: None):
        wrong = run_packed(model, batch, inputs)
        report = find_leaks(model, inputs=inputs, max_seq_len=MAX_SEQ_LEN)
    assert differences(wrong, run_alone(alone, data, batch))["logits"] > 1e-2
    assert {leak.kind for leak in report.leaks} == {"alone"}


def test_the_figures_of_the_page_are_within_the_limits() -> None:
    if VARIABLE in os.environ:
        pytest.skip("the page is being written")
    written = {
        key: value
        for key, value in read_page(PAGE.read_text(encoding="utf-8")).items()
        if key[0] == "transformers"
    }
    assert {key: over for key, outcome in written.items() if (over := over_the_limit(outcome))} == {}
    assert {family for _, family, backend in written if backend != EVERY} == {
        *FAMILIES,
        *HYBRIDS,
        *VISION_FAMILIES,
        *ISOLATED,
    }


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
