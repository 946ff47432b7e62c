"""Shared prefixes: a segment of a group has the logits and gradients that it has behind its own copy of the prompt.

`make test` runs one family for each mechanism, `make test-slow` all.
"""

from __future__ import annotations

from collections.abc import Callable
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
from streampack.attention.shared import SharedPrefixes, fold_keys, unfold_keys
from streampack.packing.batch import BatchGroups
from streampack.packing.groups import Group
from tests.support import hf_models, tiny_torchtune
from tests.support.compiled import attend_in_graph
from tests.support.groups import TREES, batch_of, run_alone, run_packed, segments, trees
from tests.support.hybrid_models import HYBRIDS
from tests.support.isolation import VOCAB, differences
from tests.support.quick import MECHANISMS, TORCHTUNE, sweep

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
        pytest.skip(hf_models.WITHOUT[family, attention])
    model, inputs, alone = hf_models.prepared(family, attention)
    found = differences(run_packed(model, batch, inputs), run_alone(alone, batch))
    assert max(found.values()) < LIMIT[torch.float32], found


# Families of which transformers computes all layers in fp64, and others, whose norms or RoPE it computes in fp32.
IN_FP64 = ("gpt2", "gpt_neox", "phi", "stablelm", "starcoder2")


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize(
    "family", sweep([*IN_FP64, "llama", "mistral", "gemma2", "llama4_text"], ["gpt2", "gemma2"])
)
def test_shared_equals_alone_in_fp64(family: str, attention: str, batch: Batch) -> None:
    with hf_models.fp64_throughout():
        model, inputs, alone = hf_models.prepared(family, attention, torch.float64)
        found = differences(run_packed(model, batch, inputs), run_alone(alone, batch))
    assert max(found["loss"], found["logits"]) < LIMIT[torch.float64], found
    assert found["gradient"] < (LIMIT[torch.float64] if family in IN_FP64 else 2e-7), found


@pytest.mark.parametrize("attention", ["dense", "varlen"])
@pytest.mark.parametrize("family", sweep(tiny_torchtune.FAMILIES, TORCHTUNE))
def test_shared_equals_alone_with_torchtune(family: str, attention: str, batch: Batch) -> None:
    model = tiny_torchtune.build(family)
    inputs = prepare_model_for_packing(model, attention=attention)
    if (family, attention) == ("gemma2", "dense"):
        with pytest.raises(ValueError, match="torchtune counts this model's window of 7 tokens"):
            inputs(batch)
        return
    alone = run_alone(tiny_torchtune.build(family), batch)
    with tiny_torchtune.exactly():
        exact = tiny_torchtune.build(family, dtype=torch.float64)
        true = run_alone(tiny_torchtune.build(family, dtype=torch.float64), batch)
        found = differences(
            run_packed(exact, batch, prepare_model_for_packing(exact, attention=attention)), true
        )
        assert max(found.values()) < LIMIT[torch.float64], found
    packed = run_packed(model, batch, inputs)
    found = differences(packed, alone)
    if family not in ("gemma", "gemma2"):
        assert max(found.values()) < LIMIT[torch.float32], found
        return
    # Alone, gradients of these are 4e-6 from those of fp64, so that is how far two orders of adding may be apart.
    ours, theirs = differences(packed, true), differences(alone, true)
    assert max(found["loss"], found["logits"]) < LIMIT[torch.float32], found
    assert ours["gradient"] < 1.2 * theirs["gradient"], (ours, theirs)


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


@uncompiled_flex
@pytest.mark.parametrize("attention", ["flex", "varlen"])
@pytest.mark.parametrize("family", ["llama3", "gemma2"])
def test_torchtune_backends_agree_on_long_packs(family: str, attention: str) -> None:
    """Packs of several blocks of a block mask, with a block that lies in one segment."""
    groups = [
        Group(
            np.arange(900) % VOCAB,
            np.arange(900) % VOCAB,
            lengths=[300, 200, 280, 120],
            parents=[-1, 0, 0, 2],
        ),
        Group(np.arange(90) % VOCAB, np.arange(90) % VOCAB, lengths=[30, 60], parents=[-1, 0]),
    ]
    batch = batch_of(groups, max_seq_len=1024)
    model = tiny_torchtune.build(family, max_seq_len=1024)
    with torch.no_grad():
        expected = [
            model(torch.cat([batch.tokens[pack, slice(*each)] for each in path])[None])[0]
            for pack, _, path in segments(batch)
        ]
        inputs = prepare_model_for_packing(model, attention=attention)
        with torch.compiler.set_stance("force_eager"):
            logits = model(**inputs(batch))
    for (pack, _, path), alone in zip(segments(batch), expected, strict=True):
        start, stop = path[-1]
        torch.testing.assert_close(logits[pack, start:stop], alone[start - stop :], rtol=1e-4, atol=1e-4)


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


def test_unshared_groups_give_the_same(batch: Batch) -> None:
    groups = trees()
    model, inputs, _ = hf_models.prepared("llama", "varlen")
    unshared = batch_of([group.unshared() for group in groups])
    with torch.no_grad():
        shared_logits, logits = (model(**inputs(each)).logits for each in (batch, unshared))
    expected = {
        tuple(torch.cat([batch.tokens[pack, slice(*each)] for each in path]).tolist()): shared_logits[
            pack, path[-1][0] : path[-1][1]
        ]
        for pack, _, path in segments(batch)
    }
    leaves = 0
    for pack, _, [(start, stop)] in segments(unshared):
        found = expected[tuple(unshared.tokens[pack, start:stop].tolist())]
        torch.testing.assert_close(logits[pack, stop - len(found) : stop], found, rtol=1e-5, atol=1e-5)
        leaves += 1
    assert leaves == sum(len(group.leaves) for group in groups) + 1


@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_the_probe_knows_groups(attention: str) -> None:
    model, inputs, _ = hf_models.prepared("llama", attention)
    report = find_leaks(model, inputs=inputs, groups=True)
    assert report.ok
    assert len(report.lengths) == 5


def changed(batch: Batch, **changes: Any) -> Batch:
    assert batch.groups is not None
    return replace(batch, groups=replace(batch.groups, **changes))


def sibling_seen(batch: Batch) -> Batch:
    """The second answer is taken for a continuation of the first."""
    assert batch.groups is not None
    parents = batch.groups.parents[0]
    assert parents == (-1, 0, 0, 2, -1)
    return changed(batch, parents=((-1, 0, 1, 2, -1),))


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


def test_keys_are_folded_and_unfolded(batch: Batch) -> None:
    shared = SharedPrefixes.of(batch)
    assert shared is not None
    keys = shared.keys()
    again = unfold_keys(fold_keys(keys))
    assert again is not None
    assert torch.equal(again.cu_seqlens_q, keys.cu_seqlens_q)
    assert torch.equal(again.cu_seqlens_k, keys.cu_seqlens_k)
    assert torch.equal(again.index, keys.index)
    assert unfold_keys(keys.cu_seqlens_q[None, None, None]) is None
    assert int(keys.cu_seqlens_q[-1]) == batch.tokens.numel()


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
    monkeypatch.setattr(varlen, "_attend_sequences", attend_in_graph)
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


def test_groups_that_share_nothing_take_the_plain_way(batch: Batch) -> None:
    assert SharedPrefixes.of(batch_of([group.unshared() for group in trees()])) is None
    assert SharedPrefixes.of(replace(batch, groups=None)) is None
    assert isinstance(batch.groups, BatchGroups)
