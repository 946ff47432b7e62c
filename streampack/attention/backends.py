"""The backends that ``"auto"`` tries, why one cannot compute a model's attention, and the flash-attn package."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.nn.attention import activate_flash_attention_impl

from streampack.attention.varlen import compute_dtype, padded_values, varlen_attention, why_not_varlen

# Implementations by the GPU's major compute capability, best first; others have 2 alone. On Hopper (9), 4 comes after
# 3, because it is less mature there.
_SUITED = {9: ("FA3", "FA4", "FA2"), 10: ("FA4", "FA2")}

# flash-attn 2's function, if the last `choose_flash` chose it; else torch's varlen attention calls the chosen kernels.
_flash2: Callable[..., Any] | None = None


def auto_backends(device: torch.device) -> tuple[str, ...]:
    """Return the backends that ``"auto"`` tries, best first.

    On a CPU, varlen comes first because it was faster. On one core, forward and backward pass of a llama of 4 layers
    and 256 dimensions over 4 packs of 1,024 tokens took 1.7, 1.8 and 1.8 s with varlen, and 2.6, 2.2 and 2.9 s with
    dense, for 64, 19 and 8 sequences.
    """
    orders = {"cuda": ("varlen", "flex", "dense"), "cpu": ("varlen", "dense")}
    return orders.get(device.type, ("dense",))


def why_not_backend(
    attention: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None = None
) -> str | None:
    """Return why a backend cannot compute this attention, or None if it can."""
    if attention == "flash":
        choose_flash(device, softcap=softcap)
        return why_not_varlen(dtype=dtype, head_dim=head_dim)
    if device.type != "cuda" or attention == "dense":
        return None
    if attention == "flex":
        short = f"torch's flex attention needs a head_dim of at least 16 on CUDA, the model's is {head_dim}"
        return short if head_dim < 16 else None
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "torch's kernel needs a GPU of compute capability 8.0 or more"
    return why_not_varlen(dtype=dtype, head_dim=head_dim, softcap=softcap)


def choose_flash(device: torch.device, *, softcap: float | None = None) -> str:
    """Let `flash_attention` call the best installed implementation for a device, and return its name.

    FA3 and FA4 also compute what torch's varlen attention computes in this process, and have no softcap there.

    Raises:
        ValueError: if flash-attn does not support the device.
        ImportError: if no implementation for the device is installed.
    """
    global _flash2
    if device.type != "cuda":
        raise ValueError(
            f"attention='flash' needs CUDA, the model is on {device.type}; use attention='varlen', which runs anywhere"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(
            f"attention='flash' needs a GPU of compute capability 8.0 or more, this one has {major}.{minor}; use "
            "attention='flex' or 'dense'"
        )
    suited = ("FA2",) if softcap is not None else _SUITED.get(major, ("FA2",))
    for name in suited:
        try:
            if name == "FA2":
                _flash2 = import_module("flash_attn").flash_attn_varlen_func
            else:
                activate_flash_attention_impl(name)
                _flash2 = None
        except (ImportError, AttributeError, RuntimeError, ValueError):  # not there, or of another version
            continue
        return name
    raise ImportError(
        f"attention='flash' needs flash-attn {' or '.join(name[2:] for name in suited)} for this model on this GPU, "
        "none is installed: pip install \"streampack[flash]\"; or use attention='varlen', the default, torch's own "
        "flash attention"
    )


def flash_attention(
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
    """Compute `varlen_attention` with what `choose_flash` chose, with the same arguments.

    Source: Dao et al., FlashAttention, https://github.com/Dao-AILab/flash-attention
    """
    if _flash2 is None:
        given = {"window": window, "scale": scale, "softcap": softcap, "cu_seqlens_k": cu_seqlens_k}
        return varlen_attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, **given)  # type: ignore[arg-type]
    q, k, v = (x.to(compute_dtype(x.device, x.dtype)) for x in (q, k, v))
    out: torch.Tensor = _flash2(
        q,
        k,
        padded_values(k, v),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens if cu_seqlens_k is None else cu_seqlens_k,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=scale,
        causal=True,
        window_size=(-1 if window is None else window - 1, 0),
        softcap=softcap or 0.0,
    )
    return out.narrow(-1, 0, v.shape[-1])
