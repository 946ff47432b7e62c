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
import torch.nn.functional as F
from torch import nn
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_iter, tree_map_only

NAME = "standin"
aten = torch.ops.aten

# What makes the host wait for a GPU: it reads a number, or the size of a result.
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
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset()}
        device = torch.device(NAME, 0)
        made: Held = torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), **layout, dtype=raw.dtype, device=device
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, [])

    def tolist(self) -> Any:
        """Read all numbers; torch refuses it for tensors of other classes."""
        return self.cpu().tolist()


class _Noting(TorchDispatchMode):
    """Makes tensors of the device, and notes copies in ``copies``."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Any] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.copies)


def _run(func: Any, args: Any, kwargs: dict[str, Any], copies: list[Any]) -> Any:
    device = kwargs.get("device")
    there = device is not None and torch.device(device).type == NAME
    tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
    if not there and not any(isinstance(each, Held) for each in tensors):
        return func(*args, **kwargs)
    if func is aten._fused_sdp_choice.default:
        return 0  # attention written out
    if (copy := _copy_of(func, args, kwargs, there=there)) is not None:
        copies.append(copy)
    else:
        mixed = [each for each in tensors if not isinstance(each, Held) and each.ndim]
        assert not mixed, f"{func} mixes devices"
    inner = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    inner |= {"device": torch.device("cpu")} if there else {}
    raw_args, raw_kwargs = tree_map_only(Held, lambda each: each.raw, (args, inner))
    result = func(*raw_args, **raw_kwargs)
    if device is not None and not there:  # moved to the host
        return result.clone() if any(result is each for each in raw_args) else result
    return return_and_correct_aliasing(func, args, kwargs, tree_map_only(torch.Tensor, Held, result))


def _copy_of(func: Any, args: Any, kwargs: dict[str, Any], *, there: bool) -> Copy | None:
    """Return what a call copies between the devices or reads, None for others."""
    if func is aten._to_copy.default and "device" in kwargs and isinstance(args[0], Held) != there:
        source, blocking = args[0], not kwargs.get("non_blocking", False)
    elif func is aten.copy_.default and isinstance(args[0], Held) != isinstance(args[1], Held):
        there, source = isinstance(args[0], Held), args[1]
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    elif func in READS:
        return Copy(READS[func], args[0].element_size(), True)
    elif func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        return Copy("repeat_interleave", 8, True)
    elif func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and any(
        each is not None and each.dtype == torch.bool for each in args[1]
    ):
        return Copy("index by a mask", 8, True)
    else:
        return None
    pinned = getattr(source, "noted_as_pinned", False)
    return Copy("to device" if there else "to host", source.nbytes, blocking, pinned)


class Event:
    """The device computes at once."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Module(backend_registration._DummyBackendModule):
    Event = Event


def set_up() -> torch.device:
    """Register the device with torch, for this process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())

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
def noted() -> Iterator[list[Any]]:
    """Note copies within the block, in a list to which callers may add marks of their own."""
    with _Noting() as mode:
        yield mode.copies


def kernel(
    q: torch.Tensor,  # [tokens, heads, head_dim]
    k: torch.Tensor,  # [keys, kv_heads, head_dim]
    v: torch.Tensor,
    ends: torch.Tensor,
    key_ends: torch.Tensor | None,
    _longest: int,
    window: int | None,
    scale: float | None,
    _softcap: float | None,
) -> torch.Tensor:
    """Compute varlen attention without a read, as torch's kernel does on a GPU."""
    own, others = (torch.arange(len(x), device=q.device) for x in (q, k))
    key_ends = ends if key_ends is None else key_ends
    of_query, of_key = (
        torch.searchsorted(cuts, at, right=True) for cuts, at in ((ends, own), (key_ends, others))
    )
    to_end = (ends[of_query] - own)[:, None] - (
        key_ends[of_key] - others
    )  # how far behind the query a key is, negated
    mask = (of_query[:, None] == of_key) & (to_end <= 0)
    mask &= -to_end < (window or len(k))
    heads = [x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale).transpose(0, 1)
