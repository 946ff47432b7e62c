"""Models with a table of positions, which limits the length of samples but not of packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from streampack.packing.settings import Packing
from streampack.types import IGNORE_INDEX


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
        tables = [getattr(module, "embed_positions", None)]  # GPT-J's
        if hasattr(module, "rope_init"):  # torchtune's rotary embeddings
            tables.append(getattr(module, "cache", None))
        counts += [table.shape[0] for table in tables if torch.is_tensor(table)]
    return min(counts, default=None)


def _text_modules(
    model: nn.Module, name: str = "", kind: str | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of a model's parts, leaving out inner models of another modality."""
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
    """Wrap positions of padding around a table's end, and check that no sample reaches beyond it.

    There is one host sync, and only if rows are longer than the table.

    Args:
        positions: ``[batch, max_seq_len]``, from 0 in every segment.
        batch: its ``fragments`` tell padding from samples; without them its ``labels`` do; without both, there is no
            padding.
        table: the number of positions.
        model: the model's kind, for the message.

    Raises:
        ValueError: for a sample that is longer than the table; on CUDA, the model would abort the process.
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
    """Check that samples are not cut to more tokens than the model's table has positions.

    Where samples are not cut, packs may be longer than the table; a sample that is too long is refused when it comes.

    Raises:
        ValueError: if they are.
    """
    table = position_table(model)
    cuts = packing.overlong in ("split", "truncate")
    if table is not None and packing.max_seq_len > table and cuts:
        raise ValueError(
            f"overlong={packing.overlong!r} cuts samples to max_seq_len={packing.max_seq_len} tokens, and the model "
            f"has {table} positions; set max_seq_len={table}"
        )
