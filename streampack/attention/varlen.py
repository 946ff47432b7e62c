"""Attention over sequences laid end to end: no mask, and no work between tokens that do not see one another.

On CUDA the kernel is torch's own, ``torch.nn.attention.varlen`` (flash attention). torch has none for CPUs, so
there each sequence is computed by itself: by the kernel of ``scaled_dot_product_attention``, or, where a softcap or a
window asks for what that has not, in blocks of its queries.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

# A block of scores has heads * QUERIES * (keys up to the block) numbers: 0.5 GiB in fp32 for 32 heads and 8,192
# keys, where all queries at once would be 8 GiB.
QUERIES = 512

# torch 2.11 takes grouped queries as they are, 2.12 and later want to be told.
_varlen_attn: Callable[..., torch.Tensor] = varlen_attn  # type: ignore[assignment]  # a tuple only if asked for
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

# What `scaled_dot_product_attention` calls on a CPU: within an operator autograd does not run, so both ways are called
# by their names. Forward and backward, with 8 heads of 64 in fp32 on one core of an AMD EPYC, the blocks take 1.1 times
# as long for sequences of 64 tokens, 1.6 to 2.1 times of 512, 3.2 times of 8,192; for packs of 4,096 tokens with
# FLAN-like lengths 1.4 to 1.5 times. 16-bit numbers go through it in 32 bits: with such as they are, it took 2 times as
# long as the blocks for sequences of 16 to 111 tokens.
_sdpa = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_sdpa_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def cu_seqlens_of(seq_lens: torch.Tensor, *, max_seq_len: int, most: int | None = None) -> torch.Tensor:
    """Where the sequences of a batch begin, all packs laid end to end, and where the last one ends.

    Every pack gets the same number of entries, of which those that it does not need are empty sequences at its
    end, and all its tokens are covered, padding too: kernels leave the rows of uncovered tokens uninitialised.
    Nothing waits for the host.

    >>> cu_seqlens_of(torch.tensor([[3, 2, 1], [4, 2, 0]]), max_seq_len=6).tolist()
    [0, 3, 5, 6, 6, 10, 12, 12, 12]

    Args:
        seq_lens: ``[batch, segments]``, as in a `Batch`; the padding's length may be left out.
        max_seq_len: the length of a pack.
        most: segments that a pack can have, padding included (``max_seqs_per_pack + 1``). It makes the result
            as long for every batch, which CUDA graphs need. Without it the length follows the batch and is
            marked as one that varies, so that ``torch.compile`` makes one graph all the same.

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
    # The last column stays: with it a pack's tokens are covered where the padding's length was left out.
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
    """Causal attention within each sequence.

    >>> q, k, v = torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(0))  # 5 tokens, 2 heads
    >>> out = varlen_attention(q, k, v, cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32), max_seqlen=3)
    >>> torch.equal(out[3], v[3])  # the first token of a sequence sees nothing but itself
    True

    Args:
        q: ``[tokens, heads, head_dim]``.
        k: ``[tokens, kv_heads, head_dim]``; ``heads`` is a multiple of ``kv_heads``.
        v: as ``k``.
        cu_seqlens: ``[sequences + 1]`` int32, from 0 to ``tokens``: where each sequence begins. See `cu_seqlens_of`.
        max_seqlen: no sequence is longer. Give ``max_seq_len``: the true longest would make a new graph at
            every change.
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
        out: torch.Tensor = _varlen_loop(q, k, v, cu_seqlens, window, scale, softcap)[0]
        return out
    if why := varlen_unfit(dtype=q.dtype, head_dim=q.shape[-1], softcap=softcap):
        raise ValueError(f"attention='varlen' on CUDA: {why}; use attention='flex' or 'dense'")
    sees = (-1 if window is None else window - 1, 0)  # keys before a query's own, and behind it
    return _varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=sees,
        **(_GROUPED if q.shape[1] != k.shape[1] else {}),
    )  # fmt: skip


def varlen_unfit(*, dtype: torch.dtype, head_dim: int, softcap: float | None = None) -> str | None:
    """Why torch's kernel on CUDA cannot compute such an attention; None if it can.

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


