"""`Source`: the base class of all sources, and the contract that a source of one's own implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from streampack.sources.base import Reader, Reading
from streampack.sources.examples import EXAMPLES, Example, first_rows
from streampack.sources.row_copies import own_row
from streampack.sources.shuffling import Part, Record, read_parts
from streampack.storage.base import File, Together
from streampack.storage.listing import Corpus
from streampack.types import RowId


class Source(ABC):
    """Rows that several lanes divide among them, and that each lane can read again from any cursor.

    A source of one's own needs two methods: `fingerprint`, and `rows`, which numbers its rows and can begin at any
    number. Shuffling, lanes, resume and bad records then work as for the others. A source that finds its rows in
    another way, in files for instance, overrides `read`, `locate` and `fetch` in the place of `rows`. Everything else
    has a default.

    >>> class Squares(Source):
    ...     def fingerprint(self):
    ...         return "squares up to 100"
    ...
    ...     def rows(self, start, step):
    ...         for n in range(start, 100, step):
    ...             yield {"input_ids": [n, n * n]}
    >>> from streampack import IterablePackedDataset
    >>> pack = next(iter(IterablePackedDataset(Squares(), max_seq_len=4, num_lanes=2)))
    >>> pack["tokens"].tolist(), [fragment.row_id for fragment in pack["fragments"]]
    ([0, 0, 2, 4], [(0, 0), (0, 2)])
    """

    max_lanes: int | None = None
    """The most lanes that can divide the rows; None for any number."""

    ids_below: int | None = None
    """A bound that all token ids in the rows are below, where rows are tokens already and it is known."""

    @property
    def way_out(self) -> str:
        """Suffix of the error message where ``max_lanes`` are too few: how to get more lanes."""
        return (
            "each would read everything; use one consumer, or IterableSource(..., stride=True) to let each read "
            "everything and keep its part"
        )

    @property
    def retry_budget(self) -> float:
        """Seconds that one read may take in retries: so much longer the loader waits for other ranks."""
        return 0.0

    @property
    def names(self) -> list[str]:
        """Names of the sources of a mixture, those within others too; none for a source that is no mixture."""
        return []

    def source_index(self, row_id: RowId) -> int:
        """Which of `names` a row comes from; 0 for a source that is no mixture."""
        return 0

    def encoder(self, row_id: RowId) -> Callable[[Mapping[str, Any]], Any] | None:
        """The encoder of a row's own source in a mixture; None for the run's."""
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """A digest of the corpus; a state made with another one is refused."""

    def rows(self, start: int, step: int) -> Iterator[Mapping[str, Any]]:
        """Rows number ``start``, ``start + step``, ..., the same ones at every call."""
        raise NotImplementedError(f"{type(self).__name__} needs either rows, or read, locate and fetch")

    def read(self, reading: Reading) -> Reader:
        """Open a reader of one lane's rows in one epoch. By default by way of `rows`."""
        return read_parts(
            [Part(0, reading.lane)],
            reading,
            open_part=lambda part, offset, following: _numbered(
                self, offset, reading.num_lanes, held=reading.shuffle_window > 0
            ),
            decode=lambda part, offset, raw: raw,
            place=lambda part, offset: f"row {offset}",
            locate=self.locate,
        )

    def locate(self, row_id: RowId) -> str:
        """Where a row stands, in words for people: file and line, or row number."""
        return f"row {row_id[-1]}"

    def fetch(self, row_id: RowId) -> Mapping[str, Any]:
        """Read one row again."""
        return next(iter(self.rows(row_id[-1], 1)))

    def shard(self, row_id: RowId) -> str:
        """The part of the corpus that a row is in, by which bad records are listed. By default, where it stands."""
        return self.locate(row_id)

    def natural_lanes(self) -> int:
        """How many lanes the rows fill without their last, part-empty packs mattering: a lane per some 100 packs."""
        return 1

    def probe(self, count: int) -> tuple[list[Mapping[str, Any]], float]:
        """About ``count`` rows from all over the corpus, and how many times as much the whole corpus is.

        A broken record counts as a row, and is left out.

        Raises:
            ValueError: if nobody knows how much the corpus is.
        """
        raise ValueError(f"the length of {type(self).__name__} is unknown; set max_steps")

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """About ``count`` rows, the same at each call and in each process, from all over the corpus if that is cheap.

        By default the first ones.
        """
        return first_rows(self.read(Reading()), count)

    def identity(self) -> dict[str, Any]:
        """What tells this corpus from another, by name: plain values, mappings of them, and `Compared`."""
        return {"source": type(self).__name__, "fingerprint": self.fingerprint()}

    def corpora(self) -> list[Corpus]:
        """The files that the fingerprint is made of; none for a source without files."""
        return []

    def listing(self) -> list[File]:
        """The files that must be the same on all ranks. By default those of `corpora`."""
        return [file for corpus in self.corpora() for file in corpus.files]

    def divisible(self) -> list[Divisible]:
        """The sources within this one, itself perhaps, that are `Divisible`."""
        return []


class Divisible(Protocol):
    """A source that must read something of its files to cut them into lanes, and can do so before they are read."""

    def is_divided(self, num_lanes: int) -> bool:
        """Whether that was done."""

    def divide(self, num_lanes: int, together: Together) -> None:
        """Do it; ``together`` says who reads what, and is asked in any case."""


def _numbered(source: Source, start: int, step: int, *, held: bool) -> Iterator[Record]:
    """Rows with their numbers. ``held``: until others are read, so that they are copied."""
    number = start
    for row in source.rows(start, step):
        yield number, own_row(row) if held else row, number + step
        number += step
