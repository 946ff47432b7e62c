"""Models with a table of positions, which limits the length of packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def position_table(model: nn.Module) -> int | None:
    """Return how many positions a model's tables hold, learned or precomputed; None if it has no table.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> position_table(GPT2LMHeadModel(GPT2Config(n_positions=128, n_embd=8, n_layer=1, n_head=1, vocab_size=9)))
    128

    Tables of another modality, such as the patches of an image, do not count.
    """
    counts = []
    for name, module in _text_modules(model):
        if isinstance(module, nn.Embedding) and (
            name == "wpe" or ("position" in name and "relative" not in name)
        ):
            counts.append(module.num_embeddings - getattr(module, "offset", 0))
        tables = [getattr(module, "embed_positions", None)]  # as GPT-J calls it
        if hasattr(module, "rope_init"):  # a rotary embedding of torchtune
            tables.append(getattr(module, "cache", None))
        counts += [table.shape[0] for table in tables if torch.is_tensor(table)]
    return min(counts, default=None)


def _text_modules(
    model: nn.Module, name: str = "", model_type: str | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of a model's parts, leaving out inner models of another modality."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        own = config.get_text_config().model_type
        if model_type is not None and own != model_type:
            return
        model_type = own
    yield name, model
    for child, module in model.named_children():
        yield from _text_modules(module, child, model_type)
