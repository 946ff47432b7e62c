"""`Mix`: several sources as one, each with a weight: its target fraction of the trained tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

from streampack.sources.examples import EXAMPLES, Example
from streampack.sources.mixture_entries import Encode, Entry, entry_of
from streampack.sources.mixture_scheduler import (
    MOST_RESTARTS,
    STOPS,
    MixtureScheduler,
    SourceState,
    states_at,
)
from streampack.sources.passes import lane_in_pass
from streampack.sources.reading import Reader, Reading
from streampack.sources.source import Source
from streampack.storage.listing import Once, alone
from streampack.storage.use import StorageUse
from streampack.types import Cursor, RowId
from streampack.validation import require

TOTAL_WEIGHT = 1 << 24
"""The weights are rounded to integers that add up to about this number, so that deficits are exact. The rounding error
of a source's fraction is below 6e-8 times the number of sources."""


def pass_number(epoch: int, restarts: int) -> int:
    """Return the number of a pass over a source, which is the epoch that it is given.

    So each pass is shuffled with another key.
    """
    return epoch * MOST_RESTARTS + restarts


class Mix(Source):
    """Several sources as one, each with a weight: its target fraction of the trained tokens.

    >>> from streampack import IterablePackedDataset
    >>> short = [{"tokens": [1] * 3, "labels": [1] * 3}] * 1000
    >>> long = [{"tokens": [2] * 9, "labels": [2] * 9}] * 500
    >>> mix = Mix([{"name": "short", "source": short, "weight": 1}, {"name": "long", "source": long, "weight": 3}])
    >>> data = IterablePackedDataset(mix, max_seq_len=36)
    >>> packs = list(data)
    >>> {name: (stats.trained, stats.epochs) for name, stats in data.source_stats().items()}
    {'short': (2000, 1), 'long': (6016, 2)}

    Weights are fractions of trained tokens: those with a label in the packs, not padding, prompts or what is cut off.
    In each lane, the next row comes from the source that is furthest behind its weight (see `MixtureScheduler`). A
    source may have fewer rows than there are lanes: in each pass over it, they go to other lanes. ``stop`` says when an
    epoch ends:

    - ``"first_exhausted"``: when the next row should come from a source that has none left. No row comes twice in an
      epoch.
    - ``"all_exhausted"``: when every source was read to its end. A source that is needed again before that is
      restarted, in another order. Every row comes at least once.
    - ``"never"``: never. Sources are restarted as often as they are needed, and the run ends after its number of
      steps.

    In a config, under ``data``::

        source:
          _component_: streampack.Mix
          stop: never
          sources:
            - {name: code, weight: 0.3, source: {...}, encoder: {...}}
            - {name: web, weight: 0.7, source: {...}, encoder: {...}}

    A source may be a `Mix` itself, with the same ``stop``: its sources take its place, and their weights divide its
    weight. Weights may be changed at a resume, with a warning: the new ones apply from the next row on. Names, order
    and ``stop`` may not be changed.

    Args:
        sources: a mapping for each, with ``name``, ``source`` (whatever an `IterablePackedDataset` takes), ``weight``
            (only the ratios of the weights matter; one of weight 0 is not read) and, if its rows need another encoder
            than the run's,
            ``encoder``. A mixture's `entries` are taken, too.
        stop: when an epoch ends.
        once: see `JSONLSource`.

    Raises:
        ValueError: for a name that is missing, used twice or holds a slash, a weight below 0, only weights of 0, an
            unknown ``stop``, or another ``stop`` than that of a mixture within; when the mixture is read, if a source
            has no rows, or none of its tokens is trained.
    """

    def __init__(
        self,
        sources: Sequence[Mapping[str, Any] | Entry],
        *,
        stop: str = "all_exhausted",
        once: Once = alone,
    ) -> None:
        self.stop = stop
        require(stop, "stop", STOPS)
        given = [entry_of(entry, once) for entry in sources]
        if not given:
            raise ValueError("a mixture of no sources has no rows; name at least one")
        seen: set[str] = set()
        for entry in given:
            if entry.name in seen:
                raise ValueError(f"two sources are named {entry.name!r}; give each a name of its own")
            seen.add(entry.name)
        flat = [leaf for entry in given for leaf in self._flattened(entry)]
        total = math.fsum(entry.weight for entry in flat)
        if not total:
            raise ValueError("all sources of the mixture have weight=0; give at least one a weight above 0")
        self.entries = [replace(entry, weight=entry.weight / total) for entry in flat]
        self.varies_by_process = any(entry.source.varies_by_process for entry in self.entries)
        self.local = all(entry.source.local for entry in self.entries)
        self.weights = tuple(
            max(1, round(entry.weight * TOTAL_WEIGHT)) if entry.weight else 0 for entry in self.entries
        )

    def _flattened(self, entry: Entry) -> list[Entry]:
        """Return the entries that take an entry's place: the sources of a mixture, or the entry itself.

        The weight of an entry that is a mixture is divided among its sources.
        """
        mix = entry.source
        if not isinstance(mix, Mix):
            return [entry]
        if mix.stop != self.stop:
            raise ValueError(
                f"source {entry.name!r} is a mixture with stop={mix.stop!r}, within one with stop={self.stop!r}; give "
                "both the same stop"
            )
        return [
            replace(
                inner,
                name=f"{entry.name}/{inner.name}",
                weight=entry.weight * inner.weight,
                encoder=entry.encoder if inner.encoder is None else inner.encoder,
            )
            for inner in mix.entries
        ]

    @property
    def names(self) -> list[str]:
        """See `Source.names`."""
        return [entry.name for entry in self.entries]

    @property
    def target_fractions(self) -> dict[str, float]:
        """Target fraction of trained tokens of each source."""
        return {entry.name: round(entry.weight, 7) for entry in self.entries}

    def changed(self, before: Any) -> str | None:
        """Return the warning for a resume with other `target_fractions` than a state's; None where they are equal."""
        ours = self.target_fractions
        if not isinstance(before, Mapping) or before == ours:
            return None
        changes = [
            f"{name} {before.get(name)} -> {ours[name]}" for name in ours if before.get(name) != ours[name]
        ]
        return (
            f"the mixture's weights changed since the state was written: {', '.join(changes)}. The rows that wait were "
            "drawn by the old ones; the next are drawn by the new ones, and the fractions approach them"
        )

    def source_index(self, row_id: RowId) -> int:
        """See `Source.source_index`."""
        return row_id[0]

    def encoder(self, row_id: RowId) -> Encode | None:
        """See `Source.encoder`."""
        return self.entries[row_id[0]].encoder

    def identity(self) -> dict[str, Any]:
        """See `Source.identity`; without the weights."""
        names = ", ".join(entry.name for entry in self.entries)
        own = {"source": "Mix", "stop": self.stop, "names": names}
        return {**own, **{f"{entry.name}/": entry.source.identity() for entry in self.entries}}

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """See `Source.examples`: some of each source."""
        each = max(1, count // len(self.entries))
        return [
            Example((number, *row.row_id), row.data)
            for number, entry in enumerate(self.entries)
            for row in entry.source.examples(each)
        ]

    def leaves(self) -> dict[str, Source]:
        """See `Source.leaves`."""
        return {entry.name: leaf for entry in self.entries for leaf in entry.source.leaves().values()}

    def epochs_read(self, epoch: int, cursor: Cursor = ()) -> dict[str, int]:
        """See `Source.epochs_read`. Each pass over a source is an epoch of it."""
        states = states_at(cursor, len(self.names)) if cursor else [SourceState() for _ in self.names]
        restarts = {name: state.restarts for name, state in zip(self.names, states, strict=True)}
        return {name: pass_number(epoch, restarts[name]) for name in self.names}

    def read(self, reading: Reading) -> MixtureScheduler:
        """Open a reader of one lane's rows in one epoch.

        Whoever reads must call the reader's `Reader.charge` with the samples made of a row, before the next row is
        read: the trained tokens decide which source that comes from. A lane of an `IterablePackedDataset` does.
        """
        weights = reading.weights or self.weights
        if len(weights) != len(self.entries):
            raise ValueError(f"there are {len(weights)} weights for {len(self.entries)} sources")
        return MixtureScheduler(
            self.names,
            open_source=partial(self._open, reading),
            locate=self.locate,
            stop=self.stop,
            weights=weights,
            reading=reading,
            remote=[number for number, entry in enumerate(self.entries) if not entry.source.local],
            begins=[
                [each.until - pass_number(reading.epoch, 0) for each in reading.earlier.get(entry.name, ())]
                for entry in self.entries
            ],
        )

    def _open(self, reading: Reading, source_index: int, restarts: int, start: Cursor | None) -> Reader:
        """Open a source that was restarted ``restarts`` times in the epoch; ``start`` None is its beginning."""
        entry = self.entries[source_index]
        number = pass_number(reading.epoch, restarts)
        # Without a seed per source, two sources of equal size get the same permutation, and row i of one always meets
        # row i of the other.
        own = replace(
            reading,
            lane=lane_in_pass(reading.lane, reading.num_lanes, number),
            epoch=number,
            seed=crc32(f"{reading.seed} {entry.name}".encode()),
            start=start,
            read_ahead=reading.read_ahead and reading.read_ahead.part(entry.weight),
            earlier={"": reading.earlier.get(entry.name, ())},
            weights=(),
        )
        return entry.source.read(own)

    def locate(self, row_id: RowId) -> str:
        """See `Source.locate`; begins with the source's name."""
        entry = self.entries[row_id[0]]
        return f"{entry.name}: {entry.source.locate(row_id[1:])}"

    def shard(self, row_id: RowId) -> str:
        """See `Source.shard`; begins with the source's name."""
        entry = self.entries[row_id[0]]
        return f"{entry.name}/{entry.source.shard(row_id[1:])}"

    def path_of(self, row_id: RowId) -> str | None:
        """See `Source.path_of`."""
        return self.entries[row_id[0]].source.path_of(row_id[1:])

    def fetch_many(
        self, row_ids: Sequence[RowId], *, use: StorageUse | None = None
    ) -> list[Mapping[str, Any]]:
        """See `Source.fetch_many`."""
        found: dict[RowId, Mapping[str, Any]] = {}
        for number, entry in enumerate(self.entries):
            if own := [row_id for row_id in row_ids if row_id[0] == number]:
                rows = entry.source.fetch_many([row_id[1:] for row_id in own], use=use)
                found.update(zip(own, rows, strict=True))
        return [found[row_id] for row_id in row_ids]

    def natural_lanes(self) -> int:
        """Return as many lanes as the sources fill together. Those that fill one at most count as nothing.

        With ``stop="first_exhausted"`` it is as many as each source fills, because a lane without rows of a source ends
        when that source is needed.
        """
        found = [entry.source.natural_lanes() for entry in self.entries]
        return min(found) if self.stop == "first_exhausted" else max(1, sum(n for n in found if n > 1))

    def sample(self, count: int) -> tuple[list[Example], float]:
        """See `Source.sample`; returns about equally many rows of each source."""
        rows: list[Example] = []
        total = 0.0
        for number, entry in enumerate(self.entries):
            some, scale = entry.source.sample(max(1, count // len(self.entries)))
            rows += [Example((number, *row.row_id), row.data) for row in some]
            total += len(some) * scale
        return rows, total / max(1, len(rows))
