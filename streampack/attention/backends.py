"""Which backends ``"auto"`` tries on a device, and which of them can compute a model's attention there."""

from __future__ import annotations

import torch

from streampack.attention.flash import flash_unfit
from streampack.attention.flex import flex_unfit
from streampack.attention.varlen import varlen_unfit


def auto_backends(device: torch.device) -> tuple[str, ...]:
    """Return the backends that ``"auto"`` tries, best first.

    On one core of a CPU, both passes of a llama of 4 layers of 256 over 4 packs of 1,024 tokens, with 64, 19 and 8
    sequences, took 1.7, 1.8 and 1.8 s by varlen and 2.6, 2.2 and 2.9 s by dense.
    """
    orders = {"cuda": ("varlen", "flex", "dense"), "cpu": ("varlen", "dense")}
    return orders.get(device.type, ("dense",))


def unfit(
    attention: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None
) -> str | None:
    """Return why a backend cannot compute this attention, or None if it can.

    Raises:
        ValueError: if ``attention="flash"`` and flash-attn does not support the device.
        ImportError: if ``attention="flash"`` and no flash-attn for the device is installed.
    """
    if attention == "flash":
        return flash_unfit(device=device, dtype=dtype, softcap=softcap)
    if device.type != "cuda" or attention == "dense":
        return None
    if attention == "flex":
        return flex_unfit(head_dim=head_dim)
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "torch's kernel needs a GPU of compute capability 8.0 or more"
    return varlen_unfit(dtype=dtype, head_dim=head_dim, softcap=softcap)
