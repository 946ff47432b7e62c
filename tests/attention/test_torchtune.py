"""torchtune's models: packed equals alone, for every family, attention and way of packing, or a refusal that says why.

One side is a prepared model and a batch of the real stream, with samples of one token, fragments and padding. The other
sees every sequence by itself, unpadded, without mask or positions, before the model is prepared. `make test` runs one
family for each mechanism in fp32; `make test-slow` and `make models` run all, in fp64 too.
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

from streampack import Batch, IterablePackedDataset, collate_packed, find_leaks, prepare_model_for_packing
from streampack.attention import Inputs, varlen, varlen_attention
from streampack.attention.backends import auto_backends
from streampack.attention.torchtune import _why_not_backend
from streampack.packing.batch import null_pack, to_torchtune
from tests.harness.isolation import (
    STREAMS,
    Run,
    differences,
    is_padding,
    own,
    placed,
    run_alone,
    run_packed,
    stream_and_batch,
)
from tests.harness.isolation import build as build_llama
from tests.harness.models_table import LIMITS, figures
from tests.harness.quick import TORCHTUNE
from tests.harness.tiny_torchtune import FAMILIES, MAX_SEQ_LEN, VOCAB, attention_modules, build, exactly
from tests.oracle.attention import attend, random_packs

training = pytest.importorskip("torchtune.training")

Record = Callable[[str, str, str, str], None]

# dynamo reads .grad of tensors, and torch warns of it.
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
# On a CPU, tests run flex attention uncompiled: it is slower, and needs no compiler.
uncompiled_flex = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@cache
def stream() -> tuple[IterablePackedDataset, Batch]:
    return stream_and_batch("overlong")  # samples that were split, besides everything else


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


def flex_difference(family: str, *, lora: bool) -> float:
    """Compare logits; on a CPU, torch has no backward pass for flex attention."""
    data, batch = stream()
    model = build(family, lora=lora)
    alone = run_alone(model, data, batch)
    inputs = prepare_model_for_packing(model, attention="flex")
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        logits = model(**inputs(batch))[~is_padding(batch)]
    return float((logits - alone.logits).norm() / alone.logits.norm())


CASES = [
    pytest.param(family, word, False) for family in TORCHTUNE for word in ("dense", "varlen", "flex")
] + [
    pytest.param(family, word, True, marks=pytest.mark.slow, id=f"{family}-{word}-all figures")
    for family in FAMILIES
    for word in ("dense", "varlen", "flex")
]


@uncompiled_flex
@pytest.mark.parametrize(("family", "attention", "exact"), CASES)
def test_packed_equals_alone(family: str, attention: str, exact: bool, record_model: Record) -> None:
    """With LoRA and, for the table's figures, without; the worse of the two goes into the table."""
    seen: dict[str, float] = {}
    for lora in (False, True) if exact else (attention == "varlen",):
        if attention == "flex":
            figure = {"logits": flex_difference(family, lora=lora)}
        else:
            found = packed_and_alone(build(family, lora=lora), attention)
            figure = {"logits": found["logits"], "gradients": found["gradient"]}
            if exact:
                with exactly():
                    found = packed_and_alone(build(family, lora=lora, dtype=torch.float64), attention)
                figure["fp64"] = max(found.values())
        seen = {name: max(value, seen.get(name, 0.0)) for name, value in figure.items()}
    assert all(value < LIMITS[name] for name, value in seen.items()), seen
    on_cpus = ", on a CPU; on CUDA use another" if (family, attention) == ("gemma2", "varlen") else ""
    if exact:
        record_model("torchtune", family, attention, figures(**seen) + on_cpus)


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
def test_norms_of_queries_and_keys_are_applied(family: str) -> None:
    """The attention modules take norms, although no builder of torchtune 0.6.1 gives these families any."""
    model = build(family)
    for module in attention_modules(model):
        module.q_norm, module.k_norm = (nn.RMSNorm(module.head_dim) for _ in "qk")
        nn.init.normal_(module.q_norm.weight, generator=torch.Generator().manual_seed(2))
    assert max(packed_and_alone(model, "varlen").values()) < 1e-5


# Ways of packing.


@pytest.mark.parametrize("family", ["llama3", "absolute"])
@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(name, marks=() if name in ("exact_fit", "padded wrap") else pytest.mark.slow)
        for name in STREAMS
    ],
)
def test_all_ways_of_packing_equal_alone(stream: str, family: str) -> None:
    """Several sequences in a pack, padding, one that fills a pack, one of a single token, fragments."""
    data, batch = stream_and_batch(stream)
    found = [fragment for _, _, fragment in placed(batch)]
    assert max(map(len, batch.fragments)) > 2
    assert batch.num_tokens < batch.tokens.numel()
    assert {1, MAX_SEQ_LEN} <= {fragment.stop - fragment.start for fragment in found}
    assert any(fragment.start for fragment in found) == ("split" in str(STREAMS[stream]))
    model = build_llama(family)
    packed, alone = run_packed(model, batch), run_alone(model, data, batch)
    assert max(differences(packed, alone).values()) < 1e-5, differences(packed, alone)


