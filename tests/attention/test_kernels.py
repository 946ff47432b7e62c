"""Masks, boundaries and kernels against naive loops; those of torch on CUDA against the loop on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from streampack import Group, IterablePackedDataset, collate_packed, make_mask
from streampack.attention import (
    cu_seqlens_of,
    dense_mask,
    document_ids,
    flex_mask,
    masks,
    varlen,
    varlen_attention,
)

# private: block masks of groups with a window are made by prepared models alone, and computed on CUDA alone
from streampack.attention.layout import visible_of
from tests.harness.groups import batch_of
from tests.oracle.attention import (
    LIMIT,
    attend,
    difference,
    naive_ids,
    naive_mask,
    packed,
    padded,
    tensors,
)

# Masks and boundaries.


@given(packed())
@example(([[3, 2, 1], [6], [1, 1, 1, 1, 1, 1]], 6))  # zeros behind a full pack
@example(([[4, 1], [5]], 6))  # the padding left out
@example(([[1]], 1))
def test_masks_and_boundaries_equal_the_naive_ones(case: tuple[list[list[int]], int]) -> None:
    seq_lens, size = case
    ids = document_ids(padded(seq_lens), max_seq_len=size)
    assert ids.dtype == torch.int64
    # Padding that was left out has a higher number where there are zeros at the end; only equality counts.
    assert [same(row) for row in ids.tolist()] == [same(row) for row in naive_ids(seq_lens, size)]

    dense = dense_mask(padded(seq_lens), max_seq_len=size)
    assert dense.dtype == torch.bool
    assert dense.tolist() == naive_mask(seq_lens, size)
    assert dense.any(-1).all(), "softmax over a row without a True is NaN"

    ends = cu_seqlens_of(padded(seq_lens), max_seq_len=size)
    assert ends.dtype == torch.int32
    assert len(ends) == len(seq_lens) * (max(map(len, seq_lens)) + 1) + 1
    # Without empty ones: the sequences of each pack, and the rest of it.
    expected = [0]
    for number, lengths in enumerate(seq_lens):
        for length in [*lengths, size - sum(lengths)]:
            expected += [expected[-1] + length] if length else []
        assert expected[-1] == (number + 1) * size
    assert ends.unique_consecutive().tolist() == expected


def same(ids: list[int]) -> list[int]:
    """Renumber ids in order of appearance."""
    return [list(dict.fromkeys(ids)).index(number) for number in ids]


def test_make_mask_follows_the_device() -> None:
    rows = [{"tokens": [i] * n, "labels": [i] * n} for i, n in enumerate([5, 4, 2, 3, 3], 1)]
    batch = collate_packed(list(IterablePackedDataset(rows, max_seq_len=8, num_lanes=1)))
    # Here each row has a token of its own, and padding is 0.
    wanted = (batch.tokens[:, :, None] == batch.tokens[:, None]).tril()
    for word in ("auto", "dense", "sdpa"):
        assert torch.equal(make_mask(batch, attention=word), wanted), word  # type: ignore[arg-type]
    assert make_mask(batch, attention="flex").shape == (3, 1, 8, 8)
    cuda = SimpleNamespace(device=torch.device("cuda"), shape=batch.tokens.shape)
    assert isinstance(make_mask(SimpleNamespace(tokens=cuda, seq_lens=batch.seq_lens)), BlockMask)
    assert isinstance(make_mask(batch.to("meta")), torch.Tensor)
    message = "attention='sparse' is unknown; choose one of 'auto', 'dense', 'sdpa', 'flex'"
    with pytest.raises(ValueError, match=message):
        make_mask(batch, attention="sparse")


@settings(max_examples=40)
@given(packed(longest=70), st.sampled_from([None, 1, 4, 9, 13]), st.sampled_from([4, 5, 16]))
@example(([[16, 16, 16]], 48), None, 16)
@example(([[48]], 48), 31, 16)  # the farthest pair in two adjacent blocks is 31 apart
@example(([[48]], 48), 32, 16)
@example(([[40, 3]], 48), None, 16)  # the padding left out
def test_block_masks_equal_torchs(case: tuple[list[list[int]], int], window: int | None, block: int) -> None:
    seq_lens, size = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "BLOCK_SIZE", block)
        ours = flex_mask(padded(seq_lens), max_seq_len=size, window=window)
    theirs = create_block_mask(ours.mask_mod, len(seq_lens), None, size, size, device="cpu", BLOCK_SIZE=block)
    for side in ("kv", "q"):
        names = [f"{kind}{side}_{what}" for kind in ("", "full_") for what in ("num_blocks", "indices")]
        for name in names:
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
    assert (ours.seq_lengths, ours.BLOCK_SIZE) == (theirs.seq_lengths, theirs.BLOCK_SIZE)
    # torch's mask was made of our function of two tokens, which has to be right, too.
    near = torch.ones(size, size, dtype=torch.bool).triu(1 - (window or size))
    seen = create_mask(ours.mask_mod, len(seq_lens), None, size, size, device="cpu")[:, 0]
    assert torch.equal(seen, torch.tensor(naive_mask(seq_lens, size)) & near)


# Masks of groups, whose answers see their prompt and not one another.


@pytest.mark.parametrize("window", [None, 200])
def test_blocks_of_the_mask_of_groups_are_those_of_its_tokens(window: int | None) -> None:
    """On a CPU, flex attention looks at no block, so the tables are compared with the mask of all tokens."""
    groups = [
        Group(range(900), range(900), lengths=[300, 150, 290, 160], parents=[-1, 0, 0, 2]),
        Group(range(90), range(90), lengths=[40, 50], parents=[-1, 0]),
    ]
    batch = batch_of(groups, max_seq_len=1024)
    visible = visible_of(batch)
    assert visible is not None
    mask = flex_mask(
        batch.seq_lens, max_seq_len=1024, window=window, visible=visible, positions=batch.input_pos
    )
    seen: Any = make_mask(batch, attention="dense")
    seen &= batch.input_pos[:, :, None] - batch.input_pos[:, None, :] < (window or 1024)
    tokens = seen.view(len(seen), 8, 128, 8, 128).transpose(2, 3)
    partial = mask.to_dense()[:, 0].bool()
    counts: Any = mask.full_kv_num_blocks
    blocks: Any = mask.full_kv_indices
    full = torch.zeros_like(partial)
    for pack, query in product(range(len(partial)), range(8)):
        full[pack, query, blocks[pack, 0, query, : counts[pack, 0, query]].long()] = True
    needed = tokens.flatten(3).any(-1)
    assert not (needed & ~(partial | full)).any(), "a block that a query sees is skipped"
    assert not (full & ~tokens.flatten(3).all(-1)).any(), "in a full block, a query does not see a key"
    assert window or torch.equal(partial | full, needed), "no block is computed in vain"
    assert window or full.any()


# Attention between boundaries.


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
def test_varlen_attention_equals_the_naive_one(
    cuts: list[int],
    heads: tuple[int, int],
    window: int | None,
    scale: float | None,
    softcap: float | None,
    dtype: torch.dtype,
    queries: int,
) -> None:
    ends = torch.tensor(sorted([0, *cuts, 40]), dtype=torch.int32)
    most = int(ends.diff().max())
    q, k, v, upstream = tensors(40, heads=heads[0], kv_heads=heads[1], dtype=dtype)
    given: dict[str, Any] = {"cu_seqlens": ends, "window": window, "scale": scale, "softcap": softcap}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "QUERY_BLOCK", queries)
        ours = varlen_attention(q, k, v, max_seqlen=most, **given)
        with pytest.raises(ValueError, match=f"a sequence has {most} keys, and max_seqlen is {most - 1}"):
            varlen_attention(q, k, v, max_seqlen=most - 1, **given)
        gradients = torch.autograd.grad(ours, (q, k, v), upstream)
    assert ours.dtype == dtype
    assert ours.is_contiguous()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert varlen_attention(q, k, v, max_seqlen=40, **given).dtype == torch.bfloat16
    expected = attend(*(x.double() for x in (q, k, v)), **given)
    assert difference(ours, expected) < LIMIT[dtype]
    wanted = torch.autograd.grad(expected, (q, k, v), upstream.double())
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert float((ours.detach() - theirs.detach()).norm()) < LIMIT[dtype] * upstream.norm() * 10


@pytest.mark.parametrize(
    ("dtype", "head_dim", "softcap", "why"),
    [
        (
            torch.float32,
            64,
            None,
            "flash attention computes in 16 bits and the model computes in torch.float32",
        ),
        (torch.bfloat16, 64, 50.0, "torch's flash attention has no softcap and the model has one of 50.0"),
        (torch.bfloat16, 20, None, "a head_dim that is a multiple of 8 and at most 256, the model's is 20"),
        (torch.bfloat16, 264, None, "a head_dim that is a multiple of 8 and at most 256, the model's is 264"),
        (torch.float16, 256, None, None),
        (torch.bfloat16, 16, None, None),
    ],
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_limits_of_the_cuda_kernel(
    kv_heads: int, dtype: torch.dtype, head_dim: int, softcap: float | None, why: str | None
) -> None:
    """Fake CUDA tensors run the kernel's checks without a GPU."""
    with FakeTensorMode():
        q, k, v = (torch.empty(40, h, head_dim, dtype=dtype, device="cuda") for h in (4, kv_heads, kv_heads))
        ends = torch.empty(9, dtype=torch.int32, device="cuda")
        for window in (None, 5):
            given: dict[str, Any] = {"max_seqlen": 20, "scale": 0.3, "softcap": softcap, "window": window}
            message = f"attention='varlen' on CUDA: .*{why}"
            with pytest.raises(ValueError, match=message) if why else nullcontext():
                out = varlen_attention(q, k, v, cu_seqlens=ends, **given)
                assert (out.shape, out.dtype, out.device.type) == (q.shape, dtype, "cuda")


