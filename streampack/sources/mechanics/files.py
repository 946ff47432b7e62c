"""`FileSource`, the base class of the file formats, and functions that divide files into lanes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from streampack.sources.examples import Example, example
from streampack.sources.mechanics.corpus_lists import CorpusList, Entry
from streampack.sources.mechanics.parts import Damage, Part, Record, assign, for_lanes, shared_parts
from streampack.sources.mechanics.parts_reader import PartsReader
from streampack.sources.reading import Reader, Reading, spread
from streampack.sources.source import Source
from streampack.storage.base import ParallelMap, Problem, gone, map_in_threads
from streampack.storage.corpus import Corpus
from streampack.storage.names import Files
from streampack.storage.prefetch import NO_PREFETCH, PREFETCH_BYTES, Prefetch
from streampack.storage.ranges import Fetcher
from streampack.types import RowId

WHOLE_FILE_PARTS = 2
"""A file that is at most as large as this number of parts is not cut, where cutting it takes reading it."""
PARTS_PER_LANE = 16
"""Enough parts that a sorted corpus is mixed when they are shuffled, and so few that each is a long read."""


class FileSource(Source):
    """Rows in files.

    A format implements `cut` (cuts files into lanes), `records` (returns the records of a part) and `decode` (makes a
    row of a record). A ``row_id`` is (index of the file, offset of the record in it). An offset counts bytes in JSON
    lines, tokens in flat files of them, and records in the other formats.
    """

    unit = "row"
    """The noun for what an offset counts, for messages."""

    whole = "file"
    """The noun for what cannot be cut, and is shared by lanes if there are too few of it, for messages."""

    near = 64
    """The distance in offsets below which `fetch_many` reads on to the next row, instead of beginning there, by URL."""

    reads_tags = True
    """Whether the files' ends may have to be read for their tags."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        self.files = corpus.files
        self.local = corpus.local
        # For the numbers of files that cannot be read, why.
        self.bad = self.files.problems
        # For a number of lanes, the parts of each lane.
        self._divided: dict[int, list[list[Part]]] = {}
        self._empty: set[Part] = set()  # parts that were read and have no records

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of each file."""
        return np.frombuffer(self.files.sizes, np.int64)

    @abstractmethod
    def cut(self, num_lanes: int, parallel_map: ParallelMap) -> list[list[Part]]:
        """Return the parts of each lane, in corpus order."""

    @abstractmethod
    def records(self, part: Part, offset: int, fetcher: Fetcher) -> Iterator[Record]:
        """Return the records of a part from ``offset`` on. Several threads may read parts of a source."""

    @abstractmethod
    def decode(self, part: Part, offset: int, raw: Any) -> Mapping[str, Any]:
        """Make a row's data of a record's raw data; raise ValueError if the record is broken."""

    def identity(self) -> dict[str, Any]:
        """Describe the files by names, sizes, and ETags or their first and last 64 KiB, so a corpus may be copied."""
        return {"source": type(self).__name__, "files": self.corpus.described}

    def read(self, reading: Reading) -> Reader:
        """See `Source.read`."""
        prefetch = NO_PREFETCH
        if not self.local:  # on this machine, the operating system prefetches
            prefetch = reading.prefetch or Prefetch.for_lanes(PREFETCH_BYTES, 1)
        fetcher = Fetcher(self.corpus.storage, prefetch=prefetch)

        def open_part(part: Part, offset: int) -> Iterator[Record]:
            if (problem := self.bad.get(part.file)) is not None:
                raise Damage(problem, offset=offset)
            return self.records(part, offset, fetcher)

        return PartsReader(
            self._parts_of(reading),
            reading,
            open_part=open_part,
            decode=self.decode,
            place=self.place,
            locate=self.locate,
            prefetch=fetcher if prefetch.room else None,
            empty=self._empty,
            damage=self.damage,
        )

    def damage(self, error: Exception, part: Part, offset: int) -> Damage | None:
        """See `DamageOf`: of the errors of the storage, only that a file is gone will not pass."""
        if not isinstance(error, FileNotFoundError):
            return None
        found = Damage(gone(error, self.files[part.file].shown), offset=offset)
        found.__cause__ = error  # is raised where no bad record is skipped
        return found

    def bad_files(self) -> list[Problem]:
        """Return the files that cannot be read, as far as is known; more may be when they are divided or read."""
        return [(self.files[number].shown, reason) for number, reason in sorted(self.bad.items())]

    def _parts_of(self, reading: Reading) -> Sequence[Part]:
        for earlier in reading.earlier.get("", ()):
            if reading.epoch < earlier.until:
                assert len(earlier.lanes) == reading.num_lanes, "a resume keeps the number of lanes"
                return earlier.lanes[reading.lane]
        return self.lanes(reading.num_lanes)[reading.lane]

    def listed(self) -> list[Entry]:
        """Return the files as a `CorpusList` holds them."""
        return list(map(Entry, self.files.names, self.files.sizes, self.corpus.tags()))

    def corpus_list(self, num_lanes: int) -> CorpusList:
        """Return the files and the parts of each lane, to be kept for a resume with other files."""
        return CorpusList(self.listed(), self.lanes(num_lanes))

    def place(self, part: Part, offset: int) -> str:
        """Describe the position of a reader, for errors of the storage."""
        return f"{self.files[part.file].shown} from {self.unit} {offset} on"

    def locate(self, row_id: RowId) -> str:
        """Return the file and the record's number in it, from 0."""
        return f"{self.files[row_id[0]].shown}, {self.unit} {row_id[1]}"

    def path_of(self, row_id: RowId) -> str | None:
        """See `Source.path_of`."""
        return self.files[row_id[0]].shown

    def fetch_many(self, row_ids: Sequence[RowId]) -> list[Mapping[str, Any]]:
        """See `Source.fetch_many`. Rows near one another are read in one go, and files side by side."""
        runs: list[list[RowId]] = []
        row_ids = list(map(tuple, row_ids))  # torch's DataLoader makes lists of them
        for row_id in sorted(set(row_ids)):
            if runs and runs[-1][0][0] == row_id[0] and self.is_near(runs[-1][-1], row_id):
                runs[-1].append(row_id)
            else:
                runs.append([row_id])
        found: dict[RowId, Mapping[str, Any]] = {}
        for rows in map_in_threads(self._fetch_run, runs) if len(runs) > 1 else map(self._fetch_run, runs):
            found |= rows
        return [found[row_id] for row_id in row_ids]

    def examples_at(self, row_ids: Sequence[RowId]) -> list[Example]:
        """Return copies of some rows, without data where one cannot be read."""
        return map_in_threads(lambda row_id: example(row_id, lambda: self.fetch_many([row_id])[0]), row_ids)

    def is_near(self, row_id: RowId, later: RowId) -> bool:
        """Return whether to read on from a row to a later one of its file costs less than to begin there."""
        return not self.local and later[1] - row_id[1] < self.near

    def _fetch_run(self, row_ids: Sequence[RowId]) -> dict[RowId, Mapping[str, Any]]:
        """Read rows of one file, and those between them."""
        file, first = row_ids[0]
        part, left = Part(file, first, row_ids[-1][1] + 1), set(row_ids)
        found: dict[RowId, Mapping[str, Any]] = {}
        at = row_ids[0]
        try:
            for offset, raw, _ in self.records(part, first, self.fetcher()):
                if (at := (file, offset)) in left:
                    found[at] = self.decode(part, offset, raw)
                    left.remove(at)
                    if not left:  # a compressed file may be damaged further on
                        break
            if left:
                at = min(left)
                raise ValueError(f"the file has no such {self.unit}; it is another one")
        except FileNotFoundError as error:
            error.add_note(f"while reading {self.place(part, at[1])}")
            raise
        except ValueError as error:
            if isinstance(error, Damage) and len(row_ids) > 1:  # perhaps of what is between them
                return {row_id: row for each in row_ids for row_id, row in self._fetch_run([each]).items()}
            raise ValueError(f"{self.locate(at)}: {error}") from None
        return found

    @property
    def patience(self) -> float:  # type: ignore[override]
        """See `Source.patience`."""
        return self.corpus.storage.patience

    def is_divided(self, num_lanes: int) -> bool:
        """Return whether `divide` was called for this number of lanes."""
        return num_lanes in self._divided

    def divide(self, num_lanes: int, parallel_map: ParallelMap) -> None:
        """Cut the files into lanes, and read what must be read of them for it by ``parallel_map``."""
        self._divided[num_lanes] = self.cut(num_lanes, parallel_map)

    def shared(self, num_lanes: int) -> list[str]:
        """See `Source.shared`."""
        return shared_parts(self.lanes(num_lanes), what=self.whole)

    def lanes(self, num_lanes: int) -> list[list[Part]]:
        """Return the parts of each lane, in corpus order."""
        if not self.is_divided(num_lanes):
            self.divide(num_lanes, map_in_threads)
        return self._divided[num_lanes]

    def fetcher(self) -> Fetcher:
        """Return a fetcher that prefetches nothing."""
        return Fetcher(self.corpus.storage)


