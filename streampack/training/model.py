"""Devices, dtypes, and a torchtune model with its weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torchtune import modules, training, utils

from streampack.components import build

OUTPUT_CHUNKS = 8  # torchtune makes an fp32 copy of the logits; in chunks it is made and freed piece by piece


def pick_device(name: str) -> torch.device:
    """``auto`` is the GPU where there is one; anything else is torch's name for a device."""
    device: torch.device = utils.get_device(None if name == "auto" else name)
    return device


def build_model(
    node: Mapping[str, Any],
    *,
    weights: Mapping[str, Any],
    device: torch.device,
    dtype: str,
    activation_checkpointing: bool = False,
    compile_layers: bool = False,
    trusted: Collection[str] = (),
) -> nn.Module:
    """The model that a config names, with ``weights``, on ``device``, in training mode."""
    torch_dtype = training.get_dtype(dtype, device=device)
    if torch_dtype == torch.float16:
        raise ValueError("dtype fp16 needs loss scaling, which no recipe does; use bf16 or fp32")
    with training.set_default_dtype(torch_dtype), device:
        model: nn.Module = build(node, trusted=trusted)
    if hasattr(model, "set_num_output_chunks"):
        model.set_num_output_chunks(OUTPUT_CHUNKS)  # type: ignore[operator]
    model.load_state_dict(weights)
    training.validate_expected_param_dtype(model.named_parameters(), dtype=torch_dtype)
    if compile_layers:
        training.compile_model(model, verbose=False)
    if activation_checkpointing:
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    return model.train()


def vocabulary(model: nn.Module) -> int:
    """Rows of the embedding: token ids must be below it."""
    size: int = model.tok_embeddings.num_embeddings  # type: ignore[union-attr, assignment]
    return size


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Make the step's randomness (dropout) a function of (seed, step, rank), so a resume need not store it."""
    torch.manual_seed(hash((seed, step, rank)) & (2**63 - 1))
