"""Packed equals alone, for every family of torchtune models and every attention, or a refusal that says why.

One side is a prepared model and a batch of the real stream, with samples of one token, fragments and padding. The other
sees every sequence by itself, unpadded, without mask or positions, before the model is prepared. `make test` runs one
family for each mechanism; `make test-slow` and `make models` run all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from streampack import Batch, IterablePackedDataset, find_leaks, prepare_model_for_packing
from streampack.attention import Inputs, varlen, varlen_attention
from streampack.attention.backends import auto_backends
from streampack.attention.torchtune import _why_not_backend
from streampack.losses import summed_cross_entropy
from tests.attention.test_varlen import random_packs
from tests.support.compiled import attend_in_graph
from tests.support.isolation import (
    Run,
    differences,
    is_padding,
    own,
    placed,
    run_alone,
    run_packed,
    stream_and_batch,
)
from tests.support.isolation import build as build_llama
from tests.support.models_table import LIMITS, figures
from tests.support.quick import TORCHTUNE, sweep
from tests.support.ranks import run_ranks
from tests.support.tiny_torchtune import FAMILIES, MAX_SEQ_LEN, attention_modules, build, exactly

training = pytest.importorskip("torchtune.training")

STREAM = "overlong"  # samples that were split, besides everything else
Record = Callable[[str, str, str, str], None]

# dynamo reads .grad of tensors, and torch warns of it.
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
# On a CPU, tests run flex attention uncompiled: it is slower, and needs no compiler.
uncompiled_flex = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@cache
def stream() -> tuple[IterablePackedDataset, Batch]:
    return stream_and_batch(STREAM)


def run(model: nn.Module, inputs: Inputs, batch: Batch) -> Run:
    """Run a packed batch as recipes do, with nothing but what ``inputs`` returns."""
    given = inputs(batch)
    assert given.keys() == {"tokens", "mask", "input_pos"}
    assert given["tokens"] is batch.tokens
    assert given["input_pos"] is batch.input_pos
    return run_packed(model, batch, mask=given["mask"])


def packed_and_alone(model: nn.Module, attention: str, device: str = "cpu") -> dict[str, float]:
    data, batch = stream()
    batch = batch.to(device)
    alone = run_alone(model, data, batch)
    inputs = prepare_model_for_packing(model, attention=attention)
    assert inputs.attention == attention
    return differences(run(model, inputs, batch), alone)


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("family", sweep(FAMILIES, TORCHTUNE))
def test_packed_samples_match_samples_alone(family: str, attention: str, record_model: Record) -> None:
    """With and without LoRA; the worse of the two goes into the table."""
    seen = dict.fromkeys(LIMITS, 0.0)
    for lora in (False, True):
        found = packed_and_alone(build(family, lora=lora), attention)
        with exactly():
            exact = packed_and_alone(build(family, lora=lora, dtype=torch.float64), attention)
        for name, value in [
            ("logits", found["logits"]),
            ("gradients", found["gradient"]),
            ("fp64", exact["gradient"]),
        ]:
            seen[name] = max(seen[name], value)
        assert max(exact.values()) < LIMITS["fp64"]
    assert all(seen[name] < limit for name, limit in LIMITS.items()), seen
    on_cpus = ", on a CPU; on CUDA use another" if (family, attention) == ("gemma2", "varlen") else ""
    record_model("torchtune", family, attention, figures(**seen) + on_cpus)


@uncompiled_flex
@pytest.mark.parametrize("family", sweep(FAMILIES, TORCHTUNE))
def test_flex_packed_samples_match_samples_alone(family: str, record_model: Record) -> None:
    """The forward pass; on a CPU, torch has no backward pass for it."""
    data, batch = stream()
    difference = 0.0
    for lora in (False, True):
        model = build(family, lora=lora).requires_grad_(False)
        theirs = torch.cat([model(own(data, f, "tokens")[None])[0] for _, _, f in placed(batch)])
        inputs = prepare_model_for_packing(model, attention="flex")
        with torch.compiler.set_stance("force_eager"):
            ours = model(**inputs(batch))[~is_padding(batch)]
        difference = max(difference, float((ours - theirs).norm() / theirs.norm()))
    assert difference < LIMITS["logits"]
    record_model("torchtune", family, "flex", figures(logits=difference))


def test_dora_packed_samples_match_samples_alone() -> None:
    """DoRA's magnitudes are parameters besides LoRA's."""
    model = build("llama3", lora=True, use_dora=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or "magnitude" in name)
    assert max(packed_and_alone(model, "varlen").values()) < 1e-5


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
def test_norms_of_queries_and_keys_are_applied(family: str) -> None:
    """The attention modules take norms, although no builder of torchtune 0.6.1 gives these families any."""
    model = build(family)
    for module in attention_modules(model):
        module.q_norm, module.k_norm = (nn.RMSNorm(module.head_dim) for _ in "qk")
        nn.init.normal_(module.q_norm.weight, generator=torch.Generator().manual_seed(2))
    assert max(packed_and_alone(model, "varlen").values()) < 1e-5


def test_samples_are_longer_than_the_window_of_gemma2() -> None:
    _, batch = stream()
    windows = [module.sliding_window_size for module in attention_modules(build("gemma2"))]
    assert windows == [7, None]
    assert max(fragment.stop - fragment.start for _, _, fragment in placed(batch)) > 2 * 7


# Transformations of a model before or after it is prepared.


@pytest.mark.parametrize(("family", "first"), [("llama3", True), ("gemma2", False)])
def test_with_activation_checkpointing(family: str, first: bool) -> None:
    data, batch = stream()
    model = build(family)
    alone = run_alone(model, data, batch)

    def checkpoint() -> None:
        layer = type(model.layers[0])  # type: ignore[index]
        training.set_activation_checkpointing(model, auto_wrap_policy={layer})

    if first:
        checkpoint()
    inputs = prepare_model_for_packing(model, attention="varlen")
    if not first:
        checkpoint()
    assert max(differences(run(model, inputs, batch), alone).values()) < 1e-5


@compiles
def test_with_compiled_and_checkpointed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")
    data, batch = stream()
    model = build("gemma2")
    alone = run_alone(model, data, batch)
    layer = type(model.layers[0])  # type: ignore[index]
    training.compile_model(model, verbose=False)
    training.set_activation_checkpointing(model, auto_wrap_policy={layer})
    inputs = prepare_model_for_packing(model, attention="varlen")
    assert max(differences(run(model, inputs, batch), alone).values()) < 1e-5


def count_graphs(attention: str, *, device: str, backend: str, dtype: torch.dtype, family: str) -> int:
    """Count the graphs of three layers, each compiled as torchtune does it, over 20 batches of different packs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model = build(family, dtype=dtype, num_layers=3).to(device)
    inputs = prepare_model_for_packing(model, attention=attention)
    train = attention != "flex" or device == "cuda"
    model.requires_grad_(train)
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(backend=counter, fullgraph=True)  # type: ignore[operator]
    _, batch = stream()
    tokens, input_pos = batch.tokens[:2].to(device), batch.input_pos[:2].to(device)
    for seq_lens in random_packs(20, max_seq_len=32):
        packs = replace(batch, tokens=tokens, input_pos=input_pos, seq_lens=seq_lens.to(device))
        out = model(**inputs(packs)).sum()
        if train:
            out.backward()
    return counter.frame_count


