"""torchtitan's trainer on a CPU, for tests: ``python -m tests.harness.torchtitan_cpu --module NAME --config NAME ...``.

torchtitan takes CUDA where there is no accelerator, asks it for its memory, compiles flex attention, which has no
gradients on a CPU, and lets FSDP sum in a way that gloo has not. `pretend` replaces these four, and adds a function
that torch 2.13 lacks. All else is torchtitan's own, over gloo. With the environment variable `LOG`, rank 0 appends the
metrics of each step to that file; with `KILL_AT`, each rank ends itself by SIGKILL when it has logged that step.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.nn.functional import scaled_dot_product_attention

LOG = "TORCHTITAN_LOG"
KILL_AT = "TORCHTITAN_KILL_AT"


def pretend() -> None:
    """Let torchtitan take the CPU for an accelerator. Call it before anything of torchtitan is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    torch.cpu.current_device = lambda: 0  # type: ignore[assignment]  # a number, where torch says "cpu"
    if not hasattr(
        dist, "set_timeout"
    ):  # torch 2.13 has it under another name; torchtitan 0.3 is made for a later one
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives
    from torchtitan.components import metrics
    from torchtitan.models.common import attention

    metrics.build_device_memory_monitor = _Monitor
    attention.FlexAttention._compiled_flex_attn = staticmethod(_dense_flex_attention)
    attention._compiled_create_block_mask = create_block_mask

    factors = _fsdp_collectives._get_gradient_divide_factors
    _fsdp_collectives._get_gradient_divide_factors = lambda *args: factors(*args[:5], True)

    original = metrics.MetricsProcessor.log

    def log(self: Any, step: int, loss: float, max_loss: float, grad_norm: float, **more: Any) -> None:
        original(self, step, loss, max_loss, grad_norm, **more)
        path = os.environ.get(LOG)
        if path and os.environ["RANK"] == "0":
            with Path(path).open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss, "grad_norm": grad_norm}) + "\n")
        if os.environ.get(KILL_AT) == str(step):
            os.kill(os.getpid(), signal.SIGKILL)

    metrics.MetricsProcessor.log = log


def _dense_flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, block_mask: Any, **settings: Any
) -> tuple[torch.Tensor, None]:
    """Attention under the mask function of torchtitan's block mask, evaluated for every pair of tokens."""
    if settings["score_mod"] is not None or settings["return_aux"].lse:
        raise NotImplementedError("the models of these tests need neither")
    lengths = query.shape[2], key.shape[2]
    mask = create_mask(block_mask.mask_mod, query.shape[0], None, *lengths, device=query.device.type)
    chosen = {name: settings[name] for name in ("scale", "enable_gqa")}
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, **chosen), None


class _Monitor:
    """The memory of a device, as torchtitan asks for it."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(*[0] * len(DeviceMemStats._fields))

    def reset_peak_stats(self) -> None:
        pass


if __name__ == "__main__":
    pretend()
    from torchtitan.train import main

    main()
