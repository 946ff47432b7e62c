"""Rows of a padded cache, collected from packs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Name = tuple[str, int]
"""What a layer keeps: ("keys", 0), ("values", 0), ("conv", n) or ("recurrent", n), n being the number of a state."""


class PaddedRows:
    """What a model keeps of many sequences, one a row, collected from the caches of packs.

    Args:
        lengths: of the sequences, in tokens.
        right: whether padding is on the right.
    """

    def __init__(self, lengths: Sequence[int], *, right: bool) -> None:
        self.lengths, self.right = lengths, right
        self.width = max(lengths)
        # Keys and values are [sequences, kv_heads, width, head_dim], states [sequences, ...].
        self.layers: list[dict[Name, torch.Tensor]] = []

    def add(self, numbers: Sequence[int], parts: Sequence[Mapping[Name, torch.Tensor]]) -> None:
        """Add the sequences of a pack.

        Args:
            numbers: of the sequences, in the order in which they lie in the pack.
            parts: what each layer keeps of the pack, as `PackCache.parts` returns it.
        """
        lengths = [self.lengths[number] for number in numbers]
        if not self.layers:
            self.layers = [
                {name: self._make_rows(name, part) for name, part in each.items()} for each in parts
            ]
        for layer, each in zip(self.layers, parts, strict=True):
            for name, part in each.items():
                if name[0] in ("keys", "values"):
                    for number, piece in zip(numbers, torch.split(part[0], lengths, dim=1), strict=True):
                        start = 0 if self.right else self.width - self.lengths[number]
                        layer[name][number, :, start : start + self.lengths[number]] = piece
                else:
                    layer[name][numbers] = part

    def move_to(self, cache: Any) -> None:
        """Put all rows into an empty cache, and forget them."""
        for number, layer in enumerate(self.layers):
            for (kind, state), rows in layer.items():
                if kind == "conv":
                    cache.update_conv_state(rows, number, state_idx=state)
                elif kind == "recurrent":
                    cache.update_recurrent_state(rows, number, state_idx=state)
            if ("keys", 0) in layer:
                cache.update(layer["keys", 0], layer["values", 0], number)
            layer.clear()  # so that no more than one layer is held twice

    def _make_rows(self, name: Name, part: torch.Tensor) -> torch.Tensor:
        """Make rows of zeros: no keys, and the state before the first token."""
        if name[0] in ("keys", "values"):
            return part.new_zeros(len(self.lengths), part.shape[1], self.width, part.shape[3])
        return part.new_zeros(len(self.lengths), *part.shape[1:])