KINDS_OF_LAYERS = {"llama3": 1, "gemma2": 2}  # a graph each; gemma2 has layers with a window and without


@compiles
@uncompiled_flex
@pytest.mark.parametrize("attention", ["varlen", pytest.param("flex", marks=pytest.mark.slow)])
def test_packs_of_other_lengths_reuse_the_graph(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_attend_sequences", attend_in_graph)
    graphs = count_graphs(attention, device="cpu", backend="eager", dtype=torch.float32, family="gemma2")
    assert graphs == 2


def sharded() -> tuple[dict[str, float], bool, bool]:
    """As one of several ranks that have the same packs, so that their mean gradient is the gradient of each.

    Returns the differences, and whether the probe finds the model right with its mask and leaking without.
    """
    data, batch = stream()
    torch.distributed.init_process_group("gloo")
    try:
        model = build("gemma2")
        alone = run_alone(model, data, batch)
        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer, reshard_after_forward=False)  # type: ignore[arg-type]
        fully_shard(model, reshard_after_forward=False)
        inputs = prepare_model_for_packing(model, attention="varlen")
        right = find_leaks(model, inputs=inputs, max_seq_len=MAX_SEQ_LEN)
        wrong = find_leaks(model, inputs=lambda b: inputs(b) | {"mask": None}, max_seq_len=MAX_SEQ_LEN)
        assert all(isinstance(p, DTensor) for p in model.parameters()), "the probe must reshard layers"
        logits = model(**inputs(batch))
        loss = summed_cross_entropy(logits, batch.labels) / batch.num_trained
        loss.backward()
        shards = [parameter.grad for parameter in model.parameters()]
        assert sum(shard.to_local().numel() for shard in shards) < alone.gradient.numel()  # type: ignore[union-attr]
        gradient = torch.cat([shard.full_tensor().flatten() for shard in shards])  # type: ignore[union-attr]
        found = differences(Run(loss.detach(), gradient, logits[~is_padding(batch)].detach()), alone)
        return found, right.ok, wrong.ok
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow  # 11 s; test_transformers.py has the same for a model of transformers, tests/recipes whole runs
def test_with_fsdp_on_two_ranks() -> None:
    for found, right, wrong in run_ranks(sharded, 2):
        assert max(found.values()) < 1e-5, found
        assert (right, wrong) == (True, False)


