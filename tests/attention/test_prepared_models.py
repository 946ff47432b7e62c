"""What a prepared model computes beside packs, and under what others do to it: saved, compiled, sharded, wrapped.

That packed equals alone for every family is tested in test_packed_equals_alone.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from streampack import (
    Batch,
    Group,
    IterablePackedDataset,
    collate_packed,
    find_leaks,
    method_loader,
    prepare_model_for_packing,
)
from streampack.attention import varlen
from streampack.training.data import join_documents
from tests.harness import tiny_torchtune
from tests.harness.groups import batch_of, trees, without_sharing
from tests.harness.hf_models import MAX_SEQ_LEN, VOCAB, Wrapper, build, prepared
from tests.harness.isolation import (
    Operations,
    differences,
    placed,
    run_alone,
    run_packed,
    stream_and_batch,
    whole,
    worst,
)
from tests.harness.processes import run_forked
from tests.harness.vision_models import build_vision
from tests.oracle.attention import attend, random_packs

pytest.importorskip("transformers")
training = pytest.importorskip("torchtune.training")

# dynamo reads .grad of tensors, and torch warns of it.
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


# Inputs, and models that are prepared again.


def test_positions_come_from_the_lengths() -> None:
    """For example, torchtune's own packs may begin a fragment at another position than 0."""
    data, batch = stream_and_batch("overlong")
    model, inputs, alone = prepared("gpt2", "dense")
    running = replace(batch, input_pos=torch.arange(MAX_SEQ_LEN).expand_as(batch.tokens))
    assert max(differences(run_packed(model, running, inputs), run_alone(alone, batch, data)).values()) < 1e-5
    real = [torch.tensor([f.stop - f.start for f in pack], dtype=torch.int32) for pack in batch.fragments]
    without_padding = replace(batch, seq_lens=nn.utils.rnn.pad_sequence(real, batch_first=True))
    assert torch.equal(inputs(without_padding)["position_ids"], batch.input_pos)


@pytest.mark.parametrize(("make", "family"), [(build, "mistral"), (tiny_torchtune.build, "llama3")])
def test_the_last_of_several_preparations_counts(make: Any, family: str) -> None:
    """And without packs, as in generating, the model computes what it did before."""
    data, batch = stream_and_batch("overlong")
    model = make(family)
    right = run_alone(model, batch, data)
    for attention in ("varlen", "varlen", "dense", "auto", "sdpa"):
        inputs = prepare_model_for_packing(model, attention=attention)
        assert max(differences(run_packed(model, batch, inputs), right).values()) < 1e-5
        assert differences(run_alone(model, batch, data), right) == {"loss": 0, "gradient": 0, "logits": 0}
    assert inputs.attention == "dense"
    assert getattr(getattr(model, "config", None), "use_cache", True), "or it would be saved so"
    assert all(len(module._forward_pre_hooks) <= 1 for module in model.modules())


# Without inputs: saving, generating, padded batches.


def test_a_prepared_model_is_saved_as_before(tmp_path: Path) -> None:
    """A saved ``use_cache: false`` would silently slow down generation."""
    model, inputs, alone = prepared("gemma3_text", "varlen")
    _, batch = stream_and_batch("overlong")
    with torch.no_grad():
        assert model(**inputs(batch)).past_key_values is None
    saved = []
    for name, each in (("ours", model), ("theirs", alone)):
        each.save_pretrained(tmp_path / name)
        saved.append(json.loads((tmp_path / name / "config.json").read_text()))
    assert saved[0] == saved[1]
    assert saved[0]["use_cache"] is True


@pytest.mark.parametrize(
    ("family", "attention"),
    [("gpt2", "dense"), ("gemma2", "varlen"), ("gemma3_text", "varlen"), ("qwen3_next", "varlen")],
)
def test_padded_batches_and_generating_still_work(family: str, attention: str) -> None:
    """With windows, softcaps, cache and all."""
    model, _, alone = prepared(family, attention)
    tokens = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    with torch.no_grad():
        ours, theirs = (m(input_ids=tokens, attention_mask=mask).logits for m in (model, alone))
        torch.testing.assert_close(ours[mask.bool()], theirs[mask.bool()])
        settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
        assert model.generate(tokens, **settings).equal(alone.generate(tokens, **settings))


