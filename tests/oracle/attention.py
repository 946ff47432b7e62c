"""Attention written plainly: masks as loops, kernels as softmax over all pairs of tokens, and what tests feed them."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st

LIMIT = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def naive_ids(seq_lens: list[list[int]], max_seq_len: int) -> list[list[int]]:
    packs = []
    for lengths in seq_lens:
        ids = [number for number, length in enumerate(lengths) for _ in range(length)]
        packs.append(ids + [len(lengths)] * (max_seq_len - len(ids)))
    return packs


def naive_mask(seq_lens: list[list[int]], max_seq_len: int) -> list[list[list[bool]]]:
    places = range(max_seq_len)
    return [
        [[query >= key and ids[query] == ids[key] for key in places] for query in places]
        for ids in naive_ids(seq_lens, max_seq_len)
    ]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute attention over all pairs of tokens under a mask.

    In place of `varlen._attend_sequences`, which breaks the graph of ``torch.compile``, it lets graphs be counted.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    ids, ends = _numbered(cu_seqlens, len(q))
    key_ids, key_ends = _numbered(cu_seqlens if cu_seqlens_k is None else cu_seqlens_k, len(k))
    back = key_ends - ends[:, None]
    seen = (ids[:, None] == key_ids) & (back >= 0) & (back < (window or len(k)))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def _numbered(cu_seqlens: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's sequence, and how many tokens it is from its end; tokens behind the last have none."""
    places = torch.arange(tokens)
    ids = torch.searchsorted(cu_seqlens, places, right=True)
    return ids, cu_seqlens[ids.clamp(max=len(cu_seqlens) - 1)] - places


def padded(seq_lens: list[list[int]]) -> torch.Tensor:
    """Make ``seq_lens`` as in a `Batch`: int32, zeros at the end."""
    most = max(map(len, seq_lens))
    return torch.tensor([lengths + [0] * (most - len(lengths)) for lengths in seq_lens], dtype=torch.int32)


@st.composite
def packed(draw: st.DrawFn, *, longest: int = 24) -> tuple[list[list[int]], int]:
    """Draw the segments of one to three packs, with or without the padding's, and the packs' length."""
    max_seq_len = draw(st.integers(1, longest))
    packs = []
    for _ in range(draw(st.integers(1, 3))):
        ends = sorted(draw(st.sets(st.integers(1, max_seq_len), min_size=1)))
        packs.append([end - start for start, end in pairwise([0, *ends])])
    return packs, max_seq_len


def random_packs(count: int, *, max_seq_len: int, batch: int = 2) -> list[torch.Tensor]:
    """Make ``seq_lens`` of batches with different shapes."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        packs = []
        for _ in range(batch):
            number = torch.randint(0, 12, (), generator=generator)
            cuts = torch.randperm(max_seq_len - 1, generator=generator)[:number]
            packs.append(
                [stop - start for start, stop in pairwise([0, *sorted((cuts + 1).tolist()), max_seq_len])]
            )
        made.append(padded(packs))
    assert len({lens.shape for lens in made}) > 2
    return made


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
