"""`varlen_attention` by the flash-attn package, of which three generations are about, each under a name of its own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

# Where each generation has its ``flash_attn_varlen_func``. A flash-attn 2 may bring the folder of 4, without what
# 4 runs on: only an import tells.
_MODULES = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}

# By the first number of a GPU's compute capability, best first. 4 begins with Hopper (9), where it is younger than 3;
# 3 ends there; 2 is for Ampere (8) and later.
_SUITED = {8: (3, 2), 9: (3, 4, 2)}
_SUITED_LATER = (4, 2)

Kernel = Callable[..., Any]
_found: tuple[int, Kernel] | None = None  # so that compiled code neither imports nor asks for the GPU


def find_flash(device: torch.device) -> tuple[int, Kernel]:
    """The generation of flash-attn, 4, 3 or 2, that `flash_attention` uses from now on, and its kernel.

    Raises:
        ValueError: if the device is no GPU for which there is one.
        ImportError: if none that suits it is installed.
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
    suited = _SUITED.get(major, _SUITED_LATER)
    for generation in suited:
        try:
            kernel: Kernel = import_module(_MODULES[generation]).flash_attn_varlen_func
        except (ImportError, AttributeError):
            continue
        if generation == 4:
            # It compiles its kernels by itself, in Python that torch.compile cannot trace.
            kernel = torch.compiler.disable(kernel)  # type: ignore[no-untyped-call]
        _found = generation, kernel
        return _found
    raise ImportError(
        f"attention='flash' needs flash-attn {' or '.join(map(str, suited))} on this GPU, none is installed: "
        "pip install \"streampack[flash]\"; or use attention='varlen', the default, torch's own flash attention"
    )


def flash_unfit(*, device: torch.device, dtype: torch.dtype, softcap: float | None = None) -> str | None:
    """Why the flash-attn that is installed cannot compute such an attention; None if it can.

    Raises:
        ValueError: if the device is no GPU for which there is one.
        ImportError: if none that suits it is installed.
    """
    return _unfit(find_flash(device)[0], dtype=dtype, softcap=softcap)


def _unfit(generation: int, *, dtype: torch.dtype, softcap: float | None) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn computes in 16 bits and the model is in {dtype}"
    if generation == 4 and softcap is not None:
        # It has one forward; nothing in its backward pass over sequences of varying lengths accounts for it.
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
    """Causal attention within each sequence, as `varlen_attention` has it, on CUDA.

    Call `find_flash` before ``torch.compile`` sees this: it imports the package.

    Args:
        q: ``[tokens, heads, head_dim]``, bf16 or fp16.
        k: ``[tokens, kv_heads, head_dim]``; ``heads`` is a multiple of ``kv_heads``.
        v: as ``k``.
        cu_seqlens: ``[sequences + 1]`` int32, from 0 to ``tokens``: where each sequence begins.
        max_seqlen: no sequence is longer.
        window: tokens that a query sees, itself included; None: all before it.
        scale: of the scores; None: ``head_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``; flash-attn 2 and 3.

    Returns:
        ``[tokens, heads, head_dim]``, in the type of ``q``; under autocast, in autocast's.

    Raises:
        ValueError: for other than 16-bit floats, a ``softcap`` where flash-attn has none, no GPU.
        ImportError: if no flash-attn is installed that suits the GPU.

    Source: Dao et al., FlashAttention, https://github.com/Dao-AILab/flash-attention
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    generation, kernel = _found or find_flash(q.device)
    if why := _unfit(generation, dtype=q.dtype, softcap=softcap):
        raise ValueError(f"attention='flash': {why}; use attention='flex' or 'dense'")
    unlimited = None if generation == 4 else -1
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
        window_size=(
            unlimited if window is None else window - 1,
            0,
        ),  # keys before a query's own, and behind it
        softcap=softcap or 0.0,
    )
    # The fourth, and early thirds, give the scores' logsumexp too.
    attended: torch.Tensor = out if isinstance(out, torch.Tensor) else out[0]
    return attended
