"""Packed equals alone, for every family of Hugging Face models and every attention, or a refusal that says why.

Packs come from the real stream and hold samples of one token, fragments and padding. The packed side is a model
prepared as users do it; the other side is a second, untouched model, which sees one unpadded sequence at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from streampack import (
    IGNORE_INDEX,
    Batch,
    IterablePackedDataset,
    collate_packed,
    find_leaks,
    prepare_model_for_packing,
)
from streampack.attention import dense_mask, varlen
from streampack.attention.families import PROVEN
from streampack.attention.probe_pack import pack_of
from streampack.losses import summed_cross_entropy
from tests.attention.test_packed_equals_alone import Run, differences, own, placed, run_of, stream_and_batch
from tests.support.compiled import attend_in_graph
from tests.support.hf_models import EXPERTS, FAMILIES, HEADS, MAX_SEQ_LEN, VOCAB, WINDOW, build
from tests.support.models_table import EVERY, LIMITS, PAGE, VARIABLE, figures, over_the_limit, read_page
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")

ATTENTIONS = ("dense", "flex", "varlen")
Record = Callable[[str, str, str, str], None]

# Compiling it takes a minute a family here. The others are transformers' and torch's own affair.
uncompiled_flex = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile:UserWarning",
    "ignore::DeprecationWarning",
)

# Where an attention cannot compute a family on any device, and what the refusal says.
WITHOUT = {
    ("falcon", "flex"): "falcon has its attention written into its layers",
    ("falcon", "varlen"): "falcon has its attention written into its layers",
    ("stablelm", "flex"): "transformers has no flex attention for stablelm",
    ("gpt2", "flex"): "transformers has no flex attention for gpt2",
    ("gpt_oss", "varlen"): "gpt_oss has attention sinks, which varlen does not compute",
}
# With varlen, the chunks of llama4 must be longer than the packs.
CHANGES = {("llama4_text", "varlen"): {"attention_chunk_size": MAX_SEQ_LEN}}


@contextmanager
def fp64_throughout() -> Iterator[None]:
    """Some families turn numbers into fp32 in the middle (gemma2 its softmax, llama4 its RoPE): here they stay."""
    softmax, to_float = F.softmax, torch.Tensor.float
    with (
        patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x)),
        patch.object(F, "softmax", lambda scores, dim, dtype=None: softmax(scores, dim)),
    ):
        yield


def run_packed(model: nn.Module, batch: Batch, inputs: Callable[[Batch], dict[str, Any]]) -> Run:
    logits = model(**inputs(batch)).logits
    loss = summed_cross_entropy(logits, batch.labels, chunk_size=50) / batch.num_trained
    real = [sum(fragment.stop - fragment.start for fragment in pack) for pack in batch.fragments]
    return run_of(model, loss, [row[:length] for row, length in zip(logits, real, strict=True)])


def run_alone(model: nn.Module, data: IterablePackedDataset, batch: Batch) -> Run:
    loss, trained, logits = torch.zeros(()), 0, []
    for _, _, fragment in placed(batch):
        tokens, labels = own(data, fragment, "tokens"), own(data, fragment, "labels")
        logits.append(model(input_ids=tokens[None], use_cache=False).logits[0])
        if count := int((labels[1:] != IGNORE_INDEX).sum()):
            loss = loss + count * F.cross_entropy(logits[-1][:-1], labels[1:])
            trained += count
    return run_of(model, loss / trained, logits)


def prepared(family: str, attention: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """(the model, its inputs, the same model untouched)."""
    changes |= CHANGES.get((family, attention), {})
    model = build(family, dtype, **changes)
    return model, prepare_model_for_packing(model, attention=attention), build(family, dtype, **changes)


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_alone(family: str, attention: str, record_model: Record) -> None:
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


def refuses(family: str, attention: str, why: str, record_model: Record) -> None:
    model = build(family)
    before = model.config._attn_implementation
    with pytest.raises(ValueError) as error:
        prepare_model_for_packing(model, attention=attention)
    assert str(error.value).startswith(f"attention='{attention}' will not do: {why}; use 'dense'")
    assert model.config._attn_implementation == before
    record_model("transformers", family, attention, f"refused: {why}")


@uncompiled_flex
@pytest.mark.parametrize("family", FAMILIES)
def test_flex_packed_is_alone(family: str, record_model: Record) -> None:
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


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_probe_finds_nothing_either(family: str, attention: str) -> None:
    if (family, attention) not in WITHOUT:
        model, inputs, _ = prepared(family, attention)
        report = find_leaks(model, inputs=inputs, max_seq_len=MAX_SEQ_LEN)
        assert report.ok, report
        assert not report.blind


def test_every_proven_family_is_proven() -> None:
    assert set(FAMILIES) == PROVEN


HYBRID = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
STATE = "carries a state from token to token, over the ends of samples, and attention masks do not reach it"
ALIBI = "adds a bias for the distance of tokens (ALiBi) counted from the start of the pack"
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": (STATE, {"state_size": 4}),
    "mamba2": (STATE, {"state_size": 4, "num_heads": 8, "head_dim": 16, "n_groups": 1}),
    "falcon_mamba": (STATE, {}),
    "recurrent_gemma": (STATE, {"head_dim": 16, "lru_width": 64}),
    "rwkv": (STATE, {}),
    "lfm2": (STATE, {"layer_types": ["conv", "full_attention"]}),
    "minimax": (STATE, {"head_dim": 16, "num_local_experts": 4}),
    "qwen3_next": (STATE, HYBRID | {"linear_value_head_dim": 8, "num_experts": 4, "head_dim": 16}),
    "falcon": (ALIBI, {"alibi": True}),
    "bloom": (ALIBI, {"n_head": 4, "n_layer": 2}),
    "mpt": (ALIBI, {"d_model": 64, "n_heads": 4, "n_layers": 2}),
    "t5": ("is an encoder-decoder model", {"d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 48}),
    "gemma3_text": ("sees tokens to the right", {"use_bidirectional_attention": True}),
}


@pytest.mark.parametrize("attention", ["auto", "dense"])
@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_isolated_is_refused(family: str, attention: str, record_model: Record) -> None:
    why, changes = REFUSED[family]
    model = build(family, **changes)
    with pytest.raises(ValueError) as error:
        prepare_model_for_packing(model, attention=attention)
    assert str(error.value).startswith(f"this model cannot be packed: {family} {why}")
    assert str(error.value).endswith("; train it on padded batches, one sample a row")
    name = f"{family}, {next(iter(changes))}" if family in FAMILIES else family
    record_model("transformers", name, EVERY, "refused: " + str(error.value).split(f"{family} ", 1)[1])


@pytest.mark.parametrize("family", ["mamba", "bloom", "mpt", "lfm2"])
def test_refusals_are_earned(family: str) -> None:
    """These leak for a fact, when they are given what a llama needs."""

    def logits(batch: Batch) -> torch.Tensor:
        positions = {} if family in ("mamba", "bloom", "mpt") else {"position_ids": batch.input_pos}
        output: torch.Tensor = model(input_ids=batch.tokens, use_cache=False, **positions).logits
        return output

    model = build(family, **REFUSED[family][1])
    report = find_leaks(logits, vocab_size=VOCAB, max_seq_len=MAX_SEQ_LEN)
    assert {leak.kind for leak in report.leaks} >= {"sample"}


UNKNOWN_BUT_FIT: dict[str, dict[str, Any]] = {
    "cohere2": WINDOW | {"layer_norm_eps": 1e-5},
    "olmoe": EXPERTS,
    "glm4": HEADS,
    "exaone4": WINDOW,
}


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("family", UNKNOWN_BUT_FIT)
def test_an_unknown_family_is_tried(family: str, attention: str) -> None:
    """And what passes the probe passes this test too."""
    assert family not in PROVEN
    data, batch = stream_and_batch("overlong")
    model, inputs, alone = prepared(family, attention, **UNKNOWN_BUT_FIT[family])
    found = differences(run_packed(model, batch, inputs), run_alone(alone, data, batch))
    assert max(found.values()) < 1e-5


OPT = {"ffn_dim": 48, "word_embed_proj_dim": 64}


def test_an_unknown_family_that_leaks_is_refused() -> None:
    model = build("opt", **OPT)
    with pytest.raises(ValueError) as error:
        prepare_model_for_packing(model, attention="dense")
    message = str(error.value)
    assert "attention='dense' will not do: nothing is known of opt, and it failed a try: 9 leaks" in message
    assert "changing sample 0 moved sample 1 by" in message
    assert message.endswith("; use 'flex' or 'varlen'")
    assert model.config._attn_implementation == "sdpa", "left as it was found"
    assert model.config.use_cache
    assert prepare_model_for_packing(model, attention="auto").attention == "varlen"


def test_an_unknown_family_that_fails_is_refused() -> None:
    """Its class has no argument use_cache, or whatever goes wrong in code nobody has seen."""
    model = build("opt", **OPT)
    with (
        patch.object(type(model), "forward", lambda self, input_ids: input_ids),
        pytest.raises(ValueError, match="it failed a try: TypeError: .*unexpected keyword argument"),
    ):
        prepare_model_for_packing(model, attention="varlen")
    assert model.config._attn_implementation == "sdpa", "left as it was found"


@pytest.mark.parametrize(("family", "attention"), [("falcon", "dense"), ("llama", "varlen")])
def test_the_probe_knows_how_models_are_called(family: str, attention: str) -> None:
    """As they were prepared; it used to hand them a Batch, which raised a TypeError from deep within."""
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


def test_the_probe_takes_a_cache_for_what_it_is() -> None:
    """A model that was never prepared ignores positions, and the probe says so."""
    model = build("llama")
    report = find_leaks(model)
    assert "sample" in {leak.kind for leak in report.leaks}
    model.config.use_cache = False
    assert find_leaks(model).ok
    assert model.config._attn_implementation == "sdpa"


def test_the_probe_calls_a_model_without_positions() -> None:
    report = find_leaks(build("bloom", **REFUSED["bloom"][1]))
    assert "sample" in {leak.kind for leak in report.leaks}


def test_an_unknown_family_without_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="it has no weights yet; prepare it when they are loaded"):
        prepare_model_for_packing(build("opt", **OPT).to("meta"))


def long_batch(length: int) -> Batch:
    rows = [{"tokens": [7] * (length - 2), "labels": [7] * (length - 2)}]
    return collate_packed(list(IterablePackedDataset(rows, max_seq_len=length)))


LONGROPE = {
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 2.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    },
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "attention", "changes", "longest", "why"),
    [
        ("phi3", "dense", LONGROPE, 16, "longrope RoPE turns all samples"),
        ("llama", "varlen", {"rope_parameters": DYNAMIC}, MAX_SEQ_LEN, "dynamic RoPE turns all samples"),
        ("llama4_text", "dense", {"floor_scale": 8}, 7, "scale queries by their place in the pack"),
        ("llama4_text", "varlen", {"attention_chunk_size": 8}, 8, "varlen does not cut samples into chunks"),
    ],
)
def test_packs_too_long_for_the_model_are_refused(
    family: str, attention: str, changes: dict[str, Any], longest: int, why: str
) -> None:
    inputs = prepare_model_for_packing(build(family, **changes), attention=attention)
    inputs(long_batch(longest))
    with pytest.raises(ValueError) as error:
        inputs(long_batch(longest + 1))
    assert str(error.value).startswith(f"max_seq_len is {longest + 1}, but a packed {family} model")
    assert f"up to {longest}: " in str(error.value)
    assert why in str(error.value)
    assert str(error.value).endswith(f"set max_seq_len={longest} or less")


def test_longer_packs_would_have_been_wrong() -> None:
    """Nothing leaks, yet samples are not what they are alone: RoPE, or the place in the pack, follows the others."""
    for family, changes in (("phi3", LONGROPE), ("llama4_text", {"floor_scale": 8})):
        with patch("streampack.attention.transformers.longest_pack", lambda *_: None):
            model, inputs, _ = prepared(family, "dense", **changes)
            report = find_leaks(model, inputs=inputs, max_seq_len=64)
        assert {leak.kind for leak in report.leaks} == {"alone"}


@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_dropout_on_attention(attention: str) -> None:
    model = build("llama", attention_dropout=0.1)
    if attention == "dense":
        assert prepare_model_for_packing(model).attention == "dense"
        return
    with pytest.raises(
        ValueError, match=r"the model drops out attention weights \(0.1\), which varlen cannot; use 'dense'"
    ):
        prepare_model_for_packing(model, attention=attention)


def test_flash_without_cuda_says_so() -> None:
    with pytest.raises(ValueError, match="attention='flash' needs CUDA, the model is on cpu"):
        prepare_model_for_packing(build("llama"), attention="flash")


def test_positions_come_from_the_lengths() -> None:
    """torchtune's own packs, for one, may begin a fragment at another position than 0."""
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


