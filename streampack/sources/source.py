"""`Source`: the base class of all sources, and the contract of a user's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from streampack.sources.examples import EXAMPLES, Example, first_rows
from streampack.sources.mechanics.parts import Part, Record
from streampack.sources.mechanics.parts_reader import PartsReader
from streampack.sources.reading import Reader, Reading, own_row, picked
from streampack.types import Cursor, RowId


class UnknownSize(ValueError):
    """How many rows a source has is known only when all of them are read."""


class Source(ABC):
    """A corpus of rows, divided into lanes: streams that are read, and resumed at any cursor, independently.

    A source of your own needs two methods: `identity`, and `rows`, which numbers its rows and can begin at any number.
    Shuffling, lanes, resume and bad records then work as for the others. A source that finds its rows in another way
    overrides `read`, `locate` and `fetch_many` instead of `rows`. Everything else has a default.

    >>> class Squares(Source):
    ...     def identity(self):
    ...         return {"squares below": 100**2}
    ...
    ...     def rows(self, start, step):
    ...         for n in range(start, 100, step):
    ...             yield {"input_ids": [n, n * n]}
    >>> from streampack import IterablePackedDataset
    >>> pack = next(iter(IterablePackedDataset(Squares(), max_seq_len=4, num_lanes=2)))
    >>> pack["tokens"].tolist(), [fragment.row_id for fragment in pack["fragments"]]
    ([0, 0, 2, 4], [(0, 0), (0, 2)])

    The pack is the first of lane 0, which has rows 0, 2, 4, ... The ``row_id`` of such a source is (0, row number).
    """

    ids_below: int | None = None
    """A number that is larger than all token ids in the rows; None if it is unknown, or the rows hold no tokens."""

    map_style = False
    """Whether the rows are numbered: ``(n,)`` is the ``row_id`` of row ``n`` of `size`."""

    local = True
    """Whether the rows are on this machine; else they are fetched before they are needed."""

    varies_by_process = False
    """Whether ranks or workers of torch may read different rows, as of a dataset that splits itself."""

    probed_by_bytes = False
    """Whether the scale that `sample` returns is a ratio of bytes; else it is a ratio of numbers of rows."""

    patience = 0.0
    """Longest time in seconds that one read may spend on retries; must be below the loader's ``timeout``."""

    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """Return what distinguishes this corpus, by name; a state that was saved with another identity is refused.

        Values are plain, or mappings, or functions without arguments where files must be read for the value.
        """

    def rows(self, start: int, step: int) -> Iterator[Mapping[str, Any]]:
        """Yield rows number ``start``, ``start + step``, ..., the same ones at every call."""
        raise NotImplementedError(f"{type(self).__name__} needs either rows, or read, locate and fetch_many")

    def read(self, reading: Reading) -> Reader:
        """Open a reader of one lane's rows in one epoch."""
        return PartsReader(
            [Part(0, reading.lane)],
            reading,
            open_part=lambda part, offset: self._numbered(offset, reading),
            locate=self.locate,
        )

    def locate(self, row_id: RowId) -> str:
        """Describe where a row is, for messages and lists of many rows: file and line, or row number."""
        return f"row {row_id[-1]}"

    def fetch_many(self, row_ids: Sequence[RowId]) -> list[Mapping[str, Any]]:
        """Read some rows again, in the order given: those that waited to be packed when a run was stopped.

        By default in one pass over `rows`, from the first of them to the last.

        Raises:
            ValueError: if the source ends before.
        """
        if not (numbers := sorted({row_id[-1] for row_id in row_ids})):
            return []
        found = picked(self.rows(numbers[0], 1), numbers)
        return [found[row_id[-1]] for row_id in row_ids]

    @property
    def size(self) -> int | None:
        """How many rows there are; None if that is unknown."""
        return None

    def sample(self, count: int) -> tuple[list[Example], float]:
        """Return about ``count`` rows from all over the corpus, and how many times as large the corpus is.

        Records that cannot be read have no data, or are skipped; they count as rows for the size.

        Raises:
            UnknownSize: if the corpus has no known length.
        """
        if (size := self.size) is None:
            raise UnknownSize(f"the length of {type(self).__name__} is unknown; set max_steps")
        found = self.examples(count)
        return found, size / max(1, len(found))

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """Return about ``count`` rows that are cheap to read, the same ones at each call and in each process."""
        return first_rows(self.read(Reading()), count)

    def leaves(self) -> Mapping[str, Source]:
        """Return the sources that hold the rows: itself under an empty name, or a mixture's by their names."""
        return {"": self}

    def path_of(self, row_id: RowId) -> str | None:
        """Return the path or URL, without secrets, of the file that a row is in; None if it is in no file."""
        return None

    def natural_lanes(self) -> int:
        """Return the most lanes that a new run has by default: about one per 100 rows or 64 KiB."""
        return 1

    def shared(self, num_lanes: int) -> list[str]:
        """Return a sentence if several of the lanes read the same rows, for the log."""
        return []

    def epochs_read(self, epoch: int, cursor: Cursor = ()) -> dict[str, int]:
        """Return for each of `leaves` the epoch of it that a lane reads at a cursor in ``epoch``."""
        return dict.fromkeys(self.leaves(), epoch)

    @property
    def names(self) -> list[str]:
        """Names of a mixture's sources; empty for other sources."""
        return []

    def source_index(self, row_id: RowId) -> int:
        """Return which of `names` a row comes from; 0 for a source that is no mixture."""
        return 0

    def encoder(self, row_id: RowId) -> Callable[[Mapping[str, Any]], Any] | None:
        """Return the encoder that a row's source in a mixture has of its own; None if it uses the run's."""
        return None

    def _numbered(self, start: int, reading: Reading) -> Iterator[Record]:
        """Yield a lane's rows as records. Rows that a shuffle window will hold while others are read are copied."""
        number = start
        for row in self.rows(start, reading.num_lanes):
            yield number, own_row(row) if reading.shuffle_window else row, number + reading.num_lanes
            number += reading.num_lanes


def shared_by_lanes(source: Source, num_lanes: int) -> list[str]:
    """Return a sentence for each source of files or streams within ``source`` whose rows several lanes read."""
    return [
        f"{name}: {what}" if name else what
        for name, leaf in source.leaves().items()
        for what in leaf.shared(num_lanes)
    ]
