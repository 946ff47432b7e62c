"""Hugging Face datasets: map-style ones by row number, streaming ones by shard and row."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

from streampack.fingerprint import digest
from streampack.sources.arrow_dataset import has_plain_ids, types_of
from streampack.sources.examples import EXAMPLES, Example, leading, leading_marks, marks
from streampack.sources.formats.row_groups import BATCH_BYTES, BATCH_ROWS
from streampack.sources.mechanics.arrow_rows import ArrowBatch, clean_unknown, cleaned, cleans_of
from streampack.sources.mechanics.parts import Part, Record, assign, for_lanes, shared_parts
from streampack.sources.mechanics.parts_reader import PartsReader
from streampack.sources.memory import MapSource
from streampack.sources.reading import Reader, Reading, picked
from streampack.sources.source import Source
from streampack.sources.wrapped import WrappedSource
from streampack.types import RowId

ROW_WISE = frozenset(
    {
        "ArrowExamplesIterable",
        "ExamplesIterable",
        "FilteredExamplesIterable",
        "FormattedExamplesIterable",
        "MappedExamplesIterable",
        "RebatchedArrowExamplesIterable",
        "SelectColumnsIterable",
        "VerticallyConcatenatedMultiSourcesExamplesIterable",
    }
)
"""Classes of ``datasets`` that change or drop rows one by one. If a stream is made of these only, its shards, read one
after the other, give the same rows as the whole. Other streams may lose rows: datasets 5.2 yields five rows of two
interleaved streams of three shards, and only three of them when that is sharded three ways."""


BY_TABLE = frozenset({"ArrowExamplesIterable", "SelectColumnsIterable"})
"""Classes of ``datasets`` whose tables all have the columns and types of the stream's features. A stream that is made
of these only, such as one of Parquet files, can be read by table. JSON lines have no features before they are read."""


class HFSource(WrappedSource):
    """A dataset of Hugging Face's ``datasets``, or the name of one.

    >>> from datasets import Dataset
    >>> from streampack.sources import Reading
    >>> rows = Dataset.from_list([{"text": "a"}, {"text": "b"}, {"text": "c"}])
    >>> [row.data["text"] for row in HFSource(rows).read(Reading(1, num_lanes=2))]
    ['b']
    >>> [row.data["text"] for row in HFSource(rows.to_iterable_dataset()).read(Reading(start=(0, 1, 0)))]
    ['b', 'c']

    A map-style dataset is read as by `MapSource`. The shards of a streaming one are divided among the lanes. If there
    are fewer shards than lanes, several lanes read the same one and take turns with its rows; ``dataset.reshard()``
    makes a shard of each row group of Parquet files. A resume reads the shard again up to the cursor, with all that
    ``map`` does (else about 8 us a row), so do slow work in the encoder. A stream that does more than change or drop
    rows one by one (interleaved, repeated, cut by ``take``) is read as one shard.

    Ids in the columns of a map-style dataset, and of a stream of Parquet or Arrow files, are read as arrays. A stream
    that was changed by ``map``, ``filter``, ``cast`` or ``with_format`` is read by row, as Python lists. Records in
    lists, such as messages and tools, come without their fields that are null: Arrow fills in those.

    Args:
        dataset: a ``Dataset``, an ``IterableDataset``, or a name for ``datasets.load_dataset``.
        name: the dataset's configuration. This and the next four arguments are for a dataset by name.
        split: the split to read, such as ``"train"``.
        data_files: the files of a local folder, or those for a builder such as ``"json"``.
        revision: the revision of the dataset's repository. A commit keeps a run's corpus from changing.
        streaming: whether to read the rows from where they lie. If False, the dataset is downloaded, and its rows are
            read by number.
        columns: the columns to keep; None for all.

    Raises:
        ValueError: for a shuffled stream, whose buffer is lost on resume, so that rows would be lost and others
            repeated; for several splits, and for anything that is no dataset.
        ImportError: if ``datasets`` is not installed.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        name: str | None = None,
        split: str | None = None,
        data_files: Any = None,
        revision: str | None = None,
        streaming: bool = True,
        columns: Sequence[str] | None = None,
    ) -> None:
        try:
            import datasets
        except ImportError as error:
            raise ImportError(
                "reading Hugging Face datasets needs datasets: pip install 'streampack[hf]'"
            ) from error
        if isinstance(dataset, str):
            asked: dict[str, Any] = {"split": split, "data_files": data_files, "revision": revision}
            try:  # it may be a folder with a script
                dataset = datasets.load_dataset(dataset, name=name, streaming=streaming, **asked)
            except (RuntimeError, ValueError, FileNotFoundError) as error:
                raise ValueError(
                    f"datasets cannot load {dataset!r}: {' '.join(str(error).split())}; name files, or a dataset of "
                    "files, or load it yourself and give the dataset"
                ) from error
        elif any(given is not None for given in (name, split, data_files, revision)):
            raise ValueError(
                "name, split, data_files and revision are for a dataset by name; this one is loaded already"
            )
        if isinstance(dataset, Mapping):
            raise ValueError(f"the dataset has several splits; name one: split={next(iter(dataset), None)!r}")
        if not isinstance(dataset, datasets.Dataset | datasets.IterableDataset):
            raise ValueError(f"a {type(dataset).__name__} is no Hugging Face dataset; give one, or its name")
        if columns is not None:
            there = dataset.column_names
            if there is not None and (lacking := [column for column in columns if column not in there]):
                raise ValueError(
                    f"the dataset has no column {lacking[0]!r}; it has {', '.join(map(repr, there))}"
                )
            dataset = dataset.select_columns(list(columns))
        if isinstance(dataset, datasets.Dataset):
            super().__init__(MapSource(dataset))
        else:
            super().__init__(_Stream(dataset))


