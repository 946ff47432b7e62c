"""Varlen attention with the flash-attn package, of which three generations are in use under different names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

# The module that has ``flash_attn_varlen_func`` in each generation. An installed flash-attn 2 may contain the folder of
# generation 4 without its dependencies, so only an import shows whether 4 is installed.
_MODULE_NAMES = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}

# Generations by the GPU's major compute capability, best first; GPUs above 10 use those of 10. On Hopper (9),
# generation 4 comes after 3, because it is less mature there.
_GENERATIONS = {8: (3, 2), 9: (3, 4, 2), 10: (4, 2)}

Kernel = Callable[..., Any]
# The result of the last `find_flash`, kept so that compiled code neither imports a module nor queries the GPU.
_chosen: tuple[int, Kernel] | None = None


def find_flash(device: torch.device) -> tuple[int, Kernel]:
    """Choose the generation of flash-attn (4, 3 or 2) for a device; return it and its kernel.

    `flash_attention` uses the generation that was chosen last.

    Raises:
        ValueError: if flash-attn does not support the device.
        ImportError: if no generation for the device is installed.
    """
    global _chosen
    if device.type != "cuda":
        raise ValueError(
            f"attention='flash' needs CUDA, the model is on {device.type}; use attention='varlen', which runs anywhere"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < min(_GENERATIONS):
        raise ValueError(
            f"attention='flash' needs a GPU of compute capability 8.0 or more, this one has {major}.{minor}; use "
            "attention='flex' or 'dense'"
        )
    suited = _GENERATIONS[min(major, max(_GENERATIONS))]
    for generation in suited:
        try:
            kernel: Kernel = import_module(_MODULE_NAMES[generation]).flash_attn_varlen_func
        except (ImportError, AttributeError):
            continue
        if generation == 4:
            # Generation 4 compiles its kernels in Python code that torch.compile cannot trace.
            kernel = torch.compiler.disable(kernel)  # type: ignore[no-untyped-call]
        _chosen = generation, kernel
        return _chosen
    raise ImportError(
        f"attention='flash' needs flash-attn {' or '.join(map(str, suited))} on this GPU, none is installed: "
        "pip install \"streampack[flash]\"; or use attention='varlen', the default, torch's own flash attention"
    )


def why_not_flash(*, device: torch.device, dtype: torch.dtype, softcap: float | None = None) -> str | None:
    """Return why the installed flash-attn cannot compute this attention, or None if it can.

    Raises:
        ValueError: if flash-attn does not support the device.
        ImportError: if no generation for the device is installed.
    """
    return _why_not_generation(find_flash(device)[0], dtype=dtype, softcap=softcap)


def _why_not_generation(generation: int, *, dtype: torch.dtype, softcap: float | None) -> str | None:
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn computes in 16 bits and the model is in {dtype}"
    if generation == 4 and softcap is not None:
        # The forward pass of generation 4 has a softcap; its backward pass of varlen attention ignores it.
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
    cu_seqlens_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `varlen_attention` with flash-attn, with the same arguments; a ``softcap`` needs flash-attn 2 or 3.

    Call `find_flash` before compiling code that calls this, because the first call imports the package.

    Raises:
        ValueError: without a supported GPU, for dtypes other than 16-bit floats, for a ``softcap`` with flash-attn 4.
        ImportError: if no flash-attn for the GPU is installed.

    Source: Dao et al., FlashAttention, https://github.com/Dao-AILab/flash-attention
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    generation, kernel = _chosen or find_flash(q.device)
    if why := _why_not_generation(generation, dtype=q.dtype, softcap=softcap):
        raise ValueError(f"attention='flash': {why}; use attention='flex' or 'dense'")
    unlimited = None if generation == 4 else -1
    keys_before = unlimited if window is None else window - 1
    out = kernel(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens if cu_seqlens_k is None else cu_seqlens_k,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        softmax_scale=scale,
        causal=True,
        window_size=(keys_before, 0),  # how many keys a query attends to before and after its own token
        softcap=softcap or 0.0,
    )
    # Generation 4, and early versions of 3, return a tuple with the scores' logsumexp.
    attended: torch.Tensor = out if isinstance(out, torch.Tensor) else out[0]
    return attended
