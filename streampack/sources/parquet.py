"""Parquet: parts are row groups, and only the columns that are needed are read."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from streampack.fingerprint import digest
from streampack.sources.base import Reader, Reading, spread
from streampack.sources.examples import EXAMPLES, Example
from streampack.sources.row_groups import Footers, RowGroups, group_of, plain_row, starts_of
from streampack.sources.shuffling import Damage, Part, read_parts
from streampack.sources.source import Divisible, Source
from streampack.storage.base import Together, together
from streampack.storage.formats import PARQUET
from streampack.storage.listing import Corpus, Name, find_files
from streampack.storage.ranges import Fetcher
from streampack.types import RowId

PARTS_PER_LANE = 16  # enough for shuffling parts to mix a sorted corpus, few enough to keep reads long
DIVISION = "runs"  # how lanes are cut; another way needs another word, for cursors in older states go by it
LARGE = 2  # parts' worth: smaller files are a part each, and their footers are read when their turn comes
FEW = 2  # parts of a lane: with fewer, all is cut as fine as can be, or lanes would be uneven, or empty


class ParquetSource(Source):
    """The rows of Parquet files as mappings of plain Python values.

    >>> import tempfile, pyarrow, pyarrow.parquet
    >>> from streampack.sources import Reading
    >>> path = tempfile.mkdtemp() + "/rows.parquet"
    >>> pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "url": ["x", "y"]}), path)
    >>> [row.data for row in ParquetSource(path, columns=["text"]).read(Reading())]
    [{'text': 'a'}, {'text': 'b'}]

    Whole files are shared out over the lanes; of files that are large for that, runs of row groups, which their footers
    tell before the first row is read (with a `PackedDataLoader`, each rank reads some of those footers for all). A row
    group is read in one go, as it is stored, and decoded 1,024 rows at a time.

    Args:
        paths: files, folders or globs of this machine, or URLs (``http``, ``https``, ``s3``, ``hf``).
        columns: the top-level columns to read; default: all.
        manifest: see `JSONLSource`, as for the arguments below.
        storage_options: for the storage behind URLs.
        retries: how often a read that fails is tried again.
        timeout: seconds that one request may take.
        read_ahead: bytes, per lane, fetched ahead behind a URL.

    Raises:
        ValueError: if nothing matches, a file is empty, or one is named twice; for a column that a file lacks, and for
            a damaged page, when it is read, with file and row group.
        ImportError: without pyarrow.
    """

    def __init__(
        self,
        paths: Name | Iterable[Name] | None = None,
        *,
        columns: Sequence[str] | None = None,
        manifest: Name | None = None,
        storage_options: Mapping[str, Any] | None = None,
        retries: int = 5,
        timeout: float = 30.0,
        read_ahead: int = 8 << 20,
    ) -> None:
        try:
            import pyarrow.parquet  # noqa: F401 - to say at once that it is missing
        except ImportError as error:
            raise ImportError("reading Parquet needs pyarrow: pip install 'streampack[parquet]'") from error
        if isinstance(columns, str) or (columns is not None and not columns):
            raise ValueError(f"columns={columns!r} is no list of columns; give their names, or None for all")
        self.columns = None if columns is None else list(columns)
        self.corpus = find_files(
            paths, manifest=manifest, endings=PARQUET, storage_options=storage_options, retries=retries,
            timeout=timeout,
        )  # fmt: skip
        self.files = self.corpus.files
        self.read_ahead = self.corpus.read_ahead(read_ahead)
        self._divided: dict[int, list[list[Part]]] = {}  # the lanes, by their number
        self.footers = Footers(self.files, self.columns)

    def fingerprint(self) -> str:
        """Of the files, as for JSON lines, and the columns."""
        return digest(DIVISION, self.corpus.fingerprint(), self.columns)

    def identity(self) -> dict[str, Any]:
        """See `identity_of`."""
        columns = None if self.columns is None else ", ".join(self.columns)
        return {"source": "ParquetSource", "files": self.corpus, "columns": columns, "division": DIVISION}

    def corpora(self) -> list[Corpus]:
        """What the fingerprint reads."""
        return [self.corpus]

    def read(self, reading: Reading) -> Reader:
        """See `Source.read`."""
        if not self.is_divided(reading.num_lanes):
            self.divide(reading.num_lanes, together)
        fetcher = Fetcher(self.corpus.storage, self.corpus.retries, ahead=self.read_ahead)
        return read_parts(
            self._divided[reading.num_lanes][reading.lane],
            reading,
            open_part=lambda part, offset, following: RowGroups(
                self.footers, part, offset, fetcher, following
            ),
            decode=lambda part, offset, raw: plain_row(raw),
            place=lambda part, offset: f"{self.files[part.file].shown} from row {offset} on",
            locate=self.locate,
        )

    def locate(self, row_id: RowId) -> str:
        """``file, row N``, from 0, and its row group."""
        file, row = row_id
        where = f"{self.files[file].shown}, row {row}"
        if (footer := self.footers.known(file)) is not None:
            where += f" (row group {group_of(footer, row)})"
        return where

    def shard(self, row_id: RowId) -> str:
        """The file's name in the corpus."""
        return self.files[row_id[0]].name

    def fetch(self, row_id: RowId) -> Mapping[str, Any]:
        """See `Source.fetch`. Reads the row's whole row group."""
        file, row = row_id
        _, raw, _ = next(RowGroups(self.footers, Part(file, row, row + 1), row, self._fetcher()))
        return plain_row(raw)

    @property
    def retry_budget(self) -> float:
        """See `JSONLSource.retry_budget`."""
        return self.corpus.retry_budget

    def natural_lanes(self) -> int:
        """One per 256 KiB, but no more than there are row groups, or, of eight files and more, files."""
        few = len(self.files) < 8
        parts = sum(len(self._runs(i, step=0)) for i in range(len(self.files))) if few else len(self.files)
        return max(1, min(parts, sum(file.size for file in self.files) >> 18))

    def probe(self, count: int) -> tuple[list[Mapping[str, Any]], float]:
        """The first rows of row groups of up to 16 files all over the corpus, and its size over theirs."""
        numbers = spread(len(self.files), PARTS_PER_LANE)
        rows: list[Mapping[str, Any]] = []
        wanted = -(-count // len(numbers))  # of each file
        known = size = 0
        for number in numbers:
            with suppress(ValueError):  # damage is found when it is read
                footer = self.footers.get(number, self._fetcher())
                starts = starts_of(footer)
                known += footer.num_rows
                size += self.files[number].size
                share = min(64, -(-footer.num_rows // max(1, len(starts) - 1)))  # of a group
                for group in spread(len(starts) - 1, -(-wanted // max(1, share))):
                    part = Part(number, starts[group], min(starts[group] + share, starts[group + 1]))
                    rows += [
                        plain_row(raw)
                        for _, raw, _ in RowGroups(self.footers, part, part.start, self._fetcher())
                    ]
        whole = sum(file.size for file in self.files)
        return rows, known / max(1, len(rows)) * whole / max(1, size)

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """The first rows of one row group: of the corpus, nothing is read for less."""
        with suppress(ValueError):  # damage is found when it is read
            starts = starts_of(self.footers.get(0, self._fetcher()))
            part = Part(0, 0, min(count, *starts[1:2]))
            rows = RowGroups(self.footers, part, 0, self._fetcher())
            return [Example((0, number), plain_row(raw)) for number, raw, _ in rows]
        return []

    def divisible(self) -> list[Divisible]:
        """Itself: its footers must be read to cut large files into lanes."""
        return [self]

    def is_divided(self, num_lanes: int) -> bool:
        """See `Divisible.is_divided`."""
        return num_lanes in self._divided

    def divide(self, num_lanes: int, together: Together) -> None:
        """See `Divisible.divide`. Parts are in corpus order; each goes to the lane with the fewest bytes so far."""
        step = sum(file.size for file in self.files) // max(1, num_lanes * PARTS_PER_LANE)
        parts = self._parts(step, LARGE * step, together)
        if len(parts) < FEW * num_lanes:
            parts = self._parts(0, 0, together)
        lanes: list[list[Part]] = [[] for _ in range(num_lanes)]
        load = [(0, lane) for lane in range(num_lanes)]  # a heap: bytes so far, lane
        for part, size in parts:
            least, lane = load[0]
            lanes[lane].append(part)
            heapq.heapreplace(load, (least + size, lane))
        self._divided[num_lanes] = lanes

    def _parts(self, step: int, whole: int, together: Together) -> list[tuple[Part, int]]:
        """Files of up to ``whole`` bytes, and runs of some ``step`` bytes of the others, each with its bytes."""
        large = [number for number, file in enumerate(self.files) if file.size > whole]
        runs = dict(zip(large, together(partial(self._runs, step=step), large), strict=True))
        return [
            part
            for number, file in enumerate(self.files)
            for part in runs.get(number, [(Part(number), file.size)])
        ]

    def _runs(self, number: int, step: int) -> list[tuple[Part, int]]:
        """A file's row groups in runs of some ``step`` bytes."""
        size = self.files[number].size
        try:
            footer = self.footers.get(number, self._fetcher())
        except Damage:  # which is raised again where it is read
            return [(Part(number), size)]
        groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
        scale = size / max(1, sum(group.total_byte_size for group in groups))  # as it is stored
        runs, start, held = [], 0, 0.0
        ends = starts_of(footer)[1:]
        for stop, group in zip(ends, groups, strict=True):
            held += scale * group.total_byte_size
            if stop > start and (held >= step or stop == ends[-1]):
                runs.append((Part(number, start, stop), max(1, round(held))))
                start, held = stop, 0.0
        return runs

    def _fetcher(self) -> Fetcher:
        return Fetcher(self.corpus.storage, self.corpus.retries, ahead=0)
