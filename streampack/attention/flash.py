"""`varlen_attention` by the flash-attn package, of which three generations are in use under different names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

# Modules with each generation's ``flash_attn_varlen_func``. flash-attn 2 may contain the folder of 4 without its
# dependencies, so only an import shows whether 4 is installed.
_MODULES = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}

# Generations by major compute capability, best first; later ones have those of 10. On Hopper (9), 4 is less mature.
_SUITED = {8: (3, 2), 9: (3, 4, 2), 10: (4, 2)}

Kernel = Callable[..., Any]
_found: tuple[int, Kernel] | None = None  # cached, so that compiled code neither imports nor queries the GPU


def find_flash(device: torch.device) -> tuple[int, Kernel]:
    """Choose the generation of flash-attn (4, 3 or 2) that `flash_attention` will use; return it and its kernel.

    Raises:
        ValueError: if flash-attn does not support the device.
        ImportError: if no generation for the device is installed.
    """
    global _found
    if device.type != "cuda":
        raise ValueError(
            f"attention='flash' needs CUDA, the model is on {device.type}; use attention='varlen', which runs anywhere"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < min(_SUITED):
        raise ValueError(
            f"attention='flash' needs a GPU of compute capability 8.0 or more, this one has {major}.{minor}; use "
            "attention='flex' or 'dense'"
        )
    suited = _SUITED[min(major, max(_SUITED))]
    for generation in suited:
        try:
            kernel: Kernel = import_module(_MODULES[generation]).flash_attn_varlen_func
        except (ImportError, AttributeError):
            continue
        if generation == 4:
            # It compiles its own kernels, in Python that torch.compile cannot trace.
            kernel = torch.compiler.disable(kernel)  # type: ignore[no-untyped-call]
        _found = generation, kernel
        return _found
    raise ImportError(
        f"attention='flash' needs flash-attn {' or '.join(map(str, suited))} on this GPU, none is installed: "
        "pip install \"streampack[flash]\"; or use attention='varlen', the default, torch's own flash attention"
    )


def flash_unfit(*, device: torch.device, dtype: torch.dtype, softcap: float | None = None) -> str | None:
    """Return why the installed flash-attn cannot compute this attention, or None if it can.

    Raises:
        ValueError: if flash-attn does not support the device.
        ImportError: if no generation for the device is installed.
    """
    return _unfit(find_flash(device)[0], dtype=dtype, softcap=softcap)


def _unfit(generation: int, *, dtype: torch.dtype, softcap: float | None) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn computes in 16 bits and the model is in {dtype}"
    if generation == 4 and softcap is not None:
        # Its forward pass has one; its backward pass over sequences of varying lengths does not account for it.
        return f"flash-attn 4 has no softcap to train with and the model has one of {softcap}"
    return None


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
) -> torch.Tensor:
    """Compute `varlen_attention` by flash-attn, with the same arguments; a ``softcap`` needs flash-attn 2 or 3.

    Call `find_flash` before compiling code that calls this: it imports the package.

    Raises:
        ValueError: without a GPU, for types other than 16-bit floats, for a ``softcap`` with flash-attn 4.
        ImportError: if no flash-attn for the GPU is installed.

    Source: Dao et al., FlashAttention, https://github.com/Dao-AILab/flash-attention
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    generation, kernel = _found or find_flash(q.device)
    if why := _unfit(generation, dtype=q.dtype, softcap=softcap):
        raise ValueError(f"attention='flash': {why}; use attention='flex' or 'dense'")
    unlimited = None if generation == 4 else -1
    before = unlimited if window is None else window - 1
    out = kernel(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=scale,
        causal=True,
        window_size=(before, 0),  # keys before and after the query's own token
        softcap=softcap or 0.0,
    )
    # 4, and early versions of 3, also return the scores' logsumexp.
    attended: torch.Tensor = out if isinstance(out, torch.Tensor) else out[0]
    return attended
