"""Varlen attention against naive attention under a mask."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from streampack.attention import cu_seqlens_of, varlen, varlen_attention
from streampack.attention.varlen import why_not_varlen
from tests.attention.test_attention import packed, padded

LIMIT = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}


@given(packed(), st.sampled_from([None, 0, 3]))
@example(([[4, 1], [5]], 6), None)  # the padding left out
@example(([[3, 2, 1], [6], [1, 1, 1, 1, 1, 1]], 6), None)
def test_every_token_is_in_a_sequence(case: tuple[list[list[int]], int], spare: int | None) -> None:
    seq_lens, size = case
    max_segments = None if spare is None else max(map(len, seq_lens)) + 1 + spare
    cu_seqlens = cu_seqlens_of(padded(seq_lens), max_seq_len=size, max_segments=max_segments)
    assert cu_seqlens.dtype == torch.int32
    assert len(cu_seqlens) == len(seq_lens) * (max_segments or max(map(len, seq_lens)) + 1) + 1
    # Without empty ones: the sequences of each pack, and the rest of it.
    expected = [0]
    for number, lengths in enumerate(seq_lens):
        for length in [*lengths, size - sum(lengths)]:
            expected += [expected[-1] + length] if length else []
        assert expected[-1] == (number + 1) * size
    assert cu_seqlens.unique_consecutive().tolist() == expected


def test_padding_without_an_entry_joins_the_last_sequence() -> None:
    """The padding comes last, so no token of that sequence attends to it."""
    cu_seqlens = cu_seqlens_of(torch.tensor([[3, 2], [1, 4]]), max_seq_len=6, max_segments=2)
    assert cu_seqlens.tolist() == [0, 3, 6, 7, 12]


def test_more_segments_than_max_segments_are_refused() -> None:
    message = "a pack has 3 segments, max_segments=2; raise max_segments, or leave it out"
    with pytest.raises(ValueError, match=message):
        cu_seqlens_of(torch.tensor([[3, 2, 1]]), max_seq_len=6, max_segments=2)


def test_cu_seqlens_are_made_without_a_host_sync() -> None:
    """Tensors on the meta device have no values, so reading one raises."""
    seq_lens = torch.empty(2, 5, dtype=torch.int32, device="meta")
    assert cu_seqlens_of(seq_lens, max_seq_len=16).shape == (13,)


def naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Compute attention over all pairs of tokens in fp64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    places = torch.arange(len(q))
    ids = sum((places[:, None] >= cu_seqlens).long().T)
    distance = places[:, None] - places
    mask = (ids[:, None] == ids) & (distance >= 0) & (distance < (window or len(q)))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)


def tensors(
    tokens: int, *, heads: int, kv_heads: int, dtype: torch.dtype, device: str = "cpu"
) -> list[torch.Tensor]:
    """Make q, k, v and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(tokens, h, 8, generator=generator, dtype=torch.float64).to(device, dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    ]
    return [x.requires_grad_() for x in made[:3]] + made[3:]


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.detach() - theirs.detach()).norm() / theirs.detach().norm().clamp(min=1e-9))


@settings(max_examples=60)
@given(
    cuts=st.lists(st.integers(0, 40), max_size=6),  # twice the same: an empty sequence
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    window=st.sampled_from([None, 1, 5, 100]),
    scale=st.sampled_from([None, 0.7]),
    softcap=st.sampled_from([None, 2.0]),
    dtype=st.sampled_from(list(LIMIT)),
    queries=st.sampled_from([512, 7]),
)
def test_attention_matches_the_naive_reference(
    cuts: list[int],
    heads: tuple[int, int],
    window: int | None,
    scale: float | None,
    softcap: float | None,
    dtype: torch.dtype,
    queries: int,
) -> None:
    cu_seqlens = torch.tensor(sorted([0, *cuts, 40]), dtype=torch.int32)
    q, k, v, upstream = tensors(40, heads=heads[0], kv_heads=heads[1], dtype=dtype)
    settings: dict[str, Any] = {
        "cu_seqlens": cu_seqlens,
        "window": window,
        "scale": scale,
        "softcap": softcap,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "QUERY_BLOCK", queries)
        ours = varlen_attention(q, k, v, max_seqlen=40, **settings)
        gradients = torch.autograd.grad(ours, (q, k, v), upstream)
    assert ours.dtype == dtype
    assert ours.is_contiguous()
    expected = naive(q, k, v, **settings)
    assert difference(ours, expected) < LIMIT[dtype]
    for ours, theirs in zip(
        gradients, torch.autograd.grad(expected, (q, k, v), upstream.double()), strict=True
    ):
        assert float((ours.detach() - theirs.detach()).norm()) < LIMIT[dtype] * upstream.norm() * 10


