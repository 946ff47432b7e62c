"""The ledger, which counts where every token went, messages about it, and the trained tokens of a sample."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import numpy as np

from streampack.types import IGNORE_INDEX, Sample

log = logging.getLogger(__name__)

DROP_REASONS = ("overlong", "truncated", "bad", "untrained", "removed")
"""Reasons for dropping tokens. ``overlong`` and ``untrained`` samples are dropped whole, of ``truncated`` ones what is
cut off. The tokens of ``bad`` records are unknown: 0. ``removed`` are those that waited when a run resumed without
their file or source, or continued with other settings in the middle of a row."""


@dataclass(slots=True)
class Ledger:
    """Counts of one lane, or of several added up.

    ``tokens_in == packed + buffered + sum(dropped.values())``, which is checked at every pack.

    >>> ledger = Ledger(samples=2, tokens_in=12, packed=9, packs=1, capacity=10)
    >>> ledger.drop("truncated", 1)
    >>> ledger.buffered, f"{ledger.padding:.0%}"
    (2, '10%')
    """

    samples: int = 0  # rows encoded
    tokens_in: int = 0  # tokens that the encoder made
    packs: int = 0  # packs made
    # Tokens that the packs have room for. With ``strategy="padded"`` a pack is as long as its sample; the padding of
    # its batch is not counted here, because only the loader knows the batch.
    capacity: int = 0
    packed: int = 0  # tokens in packs, without padding
    untrained: int = 0  # samples without a trained token, whether they were kept or dropped
    # Tokens dropped for each reason, and how many samples they are of.
    dropped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DROP_REASONS, 0))
    dropped_samples: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DROP_REASONS, 0))
    # Images in packs, and what they take of ``max_media``, such as patches.
    images: int = 0
    media: int = 0
    # The place of the first untrained sample since the process began, and what is wrong with it; no part of a state.
    example: str = field(default="", compare=False)

    def drop(self, reason: str, tokens: int, *, samples: int = 1) -> None:
        """Count ``tokens`` dropped tokens of one sample, or of several, under a reason."""
        self.dropped[reason] += tokens
        self.dropped_samples[reason] += samples

    @property
    def buffered(self) -> int:
        """Number of tokens that were encoded, and neither packed nor dropped yet."""
        return self.tokens_in - self.packed - sum(self.dropped.values())

    @property
    def padding(self) -> float:
        """Fraction of the capacity that holds no token; 0 before the first pack."""
        return 1 - self.packed / self.capacity if self.capacity else 0.0

    def numbers(self) -> list[int]:
        """Return all counts as a flat list, for a state; those of images come last, where there are any."""
        seen = [self.images, self.media] if self.media else []
        return [*_counts(self), *self.dropped.values(), *self.dropped_samples.values(), *seen]

    @classmethod
    def from_numbers(cls, numbers: list[int]) -> Ledger:
        """Build a ledger from its `numbers`."""
        at, reasons = len(_COUNTS), len(DROP_REASONS)
        dropped, dropped_samples = numbers[at : at + reasons], numbers[at + reasons : at + 2 * reasons]
        images, media = numbers[at + 2 * reasons :] or (0, 0)
        counts: dict[str, Any] = dict(zip(_COUNTS, numbers[:at], strict=True))
        return cls(
            **counts,
            dropped=dict(zip(DROP_REASONS, dropped, strict=True)),
            dropped_samples=dict(zip(DROP_REASONS, dropped_samples, strict=True)),
            images=images,
            media=media,
        )

    @classmethod
    def total(cls, ledgers: Iterable[Ledger]) -> Ledger:
        """Return the sum over lanes."""
        columns = zip_longest(*(ledger.numbers() for ledger in ledgers), fillvalue=0)
        return cls.from_numbers([sum(column) for column in columns] or cls().numbers())

    def as_dict(self) -> dict[str, Any]:
        """Return all counts by name, flat, for metric loggers."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        drops = {f"dropped_{reason}": tokens for reason, tokens in self.dropped.items() if reason != "bad"}
        drops["bad_records"] = self.dropped_samples["bad"]
        seen = {"images": self.images, "media": self.media} if self.media else {}
        return {**counts, **drops, "buffered": self.buffered, "padding": self.padding, **seen}


