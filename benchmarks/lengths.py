"""The three sets of lengths that every packer here is measured on.

Each is a log-normal distribution with the median and mean of a known corpus, clipped to [1, longest]. The
lengths are its evenly spaced quantiles, in a seeded random order: the lower bound is the same for every seed,
and only the order changes, which is what an online packer has to cope with.

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
PADDING = 0  # never a sample's token, so a packer's real tokens can be counted from its output alone


@dataclass(frozen=True)
class LogNormal:
    """A corpus' lengths: ``sigma`` was chosen so that 20,000 of them, clipped, have the corpus' mean."""

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
    """``count`` lengths of the distribution ``name``, in an order that ``seed`` decides.  # [count]"""
    if name not in DISTRIBUTIONS:
        raise ValueError(f"no distribution {name!r}; choose one of {', '.join(DISTRIBUTIONS)}")
    return draw(DISTRIBUTIONS[name], count=count, seed=seed, longest=longest)


def draw(shape: LogNormal, *, count: int, seed: int, longest: int) -> npt.NDArray[np.int64]:
    """``count`` lengths of any such distribution.  # [count]"""
    if count < 1 or longest < 1:
        raise ValueError(f"count is {count} and longest is {longest}; both must be at least 1")
    normal = NormalDist()
    quantiles = np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
    values = np.clip(np.rint(shape.median * np.exp(shape.sigma * quantiles)), 1, longest).astype(np.int64)
    return np.random.default_rng(seed).permutation(values)


def lower_bound(lengths: Iterable[int], max_seq_len: int) -> int:
    """The fewest packs that any packer could need: every pack but the last one full."""
    return -(-int(sum(lengths)) // max_seq_len)


def samples(lengths: npt.NDArray[np.int64], *, seed: int = 0) -> list[dict[str, npt.NDArray[np.int64]]]:
    """Random samples: int64 ``tokens`` (never 0) and ``labels``, the first third of them a prompt (-100)."""
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
    """The same samples as Python lists, which is what tokenizers return."""
    return [{key: value.tolist() for key, value in sample.items()} for sample in samples]


def main() -> None:
    """Print what the distributions look like."""
    for name, shape in DISTRIBUTIONS.items():
        values = lengths(name)
        p99 = np.percentile(values, 99)
        print(
            f"{name:6} median {np.median(values):6,.0f}  mean {values.mean():6,.0f}  p99 {p99:6,.0f}  "
            f"at the limit {(values == LONGEST).mean():5.1%}  "
            f"lower bound {lower_bound(values, LONGEST):6,} packs  {shape.like}"
        )


if __name__ == "__main__":
    main()
