"""Files and lanes of sources that contain others: what a source lists, reads for its fingerprint, and divides."""

from __future__ import annotations

from typing import Protocol

from streampack.sources.base import Source
from streampack.storage.base import File, Together
from streampack.storage.listing import Corpus


def corpora_of(source: Source) -> list[Corpus]:
    """What a source's fingerprint reads; nothing of a source without files."""
    found: list[Corpus] = getattr(source, "corpora", list)()
    return found


def listing_of(source: Source) -> list[File]:
    """The files that must be the same on all ranks: a source's own ``listing``, or what its fingerprint reads."""
    if hasattr(source, "listing"):
        found: list[File] = source.listing()
        return found
    return [file for corpus in corpora_of(source) for file in corpus.files]


class Divisible(Protocol):
    """A source that must read something of its files to cut them into lanes, and can do so before they are read."""

    def is_divided(self, num_lanes: int) -> bool:
        """Whether that was done."""

    def divide(self, num_lanes: int, together: Together) -> None:
        """Do it; ``together`` says who reads what, and is asked in any case."""


def divisible_of(source: Source) -> list[Divisible]:
    """The sources within one, itself perhaps, that are `Divisible`."""
    found: list[Divisible] = getattr(source, "divisible", list)()
    return found
