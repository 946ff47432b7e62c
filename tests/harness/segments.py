"""Groups for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from streampack import IGNORE_INDEX, Group, Sample


def without_sharing(group: Group) -> Group:
    """A group with a sequence for each answer, from the root on; shared tokens are trained in their first copy only."""
    paths = [group.paths()[leaf] for leaf in group.leaves]
    order = [segment for path in paths for segment in path]
    index = np.concatenate([np.arange(*group.bounds[segment]) for segment in order])
    first = np.isin(np.arange(index.size), np.unique(index, return_index=True)[1])
    return Group(
        group.tokens[index],
        np.where(first, group.labels[index], IGNORE_INDEX),
        lengths=[sum(group.lengths[segment] for segment in path) for path in paths],
        fields={name: values[group.leaves] for name, values in group.fields.items()},
        token_fields={name: values[index] for name, values in group.token_fields.items()},
    )


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
        return group if self.shared else without_sharing(group)

    def fingerprint(self) -> str:
        return f"{self.name} {self.shared}"
