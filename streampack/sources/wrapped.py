"""`WrappedSource`, the base class of sources that change another source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from streampack.sources.examples import EXAMPLES, Example
from streampack.sources.reading import Reader, Reading
from streampack.sources.source import Source
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

    @override
    def identity(self) -> Mapping[str, Any]:
        return self.source.identity()

    @override
    def read(self, reading: Reading) -> Reader:
        return self.source.read(reading)

    @override
    def locate(self, row_id: RowId) -> str:
        return self.source.locate(row_id)

    @override
    def fetch_many(self, row_ids: Sequence[RowId]) -> list[Mapping[str, Any]]:
        return self.source.fetch_many(row_ids)

    @override
    def path_of(self, row_id: RowId) -> str | None:
        return self.source.path_of(row_id)

    @override
    def natural_lanes(self) -> int:
        return self.source.natural_lanes()

    @override
    def examples(self, count: int = EXAMPLES) -> list[Example]:
        return self.source.examples(count)

    @property
    @override
    def size(self) -> int | None:
        return self.source.size

    @override
    def sample(self, count: int) -> tuple[list[Example], float]:
        return self.source.sample(count)

    @override
    def leaves(self) -> Mapping[str, Source]:
        return self.source.leaves()
