"""Shared prefixes: a segment of a group has the logits and gradients that it has behind its own copy of the prompt.

`make test` runs one family for each mechanism, `make test-slow` all, in fp64 too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_mask

from streampack import Batch, find_leaks, make_mask, prepare_model_for_packing
from streampack.attention import varlen
from streampack.attention.flex import flex_mask
from streampack.attention.probe_pack import first_pack
from streampack.attention.shared import SharedPrefixes
from streampack.packing.groups import Group
from tests.harness import hf_models, tiny_torchtune
from tests.harness.groups import TREES, batch_of, run_alone, run_packed, segments, trees
from tests.harness.hybrid_models import HYBRIDS
from tests.harness.isolation import differences
from tests.harness.quick import MECHANISMS, TORCHTUNE, sweep
from tests.oracle.attention import attend

LIMIT = {torch.float32: 1e-6, torch.float64: 1e-9}
uncompiled_flex = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile:UserWarning",
    "ignore:.*torch.jit.script_method:DeprecationWarning",
)


@pytest.fixture(scope="module")
def batch() -> Batch:
    found = batch_of(trees())
    assert len(found.tokens) > 2
    return found


def test_the_batch_has_every_kind_of_group(batch: Batch) -> None:
    paths = [path for _, _, path in segments(batch)]
    assert max(map(len, paths)) == 3
    assert any(path[-1][0] > path[-2][1] for path in paths if len(path) > 1), "another answer lies between"
    assert batch.num_tokens == sum(group.tokens.size for group in trees()) + 3, "each token is there once"


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("family", sweep(hf_models.FAMILIES, MECHANISMS))
def test_shared_equals_alone_with_transformers(family: str, attention: str, batch: Batch) -> None:
    if (family, attention) in hf_models.WITHOUT:
        with pytest.raises(ValueError, match="will not do"):
            hf_models.prepared(family, attention)
        return
    model, inputs, alone = hf_models.prepared(family, attention)
    found = differences(run_packed(model, batch, inputs), run_alone(alone, batch))
    assert max(found.values()) < LIMIT[torch.float32], found


# Families of which transformers computes all layers in fp64, and others, whose norms or RoPE it computes in fp32.
IN_FP64 = ("gpt2", "gpt_neox", "phi", "stablelm", "starcoder2")


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("family", [*IN_FP64, "llama", "mistral", "gemma2", "llama4_text"])
def test_shared_equals_alone_in_fp64(family: str, attention: str, batch: Batch) -> None:
    with hf_models.fp64_throughout():
        model, inputs, alone = hf_models.prepared(family, attention, torch.float64)
        found = differences(run_packed(model, batch, inputs), run_alone(alone, batch))
    assert max(found["loss"], found["logits"]) < LIMIT[torch.float64], found
    assert found["gradient"] < (LIMIT[torch.float64] if family in IN_FP64 else 2e-7), found


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("family", sweep(tiny_torchtune.FAMILIES, TORCHTUNE))
def test_shared_equals_alone_with_torchtune(
    family: str, attention: str, dtype: torch.dtype, batch: Batch
) -> None:
    model, alone = (tiny_torchtune.build(family, dtype=dtype) for _ in range(2))
    inputs = prepare_model_for_packing(model, attention=attention)
    if (family, attention) == ("gemma2", "dense"):
        with pytest.raises(ValueError, match="torchtune counts this model's window of 7 tokens"):
            inputs(batch)
        return
    with tiny_torchtune.exactly() if dtype == torch.float64 else nullcontext():
        found = differences(run_packed(model, batch, inputs), run_alone(alone, batch))
    assert max(found["loss"], found["logits"]) < LIMIT[dtype], found
    # In fp32, gradients of the gemmas alone are 4e-6 from those of fp64: so far apart may two orders of adding be.
    gemma = family in ("gemma", "gemma2") and dtype == torch.float32
    assert found["gradient"] < (1e-5 if gemma else LIMIT[dtype]), found


@uncompiled_flex
@pytest.mark.parametrize("family", sweep(["llama", "mistral", "gemma2", "qwen3"], ["mistral", "gemma2"]))
def test_flex_gives_the_logits_of_dense(family: str, batch: Batch) -> None:
    """Without gradients, which flex attention has on CUDA only."""
    logits = []
    for attention in ("flex", "dense"):
        model, inputs, _ = hf_models.prepared(family, attention)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # compiling takes half a minute
            logits.append(model(**inputs(batch)).logits)
    real = [torch.cat([out[pack, slice(*path[-1])] for pack, _, path in segments(batch)]) for out in logits]
    torch.testing.assert_close(*real, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 200])
def test_blocks_of_the_flex_mask_are_those_of_its_tokens(window: int | None) -> None:
    """On a CPU, flex attention looks at no block, so the tables are compared with the mask of all tokens."""
    tree = Group(np.arange(900), np.arange(900), lengths=[300, 150, 290, 160], parents=[-1, 0, 0, 2])
    batch = batch_of(
        [tree, Group(np.arange(90), np.arange(90), lengths=[40, 50], parents=[-1, 0])], max_seq_len=1024
    )
    shared = SharedPrefixes.of(batch)
    assert shared is not None
    mask = flex_mask(
        batch.seq_lens, max_seq_len=1024, window=window, visible=shared.visible(), positions=batch.input_pos
    )
    seen = make_mask(batch, attention="dense")
    assert isinstance(seen, torch.Tensor)
    if window is not None:
        seen &= batch.input_pos[:, :, None] - batch.input_pos[:, None, :] < window
    tokens = seen.view(len(seen), 8, 128, 8, 128).transpose(2, 3)
    partial = mask.to_dense()[:, 0].bool()
    counts, blocks = mask.full_kv_num_blocks, mask.full_kv_indices
    assert counts is not None
    assert blocks is not None
    full = torch.zeros_like(partial)
    for pack, query in np.ndindex(*counts[:, 0].shape):
        full[pack, query, blocks[pack, 0, query, : counts[pack, 0, query]].long()] = True
    needed = tokens.flatten(3).any(-1)
    assert not (needed & ~(partial | full)).any(), "a block that a query sees is skipped"
    assert not (full & ~tokens.flatten(3).all(-1)).any(), "in a full block, a query does not see a key"
    if window is None:
        assert torch.equal(partial | full, needed), "no block is computed in vain"
        assert full.any()


@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_the_probe_knows_groups(attention: str) -> None:
    model, inputs, _ = hf_models.prepared("llama", attention)
    report = find_leaks(model, inputs=inputs, groups=True)
    assert report.ok
    assert len(report.lengths) == 5


def sibling_seen(batch: Batch) -> Batch:
    """The second answer is taken for a continuation of the first."""
    assert batch.groups is not None
    assert batch.groups.parents[0] == (-1, 0, 0, 2, -1)
    return replace(batch, groups=replace(batch.groups, parents=((-1, 0, 1, 2, -1),)))


def restarted(batch: Batch) -> Batch:
    """Positions begin at 0 in every segment."""
    positions = batch.input_pos.clone()
    start = 0
    for length in batch.seq_lens[0].tolist():
        positions[0, start : start + length] = torch.arange(length)
        start += length
    return replace(batch, input_pos=positions)


@pytest.mark.parametrize("mutation", [sibling_seen, restarted])
@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_the_probe_sees_mistakes(attention: str, mutation: Callable[[Batch], Batch]) -> None:
    model, inputs, _ = hf_models.prepared("llama", attention)

    def mistaken(batch: Batch) -> dict[str, Any]:
        with_group = batch.groups is not None
        return inputs(mutation(batch) if with_group else batch)

    report = find_leaks(model, inputs=mistaken, groups=True)
    assert {leak.kind for leak in report.leaks} >= ({"sample"} if mutation is sibling_seen else {"alone"})


def test_masks_are_those_of_the_tree(batch: Batch) -> None:
    mask = make_mask(batch, attention="dense")
    expected = torch.zeros_like(mask)
    for pack, _, path in segments(batch):
        for query in range(*path[-1]):
            for start, stop in path:
                expected[pack, query, start : min(stop, query + 1)] = True
    for pack, fragments in enumerate(batch.fragments):
        start = sum(fragment.stop - fragment.start for fragment in fragments)
        size = mask.shape[1] - start
        expected[pack, start:, start:] = torch.ones(size, size).tril().bool()
    assert torch.equal(mask, expected)
    blocks: Any = make_mask(batch, attention="flex")
    flex = create_mask(blocks.mask_mod, len(mask), None, mask.shape[1], mask.shape[1], device="cpu")
    assert torch.equal(flex[:, 0], expected)


class Unwritten(torch.autograd.Function):
    """Rows behind those in use get a gradient that a kernel has left in memory as it found it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, used: int) -> torch.Tensor:
        ctx.used = used
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        grad = grad.clone()
        grad[ctx.used :] = torch.nan
        return grad, None


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Let varlen attention compute as kernels on CUDA do: they write nothing for tokens that no sequence has.

    The list is filled with the number of queries and keys of each call.
    """
    good = varlen._attend_sequences
    calls: list[tuple[int, int]] = []

    def attend(q: Any, k: Any, v: Any, cu_seqlens: Any, cu_seqlens_k: Any, *others: Any) -> torch.Tensor:
        queries, keys = int(cu_seqlens[-1]), int((cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)[-1])
        calls.append((queries, keys))
        q, k, v = Unwritten.apply(q, queries), Unwritten.apply(k, keys), Unwritten.apply(v, keys)
        out = good(q[:queries], k[:keys], v[:keys], cu_seqlens, cu_seqlens_k, *others)
        return torch.cat([out, out.new_full((len(q) - queries, *out.shape[1:]), torch.nan)])

    monkeypatch.setattr(varlen, "_attend_sequences", attend)
    return calls


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("library", ["torchtune", "transformers"])
def test_what_a_kernel_leaves_unwritten_reaches_no_gradient(
    library: str, shared: bool, batch: Batch, kernel_calls: list[tuple[int, int]]
) -> None:
    if not shared:
        batch = batch_of([group.unshared() for group in trees()])
    if library == "torchtune":
        model, alone = tiny_torchtune.build("llama3"), tiny_torchtune.build("llama3")
        inputs: Any = prepare_model_for_packing(model, attention="varlen")
    else:
        model, inputs, alone = hf_models.prepared("llama", "varlen")
    kernel_calls.clear()
    packed = run_packed(model, batch, inputs)
    assert kernel_calls
    assert all((keys > queries) == shared for queries, keys in kernel_calls)
    found = differences(packed, run_alone(alone, batch))
    assert max(found.values()) < LIMIT[torch.float32], found


def test_layers_that_run_one_sequence_at_a_time_share_no_prefix(batch: Batch) -> None:
    model = hf_models.build("mamba", **HYBRIDS["mamba"])
    inputs = prepare_model_for_packing(model)
    with pytest.raises(
        ValueError, match="mamba has layers that run one sequence at a time, .* share_prefix=False"
    ):
        inputs(batch)
    unshared = batch_of([group.unshared() for group in trees()])
    assert find_leaks(model, unshared, inputs=inputs).ok


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_groups_of_other_shapes_reuse_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_attend_sequences", attend)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model = tiny_torchtune.build("gemma2", num_layers=3)
    inputs = prepare_model_for_packing(model, attention="varlen")
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(backend=counter, fullgraph=True)  # type: ignore[operator]
    packs = 0
    for number in range(2, len(TREES)):
        batch = batch_of(trees()[:number])
        out = model(**inputs(first_pack(batch))).sum()  # the number of packs is no dynamic size
        out.backward()
        packs += 1
    assert packs > 4
    assert counter.frame_count == 2, "a graph for layers with a window and one for those without"


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["dense", "flex", "varlen", "flash"])
@pytest.mark.parametrize(
    ("build", "family"),
    [
        *((tiny_torchtune.build, family) for family in tiny_torchtune.FAMILIES),
        *((hf_models.build, family) for family in ("llama", "mistral", "gemma3_text")),
    ],
)
def test_shared_equals_alone_in_bf16_on_cuda(build: Any, family: str, attention: str) -> None:
    """Within twice the rounding error of the same model in bf16 against fp32."""
    batch = batch_of(trees()).to("cuda")
    exact = run_alone(build(family).cuda(), batch)
    model = build(family, dtype=torch.bfloat16).cuda()
    alone = run_alone(model, batch)
    try:
        inputs = prepare_model_for_packing(model, attention=attention)
        found = differences(run_packed(model, batch, inputs), alone)
    except ImportError as error:
        pytest.skip(str(error))
    except ValueError as error:
        assert family == "gemma2"
        assert "softcap" in str(error) or "window" in str(error)
        return
    rounding = differences(alone, exact)
    assert found["logits"] < 2 * rounding["logits"]
    assert found["gradient"] < 2 * rounding["gradient"]