def test_padding_moves_nothing() -> None:
    model = build_llama("absolute")
    _, batch = stream_and_batch("next_fit")
    padding = is_padding(batch)
    noise = torch.randint(1, VOCAB, batch.tokens.shape, generator=torch.Generator().manual_seed(4))
    changed = replace(
        batch,
        tokens=torch.where(padding, noise, batch.tokens),
        input_pos=torch.where(padding, noise % MAX_SEQ_LEN, batch.input_pos),
    )
    assert not torch.equal(changed.tokens, batch.tokens)
    before, after = run_packed(model, batch), run_packed(model, changed)
    assert differences(after, before) == {"loss": 0, "gradient": 0, "logits": 0}


def test_a_null_pack_weighs_nothing() -> None:
    model = build_llama("llama3")
    data, batch = stream_and_batch("exact_fit")
    null = to_torchtune(null_pack(MAX_SEQ_LEN))
    with_null = run_packed(model, collate_packed([*data, null]))
    assert max(differences(with_null, run_packed(model, batch)).values()) < 1e-5
    only_null = run_packed(model, collate_packed([null, null]))
    assert only_null.loss == 0
    assert not only_null.gradient.any()


# Transformations of a model before or after it is prepared.


@compiles
@pytest.mark.parametrize("last", [True, False], ids=["prepared last", "prepared first"])
def test_with_compiled_and_checkpointed_layers(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")
    data, batch = stream()
    model = build("gemma2")
    alone = run_alone(model, data, batch)
    if not last:
        inputs = prepare_model_for_packing(model, attention="varlen")
    layer = type(model.layers[0])  # type: ignore[index]
    training.compile_model(model, verbose=False)
    training.set_activation_checkpointing(model, auto_wrap_policy={layer})
    if last:
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
    monkeypatch.setattr(varlen, "_attend_sequences", attend)
    graphs = count_graphs(attention, device="cpu", backend="eager", dtype=torch.float32, family="gemma2")
    assert graphs == 2


def test_the_last_of_several_preparations_counts() -> None:
    data, batch = stream()
    for family in ("llama3", "gemma2"):
        model = build(family)
        before = run_alone(model, data, batch)
        prepare_model_for_packing(model, attention="varlen")
        inputs = prepare_model_for_packing(model, attention="sdpa")
        assert inputs.attention == "dense"
        assert isinstance(inputs(batch)["mask"], torch.Tensor)
        again = prepare_model_for_packing(model, attention="varlen")
        assert max(differences(run(model, again, batch), before).values()) < 1e-5
        # Without packs, as in generating, the model computes what it did before.
        assert differences(run_alone(model, data, batch), before) == {"loss": 0, "gradient": 0, "logits": 0}


def test_wrapped_models_are_found() -> None:
    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module  # as DistributedDataParallel calls it

    model = build("llama3")
    assert prepare_model_for_packing(Wrapped(torch.compile(model, backend="eager"))).attention == "varlen"  # type: ignore[arg-type]


# The choice of an attention, and what is refused.


def test_auto_on_a_cpu_is_varlen_and_only_dense_has_dropout() -> None:
    assert prepare_model_for_packing(build("llama3")).attention == "varlen"
    assert prepare_model_for_packing(build("gemma2")).attention == "varlen"
    assert prepare_model_for_packing(build("llama3", attn_dropout=0.1)).attention == "dense"
    for attention in ("flex", "varlen", "flash"):
        message = f"attention='{attention}' cannot compute this model: only 'dense' has dropout in its attention, and"
        with pytest.raises(ValueError, match=f"{message} attn_dropout is 0.1; use attention='auto'"):
            prepare_model_for_packing(build("llama3", attn_dropout=0.1), attention=attention)


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


def test_rows_beyond_the_models_positions_are_refused() -> None:
    long = 2 * MAX_SEQ_LEN + 9
    rows = [{"tokens": [7] * 20, "labels": [7] * 20}]
    batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=long)))
    message = (
        f"packs have {long} tokens, and the model has max_seq_len={MAX_SEQ_LEN}; set max_seq_len={MAX_SEQ_LEN} or "
        f"less for the packs, or build the model with max_seq_len={long}"
    )
    with pytest.raises(ValueError, match=message):
        prepare_model_for_packing(build("llama3"))(batch)


def test_the_probe_calls_torchtunes_models() -> None:
    model = build("llama3")
    assert "sample" in {leak.kind for leak in find_leaks(model).leaks}, "no mask"
    prepare_model_for_packing(model, attention="varlen")
    assert find_leaks(model).ok
    assert find_leaks(torch.compile(model, backend="eager")).ok  # type: ignore[arg-type]


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


def first_labels_kept(_patch: pytest.MonkeyPatch, batch: Batch) -> Batch:
    data, _ = stream()
    labels = batch.labels.clone()
    for pack, start, fragment in placed(batch):
        labels[pack, start] = own(data, fragment, "labels")[0] if start else -100
    assert not torch.equal(labels, batch.labels)
    return replace(batch, labels=labels)


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
        (first_labels_kept, "llama3"),
        (without_setting("window"), "gemma2"),
        (without_setting("softcap"), "gemma2"),
        (without_setting("scale"), "gemma2"),
    ],
    ids=["a token late", "positions run on", "first labels", "no window", "no softcap", "no scale"],
)
def test_a_planted_mistake_changes_gradients(
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
    assert found["logits"] > 1e-3 or change is first_labels_kept


# On CUDA.


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
