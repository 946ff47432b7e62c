"""The three sets of lengths that the benchmarks use.

Each is a log-normal distribution with the median and mean of a known corpus, clipped to [1, longest]. The
lengths are its evenly spaced quantiles, in a seeded random order: the lower bound is the same for every seed,
only the order changes.

>>> lower_bound(lengths("orca"), 4096)
1945
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

LONGEST = 4096
VOCAB_SIZE = 32_000
PADDING = 0  # never a token of a sample, so that real tokens can be counted in a packer's output


@dataclass(frozen=True)
class LogNormal:
    """A distribution like a corpus's lengths: with this ``sigma``, 20,000 clipped lengths have the corpus's mean."""

    median: float
    sigma: float
    like: str


DISTRIBUTIONS = {
    "flan": LogNormal(190, 1.3482, "instructions, skewed (FLAN): mean 435"),
    "orca": LogNormal(360, 0.4494, "word problems, narrow (OrcaMath): mean 398"),
    "stack": LogNormal(700, 1.3112, "code, heavy tail (The Stack): mean 1,215"),
}


def lengths(
    name: str, *, count: int = 20_000, seed: int = 0, longest: int = LONGEST
) -> npt.NDArray[np.int64]:
    """Return ``count`` lengths of the distribution ``name``, in the order of ``seed``.  # [count]"""
    return draw(DISTRIBUTIONS[name], count=count, seed=seed, longest=longest)


def draw(shape: LogNormal, *, count: int, seed: int, longest: int) -> npt.NDArray[np.int64]:
    """Return ``count`` lengths of any log-normal distribution.  # [count]"""
    normal = NormalDist()
    quantiles = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    values = np.clip(np.rint(shape.median * np.exp(shape.sigma * quantiles)), 1, longest).astype(np.int64)
    return np.random.default_rng(seed).permutation(values)


def causal_pairs(lengths: Iterable[int]) -> int:
    """Count the (query, key) pairs that causal attention within sequences of these lengths needs.

    >>> causal_pairs([3, 1])  # 1 + 2 + 3, and 1
    7
    """
    return sum(length * (length + 1) // 2 for length in lengths)


def lower_bound(lengths: Iterable[int], max_seq_len: int) -> int:
    """Return the fewest packs that any packer could need: all full but the last."""
    return -(-int(sum(lengths)) // max_seq_len)


def samples(lengths: npt.NDArray[np.int64], *, seed: int = 0) -> list[dict[str, npt.NDArray[np.int64]]]:
    """Return random samples: int64 ``tokens`` (never 0) and ``labels``, the first third of them a prompt (-100)."""
    tokens = np.random.default_rng(seed).integers(1, VOCAB_SIZE, int(lengths.sum()), dtype=np.int64)
    labels = tokens.copy()
    made = []
    start = 0
    for length in lengths.tolist():
        labels[start : start + length // 3] = -100
        made.append({"tokens": tokens[start : start + length], "labels": labels[start : start + length]})
        start += length
    return made


def as_lists(samples: Iterable[dict[str, Any]]) -> list[dict[str, list[int]]]:
    """Convert samples to Python lists, which tokenizers return."""
    return [{key: value.tolist() for key, value in sample.items()} for sample in samples]
