"""`ParquetSource`: parts are files or runs of row groups, and only the columns that are needed are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Any

from streampack.sources.examples import EXAMPLES, Example
from streampack.sources.formats.row_groups import (
    Footers,
    group_of,
    records_of,
    require_pyarrow,
    row_groups,
    starts_of,
)
from streampack.sources.mechanics.files import PARTS_PER_LANE, WHOLE_FILE_PARTS, FileSource
from streampack.sources.mechanics.parts import Damage, Part, Record, assign, for_lanes
from streampack.sources.reading import spread
from streampack.storage.base import ParallelMap
from streampack.storage.listing import Name, find_files
from streampack.storage.ranges import Fetcher
from streampack.storage.retries import Storage
from streampack.types import RowId

FEWEST_PARTS = 2
"""If lanes have fewer parts than this on average, all files are cut into single row groups, as lanes would be uneven or
empty otherwise."""
PROBED_FILES = 16
PARQUET = (".parquet",)


class ParquetSource(FileSource):
    """The rows of Parquet files as mappings of plain Python values.

    >>> import tempfile, pyarrow, pyarrow.parquet
    >>> from streampack.sources import Reading
    >>> path = tempfile.mkdtemp() + "/rows.parquet"
    >>> pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"], "url": ["x", "y"]}), path)
    >>> [row.data for row in ParquetSource(path, columns=["text"]).read(Reading())]
    [{'text': 'a'}, {'text': 'b'}]

    Whole files are divided among the lanes. Files that are too large for that are cut into runs of row groups, so their
    footers are read before the first row (with a `PackedDataLoader`, each rank reads some of them for all ranks). The
    stored bytes of a row group are read at once, and decoded 1,024 rows at a time, or fewer if they have more than some
    16 MiB. If there are fewer row groups than lanes, several lanes read the same one and take turns with its rows.

    Rows are mappings. Token ids in them are read as arrays where they are encoded as tokens; other encoders get a dict.
    Records in lists, such as messages and tools, come without their fields that are null: Arrow fills in those.

    Args:
        paths: files, folders or globs of this machine, or URLs (``https``, ``s3``, ``gs``, ``az``, ``hf`` and others).
        columns: the top-level columns to read; None for all.
        manifest: see `JSONLSource`.
        storage: see `JSONLSource`.

    Raises:
        ValueError: if nothing matches, no file can be read, or one is named twice; for a named column that
            a file lacks, and for a damaged page, when it is read, with file and row group.
        ImportError: if pyarrow is not installed.
    """

    whole = "row group"

    def __init__(
        self,
        paths: Name | Iterable[Name] | None = None,
        *,
        columns: Sequence[str] | None = None,
        manifest: Name | None = None,
        storage: Storage | Mapping[str, Any] | None = None,
    ) -> None:
        require_pyarrow("Parquet")
        if isinstance(columns, str) or (columns is not None and not columns):
            raise ValueError(f"columns={columns!r} is no list of columns; give their names, or None for all")
        self.columns = None if columns is None else list(columns)
        super().__init__(find_files(paths, manifest=manifest, endings=PARQUET, storage=storage))
        self.footers = Footers(self.files, self.columns)

    def identity(self) -> dict[str, Any]:
        """See `Source.identity`."""
        columns = None if self.columns is None else ", ".join(self.columns)
        return {**super().identity(), "columns": columns}

    def records(self, part: Part, offset: int, fetcher: Fetcher) -> Iterator[Record]:
        """See `FileSource.records`."""
        return records_of(self.footers, part, offset, fetcher)

    def decode(self, part: Part, offset: int, raw: Any) -> Mapping[str, Any]:
        """See `FileSource.decode`."""
        batch, i = raw
        row: Mapping[str, Any] = batch.row(i)
        return row

    def is_near(self, row_id: RowId, later: RowId) -> bool:
        """See `FileSource.is_near`: the bytes of a row group are read at once."""
        footer = self.footers.get(row_id[0], self.fetcher().take)
        return group_of(footer, row_id[1]) == group_of(footer, later[1])

    def natural_lanes(self) -> int:
        """Return one lane per 64 KiB, but no more than there are parts to divide.

        Those are row groups. For eight files or more, files are counted instead, so that no footers need be read.
        """
        few = len(self.files) < 8
        parts = sum(len(self._runs(i, step=0)[0]) for i in range(len(self.files))) if few else len(self.files)
        return max(1, min(parts, sum(self.files.sizes) >> 16))

    def sample(self, count: int) -> tuple[list[Example], float]:
        """See `Source.sample`: the first rows of row groups of up to 16 files."""
        sound = [number for number in range(len(self.files)) if number not in self.bad]
        numbers = [sound[i] for i in spread(len(sound), PROBED_FILES)]
        rows: list[Example] = []
        wanted = -(-count // len(numbers))  # rows from each file
        known = size = 0
        for number in numbers:
            with suppress(ValueError, FileNotFoundError):  # training reports damage
                footer = self.footers.get(number, self.fetcher().take)
                starts = starts_of(footer)
                known += footer.num_rows
                size += self.files[number].size
                each = min(64, -(-footer.num_rows // max(1, len(starts) - 1)))  # rows from a row group
                for group in spread(len(starts) - 1, -(-wanted // max(1, each))):
                    part = Part(number, starts[group], min(starts[group] + each, starts[group + 1]))
                    rows += self._plain_rows(part)
        whole = sum(self.files.sizes)
        return rows, known / max(1, len(rows)) * whole / max(1, size)

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """See `Source.examples`: the first rows of one row group."""
        first = next(number for number in range(len(self.files)) if number not in self.files.problems)
        with suppress(ValueError, FileNotFoundError):  # training reports damage
            starts = starts_of(self.footers.get(first, self.fetcher().take))
            part = Part(first, 0, min(count, *starts[1:2]))
            return self._plain_rows(part)
        return [Example((first, 0), None)]

    def _plain_rows(self, part: Part) -> list[Example]:
        """Return the rows of a part, as dicts that hold nothing else of the file."""
        records = self.records(part, part.start, self.fetcher())
        return [Example((part.file, n), dict(self.decode(part, n, raw))) for n, raw, _ in records]

    def cut(self, num_lanes: int, parallel_map: ParallelMap) -> list[list[Part]]:
        """See `FileSource.cut`."""
        step = sum(self.files.sizes) // max(1, num_lanes * PARTS_PER_LANE)
        parts = self._parts(step, WHOLE_FILE_PARTS * step, parallel_map)
        if len(parts) < FEWEST_PARTS * num_lanes:
            parts = self._parts(0, 0, parallel_map)
        return assign(for_lanes(parts, num_lanes), num_lanes)

    def _parts(self, step: int, whole: int, parallel_map: ParallelMap) -> list[tuple[Part, float]]:
        """Return (part, bytes) for all files: one part for up to ``whole`` bytes, else runs of ``step`` bytes."""
        large = [number for number, size in enumerate(self.files.sizes) if size > whole]
        cut = parallel_map(partial(self._runs, step=step), large)
        self.bad.update(
            {number: problem for number, (_, problem) in zip(large, cut, strict=True) if problem is not None}
        )
        runs = {number: found for number, (found, _) in zip(large, cut, strict=True)}
        return [
            part
            for number, size in enumerate(self.files.sizes)
            for part in runs.get(number, [(Part(number), size)])
        ]

    def _runs(self, number: int, step: int) -> tuple[list[tuple[Part, float]], str | None]:
        """Return (part, bytes) for each run of row groups with ``step`` bytes, and why the file cannot be read, if so.

        Lanes do not depend on which columns are read, so a file that lacks one is cut like others.
        """
        size = self.files[number].size
        if (problem := self.bad.get(number)) is not None:
            return [(Part(number), size)], problem
        take = self.fetcher().take
        try:
            footer = self.footers.get(number, take)
        except (Damage, FileNotFoundError) as error:
            return [(Part(number), size)], str(self.damage(error, Part(number), 0) or error)
        groups, problem = row_groups(footer), self.footers.problem(footer)
        # Footers have the sizes of row groups before compression: scale them to the size of the file.
        scale = size / max(1, sum(stored for _, stored in groups))
        runs: list[tuple[Part, float]] = []
        start, held = 0, 0.0
        ends = list(accumulate(rows for rows, _ in groups))
        for stop, (_, stored) in zip(ends, groups, strict=True):
            held += scale * stored
            if stop > start and (held >= step or stop == ends[-1]):
                runs.append((Part(number, start, stop), max(1, round(held))))
                start, held = stop, 0.0
        return runs, problem
