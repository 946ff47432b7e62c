"""Varlen attention: causal attention over sequences laid end to end, without a mask.

On CUDA the kernel is ``torch.nn.attention.varlen`` (flash attention). torch has none for CPUs; there
``scaled_dot_product_attention`` computes one sequence after another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

# Queries that see a window, or have a softcap, are computed in blocks of this many. A block of scores then has 0.5 GiB
# in fp32 for 32 heads and 8,192 keys, where all queries at once would have 8 GiB.
QUERIES = 512

# torch 2.11 infers grouped queries from the shapes, later versions take an argument.
_varlen_attn: Callable[..., torch.Tensor] = varlen_attn  # type: ignore[assignment]  # a tuple only if asked for
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def cu_seqlens_of(seq_lens: torch.Tensor, *, max_seq_len: int, most: int | None = None) -> torch.Tensor:
    """Return the cumulative sequence lengths of a batch, all packs laid end to end.

    Every pack has the same number of entries; unused ones are empty sequences at its end. All tokens are covered,
    padding too, because kernels leave the output of uncovered tokens uninitialised. There is no host sync.

    >>> cu_seqlens_of(torch.tensor([[3, 2, 1], [4, 2, 0]]), max_seq_len=6).tolist()
    [0, 3, 5, 6, 6, 10, 12, 12, 12]

    Args:
        seq_lens: ``[batch, segments]``, as in a `Batch`; the padding's length may be left out.
        max_seq_len: the length of a pack.
        most: segments that a pack can have, padding included (``max_seqs_per_pack + 1``). It makes the result
            as long for every batch, which CUDA graphs need. Without it the length depends on the batch and is
            marked as dynamic, so that ``torch.compile`` does not compile again.

    Returns:
        ``[batch * most + 1]`` int32 on the device of ``seq_lens``; ``most`` is ``segments + 1`` where not given.

    Raises:
        ValueError: if a pack has more segments than ``most``.
    """
    batch, segments = seq_lens.shape
    if most is not None and segments > most:
        raise ValueError(f"a pack has {segments} segments, most={most}; raise most, or leave it out")
    columns = most or segments + 1
    ends = torch.full((batch, columns), max_seq_len, dtype=torch.int32, device=seq_lens.device)
    # The last column stays max_seq_len, to cover a padding whose length was left out.
    known = min(segments, columns - 1)
    ends[:, :known] = seq_lens[:, :known].cumsum(1)
    ends += max_seq_len * torch.arange(batch, dtype=torch.int32, device=seq_lens.device)[:, None]
    cu_seqlens = torch.nn.functional.pad(ends.flatten(), (1, 0))
    if most is None and not torch.compiler.is_compiling():
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)
    return cu_seqlens


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute causal attention within each sequence.

    On CUDA it is part of a compiled graph; elsewhere ``torch.compile`` breaks the graph here, because the lengths
    are read.

    >>> q, k, v = torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(0))  # 5 tokens, 2 heads
    >>> out = varlen_attention(q, k, v, cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32), max_seqlen=3)
    >>> torch.equal(out[3], v[3])  # the first token of a sequence sees nothing but itself
    True

    Args:
        q: ``[tokens, heads, head_dim]``.
        k: ``[tokens, kv_heads, head_dim]``; ``heads`` is a multiple of ``kv_heads``.
        v: as ``k``.
        cu_seqlens: ``[sequences + 1]`` int32, from 0 to ``tokens``: where each sequence begins. See `cu_seqlens_of`.
        max_seqlen: an upper bound for their lengths. Give ``max_seq_len``: ``torch.compile`` would compile again for
            each new number.
        window: tokens that a query sees, itself included; None: all before it.
        scale: of the scores; None: ``head_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``. CPU only.

    Returns:
        ``[tokens, heads, head_dim]``, in the type of ``q``; under autocast, in autocast's.

    Raises:
        ValueError: on CUDA, for what torch's kernel cannot do: a ``softcap``, or other than 16-bit floats.
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if q.device.type != "cuda":
        out: torch.Tensor = _attend_each(q, k, v, cu_seqlens, window, scale, softcap)
        return out
    if why := varlen_unfit(dtype=q.dtype, head_dim=q.shape[-1], softcap=softcap):
        raise ValueError(f"attention='varlen' on CUDA: {why}; use attention='flex' or 'dense'")
    sees = (-1 if window is None else window - 1, 0)  # keys before and after the query's own token
    return _varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=sees,
        **(_GROUPED if q.shape[1] != k.shape[1] else {}),
    )  # fmt: skip


def varlen_unfit(*, dtype: torch.dtype, head_dim: int, softcap: float | None = None) -> str | None:
    """Return why torch's CUDA kernel cannot compute this attention, or None if it can.

    >>> varlen_unfit(dtype=torch.bfloat16, head_dim=128) is None
    True
    >>> varlen_unfit(dtype=torch.float32, head_dim=128)
    "torch's kernel computes in 16 bits and the model is in torch.float32"
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return f"torch's kernel computes in 16 bits and the model is in {dtype}"
    if softcap is not None:
        return f"torch's kernel has no softcap and the model has one of {softcap}"
    if head_dim % 8 or head_dim > 256:
        return f"torch's kernel needs a head_dim that is a multiple of 8 and at most 256, the model's is {head_dim}"
    return None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it reads the lengths, which would be a graph for each pack
def _attend_each(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Compute `varlen_attention` one sequence at a time.

    16-bit inputs are computed in fp32: in bf16, sequences of 16 to 111 tokens took twice as long on an AMD EPYC.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    parts = [torch.split(x.to(dtype).transpose(0, 1)[None], lengths, dim=2) for x in (q, k, v)]
    outs = [_attend(*one, window=window, scale=scale, softcap=softcap) for one in zip(*parts, strict=True)]
    return torch.cat(outs, dim=2)[0].transpose(0, 1).to(q.dtype).contiguous()


def _attend(
    q: torch.Tensor,  # [1, heads, length, head_dim]
    k: torch.Tensor,  # [1, kv_heads, length, head_dim]
    v: torch.Tensor,
    *,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Compute causal attention of one sequence."""
    length = q.shape[2]
    if softcap is None and (window is None or window >= length):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    blocks = []
    for first in range(0, length, QUERIES):
        last = min(first + QUERIES, length)
        # The first of the keys that some of these queries see.
        begin = 0 if window is None else max(0, first - window + 1)
        queries = torch.arange(first, last, device=q.device)[:, None]
        back = queries - torch.arange(begin, last, device=q.device)
        seen = (back >= 0) & (back < (window or length))
        block = q[:, :, first:last], k[:, :, begin:last], v[:, :, begin:last]
        if softcap is None:
            blocks.append(
                F.scaled_dot_product_attention(*block, attn_mask=seen, scale=scale, enable_gqa=True)
            )
        else:
            blocks.append(_attend_capped(*block, seen, scale=scale, softcap=softcap))
    return torch.cat(blocks, dim=2)


def _attend_capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    *,
    scale: float | None,
    softcap: float,
) -> torch.Tensor:
    """Compute attention with capped scores, which ``scaled_dot_product_attention`` does not have."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    capped = (softcap * torch.tanh(scores / softcap)).masked_fill(~seen, -torch.inf)
    return capped.softmax(-1) @ v