# Compiled, checkpointed, sharded and wrapped.


@pytest.mark.parametrize("attention", ["varlen", "dense"])
def test_a_router_loss(attention: str) -> None:
    """It reads a mask of tokens, not of pairs; varlen makes none of pairs for nothing."""
    _, batch = stream_and_batch("overlong")
    model, inputs, alone = prepared("mixtral", attention, output_router_logits=True)
    masks: list[torch.Tensor] = []
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.register_forward_pre_hook(
            lambda _layer, _args, given: masks.append(given["attention_mask"]), with_kwargs=True
        )
    assert model(**inputs(batch)).aux_loss > 0
    assert {mask.shape[-2] for mask in masks} == ({1} if attention == "varlen" else {MAX_SEQ_LEN})
    assert worst(model, inputs, alone) < 1e-5


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *product(("mistral", "llama4_text"), ("dense", "flex", "varlen")),
        *product(("qwen2_5_vl",), ("dense", "varlen")),
    ],
)
def test_inputs_are_made_without_reading_a_number_from_the_device(
    family: str, attention: str, grouped: bool
) -> None:
    """On the meta device, reading a value raises."""
    batch = batch_of(trees()) if grouped else stream_and_batch("overlong")[1]
    changes = {"attention_chunk_size": MAX_SEQ_LEN} if family == "llama4_text" else {}
    model = build_vision(family) if family == "qwen2_5_vl" else build(family, **changes)
    given = prepare_model_for_packing(model, attention=attention)(batch.to("meta"))
    assert given["input_ids"].is_meta
    assert given["position_ids"].is_meta


def test_kernels_are_told_how_long_sequences_are_not_packs() -> None:
    """They start blocks of threads up to the bound."""
    rows = [{"tokens": [7] * length, "labels": [7] * length} for length in (300, 200, 129, 100, 100, 100)]
    for size, longest in ((1024, 512), (4096, 4096), (400, 400)):
        batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=size, num_lanes=1)))
        given = prepare_model_for_packing(build("llama"), attention="varlen")(batch)
        assert given["max_length_q"] == given["max_length_k"] == longest
    answers = Group([7] * 400, [7] * 400, lengths=[100] * 4, parents=[-1, 0, 0, 0])
    batch = batch_of([answers], max_seq_len=403)  # 200 tokens are an answer with its prompt
    assert prepare_model_for_packing(build("llama"), attention="varlen")(batch)["max_length_k"] == 256


@pytest.mark.filterwarnings("ignore:.*lets the samples of a row see one another")
def test_kernels_are_told_how_long_joined_sequences_are() -> None:
    """The bound covers joined sequences, not their fragments: a kernel leaves uncomputed what is behind it."""
    rows = [{"tokens": [7] * 90, "labels": [7] * 90}] * 22
    [cut, _] = method_loader(rows, method="fixed_length", max_seq_len=1024, batch_size=1)
    streamed = collate_packed(list(IterablePackedDataset(rows, max_seq_len=1024, num_lanes=1)))
    model = build("llama", max_position_embeddings=1024)
    inputs = prepare_model_for_packing(model, attention="varlen")
    assert inputs(streamed)["max_length_k"] == 128
    for batch in (cut, join_documents(streamed)):
        assert batch.seq_lens.max() > 900
        assert inputs(batch)["max_length_k"] == 1024
        assert torch.isfinite(whole(model(**inputs(batch)))).all()


def test_checkpointed_layers_and_a_wrapped_model() -> None:
    model, inputs, alone = prepared("qwen3", "varlen")
    model.train().activation_checkpointing_enable()
    assert worst(model, inputs, alone) < 1e-5
    wrapped = Wrapper(build("llama"))
    inputs = prepare_model_for_packing(wrapped)
    assert inputs.attention == "varlen"
    assert worst(wrapped, inputs, build("llama")) < 1e-5
    decoder = torch.compile(tiny_torchtune.build("llama3"), backend="eager")
    assert prepare_model_for_packing(Wrapper(decoder)).attention == "varlen"  # type: ignore[arg-type]