def test_preparing_twice_and_changing_ones_mind() -> None:
    data, batch = stream_and_batch("overlong")
    model, alone = build("mistral"), build("mistral")
    right = run_alone(alone, data, batch)
    for attention in ("varlen", "varlen", "dense", "auto"):
        inputs = prepare_model_for_packing(model, attention=attention)
        assert max(differences(run_packed(model, batch, inputs), right).values()) < 1e-5
    assert model.config.use_cache, "or it would be saved so"
    assert all(len(module._forward_pre_hooks) <= 1 for module in model.modules())


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2_moe", "gemma3_text"])
def test_a_prepared_model_is_saved_and_generates_as_before(
    family: str, attention: str, tmp_path: Path
) -> None:
    """A saved ``use_cache: false`` would slow down whoever generates with it, in silence."""
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


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("family", ["mistral", "gpt2", "qwen2_moe", "stablelm"])
def test_a_prepared_model_is_what_it_was_without_inputs(family: str, attention: str) -> None:
    """Padded batches and generating still work, windows, cache and all."""
    model, _, alone = prepared(family, attention)
    tokens = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    with torch.no_grad():
        ours, theirs = (m(input_ids=tokens, attention_mask=mask).logits for m in (model, alone))
        torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()])
        settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
        assert model.generate(tokens, **settings).equal(alone.generate(tokens, **settings))


