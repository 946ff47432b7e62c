"""Groups for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from streampack import IGNORE_INDEX, Group, Sample


class Pairs:
    """Encodes ``{"i": 3, "n": 4}`` as a group of the tokens 3001, 3002, ...: 2 of the prompt, 4 and 2 of two answers.

    Rows whose number 4 divides are plain samples of as many tokens. Field and token field say which token it is.
    """

    name = "pairs"

    def __init__(self, *, shared: bool = True) -> None:
        self.shared = shared

    def __call__(self, row: Mapping[str, Any], /) -> Sample:
        i, n = row["i"], row["n"]
        lengths = [2, n, n // 2 + 1]
        tokens = 1000 * i + 1 + np.arange(sum(lengths))
        labels = tokens.copy()
        labels[:2] = IGNORE_INDEX
        if i % 4 == 0:
            return Sample(tokens, labels)
        group = Group(
            tokens, labels, lengths=lengths, parents=[-1, 0, 0],
            fields={"number": [np.nan, 10 * i + 1, 10 * i + 2]},
            token_fields={"logps": np.where(labels == IGNORE_INDEX, np.nan, -tokens)},
        )  # fmt: skip
        return group if self.shared else group.unshared()

    def fingerprint(self) -> str:
        return f"{self.name} {self.shared}"