@pytest.mark.parametrize(("window", "masked"), [(None, 0), (18, 0), (17, 1)])
def test_only_sequences_longer_than_the_window_get_a_mask(
    window: int | None, masked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The three sequences have 11, 18 and 11 tokens."""
    masks: list[bool] = []
    sdpa = F.scaled_dot_product_attention

    def counted(*args: Any, **settings: Any) -> torch.Tensor:
        masks.append("attn_mask" in settings)
        return sdpa(*args, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    q, k, v, _ = tensors(40, heads=4, kv_heads=2, dtype=torch.float32)
    cu_seqlens = torch.tensor([0, 11, 11, 29, 40], dtype=torch.int32)
    varlen_attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=40, window=window)
    assert (len(masks), sum(masks)) == (3, masked)


def test_the_output_has_the_dtype_of_autocast() -> None:
    q, k, v, _ = tensors(12, heads=4, kv_heads=2, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = varlen_attention(
            q, k, v.bfloat16(), cu_seqlens=torch.tensor([0, 12], dtype=torch.int32), max_seqlen=12
        )
    assert out.dtype == torch.bfloat16


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, torch.Tensor):
                self.numel = max(self.numel, made.numel())
        return out


@pytest.mark.parametrize("window", [None, 2000])
def test_memory_grows_with_the_longest_sequence_and_not_with_its_square(window: int | None) -> None:
    tokens, heads = 4096, 2
    q, k, v, upstream = tensors(tokens, heads=heads, kv_heads=heads, dtype=torch.float32)
    cu_seqlens = torch.tensor([0, 1000, 1300, tokens], dtype=torch.int32)
    with Largest() as largest:
        out = varlen_attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=tokens, window=window)
        torch.autograd.grad(out, (q, k, v), upstream)
    assert largest.numel <= heads * varlen.QUERY_BLOCK * (tokens - 1300)


def random_packs(count: int, *, max_seq_len: int, batch: int = 2) -> list[torch.Tensor]:
    """Make ``seq_lens`` of batches with different shapes."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        packs = []
        for _ in range(batch):
            cuts = torch.randperm(max_seq_len - 1, generator=generator)[
                : torch.randint(0, 12, (), generator=generator)
            ]
            ends = [0, *sorted((cuts + 1).tolist()), max_seq_len]
            packs.append([stop - start for start, stop in pairwise(ends)])
        made.append(padded(packs))
    assert len({lens.shape for lens in made}) > 2
    return made


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # of dynamo
def test_compiled_code_attends_outside_the_graph() -> None:
    """The lengths are read on the host, which breaks the graph; 20 packs must not compile more often than one."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    q, k, v, upstream = tensors(64, heads=4, kv_heads=2, dtype=torch.float32)

    @torch.compile(backend=counter)
    def attend(cu_seqlens: torch.Tensor) -> torch.Tensor:
        return 2 * varlen_attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=32)

    counts = set()
    for seq_lens in random_packs(20, max_seq_len=32):
        cu_seqlens = cu_seqlens_of(seq_lens, max_seq_len=32)
        out = attend(cu_seqlens)
        gradients = torch.autograd.grad(out, (q, k, v), upstream)
        expected = 2 * varlen_attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=32)
        assert torch.equal(out, expected)
        for ours, theirs in zip(gradients, torch.autograd.grad(expected, (q, k, v), upstream), strict=True):
            assert torch.equal(ours, theirs)
        counts.add(counter.frame_count)
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("dtype", "head_dim", "softcap", "why"),
    [
        (torch.float32, 64, None, "torch's kernel computes in 16 bits and the model is in torch.float32"),
        (torch.bfloat16, 64, 50.0, "torch's kernel has no softcap and the model has one of 50.0"),
        (torch.bfloat16, 20, None, "a head_dim that is a multiple of 8 and at most 256, the model's is 20"),
        (torch.bfloat16, 264, None, "a head_dim that is a multiple of 8 and at most 256, the model's is 264"),
        (torch.float16, 256, None, None),
    ],
)
def test_limits_of_the_cuda_kernel(
    dtype: torch.dtype, head_dim: int, softcap: float | None, why: str | None
) -> None:
    said = why_not_varlen(dtype=dtype, head_dim=head_dim, softcap=softcap)
    assert said is None if why is None else why in str(said)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
@pytest.mark.parametrize("window", [None, 5])
def test_the_cuda_kernel_accepts_the_call(heads: int, kv_heads: int, window: int | None) -> None:
    """Fake CUDA tensors run the kernel's checks without a GPU."""
    with FakeTensorMode():
        q, k, v = (
            torch.empty(40, h, 16, dtype=torch.bfloat16, device="cuda") for h in (heads, kv_heads, kv_heads)
        )
        cu_seqlens = torch.empty(9, dtype=torch.int32, device="cuda")
        out = varlen_attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=20, window=window, scale=0.3)
        assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.bfloat16, "cuda")
        with pytest.raises(ValueError, match="attention='varlen' on CUDA: torch's kernel has no softcap"):
            varlen_attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=20, softcap=2.0)


