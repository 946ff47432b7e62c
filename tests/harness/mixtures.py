"""Mixtures of rows for `Numbers`, whose source a row's number tells."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from streampack import IterablePackedDataset, MapSource, Mix, Sample
from tests.harness.corpus import Numbers, rows

SHUFFLED = {"shuffle": 7, "seed": 3}
APART = 100_000  # between the numbers of the first rows of two sources
ENDLESS, ONCE, TWICE = {"epochs": None}, {"epochs": 1}, {"epochs": 2}


def shifted(data: list[dict[str, int]], by: int) -> list[dict[str, int]]:
    return [{"i": row["i"] + by, "n": row["n"]} for row in data]


def entry(name: str, source: Any, weight: float = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "source": source, "weight": weight, **more}


def three(stop: str = "all_exhausted", weights: Iterable[float] = (7, 2, 1), **sizes: int) -> Mix:
    """Three sources of short, middling and long samples."""
    longest = {"short": 4, "middling": 12, "long": 24}
    return Mix(
        [
            entry(
                name,
                MapSource(shifted(rows(sizes.get(name, 60), longest=longest[name], seed=i), APART * i)),
                weight,
            )
            for i, (name, weight) in enumerate(zip(longest, weights, strict=True))
        ],
        stop=stop,
    )


def make(source: Any, **settings: Any) -> IterablePackedDataset:
    return IterablePackedDataset(
        source, **{"max_seq_len": 24, "buffer_size": 8, "encoder": Numbers(), **settings}
    )


def training(tokens: int) -> list[Sample]:
    """A sample of which so many tokens are trained."""
    ids = np.zeros(tokens + 1, dtype=np.int32)
    return [Sample(ids, ids)]