def test_a_router_that_learns() -> None:
    """Its loss reads a mask of tokens, so boundaries must not travel in the mask's place."""
    data, batch = stream_and_batch("overlong")
    model, inputs, alone = prepared("mixtral", "varlen", output_router_logits=True)
    assert model(**inputs(batch)).aux_loss > 0
    assert max(differences(run_packed(model, batch, inputs), run_alone(alone, data, batch)).values()) < 1e-5
    with pytest.raises(ValueError, match="its router's loss .output_router_logits. cannot read"):
        prepare_model_for_packing(build("gpt_oss", output_router_logits=True), attention="dense")


@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_checkpointed_layers(attention: str) -> None:
    data, batch = stream_and_batch("overlong")
    model, inputs, alone = prepared("qwen3", attention)
    model.train().activation_checkpointing_enable()
    assert max(differences(run_packed(model, batch, inputs), run_alone(alone, data, batch)).values()) < 1e-5


class Wrapper(nn.Module):
    """As PEFT, DDP and FSDP do: the model is a part of it."""

    def __init__(self, module: nn.Module, *, prompt_learning: bool = False) -> None:
        super().__init__()
        self.module = module
        self.active_peft_config = SimpleNamespace(is_prompt_learning=prompt_learning)

    def forward(self, **inputs: Any) -> Any:
        return self.module(**inputs)


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


