"""Varlen attention that compiled code can trace on a CPU, to count the graphs of models as on CUDA."""

from __future__ import annotations

import torch


def attend_in_graph(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Compute attention over all pairs of tokens under a mask, in place of `varlen._attend_sequences`.

    That function breaks the graph of ``torch.compile``; this one does not.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    places = torch.arange(len(q))
    ids = torch.searchsorted(cu_seqlens, places, right=True)
    back = places[:, None] - places
    seen = (ids[:, None] == ids) & (back >= 0) & (back < (window or len(q)))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
