"""Block masks against those of torch's ``create_block_mask``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from streampack.attention import flex, flex_mask
from streampack.attention.flex import flex_attention_of
from tests.attention.test_attention import naive_mask, packed, padded
from tests.attention.test_varlen import LIMIT, Largest, difference, naive, random_packs

TABLES = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


def by_torch(mask: BlockMask, *, size: int, block: int) -> BlockMask:
    return create_block_mask(
        mask.mask_mod, mask.kv_num_blocks.shape[0], None, size, size, device="cpu", BLOCK_SIZE=block
    )


@settings(max_examples=80)
@given(packed(longest=70), st.sampled_from([None, 1, 4, 9, 13]), st.sampled_from([4, 5, 16]))
@example(([[16, 16, 16]], 48), None, 16)
@example(([[48]], 48), 31, 16)  # the farthest pair in two adjacent blocks is 31 apart
@example(([[48]], 48), 32, 16)
@example(([[48]], 48), 17, 16)
@example(([[48]], 48), 18, 16)
@example(([[40, 3]], 48), None, 16)  # the padding left out
def test_block_masks_equal_torchs(case: tuple[list[list[int]], int], window: int | None, block: int) -> None:
    seq_lens, size = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK_SIZE", block)
        ours = flex_mask(padded(seq_lens), max_seq_len=size, window=window)
    theirs = by_torch(ours, size=size, block=block)
    for name in TABLES:
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype
    assert (ours.seq_lengths, ours.BLOCK_SIZE) == (theirs.seq_lengths, theirs.BLOCK_SIZE)
    # torch's mask was made of our function of two tokens, which has to be right, too.
    near = torch.ones(size, size, dtype=torch.bool).triu(1 - (window or size))
    seen = create_mask(ours.mask_mod, len(seq_lens), None, size, size, device="cpu")[:, 0]
    assert torch.equal(seen, torch.tensor(naive_mask(seq_lens, size)) & near)


def test_full_blocks_are_marked() -> None:
    """In a pack of one long sequence only blocks on the diagonal need the mask."""
    mask = flex_mask(torch.tensor([[1024]]), max_seq_len=1024)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks.flatten().tolist() == list(range(8))
    assert mask.kv_num_blocks.flatten().tolist() == [1] * 8


def test_memory_does_not_grow_with_pairs_of_tokens() -> None:
    size = 16384
    seq_lens = torch.tensor([[5000, 10000, 1384]], dtype=torch.int32)
    with Largest() as seen:
        flex_mask(seq_lens, max_seq_len=size)
    assert seen.numel <= max(size, (size // 128 + 1) ** 2)


def test_no_host_sync() -> None:
    """On the meta device, reading a value raises."""
    mask = flex_mask(torch.empty(2, 5, dtype=torch.int32, device="meta"), max_seq_len=300, window=200)
    assert mask.kv_indices.device.type == "meta"


# On a CPU, tests run flex attention uncompiled: it is slower, and needs no compiler.
eager = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@eager
@pytest.mark.parametrize(
    ("window", "scale", "softcap"), [(None, None, None), (150, None, 2.0), (150, 0.7, None)]
)
def test_attention_equals_the_naive_one(
    window: int | None, scale: float | None, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 500, 16, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
    mask = flex_mask(torch.tensor([[200, 180, 120]]), max_seq_len=500, window=window)
    ours = flex_attention_of(q, k, v, block_mask=mask, scale=scale, softcap=softcap)
    cu_seqlens = torch.tensor([0, 200, 380, 500])
    expected = naive(
        *(x[0].transpose(0, 1) for x in (q, k, v)),
        cu_seqlens=cu_seqlens,
        window=window,
        scale=scale,
        softcap=softcap,
    )
    assert difference(ours[0].transpose(0, 1), expected) < LIMIT[torch.float64]


def count_graphs(device: str, backend: str) -> int:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 256, 16, generator=generator).to(device) for h in (4, 2, 2))

    @torch.compile(backend=counter, fullgraph=True)
    def attend(mask: BlockMask) -> torch.Tensor:
        return 2 * flex_attention_of(q, k, v, block_mask=mask, softcap=3.0)

    for seq_lens in random_packs(15, max_seq_len=256):
        mask = flex_mask(seq_lens.to(device), max_seq_len=256)
        out: Any = attend(mask)
        expected = 2 * flex_attention_of(q, k, v, block_mask=mask, softcap=3.0)
        assert difference(out, expected) < LIMIT[torch.float32]
    return counter.frame_count


@eager
def test_packs_of_other_lengths_reuse_the_graph() -> None:
    assert count_graphs("cpu", "eager") == 1


@pytest.mark.gpu
def test_packs_of_other_lengths_reuse_the_graph_on_cuda() -> None:
    assert count_graphs("cuda", "inductor") == 1
