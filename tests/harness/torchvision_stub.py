"""The few functions of torchvision that torchtune calls, for machines whose torch it is not built for."""

from __future__ import annotations

import enum
import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"


def to_image(image: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def to_dtype(image: torch.Tensor, *, dtype: torch.dtype, scale: bool) -> torch.Tensor:
    return image.to(dtype) / 255 if scale else image.to(dtype)


def resize(inpt: torch.Tensor, size: Any, interpolation: InterpolationMode, antialias: bool) -> torch.Tensor:
    batch = inpt[None].float()
    found = F.interpolate(batch, tuple(size), mode=interpolation.value, antialias=antialias)
    return found[0].to(inpt.dtype)


def pad(inpt: torch.Tensor, padding: list[int]) -> torch.Tensor:
    left, top, right, bottom = padding
    return F.pad(inpt, (left, right, top, bottom))


def normalize(image: torch.Tensor, *, mean: Any, std: Any) -> torch.Tensor:
    mean, std = (torch.tensor(each, dtype=image.dtype)[:, None, None] for each in (mean, std))
    return (image - mean) / std


def import_vision_models() -> None:
    """Import torchtune's vision models, with this module in torchvision's place if that does not load."""
    try:
        importlib.import_module("torchtune.models.llama3_2_vision")
        return
    except (ImportError, RuntimeError):  # not installed, or built for another torch
        for name in [
            name for name in sys.modules if name.startswith(("torchvision", "torchtune.models.clip"))
        ]:
            del sys.modules[name]
    stubs = {name: ModuleType(name) for name in (
        "torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional",
    )}  # fmt: skip
    root, transforms, v2, functional = stubs.values()
    for function in (to_image, to_dtype, resize, pad, normalize):
        setattr(functional, function.__name__, function)
    root.transforms, transforms.v2, v2.functional = transforms, v2, functional  # type: ignore[attr-defined]
    transforms.InterpolationMode = InterpolationMode  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stubs.items():
            patch.setitem(sys.modules, name, module)
        importlib.import_module("torchtune.models.llama3_2_vision")
