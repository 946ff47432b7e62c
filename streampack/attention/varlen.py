"""Varlen attention: causal attention over sequences laid end to end, without a mask.

On CUDA the kernel is ``torch.nn.attention.varlen`` (flash attention). torch has none for CPUs; there
``scaled_dot_product_attention`` computes one sequence after another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from streampack.attention.layout import Packed, PackedRows, prefix_keys, shares_prefixes
from streampack.packing.batch import Batch

# On a CPU, attention with a sliding window or a softcap is computed for this many queries at a time. That bounds the
# memory for scores: 512 queries of 32 heads over 8,192 keys take 0.5 GiB in fp32, and 8,192 queries would take 8 GiB.
QUERY_BLOCK = 512

# torch's annotation allows a tuple, which varlen_attn returns only with ``return_aux``.
_varlen_kernel: Callable[..., torch.Tensor] = varlen_attn  # type: ignore[assignment]
# torch 2.11 infers from the shapes that several query heads share a key head; later versions need an argument.
_GQA_ARGUMENT = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class Boundaries:
    """The sequences of a batch, its packs laid end to end, as kernels without a mask take them."""

    cu_seqlens_q: torch.Tensor  # [sequences + 1] int32
    cu_seqlens_k: torch.Tensor  # the same; with shared prefixes, a sequence has more keys than queries
    max_seqlen: int  # no sequence has more keys
    keys: torch.Tensor | None  # [keys] int32: the tokens that are the keys; None: all tokens

    @classmethod
    def of(cls, batch: Packed) -> Boundaries:
        """Return the boundaries of a batch.

        Nothing is copied to the host, but for dicts on a device that say their boundaries by positions alone.
        """
        size, seq_lens = batch.tokens.shape[1], batch.seq_lens
        longest = batch.longest if isinstance(batch, Batch | PackedRows) else None
        if isinstance(batch, Batch) and longest is not None:
            used = [sum(fragment.length for fragment in fragments) for fragments in batch.fragments]
            longest = max(longest, size - min(used))
        # The next power of two. Kernels start a block of threads for every 128 tokens up to it, in each sequence; with
        # the length of the pack, most of them would end at once.
        bound = min(size, 1 << max((longest or size) - 1, 127).bit_length())
        if isinstance(batch, PackedRows) and seq_lens.shape[1] == size:
            # A dict on a device that gives positions alone. Blocks of threads for as many sequences as tokens would
            # take longer than to wait once for their number.
            seq_lens = seq_lens[:, : int((seq_lens > 0).sum(1).max())]
        if shares_prefixes(batch):
            queries, keys, index = prefix_keys(batch)
            return cls(queries, keys, bound, index)
        cu_seqlens = cu_seqlens_of(seq_lens, max_seq_len=size)
        return cls(cu_seqlens, cu_seqlens, bound, None)

    def attend(
        self,
        kernel: Callable[..., torch.Tensor],
        q: torch.Tensor,  # [batch, heads, max_seq_len, head_dim]
        k: torch.Tensor,  # [batch, kv_heads, max_seq_len, head_dim]
        v: torch.Tensor,
        **settings: Any,  # window, scale, softcap
    ) -> torch.Tensor:
        """Compute causal attention within each sequence, ``[batch, max_seq_len, heads, head_dim]``."""
        flat_q, flat_k, flat_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        if self.keys is not None:
            flat_k, flat_v = flat_k.index_select(0, self.keys), flat_v.index_select(0, self.keys)
        out = kernel(
            flat_q,
            flat_k,
            flat_v,
            cu_seqlens=self.cu_seqlens_q,
            cu_seqlens_k=None if self.keys is None else self.cu_seqlens_k,
            max_seqlen=self.max_seqlen,
            **settings,
        )
        return out.view(len(q), q.shape[2], *out.shape[1:])


def cu_seqlens_of(seq_lens: torch.Tensor, *, max_seq_len: int) -> torch.Tensor:
    """Return the cumulative sequence lengths of a batch, all packs laid end to end.

    Every pack has ``segments + 1`` entries; those that it does not need are empty sequences at its end. With
    ``max_seqs_per_pack``, all batches have the same number, as CUDA graphs need. The sequences cover all tokens,
    padding too, because kernels leave the output of other tokens uninitialised. Nothing is copied to the host.

    >>> cu_seqlens_of(torch.tensor([[3, 2, 1], [4, 2, 0]]), max_seq_len=6).tolist()
    [0, 3, 5, 6, 6, 10, 12, 12, 12]

    Args:
        seq_lens: ``[batch, segments]``, as in a `Batch`; the padding's length may be missing.
        max_seq_len: the length of a pack.

    Returns:
        ``[batch * (segments + 1) + 1]`` int32 on the device of ``seq_lens``, whose length is marked as dynamic, so that
        ``torch.compile`` does not compile again for another.
    """
    batch, segments = seq_lens.shape
    ends = torch.full((batch, segments + 1), max_seq_len, dtype=torch.int32, device=seq_lens.device)
    ends[:, :segments] = seq_lens.cumsum(1)
    ends += max_seq_len * torch.arange(batch, dtype=torch.int32, device=seq_lens.device)[:, None]
    cu_seqlens = F.pad(ends.flatten(), (1, 0))
    if not torch.compiler.is_compiling():
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
    cu_seqlens_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention within each sequence.

    On CUDA ``torch.compile`` includes it in the graph. On other devices it breaks the graph here, because the lengths
    are read as Python integers.

    >>> q, k, v = torch.randn(3, 5, 2, 8, generator=torch.Generator().manual_seed(0))  # 5 tokens, 2 heads
    >>> out = varlen_attention(q, k, v, cu_seqlens=torch.tensor([0, 3, 5], dtype=torch.int32), max_seqlen=3)
    >>> torch.equal(out[3], v[3])  # the first token of a sequence sees nothing but itself
    True

    Args:
        q: ``[tokens, heads, head_dim]``.
        k: ``[tokens, kv_heads, head_dim]``; ``heads`` is a multiple of ``kv_heads``.
        v: as ``k``, or of fewer channels, as multi-head latent attention has them.
        cu_seqlens: ``[sequences + 1]`` int32, from 0 to ``tokens``: where each sequence begins. See `cu_seqlens_of`.
        max_seqlen: an upper bound for the sequences' lengths.
        window: how many tokens a query attends to, its own included; None: all tokens before it.
        scale: factor of the scores; None: ``head_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``; None: they stay as they are. CPU only.
        cu_seqlens_k: ``[sequences + 1]`` int32, where the keys of each sequence begin, if it has more of them than
            queries: its queries are then the last of its keys. None: as ``cu_seqlens``.

    Returns:
        ``[tokens, heads, head_dim of v]``, in the dtype of ``q``; under autocast, in autocast's dtype.

    Raises:
        ValueError: on CUDA, for what torch's kernel cannot do: a ``softcap``, other dtypes than 16-bit floats, a
            ``head_dim`` above 256 or no multiple of 8. On a CPU, for a sequence longer than ``max_seqlen``,
            whose rest a kernel would not compute.
    """
    q, k, v = (x.to(compute_dtype(x.device, x.dtype)) for x in (q, k, v))  # autocast does not know kernels
    if q.device.type != "cuda":
        out: torch.Tensor = _attend_sequences(
            q, k, v, cu_seqlens, cu_seqlens_k, max_seqlen, window, scale, softcap
        )
        return out
    if why := why_not_varlen(dtype=q.dtype, head_dim=q.shape[-1], softcap=softcap):
        raise ValueError(f"attention='varlen' on CUDA: {why}; use attention='flex' or 'dense'")
    # How many keys a query attends to before and after its own token; -1 stands for all.
    window_size = (-1 if window is None else window - 1, 0)
    out = _varlen_kernel(
        q, k, padded_values(k, v), cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k,
        max_seqlen, max_seqlen, scale=scale, window_size=window_size,
        **(_GQA_ARGUMENT if q.shape[1] != k.shape[1] else {}),
    )  # fmt: skip
    return out.narrow(-1, 0, v.shape[-1])


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which attention computes: autocast's where it is on, otherwise ``dtype``."""
    kind = device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else dtype