@pytest.mark.parametrize(("window", "window_size"), [(None, (-1, 0)), (1, (0, 0)), (5, (4, 0))])
def test_a_window_includes_the_querys_own_token(
    window: int | None, window_size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch counts the tokens before and after the query's own; (-1, 0) stands for all before it."""
    got: dict[str, Any] = {}
    monkeypatch.setattr(varlen, "_varlen_kernel", lambda *_, **settings: got.update(settings))
    with FakeTensorMode():
        q = torch.empty(40, 4, 16, dtype=torch.bfloat16, device="cuda")
        cu_seqlens = torch.empty(9, dtype=torch.int32, device="cuda")
        varlen_attention(q, q, q, cu_seqlens=cu_seqlens, max_seqlen=20, window=window)
    assert got == {"scale": None, "window_size": window_size}


# The following tests compare torch's kernel on CUDA with the loop on the CPU.


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_the_cuda_kernel_equals_the_cpu_loop(
    heads: tuple[int, int], window: int | None, scale: float | None
) -> None:
    """The CPU gets the same 16-bit inputs and accumulates in 32 bits, as the kernel does."""
    cu_seqlens = torch.tensor([0, 0, 37, 38, 64, 64, 200], dtype=torch.int32)
    results = []
    for device in ("cpu", "cuda"):
        q, k, v, upstream = tensors(
            200, heads=heads[0], kv_heads=heads[1], dtype=torch.bfloat16, device=device
        )
        out = varlen_attention(
            q, k, v, cu_seqlens=cu_seqlens.to(device), max_seqlen=136, window=window, scale=scale
        )
        results.append([x.detach().cpu() for x in (out, *torch.autograd.grad(out, (q, k, v), upstream))])
    for ours, theirs in zip(*results, strict=True):
        assert difference(ours.double(), theirs.double()) < LIMIT[torch.bfloat16] or window == 1


@pytest.mark.gpu
def test_the_cuda_kernel_refuses_fp32() -> None:
    q, k, v, _ = tensors(12, heads=4, kv_heads=2, dtype=torch.float32, device="cuda")
    with pytest.raises(ValueError, match="attention='varlen' on CUDA: torch's kernel computes in 16 bits"):
        varlen_attention(
            q, k, v, cu_seqlens=torch.tensor([0, 12], dtype=torch.int32, device="cuda"), max_seqlen=12
        )


@pytest.mark.gpu
def test_packs_of_other_lengths_reuse_the_graph_on_cuda() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    q, k, v, upstream = tensors(512, heads=4, kv_heads=2, dtype=torch.bfloat16, device="cuda")

    @torch.compile(backend=counter, fullgraph=True)
    def attend(cu_seqlens: torch.Tensor) -> torch.Tensor:
        return 2 * varlen_attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=256)

    for seq_lens in random_packs(20, max_seq_len=256):
        out = attend(cu_seqlens_of(seq_lens.cuda(), max_seq_len=256))
        torch.autograd.grad(out, (q, k, v), upstream)
    assert counter.frame_count == 1
