"""Recipes on a device that this machine does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from streampack_recipes import dpo, full_finetune, lora_finetune
from torch import nn

from streampack.training import preferences, run
from streampack.training.model import build_model

RECIPES: dict[str, Any] = {
    "full": full_finetune,
    "lora": lora_finetune,
    "dpo": dpo,
    "pretrain": full_finetune,
}


def place_recipes_on(
    device: torch.device, patch: pytest.MonkeyPatch, *, place: Callable[[nn.Module], nn.Module]
) -> None:
    """Let recipes train on a device: models get their weights on the CPU, and ``place`` moves them."""

    def build(*args: Any, device: torch.device, **settings: Any) -> nn.Module:
        return place(build_model(*args, device=torch.device("cpu"), **settings))

    patch.setattr(run, "pick_device", lambda _: device)
    for module in (full_finetune, lora_finetune, dpo, preferences):
        patch.setattr(module, "build_model", build)
