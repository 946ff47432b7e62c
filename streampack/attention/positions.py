"""Models with a table of positions: packs may be longer than the table, samples may not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from streampack.packing.settings import Packing
from streampack.types import IGNORE_INDEX


def position_table(model: nn.Module) -> int | None:
    """Count the positions that a model has learned, or computed once; None where it computes each as it comes.

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
        tables = [getattr(module, name, None) for name in ("embed_positions", "pos_encoding")]  # GPT-J, CTRL
        if hasattr(module, "rope_init"):  # torchtune's rotary embeddings
            tables.append(getattr(module, "cache", None))
        counts += [table.shape[0] for table in tables if torch.is_tensor(table)]
    return min(counts, default=None)


def _text_modules(
    model: nn.Module, name: str = "", kind: str | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """(own name, module) of a model's parts, without models inside it that are not of its text."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        own = config.get_text_config().model_type
        if kind is not None and own != kind:
            return
        kind = own
    yield name, model
    for child, module in model.named_children():
        yield from _text_modules(module, child, kind)


def within_table(positions: torch.Tensor, batch: Any, *, table: int, model: str) -> torch.Tensor:
    """Give padding positions of the table, again from its beginning; those of samples stay.

    Where rows are longer than the table, it waits for the device once.

    Args:
        positions: ``[batch, max_seq_len]``, from 0 in every segment.
        batch: whose ``fragments`` tell how much of a row is real. Without them, what has a label is; without
            labels too, all.
        table: how many positions there are.
        model: its kind, for the message.

    Raises:
        ValueError: for a sample that is longer than the table. On CUDA, the model would end the process.
    """
    if positions.shape[1] <= table:
        return positions
    beyond = positions >= table
    fragments, labels = getattr(batch, "fragments", None), getattr(batch, "labels", None)
    if fragments is not None:
        real = [[sum(f.stop - f.start for f in pack)] for pack in fragments]
        places = torch.arange(positions.shape[1], device=positions.device)
        beyond &= places < torch.tensor(real, device=positions.device)
    elif labels is not None:
        beyond &= labels != IGNORE_INDEX
    longest = int(torch.where(beyond, positions, -1).max()) + 1
    if longest:
        raise ValueError(
            f"a sample has {longest} tokens, and this {model} model has {table} positions; leave out or cut samples "
            f"that are longer, as with max_seq_len={table}"
        )
    return positions % table


def require_positions(model: nn.Module, packing: Packing) -> None:
    """Refuse settings that make samples longer than the model's table of positions.

    Raises:
        ValueError: if samples are cut to more tokens than there are positions. Packs may be longer: where samples are
            not cut, one that is too long is refused when it comes.
    """
    table = position_table(model)
    cuts = packing.overlong in ("split", "truncate")
    if table is not None and packing.max_seq_len > table and cuts:
        raise ValueError(
            f"overlong={packing.overlong!r} cuts samples to max_seq_len={packing.max_seq_len} tokens, and the model "
            f"has {table} positions; set max_seq_len={table}"
        )