def test_the_last_of_several_preparations_counts() -> None:
    data, batch = stream()
    for family in ("llama3", "gemma2"):
        model = build(family)
        before = run_alone(model, data, batch)
        prepare_model_for_packing(model, attention="varlen")
        calls = [module.__dict__.get("_attention_call") for module in attention_modules(model)]
        inputs = prepare_model_for_packing(model, attention="sdpa")
        assert calls == [module.__dict__.get("_attention_call") for module in attention_modules(model)]
        assert inputs.attention == "dense"
        assert isinstance(inputs(batch)["mask"], torch.Tensor)
        again = prepare_model_for_packing(model, attention="varlen")
        assert max(differences(run(model, again, batch), before).values()) < 1e-5
        # Without packs, as in generating, the model computes what it did before.
        assert differences(run_alone(model, data, batch), before) == {"loss": 0, "gradient": 0, "logits": 0}


def test_auto_on_a_cpu_is_varlen_unless_there_is_dropout() -> None:
    assert prepare_model_for_packing(build("llama3")).attention == "varlen"
    assert prepare_model_for_packing(build("gemma2")).attention == "varlen"
    assert prepare_model_for_packing(build("llama3", attn_dropout=0.1)).attention == "dense"


@pytest.mark.parametrize(
    ("family", "dtype", "capability", "chosen"),
    [
        ("llama3", torch.bfloat16, (9, 0), "varlen"),
        ("llama3", torch.float32, (9, 0), "flex"),
        ("llama3", torch.bfloat16, (7, 5), "flex"),
        ("gemma2", torch.bfloat16, (9, 0), "flex"),
        ("small heads", torch.float32, (9, 0), "dense"),
    ],
)
def test_auto_on_cuda_is_the_first_that_fits(
    family: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The choice alone; nothing runs on CUDA here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    changed = {"num_heads": 16, "num_kv_heads": 2} if family == "small heads" else {}
    model = build("llama3" if changed else family, dtype=dtype, **changed)
    attentions, cuda = attention_modules(model), torch.device("cuda")
    fits = [
        word
        for word in auto_backends(cuda)
        if _why_not_backend(word, attentions=attentions, device=cuda, dtype=dtype) is None
    ]
    assert fits[0] == chosen


# Models that are refused.


def without(_: nn.Module) -> nn.Module:
    return nn.Linear(2, 2)


def with_cache(model: nn.Module) -> nn.Module:
    model.setup_caches(1, torch.float32)  # type: ignore[operator]
    return model


def seeing_ahead(model: nn.Module) -> nn.Module:
    attention_modules(model)[1].is_causal = False
    return model


def with_attention_of_its_own(model: nn.Module) -> nn.Module:
    class Own(type(attention_modules(model)[1])):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    attention_modules(model)[1].__class__ = Own
    return model


def with_a_layer_of_its_own(model: nn.Module) -> nn.Module:
    model.layers[1] = nn.Linear(128, 128)  # type: ignore[operator]
    return model


def with_an_encoder(model: nn.Module) -> nn.Module:
    attention = attention_modules(model)[1]
    attention.pos_embeddings = None
    modules = pytest.importorskip("torchtune.modules")
    model.layers[1] = modules.TransformerCrossAttentionLayer(attention, model.layers[1].mlp)  # type: ignore[index, operator, union-attr]
    return model


def inside_another(model: nn.Module) -> nn.Module:
    return nn.Sequential(model)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without, "Linear is not a torchtune or Hugging Face model, so its attention is unknown; give it"),
        (with_cache, r"layer 0 has a key-value cache, .* take it away with torchtune.modules.common_utils.delete_kv_"),
        (seeing_ahead, r"layer 1 sees tokens ahead \(is_causal=False\), which a pack's masks hide; train this model "),
        (with_attention_of_its_own, r"layer 1 has an attention that is not known \(Own\); train this model without "),
        (with_a_layer_of_its_own, r"layer 1 has an attention that is not known \(Linear\); train this model without "),
        (with_an_encoder, r"layer 1 attends to a second input \(images, an encoder's\), and packs do not say "),
        (inside_another, "Sequential is no TransformerDecoder, and how it makes use of one is not known; prepare the "),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_models_that_cannot_keep_samples_apart_are_refused(
    change: Callable[[nn.Module], nn.Module], why: str
) -> None:
    model = change(build("llama3"))
    for attention in ("auto", "dense"):
        with pytest.raises(ValueError, match=why):
            prepare_model_for_packing(model, attention=attention)


