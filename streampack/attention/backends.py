"""The backends that ``"auto"`` tries on a device, and why one cannot compute a model's attention there."""

from __future__ import annotations

import torch

from streampack.attention.flash import why_not_flash
from streampack.attention.masks import why_not_flex
from streampack.attention.varlen import why_not_varlen


def auto_backends(device: torch.device) -> tuple[str, ...]:
    """Return the backends that ``"auto"`` tries, best first.

    On a CPU, varlen comes first because it was faster. On one core, forward and backward pass of a llama of 4 layers
    and 256 dimensions over 4 packs of 1,024 tokens took 1.7, 1.8 and 1.8 s with varlen, and 2.6, 2.2 and 2.9 s with
    dense, for 64, 19 and 8 sequences.
    """
    orders = {"cuda": ("varlen", "flex", "dense"), "cpu": ("varlen", "dense")}
    return orders.get(device.type, ("dense",))


def compute_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which attention computes with weights of ``dtype``: autocast's, if it is on."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def why_not_backend(
    attention: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None
) -> str | None:
    """Return why a backend cannot compute this attention, or None if it can.

    Raises:
        ValueError: if ``attention="flash"`` and flash-attn does not support the device.
        ImportError: if ``attention="flash"`` and no flash-attn for the device is installed.
    """
    if attention == "flash":
        return why_not_flash(device=device, dtype=dtype, head_dim=head_dim, softcap=softcap)
    if device.type != "cuda" or attention == "dense":
        return None
    if attention == "flex":
        return why_not_flex(head_dim=head_dim)
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "torch's kernel needs a GPU of compute capability 8.0 or more"
    return why_not_varlen(dtype=dtype, head_dim=head_dim, softcap=softcap)