class _Stream(Source):
    """The rows of an ``IterableDataset``. A part is a shard, and an offset is a row's number in its shard."""

    def __init__(self, dataset: Any) -> None:
        classes = set(_class_names(dataset._ex_iterable))
        if any("Shuffled" in name for name in classes):
            raise ValueError(
                "the stream is shuffled, and datasets loses the shuffle buffer on resume: rows would be lost and "
                "others come twice; leave .shuffle() out, and use IterablePackedDataset(..., shuffle=True)"
            )
        self.dataset = dataset
        # Whether it is read as one shard. Its info is that of the split, so it may be only a part of that.
        self.whole = not classes <= ROW_WISE
        self.shards = 1 if self.whole else dataset.num_shards
        plain = classes <= BY_TABLE and dataset._formatting is None and dataset.features is not None
        self.by_table = plain and has_plain_ids(dataset.features)
        # What a stream yields that was neither of Arrow nor has features is as its author wrote it.
        self.unknown = dataset.features is None and any("Arrow" in name for name in classes)
        self._divided: dict[int, list[list[Part]]] = {}  # for a number of lanes, the parts of each lane
        self._empty: set[Part] = set()  # parts that were read and have no records
        self._identity: dict[str, Any] | None = None

    def identity(self) -> dict[str, Any]:
        if self._identity is None:
            info, features = self.dataset.info, self.dataset.features
            last = self.shards - 1
            first = leading_marks(self.examples(EXAMPLES))
            if last > 0:
                first |= marks(leading(self._rows(last), 1, part=last))
            self._identity = {
                "source": "HFSource",
                "name": info.dataset_name,
                "config": info.config_name,
                "split": str(self.dataset.split),
                "shards": self.shards,
                "columns": None if features is None else ", ".join(sorted(features)),
                "features": None if features is None else digest(sorted(map(str, features.items()))),
                "content": first,
            }
        return self._identity

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        return leading(self._rows(0), count, part=0)

    def read(self, reading: Reading) -> Reader:
        return PartsReader(
            self._lanes(reading.num_lanes)[reading.lane],
            reading,
            open_part=lambda part, offset: self._records(part.file, offset),
            locate=self.locate,
            empty=self._empty,
        )

    def shared(self, num_lanes: int) -> list[str]:
        return shared_parts(self._lanes(num_lanes), what="shard")

    def _lanes(self, num_lanes: int) -> list[list[Part]]:
        if num_lanes not in self._divided:
            parts = [(Part(shard), 1.0) for shard in range(self.shards)]
            self._divided[num_lanes] = assign(for_lanes(parts, num_lanes), num_lanes)
        return self._divided[num_lanes]

    def locate(self, row_id: RowId) -> str:
        shard, row = row_id
        return f"shard {shard}, row {row}"

    def fetch_many(self, row_ids: Sequence[RowId]) -> list[Mapping[str, Any]]:
        found: dict[RowId, Mapping[str, Any]] = {}
        for shard, ids in groupby(sorted(set(row_ids)), key=itemgetter(0)):
            numbers = [number for _, number in ids]
            rows = picked(self._rows(shard, numbers[0]), numbers)
            found |= {(shard, number): row for number, row in rows.items()}
        return [found[row_id] for row_id in row_ids]

    def natural_lanes(self) -> int:
        return self.shards

    @property
    def size(self) -> int | None:
        splits = self.dataset.info.splits or {}
        split = splits.get(str(self.dataset.split))
        found: int | None = None if self.whole or split is None else split.num_examples or None
        return found

    def _records(self, shard: int, offset: int) -> Iterator[Record]:
        for number, row in enumerate(self._rows(shard, offset), offset):
            yield number, row, number + 1

    def _rows(self, shard: int, offset: int = 0) -> Iterator[Mapping[str, Any]]:
        """Read a shard's rows from number ``offset`` on."""
        # A new object each time: iterators of a stream that is interleaved or concatenated disturb one another, in
        # datasets 5.2.
        dataset = self.dataset.shard(self.shards, shard)
        if self.by_table:
            return _rows_of(dataset.with_format("arrow").iter(BATCH_ROWS), offset)
        rows: Iterator[Mapping[str, Any]] = iter(dataset)
        if "torch" in sys.modules:
            from torch.utils.data import get_worker_info

            if get_worker_info() is not None:
                # In a worker of a torch DataLoader, ``iter(dataset)`` yields only this worker's share of the rows.
                rows = ({key: values[0] for key, values in batch.items()} for batch in dataset.iter(1))
        rows = islice(rows, offset, None)
        if self.unknown:
            return map(clean_unknown, rows)
        cleans = cleans_of(types_of(self.dataset.features), decoded=True)
        return map(partial(cleaned, cleans=cleans), rows)


def _rows_of(tables: Iterable[Any], offset: int) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of pyarrow's tables from number ``offset`` on.

    Rows count from the first table's first row, so where tables begin is no part of a cursor.
    """
    for table in tables:
        row_bytes = table.nbytes // max(1, len(table))
        for batch in table.to_batches(max_chunksize=max(1, BATCH_BYTES // max(1, row_bytes))):
            if offset < len(batch):
                rows = ArrowBatch(dict(zip(batch.schema.names, batch.columns, strict=True)), whole=True)
                yield from map(rows.row, range(offset, len(batch)))
            offset = max(0, offset - len(batch))


def _class_names(iterable: Any) -> Iterator[str]:
    """Yield the names of the classes that a stream is made of, from the outermost on."""
    yield type(iterable).__name__
    inner = [getattr(iterable, "ex_iterable", None), *getattr(iterable, "ex_iterables", [])]
    for each in inner:
        if each is not None:
            yield from _class_names(each)
