"""`IterableSource`: the rows of any deterministic Python iterable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from streampack.sources.examples import EXAMPLES, UNKNOWN, Example, leading, leading_marks
from streampack.sources.reading import own_row
from streampack.sources.source import Source
from streampack.sources.turns import sharing
from streampack.storage.use import StorageUse
from streampack.types import RowId

Rows = Iterable[Mapping[str, Any]]


class IterableSource(Source):
    """Rows of an iterable that yields the same rows each time it is iterated, or of a function that returns one.

    By default each consumer (ranks x workers) reads one lane of it. Each lane iterates over all rows, and they take
    turns in keeping one. An iterable cannot begin in the middle, so a resume reads it again from its start. Where that
    takes long, write token shards with `streampack tokenize`.

    The iterable may reuse a row's memory for the next row: rows that must be kept are copied, with the dicts, lists,
    arrays and tensors in them. Objects of other classes are not copied, so they must be new for each row.

    >>> from streampack.sources import Reading
    >>> source = IterableSource(lambda: ({"tokens": [i], "labels": [i]} for i in range(3)))
    >>> [row.data["tokens"] for row in source.read(Reading(start=(0, 1, 0)))]
    [[1], [2]]

    Each rank and each worker must be given the same rows, all of them. An iterable that shares out its rows among ranks
    or torch's workers by itself would lose rows here, so several consumers are refused without a `PackedDataLoader`,
    which compares the ranks' first rows, and whose workers are none of torch's.

    Raises:
        ValueError: for an iterator or generator, which could be read only once.
    """

    varies_by_process = True

    def __init__(self, rows: Rows | Callable[[], Rows]) -> None:
        if isinstance(rows, Iterator):
            raise ValueError(
                f"a {type(rows).__name__} can be read only once, so neither a second epoch nor a resume is "
                "possible; pass a function that makes it: IterableSource(lambda: ...)"
            )
        self.iterable = rows
        # The last iterator, to notice if the next one is the same object.
        self._newest: Iterator[Any] | None = None
        self._first: dict[str, str] | None = None  # marks of the first rows, once they were read

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_newest": None}

    def identity(self) -> dict[str, Any]:
        """Return marks of the first twelve rows. The other rows are not read for it.

        Raises:
            ValueError: if the iterable, iterated again, begins with another row.
        """
        if self._first is None:
            first, again = (leading_marks(self.examples(count)) for count in (EXAMPLES, 1))
            both = {marked.get("0.0", UNKNOWN) for marked in (first, again)}
            if len(both) == 2 and UNKNOWN not in both:
                raise ValueError(
                    f"{type(self.iterable).__name__} gives other rows each time it is iterated, so neither a second "
                    "epoch nor a resume is possible; make it begin anew, in the same order: shuffle with "
                    "IterablePackedDataset(..., shuffle=True), and open files in the function that is given to "
                    "IterableSource"
                )
            self._first = first
        return {"source": "IterableSource", "content": self._first}

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """See `Source.examples`."""
        return leading(self._iterate(), count, part=0)

    def rows(self, start: int, step: int) -> Iterator[Mapping[str, Any]]:
        """See `Source.rows`. Reads the iterable from its beginning."""
        for number, row in enumerate(self._iterate()):
            if number >= start and (number - start) % step == 0:
                yield row

    def fetch_many(
        self, row_ids: Sequence[RowId], *, use: StorageUse | None = None
    ) -> list[Mapping[str, Any]]:
        """See `Source.fetch_many`. Reads the iterable once, up to the last of these rows."""
        numbers = {row_id[-1] for row_id in row_ids}
        rows = islice(enumerate(self._iterate()), max(numbers, default=-1) + 1)
        found = {number: own_row(row) for number, row in rows if number in numbers}
        if len(found) < len(numbers):
            raise ValueError(f"the iterable ends before row {min(numbers - {*found})}; the data changed")
        return [found[row_id[-1]] for row_id in row_ids]

    def shared(self, num_lanes: int) -> list[str]:
        """See `Source.shared`."""
        return sharing([num_lanes], what="iterable")

    def shard(self, row_id: RowId) -> str:
        """Return the iterable's class: there is only one shard."""
        return type(self.iterable).__name__

    def _iterate(self) -> Iterator[Mapping[str, Any]]:
        rows = self.iterable() if callable(self.iterable) else self.iterable
        iterator = iter(rows)
        if iterator is self._newest:
            what = "function" if callable(self.iterable) else f"{type(self.iterable).__name__}"
            raise ValueError(f"the {what} returned the same iterator twice; it must make a new one each time")
        self._newest = iterator
        return iterator