@compiles
@pytest.mark.parametrize(
    "last", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["prepared last", "prepared first"]
)
def test_with_compiled_and_checkpointed_layers(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")
    model = tiny_torchtune.build("llama3")
    if not last:
        inputs = prepare_model_for_packing(model, attention="varlen")
    layer = type(model.layers[0])  # type: ignore[index]
    training.compile_model(model, verbose=False)
    training.set_activation_checkpointing(model, auto_wrap_policy={layer})
    if last:
        inputs = prepare_model_for_packing(model, attention="varlen")
    assert worst(model, inputs, tiny_torchtune.build("llama3")) < 1e-5


def of_other_lengths() -> Iterable[Batch]:
    """Yield 20 batches of the same tokens in other sequences."""
    _, batch = stream_and_batch("overlong")
    for seq_lens in random_packs(20, max_seq_len=MAX_SEQ_LEN):
        yield replace(
            batch, tokens=batch.tokens[:2], input_pos=batch.input_pos[:2], seq_lens=seq_lens, longest=None
        )


def of_other_groups() -> Iterable[Batch]:
    """Yield a pack of each group with a shared prompt."""
    for group in trees():
        if max(group.parents) >= 0:
            yield batch_of([group])


@compiles
@pytest.mark.parametrize("batches", [of_other_lengths, pytest.param(of_other_groups, marks=pytest.mark.slow)])
def test_other_packs_reuse_the_graph(batches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(varlen, "_attend_sequences", lambda *given: attend(*given[:5], *given[6:]))
    model: Any = tiny_torchtune.build("llama3", num_layers=3)
    counter = CompileCounterWithBackend("eager")
    inputs = prepare_model_for_packing(model, attention="varlen")
    for layer in model.layers:
        layer.compile(backend=counter, fullgraph=True)
    shapes = set()
    for batch in batches():
        whole(model(**inputs(batch))).sum().backward()
        shapes.add(batch.seq_lens.shape)
    assert len(shapes) > 2
    assert counter.frame_count == 1


def test_two_graphs_serve_all_bounds_of_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is for the first bound alone."""
    torch._dynamo.reset()
    monkeypatch.setattr(
        varlen, "_attend_sequences", lambda *given: attend(*given[:5], *given[6:]) + 0 * given[5]
    )
    model = tiny_torchtune.build("llama3", max_seq_len=1024)
    inputs = prepare_model_for_packing(model, attention="varlen")
    counter = CompileCounterWithBackend("eager")
    compiled: Any = torch.compile(model, backend=counter, fullgraph=True)
    graphs, bounds = [], []
    with torch.no_grad():
        for length in (100, 200, 400, 800, 100, 300, 1000):
            rows = [{"tokens": [7] * length, "labels": [7] * length}] * (1024 // length)
            batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=1024, num_lanes=1)))
            bounds.append(varlen.Boundaries.of(batch).max_seqlen)
            compiled(**inputs(batch))
            graphs.append(counter.frame_count)
    assert bounds == [128, 256, 512, 1024, 128, 512, 1024]
    assert graphs == [1, 2, 2, 2, 2, 2, 2]


def gradient_of(model: nn.Module, logits: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    logits.square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return torch.cat([(g.full_tensor() if isinstance(g, DTensor) else g).flatten() for g in gradients])


def sharded(batch: Batch) -> tuple[list[float], bool, bool]:
    """On one of several ranks, which all have the same packs: packed against alone, of logits and gradient.

    Also whether the probe, which must shard layers again, finds the model right with its inputs and leaking without.
    """
    model: Any = build("gemma3_text")
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
    pairs = [(packed.detach(), right.detach()), (gradient_of(model, packed), gradient)]
    return [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs], *verdicts


def test_sharded_over_two_ranks(tmp_path: Path) -> None:
    _, batch = stream_and_batch("overlong")
    for found, right, wrong in run_forked(sharded, 2, batch):
        assert max(found) < 1e-5, found
        assert (right, wrong) == (True, False)


def unwritten(x: torch.Tensor, used: int) -> torch.Tensor:
    """Give the rows behind those in use a gradient that a kernel has left in memory as it found it."""
    x = x.view_as(x)
    x.register_hook(lambda grad: torch.cat([grad[:used], torch.full_like(grad[used:], torch.nan)]))
    return x


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("make", "family"), [(build, "llama"), (tiny_torchtune.build, "llama3")])
def test_what_a_kernel_leaves_unwritten_reaches_no_gradient(
    make: Any, family: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels on CUDA write nothing for tokens that no sequence has; here varlen attention does likewise."""
    good = varlen._attend_sequences
    calls: list[tuple[int, int]] = []  # the number of queries and keys of each

    def attend(q: Any, k: Any, v: Any, cu_seqlens: Any, cu_seqlens_k: Any, *others: Any) -> torch.Tensor:
        queries, keys = int(cu_seqlens[-1]), int((cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)[-1])
        calls.append((queries, keys))
        q, k, v = unwritten(q, queries), unwritten(k, keys), unwritten(v, keys)
        out = good(q[:queries], k[:keys], v[:keys], cu_seqlens, cu_seqlens_k, *others)
        return torch.cat([out, out.new_full((len(q) - queries, *out.shape[1:]), torch.nan)])

    monkeypatch.setattr(varlen, "_attend_sequences", attend)
    batch = batch_of([group if shared else without_sharing(group) for group in trees()])
    model, right = make(family), run_alone(make(family), batch)
    packed = run_packed(model, batch, prepare_model_for_packing(model, attention="varlen"))
    assert calls
    assert all((keys > queries) == shared for queries, keys in calls)
    found = differences(packed, right)
    assert max(found.values()) < 1e-6, found


# Families of which nothing is known.


class Foreign(nn.Module):
    """A module of neither library, of which nobody knows whether it mixes tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return self.inner(hidden_states)


@pytest.mark.parametrize(("attention", "chosen"), [("varlen", "varlen"), ("auto", "dense")])
def test_a_model_of_which_nothing_is_known_is_tried_with_its_first_batch(attention: str, chosen: str) -> None:
    """And with no other; of itself, only masks are chosen."""
    model: Any = build("llama")
    model.model.layers[1].mlp = Foreign(model.model.layers[1].mlp)
    inputs = prepare_model_for_packing(model, attention=attention)
    assert inputs.attention == chosen
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    _, batch = stream_and_batch("overlong")
    inputs(batch)
    tried = len(passes)
    inputs(batch)
    assert len(passes) == tried > 1
    assert worst(model, inputs, build("llama")) < 1e-5
    assert find_leaks(model).ok, "the inputs are made again in the same way"


# The choice of an attention.


@pytest.mark.parametrize(
    ("make", "chosen"),
    [
        (lambda: tiny_torchtune.build("llama3"), "varlen"),
        (lambda: tiny_torchtune.build("gemma2"), "dense"),  # computes its scores itself
        (lambda: tiny_torchtune.build("llama3", attn_dropout=0.1), "dense"),  # kernels have none
        (lambda: build("llama", attention_dropout=0.1), "dense"),
        (lambda: build("deepseek_v32"), "dense"),  # selects keys under a mask
    ],
    ids=["llama3", "gemma2", "torchtune's dropout", "dropout", "deepseek_v32"],
)
def test_auto_on_a_cpu_is_varlen_where_it_can_compute_the_model(make: Any, chosen: str) -> None:
    assert prepare_model_for_packing(make()).attention == chosen


def test_the_dropout_of_the_attention_is_kept() -> None:
    model = tiny_torchtune.build("llama3", attn_dropout=0.1)
    prepare_model_for_packing(model)
    assert {module.attn_dropout for module in tiny_torchtune.attention_modules(model)} == {0.1}


# On CUDA.


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("family", "grouped"), [("lfm2", False), ("mamba", False), ("llama", True)])
def test_tokens_are_gathered_without_a_sort(family: str, grouped: bool, device: str) -> None:
    """Backward passes of indexing sort on CUDA, and the host reads masks of bools; packs add neither to a model."""
    batch = (batch_of(trees()) if grouped else stream_and_batch("overlong")[1]).to(device)
    model: Any = build(family, torch.bfloat16).to(device)
    with Operations() as plain:
        model(input_ids=batch.tokens, use_cache=False).logits.sum().backward()
    inputs = prepare_model_for_packing(model, attention="varlen" if grouped else "dense")
    given = inputs(batch)
    with Operations() as packed:
        model(**given).logits.sum().backward()
    assert packed.counts["index_select"] > 0
    for name in ("index", "index_put", "index_put_", "nonzero", "sort"):
        assert packed.counts[name] <= plain.counts[name], name


@pytest.mark.gpu
@pytest.mark.filterwarnings("always:called a synchronizing CUDA operation")
def test_layers_of_sequences_read_lengths_once_a_pass(recwarn: pytest.WarningsRecorder) -> None:
    """The host waits for the lengths of sequences once a pass, for one such layer as for four."""
    batch = stream_and_batch("overlong")[1].to("cuda")
    for count in (2, 5):
        layers = ["conv"] * (count - 1) + ["full_attention"]
        model: Any = build("lfm2", num_hidden_layers=count, layer_types=layers).cuda()
        read = []
        for given in (
            {"input_ids": batch.tokens, "use_cache": False},
            prepare_model_for_packing(model, attention="dense")(batch),
        ):
            recwarn.clear()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                model(**given).logits.sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            read.append(sum("synchronizing" in str(each.message) for each in recwarn))
        assert read[1] <= read[0] + 1, read


@pytest.mark.gpu
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("attention", ["dense", "flex", "varlen"])
@pytest.mark.parametrize(
    ("make", "family"), [(tiny_torchtune.build, "llama3"), (build, "llama"), (build, "mistral")]
)
def test_models_read_no_number_from_the_device(make: Any, family: str, attention: str, grouped: bool) -> None:
    """Neither making masks nor the passes do: torch would raise."""
    batch = (batch_of(trees()) if grouped else stream_and_batch("overlong")[1]).to("cuda")
    model = make(family, dtype=torch.bfloat16).cuda()
    inputs = prepare_model_for_packing(model, attention=attention)
    whole(model(**inputs(batch))).sum().backward()  # what is compiled, is compiled by now
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        whole(model(**inputs(batch))).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "family"), [(tiny_torchtune.build, "llama3"), (build, "llama")])
def test_weights_of_32_bits_compute_in_16_under_autocast(make: Any, family: str) -> None:
    model = make(family).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        inputs = prepare_model_for_packing(model)
        assert inputs.attention == "varlen"
        assert torch.isfinite(whole(model(**inputs(stream_and_batch("overlong")[1].to("cuda"))))).all()


@pytest.mark.gpu
def test_flex_attention_is_not_compiled_for_each_length() -> None:
    """Packs of scoring differ in length; after eight graphs for lengths torch would compute all scores of a pack."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_torchtune.build("llama3", dtype=torch.bfloat16, max_seq_len=2048).cuda()
    inputs = prepare_model_for_packing(model, attention="flex")
    for size in range(256, 1536, 128):
        rows = [{"tokens": [7] * length, "labels": [7] * length} for length in (100, size - 100)]
        packs = list(IterablePackedDataset(rows, max_seq_len=size, num_lanes=1))
        whole(model(**inputs(collate_packed(packs).to("cuda"))))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "dtype", "changes", "chosen"),
    [
        ("llama3", torch.bfloat16, {}, "varlen"),
        ("llama3", torch.float32, {}, "flex"),
        ("gemma2", torch.bfloat16, {}, "dense"),
        ("llama3", torch.float32, {"num_heads": 16, "num_kv_heads": 2}, "dense"),  # small heads
    ],
)
def test_auto_on_cuda_is_the_first_that_fits(
    family: str, dtype: torch.dtype, changes: dict[str, int], chosen: str
) -> None:
    model = tiny_torchtune.build(family, dtype=dtype, **changes).cuda()
    assert prepare_model_for_packing(model).attention == chosen