@dataclass(slots=True)
class SourceStats:
    """Counts of one source of a mixture, in one lane or in several added up."""

    # Passes over the source that were begun, those without rows for the lane included; of several lanes, their mean.
    epochs: float = 0
    samples: int = 0  # rows encoded
    tokens_in: int = 0  # tokens that the encoder made
    packed: int = 0  # tokens in packs, without padding
    trained: int = 0  # tokens in packs that the loss counts

    def numbers(self) -> list[int]:
        """Return all counts as a flat list, for a state."""
        return [getattr(self, f.name) for f in fields(self)]

    @classmethod
    def total(cls, source_stats: Iterable[SourceStats]) -> SourceStats:
        """Return the counts of several lanes together."""
        epochs, *counts = zip(*(stats.numbers() for stats in source_stats), strict=True)
        return cls(sum(epochs) / len(epochs), *map(sum, counts))


_COUNTS = tuple(
    f.name for f in fields(Ledger) if not f.name.startswith(("dropped", "images", "media", "example"))
)
_counts = attrgetter(*_COUNTS)


def trained_tokens(sample: Sample, cuts: Sequence[int] = ()) -> int:
    """Count the trained labels of a sample that is cut at ``cuts``: in each part, all but the first can be trained."""
    tokens, labels = sample
    if labels is tokens:
        return tokens.size - 1 - len(cuts)
    firsts = sum(1 for start in (0, *cuts) if labels[start] != IGNORE_INDEX)
    return int(np.count_nonzero(labels != IGNORE_INDEX)) - firsts


def trains_nothing(sample: Sample) -> bool:
    """Return whether no label of a sample is trained when it is packed whole: its first label never is."""
    tokens, labels = sample
    if labels is tokens:
        return tokens.size < 2
    # Most samples end in a trained token. Looking at that one first spares looking at the others.
    if labels.size > 1 and labels.item(-1) != IGNORE_INDEX:
        return False
    return not bool((labels[1:] != IGNORE_INDEX).any())


WORDS = {
    "overlong": "longer than a pack",
    "untrained": "without a trained token",
    "bad": "broken, and skipped",
}


def nothing_to_pack(ledger: Ledger) -> ValueError:
    """Make the error for a run without a pack.

    >>> nothing = Ledger()
    >>> nothing.drop("bad", 0)
    >>> print(nothing_to_pack(nothing))  # doctest: +ELLIPSIS
    no row makes a pack: all 1 that were read are dropped (1 broken, and skipped); check what the source reads, and ...
    """
    if not (rows := ledger.samples + ledger.dropped_samples["bad"]):
        return ValueError("the source has no rows at all; check what it reads")
    return ValueError(
        f"no row makes a pack: all {rows:,} that were read are dropped ({_reasons(ledger)}); check what the source "
        "reads, and the encoder, max_seq_len, max_media and the settings that drop rows"
    )


def endless_drop(ledger: Ledger, *, lane: int, rows: int) -> ValueError:
    """Make the error for a lane that dropped its last ``rows`` rows, of a source that may have no end."""
    return ValueError(
        f"lane {lane}: the last {rows:,} rows that it read are all dropped (so far {_reasons(ledger)}), and the source "
        "may have no end; check its rows, the encoder and max_seq_len, or leave such rows out of the source"
    )


def _reasons(ledger: Ledger) -> str:
    counts = [(ledger.dropped_samples[reason], words) for reason, words in WORDS.items()]
    return "; ".join(f"{count:,} {words}" for count, words in counts if count)


def warn_of_untrained(ledger: Ledger, *, max_seq_len: int) -> None:
    """Say how many samples train nothing, and what is wrong with the first."""
    log.warning(
        "%d of the first %d samples train nothing (max_seq_len=%d). The first: %s. Set untrained='drop' to leave them "
        "out, 'error' to stop at the first, or 'keep' if they are meant to be there",
        ledger.untrained, ledger.samples, max_seq_len, ledger.example,
    )  # fmt: skip
