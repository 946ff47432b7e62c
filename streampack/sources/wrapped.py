"""`WrappedSource`, the base class of sources that change another source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streampack.sources.base import Reader, Reading
from streampack.sources.examples import EXAMPLES, Example
from streampack.sources.source import Divisible, Listable, Source
from streampack.storage.base import File
from streampack.storage.listing import Corpus
from streampack.storage.problems import Problem
from streampack.storage.use import StorageUse
from streampack.types import RowId


class WrappedSource(Source):
    """A source that passes all calls on to ``source``. A subclass overrides those that it changes."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.ids_below = source.ids_below
        self.map_style = source.map_style
        self.local = source.local
        self.probed_by_bytes = source.probed_by_bytes
        self.varies_by_process = source.varies_by_process

    def fingerprint(self) -> str:
        """See `Source.fingerprint`."""
        return self.source.fingerprint()

    def identity(self) -> dict[str, Any]:
        """See `Source.identity`."""
        return self.source.identity()

    def read(self, reading: Reading) -> Reader:
        """See `Source.read`."""
        return self.source.read(reading)

    def locate(self, row_id: RowId) -> str:
        """See `Source.locate`."""
        return self.source.locate(row_id)

    def locate_cheaply(self, row_id: RowId) -> str:
        """See `Source.locate_cheaply`."""
        return self.source.locate_cheaply(row_id)

    def fetch(self, row_id: RowId) -> Mapping[str, Any]:
        """See `Source.fetch`."""
        return self.source.fetch(row_id)

    def fetch_many(
        self, row_ids: Sequence[RowId], *, use: StorageUse | None = None
    ) -> list[Mapping[str, Any]]:
        """See `Source.fetch_many`."""
        return self.source.fetch_many(row_ids, use=use)

    def shard(self, row_id: RowId) -> str:
        """See `Source.shard`."""
        return self.source.shard(row_id)

    def path_of(self, row_id: RowId) -> str | None:
        """See `Source.path_of`."""
        return self.source.path_of(row_id)

    def problem_of(self, row_id: RowId) -> str | None:
        """See `Source.problem_of`."""
        return self.source.problem_of(row_id)

    @property
    def retry_budget(self) -> float:
        """See `Source.retry_budget`."""
        return self.source.retry_budget

    def natural_lanes(self) -> int:
        """See `Source.natural_lanes`."""
        return self.source.natural_lanes()

    def shared(self, num_lanes: int) -> list[str]:
        """See `Source.shared`."""
        return self.source.shared(num_lanes)

    def num_rows(self) -> int:
        """See `Source.num_rows`."""
        return self.source.num_rows()

    def probe(self, count: int) -> tuple[list[Example], float]:
        """See `Source.probe`."""
        return self.source.probe(count)

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """See `Source.examples`."""
        return self.source.examples(count)

    def corpora(self) -> list[Corpus]:
        """See `Source.corpora`."""
        return self.source.corpora()

    def listing(self) -> list[File]:
        """See `Source.listing`."""
        return self.source.listing()

    def bad_shards(self) -> list[Problem]:
        """See `Source.bad_shards`."""
        return self.source.bad_shards()

    def file_sources(self) -> Mapping[str, Listable]:
        """See `Source.file_sources`."""
        return self.source.file_sources()

    def divisible(self) -> list[Divisible]:
        """See `Source.divisible`."""
        return self.source.divisible()