def file_sources(source: Source) -> dict[str, FileSource]:
    """Return the sources of files within a source, by the names of `Source.leaves`."""
    return {name: leaf for name, leaf in source.leaves().items() if isinstance(leaf, FileSource)}


def divide(
    lengths: Sequence[int],
    num_lanes: int,
    *,
    sizes: Sequence[int] | None = None,
    whole: Collection[int] = (),
    least: int = 1,
) -> list[list[Part]]:
    """Cut files into slices and assign those to lanes. Returns the parts of each lane, in corpus order.

    >>> [[(part.file, part.start) for part in lane] for lane in divide([4, 2], 2, sizes=[400, 200])]
    [[(0, 0), (0, 2), (1, 0)], [(0, 1), (0, 3), (1, 1)]]

    Args:
        lengths: bytes or records of each file.
        num_lanes: how many lanes.
        sizes: bytes or tokens of each file, by which lanes are balanced; by default ``lengths``.
        whole: indices of the files that cannot be read from the middle. They are not cut; if there are too few of them,
            lanes share them.
        least: the length of the shortest slice, unless a file's last one.
    """
    sizes = lengths if sizes is None else sizes
    total = sum(length for number, length in enumerate(lengths) if number not in whole)
    step = max(least, -(-total // (num_lanes * PARTS_PER_LANE)))
    uncut = [(Part(number), float(sizes[number])) for number in sorted(whole)]
    shares: dict[int, list[tuple[Part, float]]] = {number: [] for number in whole}
    for part, size in for_lanes(uncut, num_lanes, rest=sum(sizes) - sum(size for _, size in uncut)):
        shares[part.file].append((part, size))

    def parts() -> Iterator[tuple[Part, float]]:
        for number, length in enumerate(lengths):
            if number in whole:
                yield from shares[number]
                continue
            for start in range(0, length, step):
                stop = min(start + step, length)
                yield Part(number, start, stop), sizes[number] * (stop - start) / length

    return assign(parts(), num_lanes)


def divide_scanned(
    files: Files,
    num_lanes: int,
    *,
    scanned: Collection[int],
    starts_after: Callable[[int, Sequence[int]], Sequence[int]],
    parallel_map: ParallelMap,
    least: int = 1,
) -> list[list[Part]]:
    """Divide files by bytes, as `divide` does. In the ``scanned`` ones only a scan finds where records begin.

    A file that cannot be read from the middle is not cut. A scanned one is cut if it is larger than two parts:
    ``starts_after(number, places)`` returns for each byte where the next record begins, or the file's size.
    """
    sizes = files.sizes
    step = sum(sizes) // (num_lanes * PARTS_PER_LANE)
    # An empty file is a part, too, so that a lane lists it as a bad record.
    whole = files.packed | {number for number, size in enumerate(sizes) if not size}
    whole |= {number for number in scanned if sizes[number] <= WHOLE_FILE_PARTS * step}
    lanes = divide(sizes, num_lanes, whole=whole, least=least)
    cuts: dict[int, list[int]] = {}
    for part in sorted(chain.from_iterable(lanes)):
        if part.start and part.file in scanned:
            cuts.setdefault(part.file, []).append(part.start)
    # A collective, which files that need no scan are spared.
    found = parallel_map(lambda number: starts_after(number, cuts[number]), [*cuts]) if scanned else []
    moved = {
        (number, place): start
        for number, starts in zip(cuts, found, strict=True)
        for place, start in zip(cuts[number], starts, strict=True)
    }

    def aligned(part: Part) -> Part:
        start, stop = (moved.get((part.file, place or 0), place) for place in part[1:3])
        return part._replace(start=start or 0, stop=stop)

    return [[part for part in map(aligned, lane) if part.start != part.stop] for lane in lanes]


def places(lengths: Sequence[int] | npt.NDArray[np.int64], wanted: int) -> list[tuple[int, int]]:
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
