"""`WrappedSource`, the base class of sources that change another source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streampack.sources.examples import EXAMPLES, Example
from streampack.sources.reading import Reader, Reading
from streampack.sources.source import Source
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

    def identity(self) -> Mapping[str, Any]:
        """See `Source.identity`."""
        return self.source.identity()

    def read(self, reading: Reading) -> Reader:
        """See `Source.read`."""
        return self.source.read(reading)

    def locate(self, row_id: RowId) -> str:
        """See `Source.locate`."""
        return self.source.locate(row_id)

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

    def natural_lanes(self) -> int:
        """See `Source.natural_lanes`."""
        return self.source.natural_lanes()

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """See `Source.examples`."""
        return self.source.examples(count)

    @property
    def size(self) -> int | None:
        """See `Source.size`."""
        return self.source.size

    def sample(self, count: int) -> tuple[list[Example], float]:
        """See `Source.sample`."""
        return self.source.sample(count)

    def leaves(self) -> Mapping[str, Source]:
        """See `Source.leaves`."""
        return self.source.leaves()