def test_values_of_fewer_channels_are_padded_for_the_cuda_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of multi-head latent attention have fewer channels than keys; flash attention takes one size for both."""
    got: list[torch.Size] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **_settings: Any) -> torch.Tensor:
        got.append(v.shape)
        return q.new_empty(*q.shape[:2], v.shape[-1])

    monkeypatch.setattr(varlen, "_varlen_kernel", kernel)
    with FakeTensorMode():
        q, k, v = (torch.empty(40, 4, size, dtype=torch.bfloat16, device="cuda") for size in (24, 24, 16))
        ends = torch.empty(9, dtype=torch.int32, device="cuda")
        assert varlen_attention(q, k, v, cu_seqlens=ends, max_seqlen=20).shape == (40, 4, 16)
    assert got == [(40, 4, 24)]


def test_a_window_on_cuda_includes_the_querys_own_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts the tokens before and after the query's own; (-1, 0) stands for all before it."""
    got = []

    def kernel(q: torch.Tensor, *_: Any, **given: Any) -> torch.Tensor:
        got.append(given["window_size"])
        return q

    monkeypatch.setattr(varlen, "_varlen_kernel", kernel)
    with FakeTensorMode():
        q = torch.empty(40, 4, 16, dtype=torch.bfloat16, device="cuda")
        ends = torch.empty(9, dtype=torch.int32, device="cuda")
        for window in (None, 1, 5):
            varlen_attention(q, q, q, cu_seqlens=ends, max_seqlen=20, window=window)
    assert got == [(-1, 0), (0, 0), (4, 0)]
