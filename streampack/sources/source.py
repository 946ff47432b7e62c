"""`Source`: the base class of all sources, and the contract of a user's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from streampack.sources.base import Reader, Reading, own_row
from streampack.sources.corpus_lists import CorpusList, Entry
from streampack.sources.examples import EXAMPLES, Example, first_rows
from streampack.sources.parts import Part, Record
from streampack.sources.shuffling import read_parts
from streampack.storage.base import File, ParallelMap
from streampack.storage.file_marks import FileMarks
from streampack.storage.listing import Corpus
from streampack.storage.problems import Problem
from streampack.storage.use import StorageUse
from streampack.types import Cursor, RowId


class Source(ABC):
    """A corpus of rows, divided into lanes: streams that are read, and resumed at any cursor, independently.

    A source of your own needs two methods: `fingerprint`, and `rows`, which numbers its rows and can begin at any
    number. Shuffling, lanes, resume and bad records then work as for the others. A source that finds its rows in
    another way overrides `read`, `locate` and `fetch` instead of `rows`. Everything else has a default.

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

    The pack is the first of lane 0, which has rows 0, 2, 4, ... The ``row_id`` of such a source is (0, row number).
    """

    ids_below: int | None = None
    """A number that is larger than all token ids in the rows; None if it is unknown, or the rows hold no tokens."""

    map_style = False
    """Whether the rows are numbered: ``fetch((n,))`` returns row ``n`` of `num_rows`."""

    local = True
    """Whether the rows are on this machine; else they are fetched before they are needed."""

    varies_by_process = False
    """Whether a rank or a worker of torch may be given other rows than another, as by a dataset that splits itself."""

    probed_by_bytes = False
    """Whether the scale that `probe` returns is a ratio of bytes; else it is a ratio of numbers of rows."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest of the corpus. A state saved with a different digest is refused."""

    def rows(self, start: int, step: int) -> Iterator[Mapping[str, Any]]:
        """Yield rows number ``start``, ``start + step``, ..., the same ones at every call."""
        raise NotImplementedError(f"{type(self).__name__} needs either rows, or read, locate and fetch")

    def read(self, reading: Reading) -> Reader:
        """Open a reader of one lane's rows in one epoch."""
        return read_parts(
            [Part(0, reading.lane)],
            reading,
            open_part=lambda part, offset, following: self._numbered(offset, reading),
            locate=self.locate,
        )

    def locate(self, row_id: RowId) -> str:
        """Describe where a row is, for messages: file and line, or row number."""
        return f"row {row_id[-1]}"

    def locate_cheaply(self, row_id: RowId) -> str:
        """Describe where a row is, for lists of many rows: as `locate`, but by a byte where lines are dear to count."""
        return self.locate(row_id)

    def fetch(self, row_id: RowId) -> Mapping[str, Any]:
        """Read one row again."""
        return next(iter(self.rows(row_id[-1], 1)))

    def fetch_many(
        self, row_ids: Sequence[RowId], *, use: StorageUse | None = None
    ) -> list[Mapping[str, Any]]:
        """Read some rows again, in the order given: those that waited to be packed when a run was stopped.

        By default one by one. A source overrides it that can read rows which lie near one another at once. ``use`` is
        that of `Reading`.
        """
        return [own_row(self.fetch(row_id)) for row_id in row_ids]

    def shard(self, row_id: RowId) -> str:
        """Return the name of the file or other part of the corpus that a row is in, for the list of bad records."""
        return self.locate(row_id)

    def path_of(self, row_id: RowId) -> str | None:
        """Return the path or URL, without secrets, of the file that a row is in; None if it is in no file."""
        return None

    def problem_of(self, row_id: RowId) -> str | None:
        """Return how the file of a row that cannot be encoded differs from others, which may be why; else None."""
        return None

    @property
    def retry_budget(self) -> float:
        """Longest time in seconds that one read may spend on retries; must be below the loader's ``timeout``."""
        return 0.0

    def natural_lanes(self) -> int:
        """Return a sensible number of lanes: about one per 100 packs, as each lane's last pack is not full."""
        return 1

    def shared(self, num_lanes: int) -> list[str]:
        """Return a sentence for each source within this one of which several lanes read the same rows, for the log."""
        return []

    def num_rows(self) -> int:
        """Return how many rows there are.

        Raises:
            ValueError: if that is unknown.
        """
        raise ValueError(f"the length of {type(self).__name__} is unknown; set max_steps")

    def probe(self, count: int) -> tuple[list[Example], float]:
        """Return about ``count`` rows from all over the corpus, and how many times as large the corpus is.

        Records that cannot be read have no data, or are left out; they count as rows for the size.

        Raises:
            ValueError: if the corpus has no known length.
        """
        size, found = self.num_rows(), self.examples(count)
        return found, size / max(1, len(found))

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """Return about ``count`` rows, the same ones at each call and in each process; by default the first rows."""
        return first_rows(self.read(Reading()), count)

    def identity(self) -> dict[str, Any]:
        """Return what distinguishes this corpus, by name: plain values, mappings, and functions that read files."""
        return {"source": type(self).__name__, "fingerprint": self.fingerprint()}

    def corpora(self) -> list[Corpus]:
        """Return the files that the fingerprint is made of; none for a source without files."""
        return []

    def listing(self) -> list[File]:
        """Return the files that must be the same on all ranks; by default those of `corpora`."""
        return [file for corpus in self.corpora() for file in corpus.files]

    def bad_shards(self) -> list[Problem]:
        """Return the files that cannot be read, as far as is known; more may be when the source is divided or read."""
        return []

    def file_sources(self) -> Mapping[str, Listable]:
        """Return the sources of files within this one: one under an empty name, or a mixture's by their names."""
        return {}

    def of_files(self, files: Sequence[tuple[int, str]]) -> Source:
        """Return this source of some of its files, given as (number, name that the file shall have), in this order.

        Raises:
            ValueError: if that is not possible; it says so of all sources but JSON lines and Parquet.
        """
        raise ValueError(
            f"files were added, and {type(self).__name__} cannot be read without the others; tokenize the new ones to "
            "another folder: TokenShardSource reads several folders as one corpus"
        )

    def epochs_read(self, epoch: int, cursor: Cursor = ()) -> dict[str, int]:
        """Return for each of `file_sources` the epoch of it that a lane reads at a cursor in ``epoch``."""
        return dict.fromkeys(self.file_sources(), epoch)

    def divisible(self) -> list[Divisible]:
        """Return the sources within this one, perhaps itself, that are `Divisible`."""
        return []

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


class Listable(Protocol):
    """A source of files, whose list can be kept."""

    warned_of: set[str]
    """Files that cannot be read of which the user was warned, as they are shown."""

    def marks(self) -> FileMarks:
        """Return the files with the tags by which a resume compares them."""

    def listed(self) -> list[Entry]:
        """Return the files with their sizes and tags."""

    def corpus_list(self, num_lanes: int) -> CorpusList:
        """Return the files and the parts of each lane."""


class Divisible(Protocol):
    """A source that must read something of its files to cut them into lanes, such as Parquet footers."""

    def is_divided(self, num_lanes: int) -> bool:
        """Return whether `divide` was called for this number of lanes."""

    def divide(self, num_lanes: int, parallel_map: ParallelMap) -> None:
        """Cut the files into lanes; reads by ``parallel_map``, which is called in any case."""
