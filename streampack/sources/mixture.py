"""`Mix`: several sources as one, each with a weight: its target fraction of the trained tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from typing_extensions import override

from streampack.sources.as_source import as_source
from streampack.sources.examples import EXAMPLES, Example
from streampack.sources.mixture_reader import (
    STOPS,
    Entry,
    MixtureReader,
    SourceState,
    pass_number,
    states_at,
)
from streampack.sources.reading import Reading
from streampack.sources.source import Source
from streampack.types import Cursor, RowId
from streampack.validation import require

TOTAL_WEIGHT = 1 << 24
"""The weights are rounded to integers that add up to about this number, so that deficits are exact. The rounding error
of a source's fraction is below 6e-8 times the number of sources."""


class Mix(Source):
    """Several sources as one, each with a weight: its target fraction of the trained tokens.

    >>> from streampack import IterablePackedDataset
    >>> short = [{"tokens": [1] * 3, "labels": [1] * 3}] * 1000
    >>> long = [{"tokens": [2] * 9, "labels": [2] * 9}] * 500
    >>> mix = Mix([{"name": "short", "source": short, "weight": 1}, {"name": "long", "source": long, "weight": 3}])
    >>> data = IterablePackedDataset(mix, max_seq_len=36, num_lanes=1)
    >>> packs = list(data)
    >>> {name: (stats.trained, stats.epochs) for name, stats in data.source_stats().items()}
    {'short': (2000, 1.0), 'long': (6016, 2.0)}

    Weights are fractions of trained tokens: those with a label in the packs, not padding, prompts or what is cut off.
    In each lane, the next row comes from the source that is furthest behind its weight (see `MixtureReader`). A
    source may have fewer rows than there are lanes: in each pass over it, they go to other lanes. ``stop`` says when an
    epoch ends:

    - ``"first_exhausted"``: when the next row should come from a source that has none left in the lane. No row comes
      twice in an epoch. With few rows of a source a lane, some lanes end early.
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

    Weights may be changed at a resume, with a warning: the new ones apply from the next row on, and the packs of open
    balance windows that were not returned are dropped and counted. Names, order and ``stop`` may not be changed.

    Args:
        sources: a mapping for each, with ``name``, ``source`` (whatever an `IterablePackedDataset` takes), ``weight``
            (only the ratios of the weights matter; one of weight 0 is not read) and, if its rows need another encoder
            than the run's, ``encoder``. A mixture's `entries` are taken, too.
        stop: when an epoch ends.

    Raises:
        ValueError: for a name that is missing, used twice or holds a slash, a weight below 0, only weights of 0, an
            unknown ``stop``, or a mixture as a source; when the mixture is read, if a source has no rows, or none of
            its tokens is trained.
    """

    def __init__(
        self,
        sources: Sequence[Mapping[str, Any] | Entry],
        *,
        stop: str = "all_exhausted",
    ) -> None:
        self.stop = stop
        require(stop, "stop", STOPS)
        given = [entry_of(entry) for entry in sources]
        if not given:
            raise ValueError("a mixture of no sources has no rows; name at least one")
        seen: set[str] = set()
        for entry in given:
            if entry.name in seen:
                raise ValueError(f"two sources are named {entry.name!r}; give each a name of its own")
            seen.add(entry.name)
            if isinstance(entry.source, Mix):
                raise ValueError(
                    f"source {entry.name!r} is a mixture; name its sources in this one, with weights"
                )
        total = math.fsum(entry.weight for entry in given)
        if not total:
            raise ValueError("all sources of the mixture have weight=0; give at least one a weight above 0")
        self.entries = [replace(entry, weight=entry.weight / total) for entry in given]
        self.varies_by_process = any(entry.source.varies_by_process for entry in self.entries)
        self.local = all(entry.source.local for entry in self.entries)
        self.weights = tuple(
            max(1, round(entry.weight * TOTAL_WEIGHT)) if entry.weight else 0 for entry in self.entries
        )

    @property
    @override
    def names(self) -> list[str]:
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

    @override
    def source_index(self, row_id: RowId) -> int:
        return row_id[0]

    @override
    def encoder(self, row_id: RowId) -> Callable[[Mapping[str, Any]], Any] | None:
        return self.entries[row_id[0]].encoder

    @override
    def identity(self) -> dict[str, Any]:
        names = ", ".join(entry.name for entry in self.entries)
        own = {"source": "Mix", "stop": self.stop, "names": names}
        return {**own, **{f"{entry.name}/": entry.source.identity() for entry in self.entries}}

    @override
    def examples(self, count: int = EXAMPLES) -> list[Example]:
        each = max(1, count // len(self.entries))
        return [
            Example((number, *row.row_id), row.data)
            for number, entry in enumerate(self.entries)
            for row in entry.source.examples(each)
        ]

    @override
    def leaves(self) -> dict[str, Source]:
        return {entry.name: leaf for entry in self.entries for leaf in entry.source.leaves().values()}

    @override
    def epochs_read(self, epoch: int, cursor: Cursor = ()) -> dict[str, int]:
        states = states_at(cursor, len(self.names)) if cursor else [SourceState() for _ in self.names]
        restarts = {name: state.restarts for name, state in zip(self.names, states, strict=True)}
        return {name: pass_number(epoch, restarts[name]) for name in self.names}

    @override
    def read(self, reading: Reading) -> MixtureReader:
        """Open a reader of one lane's rows in one epoch.

        Callers must call the reader's `Reader.charge` with the samples made of a row before they read the next one: the
        trained tokens decide which source that comes from. A lane of an `IterablePackedDataset` does.
        """
        return MixtureReader(self.entries, reading, locate=self.locate, stop=self.stop, weights=self.weights)

    @override
    def locate(self, row_id: RowId) -> str:
        entry = self.entries[row_id[0]]
        return f"{entry.name}: {entry.source.locate(row_id[1:])}"

    @override
    def path_of(self, row_id: RowId) -> str | None:
        return self.entries[row_id[0]].source.path_of(row_id[1:])

    @override
    def fetch_many(self, row_ids: Sequence[RowId]) -> list[Mapping[str, Any]]:
        found: dict[RowId, Mapping[str, Any]] = {}
        for number, entry in enumerate(self.entries):
            if own := [row_id for row_id in row_ids if row_id[0] == number]:
                rows = entry.source.fetch_many([row_id[1:] for row_id in own])
                found.update(zip(own, rows, strict=True))
        return [found[row_id] for row_id in row_ids]

    def natural_lanes(self) -> int:
        """Return the number of lanes that the sources fill together. A source that fills one at most counts as nothing.

        With ``stop="first_exhausted"`` each source must fill them, as a lane without rows of one ends when it needs it.
        """
        found = [entry.source.natural_lanes() for entry in self.entries]
        return min(found) if self.stop == "first_exhausted" else max(1, sum(n for n in found if n > 1))

    @override
    def sample(self, count: int) -> tuple[list[Example], float]:
        rows: list[Example] = []
        total = 0.0
        for number, entry in enumerate(self.entries):
            some, scale = entry.source.sample(max(1, count // len(self.entries)))
            rows += [Example((number, *row.row_id), row.data) for row in some]
            total += len(some) * scale
        return rows, total / max(1, len(rows))


def entry_of(given: Mapping[str, Any] | Entry) -> Entry:
    """Check the settings of a source: an `Entry`, or a mapping of its fields."""
    if isinstance(given, Entry):
        return given
    keys = [field.name for field in fields(Entry)]
    if not isinstance(given, Mapping):  # of sources that a mapping has by name, it is a name
        raise ValueError(
            f"a source of a mixture is {given!r}; give a list of mappings, each with {', '.join(keys)}"
        )
    name = given.get("name")
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"a source of a mixture is named {name!r}; give it a name without a slash")
    if unknown := sorted(set(given) - set(keys)):
        raise ValueError(f"source {name!r} has no {unknown[0]!r}; its keys are {', '.join(keys)}")
    for key in ("source", "weight"):
        if given.get(key) is None:
            raise ValueError(f"source {name!r} has no {key}; its keys are {', '.join(keys)}")
    weight = given["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 2**63:
        raise ValueError(
            f"source {name!r} has weight={weight!r}; give its fraction of the trained tokens, 0 to leave it out"
        )
    return Entry(name, as_source(given["source"]), float(weight), given.get("encoder"))
