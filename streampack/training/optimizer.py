"""The optimizer of a run, at the end of a step or in the backward pass, and the norm of gradients."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from functools import cache

import torch
from torch import nn
from torchtune import training

from streampack.instantiate import build
from streampack.training.config import RunConfig


def build_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer of a model's trained weights.

    With ``optimizer_in_bwd``, it updates each weight in the backward pass, as soon as its gradient is complete, and
    frees that gradient. Then the loss must be scaled before. torchtune makes an optimizer for each weight. Optimizers
    skip weights without a gradient, so one for all does the same, and schedule and checkpoints stay the same.
    """
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer: torch.optim.Optimizer = build(config.optimizer, trained)
    if config.optimizer_in_bwd:
        training.register_optim_in_bwd_hooks(model, dict.fromkeys(trained, optimizer))
    return optimizer


def require_one_batch(config: RunConfig, batches_per_step: int) -> None:
    """Raise ValueError if ``optimizer_in_bwd`` would update the weights several times a step.

    A resumed run keeps its packs a step, so fewer ranks than before have several batches.
    """
    if config.optimizer_in_bwd and batches_per_step > 1:
        raise ValueError(
            f"optimizer_in_bwd updates weights in every backward pass, and a step has {batches_per_step} of them on "
            f"each rank; set batch_size={config.batch_size * batches_per_step}, or optimizer_in_bwd=False"
        )


def scale_gradients(model: nn.Module, factor: torch.Tensor, *, compiled: bool = False) -> None:
    """Multiply all gradients by a factor; ``compiled``, in fewer kernels than one for each weight."""
    (_compiled_scale() if compiled else training.scale_grads)(model, factor)


@cache
def _compiled_scale() -> Callable[[nn.Module, torch.Tensor], None]:
    return torch.compile(training.scale_grads, backend=os.environ.get("TORCH_COMPILE_BACKEND", "inductor"))


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients so that their norm over all shards is at most ``max_norm``; return the norm before."""
    # Tensor-parallel layers and others are on different meshes, and torch adds up no norms across meshes.
    by_mesh: dict[object, list[nn.Parameter]] = defaultdict(list)
    for value in model.parameters():
        if value.grad is not None:
            by_mesh[getattr(value, "device_mesh", None)].append(value)
    norms = [nn.utils.get_total_norm([value.grad for value in group]) for group in by_mesh.values()]  # type: ignore[misc]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm
