"""Varlen attention that compiled code can trace on a CPU, to count the graphs of models as on CUDA."""

from __future__ import annotations

import torch


def attend_in_graph(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Compute attention over all pairs of tokens under a mask, in place of `varlen._attend_sequences`.

    That function breaks the graph of ``torch.compile``; this one does not.
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