def padded_values(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return values with the channels of the keys: flash attention has one size for both."""
    return F.pad(v, (0, k.shape[-1] - v.shape[-1])) if v.shape[-1] < k.shape[-1] else v


def why_not_varlen(*, dtype: torch.dtype, head_dim: int, softcap: float | None = None) -> str | None:
    """Return why torch's CUDA kernel cannot compute this attention, or None if it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention computes in 16 bits and the model computes in {dtype}"
    if softcap is not None:
        return f"torch's flash attention has no softcap and the model has one of {softcap}"
    if head_dim % 8 or head_dim > 256:
        return f"flash attention needs a head_dim that is a multiple of 8 and at most 256, the model's is {head_dim}"
    return None


# Compiled, it would make a new graph for the lengths of every pack.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_sequences(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen: int,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Compute `varlen_attention` one sequence at a time."""
    # On an AMD EPYC, bf16 took twice as long as fp32 for sequences of 16 to 111 tokens.
    dtype = torch.promote_types(q.dtype, torch.float32)
    lengths = key_lengths = [length for length in cu_seqlens.diff().tolist() if length]
    if cu_seqlens_k is not None:
        key_lengths = [length for length in cu_seqlens_k.diff().tolist() if length]
    # A kernel would leave the rest of the sequence uncomputed, and say nothing.
    if max(key_lengths) > max_seqlen:
        raise ValueError(
            f"a sequence has {max(key_lengths)} keys, and max_seqlen is {max_seqlen}; give at least that"
        )
    sequences = [
        torch.split(x.to(dtype).transpose(0, 1)[None], split, dim=2)
        for x, split in ((q, lengths), (k, key_lengths), (v, key_lengths))
    ]
    outs = [
        _attend_sequence(*qkv, window=window, scale=scale, softcap=softcap)
        for qkv in zip(*sequences, strict=True)
    ]
    return torch.cat(outs, dim=2)[0].transpose(0, 1).to(q.dtype).contiguous()


def _attend_sequence(
    q: torch.Tensor,  # [1, heads, length, head_dim]
    k: torch.Tensor,  # [1, kv_heads, keys, head_dim]; the last keys are the queries' own
    v: torch.Tensor,
    *,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Compute causal attention of one sequence."""
    length, keys = q.shape[2], k.shape[2]
    before = keys - length  # keys that belong to the prefix that the sequence continues
    if not before and softcap is None and (window is None or window >= length):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        # The first key that any query of this block attends to, and the one after the last.
        last_key = before + stop
        first_key = 0 if window is None else max(0, before + start - window + 1)
        queries = torch.arange(before + start, last_key, device=q.device)[:, None]
        distance = queries - torch.arange(first_key, last_key, device=q.device)
        mask = (distance >= 0) & (distance < (window or keys))
        block = q[:, :, start:stop], k[:, :, first_key:last_key], v[:, :, first_key:last_key]
        if softcap is None:
            blocks.append(
                F.scaled_dot_product_attention(*block, attn_mask=mask, scale=scale, enable_gqa=True)
            )
        else:
            blocks.append(capped_attention(*block, mask, scale=scale, softcap=softcap))
    return torch.cat(blocks, dim=2)


def capped_attention(
    q: torch.Tensor,  # [batch, heads, queries, head_dim]
    k: torch.Tensor,  # [batch, kv_heads, keys, head_dim]
    v: torch.Tensor,
    mask: torch.Tensor | None,  # [..., queries, keys], True where a query attends to a key; None: all before
    *,
    scale: float | None,
    softcap: float,
) -> torch.Tensor:
    """Compute attention with capped scores, which ``scaled_dot_product_attention`` does not have.

    A query that attends to no key, as in the padding of a batch, gets zeros.
    """
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        mask = mask.tril(k.shape[2] - q.shape[2])
    capped = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, -torch.inf)
    return capped.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).nan_to_num(0).to(v.dtype) @ v