def test_other_packs_need_no_other_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of 1 to 20 samples of 1 to 30 tokens; the graph is right for each of them."""
    torch._dynamo.reset()
    monkeypatch.setattr(varlen, "_attend_each", attend_in_graph)
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


# Mistakes that users make, and that this file must see: each is a wrong call of a right model.


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


def boundary_a_token_late(_model: nn.Module, batch: Batch, inputs: Any) -> dict[str, Any]:
    late = batch.seq_lens.tolist()
    for lengths in late:
        number = next((n for n in range(1, len(lengths)) if lengths[n] > 1), None)
        if number is not None:
            lengths[number - 1] += 1
            lengths[number] -= 1
    assert late != batch.seq_lens.tolist()
    return inputs(replace(batch, seq_lens=batch.seq_lens.new_tensor(late)))


MISTAKES = [
    (cache_left_on, "mistral", "dense"),
    (mask_given, "mistral", "dense"),
    (positions_run_on, "mistral", "dense"),
    (positions_run_on, "gpt2", "varlen"),
    (fragment_begins_at_1, "mistral", "dense"),
    (one_mask_for_all_layers, "mistral", "dense"),
    (boundary_a_token_late, "mistral", "dense"),
    (boundary_a_token_late, "mistral", "varlen"),
    (boundary_a_token_late, "gpt_oss", "dense"),
]


@pytest.mark.parametrize(("mistake", "family", "attention"), MISTAKES)
def test_a_mistake_shows(mistake: Any, family: str, attention: str) -> None:
    """By orders of magnitude, in the logits and in the gradients, and the probe sees each of them too."""
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


def test_a_window_that_the_attention_function_is_not_told_of() -> None:
    """transformers gives qwen2_moe's attention none, and masks that have it. varlen gets no masks."""
    data, batch = stream_and_batch("overlong")
    model, inputs, alone = prepared("qwen2_moe", "varlen")
    with patch("streampack.attention.transformers.window_of", lambda *_: None):
        wrong = run_packed(model, batch, inputs)
        report = find_leaks(model, inputs=inputs, max_seq_len=MAX_SEQ_LEN)
    assert differences(wrong, run_alone(alone, data, batch))["logits"] > 1e-2
    assert {leak.kind for leak in report.leaks} == {"alone"}


def test_the_page_keeps_the_limits() -> None:
    if VARIABLE in os.environ:
        pytest.skip("the page is being written")
    written = {
        key: value
        for key, value in read_page(PAGE.read_text(encoding="utf-8")).items()
        if key[0] == "transformers"
    }
    assert {key: over for key, outcome in written.items() if (over := over_the_limit(outcome))} == {}
    assert {family for _, family, backend in written if backend != EVERY} == set(FAMILIES)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["dense", "flex", "varlen"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "gpt_oss"])
def test_packed_is_alone_on_cuda(family: str, attention: str) -> None:
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
