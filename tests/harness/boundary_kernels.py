"""Functions of torch with the arguments of kernels that take boundaries: slow, and plainly right."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Convolve ``[batch, channels, tokens]`` with the tokens of the same number in ``seq_idx``, ``[batch, tokens]``."""
    width = weight.shape[1]
    padded = F.pad(x, (width - 1, 0))
    number = torch.zeros(x.shape[0], x.shape[2]) if seq_idx is None else seq_idx
    numbers = F.pad(number, (width - 1, 0), value=-1)
    out = torch.zeros_like(x)
    for shift in range(width):
        own = numbers[:, shift : shift + x.shape[2]] == number
        out = out + padded[:, :, shift : shift + x.shape[2]] * own[:, None] * weight[:, shift, None]
    out = out if bias is None else out + bias[:, None]
    return F.silu(out) if activation in ("silu", "swish") else out


def one_by_one(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a delta rule that takes ``cu_seqlens``, made of one that computes a single sequence.

    Query, key, value, decay and beta are ``[1, tokens, ...]``.
    """

    def by_boundaries(*args: Any, cu_seqlens: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if cu_seqlens is None:
            return rule(*args, **kwargs)

        def part(value: Any, start: int, stop: int) -> Any:
            return value[:, start:stop] if torch.is_tensor(value) else value

        outputs = [
            rule(
                *[part(each, start, stop) for each in args],
                **{name: part(each, start, stop) for name, each in kwargs.items() if name != "seq_idx"},
            )[0]
            for start, stop in pairwise(cu_seqlens.tolist())
        ]
        return torch.cat(outputs, 1), None

    return by_boundaries
