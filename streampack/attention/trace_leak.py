"""Find the module in which a leak begins: what it gets of a sample is the same, and what it gives is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

TOLERANCE = 1e-4  # of a module's own output; leaks are far above it, rounding of fp32 is below


def leaking_module(
    model: nn.Module,
    run: Callable[[], object],
    run_changed: Callable[[], object],
    *,
    max_seq_len: int,
    place: slice,
) -> str | None:
    """Return name and class of the first module that carries a change of other tokens to those at ``place``.

    Modules are compared in the order in which they finish, so that the smallest one is found. None if no module has
    one vector for each token as its input and its output and does so.

    Args:
        model: is run twice.
        run: runs it on a pack.
        run_changed: runs it on the pack with other tokens elsewhere.
        max_seq_len: the pack's.
        place: tokens that are the same in both.
    """
    with _recorded(model, max_seq_len=max_seq_len, place=place) as base:
        run()
    with _recorded(model, max_seq_len=max_seq_len, place=place) as changed:
        run_changed()
    names = {module: name for name, module in model.named_modules()}
    for (module, *before), (_, *after) in zip(base, changed, strict=False):
        given, returned = (
            not torch.allclose(a, b, rtol=TOLERANCE, atol=1e-6) for a, b in zip(before, after, strict=True)
        )
        if returned and not given:
            return f"{names[module]} ({type(module).__name__})"
    return None


@contextmanager
def _recorded(
    model: nn.Module, *, max_seq_len: int, place: slice
) -> Iterator[list[tuple[nn.Module, torch.Tensor, torch.Tensor]]]:
    """Record what each module that maps tokens to tokens got and gave at ``place``, a number for each token."""
    found: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []

    def record(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        given = _of_tokens((*args, *kwargs.values()), max_seq_len)
        returned = _of_tokens(output if isinstance(output, tuple) else (output,), max_seq_len)
        if given is not None and returned is not None:
            found.append((module, _project(given[0, place]), _project(returned[0, place])))

    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in model.modules()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _of_tokens(values: Any, max_seq_len: int) -> torch.Tensor | None:
    """Return the first of some values that is ``[batch, max_seq_len, channels]``."""
    for value in values:
        if (
            torch.is_tensor(value)
            and value.ndim == 3
            and value.shape[1] == max_seq_len
            and value.is_floating_point()
        ):
            return value
    return None


def _project(vectors: torch.Tensor) -> torch.Tensor:
    """Return a number for each vector ``[tokens, channels]``, relative to the vectors' size, that shows any change."""
    weights = torch.linspace(0.5, 1.5, vectors.shape[-1], device=vectors.device)
    vectors = vectors.detach().float()
    projected: torch.Tensor = (vectors * weights).sum(-1) / vectors.norm().clamp(min=1e-20)
    return projected
