"""A device that is neither CPU nor GPU: its tensors keep their numbers on the CPU, and every copy is noted.

`set_up` changes the whole process, so tests run in a process of their own (`run_forked`). The names by which torch
makes such a device are private and may change; nothing but tests uses them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

NAME = "standin"
aten = torch.ops.aten

# What waits for a GPU: a number is read, or the size of a result is only known there.
READS = {
    aten._local_scalar_dense.default: "item",
    aten.equal.default: "equal",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten.bincount.default: "bincount",
    aten._unique2.default: "unique",
    aten.unique_consecutive.default: "unique_consecutive",
}


@dataclass(frozen=True)
class Copy:
    """A copy between the devices, or a read by the host."""

    kind: str  # "to device", "to host", or what reads
    size: int  # in bytes
    blocking: bool
    pinned: bool = False


class Held(torch.Tensor):
    """A tensor of the device, whose numbers are in ``raw``."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> Held:
        made: Held = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, [])


class Noting(TorchDispatchMode):
    """Makes tensors of the device, and notes copies in ``copies``."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Copy] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.copies)


def _run(func: Any, args: Any, kwargs: dict[str, Any], copies: list[Copy]) -> Any:
    device = kwargs.get("device")
    there = device is not None and torch.device(device).type == NAME
    flat = [each for each in [*args, *kwargs.values()] if isinstance(each, torch.Tensor)]
    flat += [
        each for part in args if isinstance(part, list | tuple) for each in part if torch.is_tensor(each)
    ]
    held = any(isinstance(each, Held) for each in flat)
    if not (held or there):
        return func(*args, **kwargs)
    if func is aten._fused_sdp_choice.default:
        return 0  # attention written out
    if func is aten._to_copy.default and device is not None:
        source = args[0]
        if isinstance(source, Held) != there:
            kind = "to device" if there else "to host"
            blocking, pinned = (
                not kwargs.get("non_blocking", False),
                getattr(source, "noted_as_pinned", False),
            )
            copies.append(Copy(kind, source.nbytes, blocking, pinned))
    elif func is aten.copy_.default and isinstance(args[0], Held) != isinstance(args[1], Held):
        kind = "to device" if isinstance(args[0], Held) else "to host"
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        copies.append(Copy(kind, args[1].nbytes, blocking, getattr(args[1], "noted_as_pinned", False)))
    elif func in READS:
        copies.append(Copy(READS[func], flat[0].element_size(), True))
    elif func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        if any(each is not None and each.dtype == torch.bool for each in args[1]):
            copies.append(Copy("index by a mask", 8, True))
    elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        copies.append(Copy("repeat_interleave", 8, True))
    else:
        others = [each for each in flat if not isinstance(each, Held) and each.ndim]
        assert not others, f"{func} mixes devices: {[tuple(each.shape) for each in others]}"
    inner = {**kwargs, "device": torch.device("cpu")} if there else kwargs
    inner = {name: value for name, value in inner.items() if name != "pin_memory"}
    raw_args, raw_kwargs = tree_map_only(Held, lambda each: each.raw, (args, inner))
    result = func(*raw_args, **raw_kwargs)
    if device is not None and not there:  # moved to the host
        return result.clone() if any(result is each for each in raw_args) else result
    if func in READS and not torch.is_tensor(result) and not isinstance(result, tuple):
        return result
    wrapped = tree_map_only(torch.Tensor, Held, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def set_up() -> torch.device:
    """Register the device with torch, for this process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)

    def pinned(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        copy = tensor.clone()
        copy.noted_as_pinned = True  # type: ignore[attr-defined]
        return copy

    torch.Tensor.pin_memory = pinned  # type: ignore[method-assign, assignment]
    return torch.device(NAME, 0)


def moved(model: nn.Module) -> nn.Module:
    """Move a model's parameters and buffers to the device."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                made.setdefault(value, nn.Parameter(Held(value.data), requires_grad=value.requires_grad))
                module._parameters[name] = made[value]  # type: ignore[assignment]
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = made.setdefault(value, Held(value))
    return model


@contextmanager
def noted() -> Iterator[list[Copy]]:
    """Note copies within the block."""
    with Noting() as mode:
        yield mode.copies