# One operator, into which torch.compile does not look: lengths read in compiled code would be a graph per pack.
@torch.library.custom_op("streampack::varlen_attention", mutates_args=())
def _varlen_loop(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention; and the logarithms of the sums of its weights for the way back, ``[heads, tokens]``.

    The latter are left at 0 where the way back works out the weights anew.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    logs = q.new_zeros(q.shape[1], q.shape[0], dtype=_wide(q.dtype))
    for one in _sequences(cu_seqlens):
        if _fits_sdpa(q[one], window, softcap):
            heads, sums = _sdpa(*_grouped(q[one], k[one], v[one]), is_causal=True, scale=scale)
            out[one] = _unfold(heads.flatten(1, 2), len(out[one]))
            logs[:, one] = sums.flatten(0, 1)
            continue
        for rows, keys, hidden in _blocks(one, window, device=q.device):
            probs, _ = _probabilities(q[rows], k[keys], hidden, scale, softcap)
            out[rows] = _unfold(probs @ _fold(v[keys]), len(hidden))
    return out, logs


@torch.library.custom_op("streampack::varlen_attention_backward", mutates_args=())
def _varlen_loop_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kv_heads = k.shape[1]
    dq, dk, dv = (torch.zeros(x.shape, dtype=_wide(x.dtype), device=x.device) for x in (q, k, v))
    for one in _sequences(cu_seqlens):
        if _fits_sdpa(q[one], window, softcap):
            queries, keys, values, upstream, result = _grouped(q[one], k[one], v[one], grad[one], out[one])
            sums = logs[:, one].reshape(queries.shape[:3])
            dheads = _sdpa_backward(
                upstream, queries, keys, values, result, sums, dropout_p=0.0, is_causal=True, scale=scale
            )
            dq[one] = _unfold(dheads[0].flatten(1, 2), len(dq[one]))
            dk[one], dv[one] = (x.sum(1).transpose(0, 1) for x in dheads[1:])
            continue
        for rows, seen, hidden in _blocks(one, window, device=q.device):
            probs, slope = _probabilities(q[rows], k[seen], hidden, scale, softcap)
            upstream = _fold(grad[rows], kv_heads)
            dprobs = upstream @ _fold(v[seen]).mT
            dscores = probs * (dprobs - (probs * dprobs).sum(-1, keepdim=True)) * slope
            dq[rows] = _unfold(dscores @ _fold(k[seen]), len(hidden))
            dk[seen] += (dscores.mT @ _fold(q[rows], kv_heads)).transpose(0, 1)
            dv[seen] += (probs.mT @ upstream).transpose(0, 1)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _sequences(cu_seqlens: torch.Tensor) -> Iterator[slice]:
    """Where each lies, empty ones left out."""
    return (slice(start, stop) for start, stop in pairwise(cu_seqlens.tolist()) if stop > start)


def _fits_sdpa(q: torch.Tensor, window: int | None, softcap: float | None) -> bool:
    """Whether a sequence's queries see all that came before them, and nothing is capped."""
    return q.device.type == "cpu" and softcap is None and (window is None or window >= len(q))


def _blocks(
    one: slice, window: int | None, *, device: torch.device
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """(queries, the keys that some of them see, ``[queries, keys]`` bool: True where one does not) of a sequence."""
    for first in range(one.start, one.stop, QUERIES):
        last = min(first + QUERIES, one.stop)
        begin = one.start if window is None else max(one.start, first - window + 1)
        places = torch.arange(begin, last, device=device)
        back = places[first - begin :, None] - places
        hidden = back < 0 if window is None else (back < 0) | (back >= window)
        yield slice(first, last), slice(begin, last), hidden


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor, scale: float | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """``[kv_heads, group * queries, keys]`` attention weights; the derivative of the scores by ``q @ k``."""
    slope: torch.Tensor | float = q.shape[-1] ** -0.5 if scale is None else scale
    scores = _fold(q, k.shape[1]) @ _fold(k).mT * slope
    if softcap is not None:
        capped = torch.tanh(scores / softcap)
        scores, slope = capped * softcap, slope * (1 - capped.square())
    scores.view(len(scores), -1, *hidden.shape).masked_fill_(hidden, -math.inf)
    return scores.softmax(-1), slope


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """All as ``[kv_heads, group, tokens, head_dim]``, ``others`` as ``q``; a group shares its keys, uncopied."""
    (tokens, heads, head_dim), kv_heads = q.shape, k.shape[1]
    shape = kv_heads, heads // kv_heads, tokens, head_dim
    # Contiguous: asked by its name, the kernel takes numbers for neighbours that strides keep apart.
    whole = [_fold(x, kv_heads).contiguous().view(shape) for x in (q, *others)]
    shared = [_fold(x).contiguous()[:, None].expand(shape) for x in (k, v)]
    return [whole[0], *shared, *whole[1:]]


def _fold(x: torch.Tensor, kv_heads: int | None = None) -> torch.Tensor:
    """``[tokens, heads, head_dim]`` -> ``[kv_heads, group * tokens, head_dim]``: heads that share keys side by side."""
    tokens, heads, head_dim = x.shape
    groups = x.to(_wide(x.dtype)).reshape(tokens, kv_heads or heads, -1, head_dim)
    return groups.permute(1, 2, 0, 3).reshape(kv_heads or heads, -1, head_dim)


def _unfold(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """The way back."""
    kv_heads, _, head_dim = x.shape
    return x.reshape(kv_heads, -1, tokens, head_dim).permute(2, 0, 1, 3).reshape(tokens, -1, head_dim)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which to compute: kernels add up 16-bit numbers in 32 bits too."""
    return torch.promote_types(dtype, torch.float32)


@_varlen_loop.register_fake
def _(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    logs = q.new_empty(q.shape[1], q.shape[0], dtype=_wide(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), logs


@_varlen_loop_backward.register_fake
def _(_grad: torch.Tensor, *qkv_and_others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in qkv_and_others[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_seqlens, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _gradients(ctx: Any, grad: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
    return (*_varlen_loop_backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None)


_varlen_loop.register_autograd(_gradients, setup_context=_save)