def test_only_dense_has_dropout_in_the_attention() -> None:
    for attention in ("flex", "varlen", "flash"):
        message = f"attention='{attention}' cannot compute this model: only 'dense' has dropout in its attention, and"
        with pytest.raises(ValueError, match=f"{message} attn_dropout is 0.1; use attention='auto'"):
            prepare_model_for_packing(build("llama3", attn_dropout=0.1), attention=attention)


def test_wrapped_models_are_found() -> None:
    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module  # as DistributedDataParallel calls it

    model = build("llama3")
    assert prepare_model_for_packing(Wrapped(torch.compile(model, backend="eager"))).attention == "varlen"  # type: ignore[arg-type]


# Mistakes that must show by orders of magnitude above the limit, with varlen.

Change = Callable[[pytest.MonkeyPatch, Batch], Batch]


def a_boundary_late(_patch: pytest.MonkeyPatch, batch: Batch) -> Batch:
    seq_lens = batch.seq_lens.clone()
    movable = (seq_lens[:, :2] > 1).all(1)
    seq_lens[movable, 0] += 1
    seq_lens[movable, 1] -= 1
    return replace(batch, seq_lens=seq_lens)


def positions_run_on(_patch: pytest.MonkeyPatch, batch: Batch) -> Batch:
    return replace(batch, input_pos=torch.arange(batch.tokens.shape[1]).expand_as(batch.input_pos))


def without_setting(name: str) -> Change:
    def change(patch: pytest.MonkeyPatch, batch: Batch) -> Batch:
        def attend(*args: Any, **settings: Any) -> torch.Tensor:
            return varlen_attention(*args, **(settings | {name: None}))

        patch.setattr("streampack.attention.torchtune.varlen_attention", attend)
        return batch

    return change


@pytest.mark.parametrize(
    ("change", "family"),
    [
        (a_boundary_late, "llama3"),
        (positions_run_on, "absolute"),  # RoPE sees distances only
        (without_setting("window"), "gemma2"),
        (without_setting("softcap"), "gemma2"),
        (without_setting("scale"), "gemma2"),
    ],
    ids=["a token late", "positions run on", "no window", "no softcap", "no scale"],
)
def test_a_planted_mistake_changes_logits_and_gradients(
    change: Change, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, batch = stream()
    model = build_llama(family) if family == "absolute" else build(family)
    alone = run_alone(model, data, batch)
    inputs = prepare_model_for_packing(model, attention="varlen")
    assert max(differences(run(model, inputs, batch), alone).values()) < 1e-5
    wrong = change(monkeypatch, batch)
    found = differences(run(model, inputs, wrong), alone)
    assert found["gradient"] > 1e-3
    assert found["logits"] > 1e-3
