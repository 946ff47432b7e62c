"""`FileSource`, the base class of the file formats, and functions that divide files into lanes."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from streampack.sources.base import Reader, Reading, spread
from streampack.sources.parts import Part, Record
from streampack.sources.shuffling import read_parts
from streampack.sources.source import Source
from streampack.storage.base import ParallelMap, map_in_threads
from streampack.storage.listing import Corpus
from streampack.storage.ranges import Fetcher
from streampack.types import RowId

PARTS_PER_LANE = 16
"""Enough parts that a sorted corpus is mixed when they are shuffled, and so few that each is a long read."""
LONGEST_PART = 1 << 30  # bytes


class FileSource(Source):
    """Rows in files.

    A format implements `cut` (cuts files into lanes), `records` (returns the records of a part) and `decode` (makes a
    row of a record). A ``row_id`` is (index of the file, offset of the record in it). An offset counts bytes in JSON
    lines, and records in the other formats.
    """

    unit = "row"
    """What an offset counts, for messages."""

    def __init__(self, corpus: Corpus, *, read_ahead: int) -> None:
        self.corpus = corpus
        self.files = corpus.files
        self.local = corpus.local
        self.read_ahead = corpus.read_ahead(read_ahead)
        # For a number of lanes, the parts of each lane.
        self._divided: dict[int, list[list[Part]]] = {}

    @abstractmethod
    def cut(self, num_lanes: int, parallel_map: ParallelMap) -> list[list[Part]]:
        """Return the parts of each lane, in corpus order."""

    @abstractmethod
    def records(
        self, part: Part, offset: int, fetcher: Fetcher, following: Part | None = None
    ) -> Iterator[Record]:
        """Return the records of a part from ``offset`` on.

        ``following`` is the part that will be read next, if there is one. A format may have it fetched ahead.
        """

    @abstractmethod
    def decode(self, part: Part, offset: int, raw: Any) -> Mapping[str, Any]:
        """Make a row's data of a record's raw data.

        Raises:
            ValueError: if the record is broken.
        """

    def fingerprint(self) -> str:
        """Return a digest of the files' names and sizes, and of each file's ETag or its first and last 64 KiB.

        Modification times are no part of it, so a corpus may be copied.
        """
        return self.corpus.fingerprint()

    def identity(self) -> dict[str, Any]:
        """See `Source.identity`."""
        return {"source": type(self).__name__, "files": self.corpus}

    def corpora(self) -> list[Corpus]:
        """See `Source.corpora`."""
        return [self.corpus]

    def read(self, reading: Reading) -> Reader:
        """See `Source.read`."""
        if not self.is_divided(reading.num_lanes):
            self.divide(reading.num_lanes, map_in_threads)
        fetcher = self.fetcher(ahead=self.read_ahead)
        return read_parts(
            self._divided[reading.num_lanes][reading.lane],
            reading,
            open_part=lambda part, offset, following: self.records(part, offset, fetcher, following),
            decode=self.decode,
            place=self.place,
            locate=self.locate,
        )

    def place(self, part: Part, offset: int) -> str:
        """Describe where reading stands, for errors of the storage."""
        return f"{self.files[part.file].shown} from {self.unit} {offset} on"

    def locate(self, row_id: RowId) -> str:
        """Return the file and the record's number in it, from 0."""
        return f"{self.files[row_id[0]].shown}, {self.unit} {row_id[1]}"

    def shard(self, row_id: RowId) -> str:
        """Return the file's name in the corpus."""
        return self.files[row_id[0]].name

    def fetch(self, row_id: RowId) -> Mapping[str, Any]:
        """See `Source.fetch`."""
        file, offset = row_id
        part = Part(file, offset, offset + 1)
        _, raw, _ = next(iter(self.records(part, offset, self.fetcher())))
        try:
            return self.decode(part, offset, raw)
        except ValueError as error:
            raise ValueError(f"{self.locate(row_id)}: {error}") from None

    @property
    def retry_budget(self) -> float:
        """See `Source.retry_budget`."""
        return self.corpus.retry_budget

    def is_divided(self, num_lanes: int) -> bool:
        """See `Divisible`."""
        return num_lanes in self._divided

    def divide(self, num_lanes: int, parallel_map: ParallelMap) -> None:
        """See `Divisible`."""
        self._divided[num_lanes] = self.cut(num_lanes, parallel_map)

    def fetcher(self, *, ahead: int = 0) -> Fetcher:
        """Return a fetcher that reads up to ``ahead`` bytes ahead."""
        return Fetcher(self.corpus.storage, self.corpus.retries, ahead=ahead)


def divide(
    lengths: Sequence[int],
    num_lanes: int,
    *,
    sizes: Sequence[int] | None = None,
    whole: Collection[int] = (),
) -> list[list[Part]]:
    """Cut files into slices and deal those out to lanes. Returns the parts of each lane, in corpus order.

    >>> divide([4, 2], 2, sizes=[400, 200])[0][:3]
    [Part(file=0, start=0, stop=1), Part(file=0, start=2, stop=3), Part(file=1, start=0, stop=1)]

    Args:
        lengths: bytes or records of each file.
        num_lanes: how many lanes.
        sizes: bytes of each file, by which lanes are balanced; by default ``lengths``.
        whole: indices of the files that cannot be read from the middle, and are not cut.
    """
    total = sum(length for number, length in enumerate(lengths) if number not in whole)
    step = min(LONGEST_PART, max(1, -(-total // (num_lanes * PARTS_PER_LANE))))

    def parts() -> Iterator[tuple[Part, float]]:
        for number, length in enumerate(lengths):
            size = length if sizes is None else sizes[number]
            if number in whole:
                yield Part(number), size
                continue
            for start in range(0, length, step):
                stop = min(start + step, length)
                yield Part(number, start, stop), size * (stop - start) / length

    return deal(parts(), num_lanes)


def deal(parts: Iterable[tuple[Part, float]], num_lanes: int) -> list[list[Part]]:
    """Give each of ``parts``, (part, bytes), to the lane with the fewest bytes so far; of several, to the first."""
    lanes: list[list[Part]] = [[] for _ in range(num_lanes)]
    load = [(0.0, lane) for lane in range(num_lanes)]  # a heap of (bytes so far, lane)
    for part, size in parts:
        least, lane = load[0]
        lanes[lane].append(part)
        heapq.heapreplace(load, (least + size, lane))
    return lanes


def places(lengths: Sequence[int], wanted: int) -> list[tuple[int, int]]:
    """Return about ``wanted`` places from all over the files: (index of the file, offset in it).

    ``lengths`` are the lengths of the files, in the unit of the offsets.

    >>> places([3, 0, 1], 9)
    [(0, 0), (0, 1), (0, 2), (2, 0)]
    """
    ends = np.cumsum(lengths)
    numbers = np.asarray(spread(int(ends[-1]), wanted), np.int64)
    files = np.searchsorted(ends, numbers, side="right")
    starts = ends - np.asarray(lengths)
    return list(zip(files.tolist(), (numbers - starts[files]).tolist(), strict=True))
