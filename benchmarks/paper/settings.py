"""The data sets, the settings that their rows share, and the rows. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

# Of `method_loader`; the first line has rows of samples, the second packs.
UNPACKED = ("random_padding", "group_by_length_padding", "minibatch_packing")
PACKED = ("fixed_length", "fixed_length_posid", "multipack", "sorted_packing", "random_packing", "exact_fit")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that all rows of a data set share."""

    data: str  # a name of benchmarks.lengths, or "docstrings"
    samples: int
    validation: int  # samples held out
    shorter: int  # lengths of benchmarks.lengths are divided by this
    max_seq_len: int
    batch_size: int  # samples of a mini-batch, and packs of a wide step
    lr: float
    seed: int = 0  # of the weights and of the order; the samples are the same for all seeds


# Some 100,000 tokens each. The learning rate is the one of 0.001, 0.0015, 0.003 and 0.006 (for docstrings 0.012 too)
# that gives mini-batches their lowest validation loss, with seed 0: all others are compared with them at their best.
TINY = Settings(data="flan", samples=1800, validation=400, shorter=8, max_seq_len=512, batch_size=8, lr=3e-3)
DATA = {
    "flan": TINY,
    "orca": replace(TINY, data="orca", samples=1950, lr=1.5e-3),
    "stack": replace(TINY, data="stack", samples=640, batch_size=4, lr=1.5e-3),
    "docstrings": replace(TINY, data="docstrings", samples=1280, shorter=1, lr=6e-3),
}
SMOKE = replace(TINY, samples=48, validation=8, shorter=16, max_seq_len=64)


class Row(NamedTuple):
    """A method, and the kind of its optimizer steps; see `Budget.of`."""

    step: Literal["samples", "wide", "narrow", "scaled"]
    method: str


# The paper's three groups, and a fourth with a higher learning rate.
ROWS = {
    f"{row.step}/{row.method}": row
    for row in (
        *(Row("samples", name) for name in UNPACKED),
        *(Row("wide", name) for name in PACKED),
        *(Row("narrow", name) for name in PACKED),
        Row("scaled", "exact_fit"),
    )
}


def budget_of(row: Row, settings: Settings, *, mean: float) -> tuple[int, float]:
    """Return the rows of an optimizer step (for ``minibatch_packing``, samples) and its learning rate.

    Args:
        row: ``"samples"``: a step is a mini-batch of n samples. ``"wide"``: n packs, so far fewer steps an epoch.
            ``"narrow"``: as many packs as hold the tokens of n samples, so about as many steps. ``"scaled"``: n packs,
            and the learning rate grows with the root of the samples of a step, as Adam's noise requires (Malladi et
            al. 2022, arXiv 2205.10287).
        settings: with n, the ``batch_size``.
        mean: tokens of a sample.
    """
    more = settings.max_seq_len / mean
    if row.step == "narrow":
        return max(1, round(settings.batch_size / more)), settings.lr
    return settings.batch_size, settings.lr * (more**0.5 if row.step == "scaled" else 1)
