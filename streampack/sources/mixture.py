"""`Mix`: several sources as one, each with a weight: its target fraction of the trained tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

from streampack.fingerprint import digest
from streampack.sources.base import Reader, Reading
from streampack.sources.corpus_identity import identity_of
from streampack.sources.examples import EXAMPLES, Example
from streampack.sources.mixture_entry import Encode, Entry, entry_of
from streampack.sources.mixture_scheduler import STOPS, MixtureScheduler, Weighing
from streampack.sources.source import Divisible, Source
from streampack.storage.base import File
from streampack.storage.listing import Corpus, Once, alone
from streampack.types import Cursor, RowId
from streampack.validation import require

TOTAL_WEIGHT = 1 << 24  # about the sum of the weights as integers: fractions are exact to 0.00001 points
TURN_BITS = 20  # a source's epoch is the mixture's, then its turn in it: no two are shuffled alike


class Leaf(NamedTuple):
    """A source that has rows, at any depth of nested mixtures."""

    name: str  # "code", or "web/en" for one within another
    source: Source
    encoder: Encode
    weight: float  # fraction of the trained tokens of the whole, 0 to 1


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
    In each lane, the next row comes from the source that is furthest behind its weight (see `MixtureScheduler`), so
    each source must have rows in each lane. ``stop`` says when an epoch ends:

    - ``"first_exhausted"``: when a source that is due has no row left. No row comes twice in an epoch.
    - ``"all_exhausted"``: when every source was read to its end. One that is due again before that begins anew, in
      another order. Every row comes at least once.
    - ``"never"``: sources begin anew for ever; the run ends by its steps.

    In a config, under ``data``::

        source:
          _component_: streampack.Mix
          stop: never
          sources:
            - {name: code, weight: 0.3, source: {...}, encoder: {...}}
            - {name: web, weight: 0.7, source: {...}, encoder: {...}}

    A source may be a `Mix` itself: its own weights divide its weight, and its own ``stop`` ends it. Weights may be
    changed at a resume, with a warning: they choose from the next row on. Names, order and ``stop`` may not.

    Args:
        sources: a mapping for each, with ``name``, ``source`` (whatever an `IterablePackedDataset` takes), ``weight``
            (above 0; only their ratios matter) and, if its rows need one of their own, ``encoder``.
        stop: when an epoch ends.
        once: see `JSONLSource`.

    Raises:
        ValueError: for a name that is missing, used twice or holds a slash, a weight that is no number above 0, or an
            unknown ``stop``; when it is read, if a source has no rows in some lane, or trains nothing.
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
        self.entries = [given if isinstance(given, Entry) else entry_of(given, once) for given in sources]
        if not self.entries:
            raise ValueError("a mixture of no sources has no rows; name at least one")
        seen: set[str] = set()
        for entry in self.entries:
            if entry.name in seen:
                raise ValueError(f"two sources are named {entry.name!r}; give each a name of its own")
            seen.add(entry.name)
        total = math.fsum(entry.weight for entry in self.entries)
        own = [max(1, round(entry.weight / total * TOTAL_WEIGHT)) for entry in self.entries]
        self.weights = tuple(own)  # of the whole tree: first our own, then those of each mixture within
        self._names: list[str] = []
        self._first_weight: list[int] = []  # of each entry that is a mixture, its place in `weights`
        self._first_name: list[int] = []  # of each entry, its place in `names`
        for entry in self.entries:
            self._first_weight.append(len(self.weights))
            self._first_name.append(len(self._names))
            self.weights += mix.weights if (mix := mix_of(entry)) else ()
            self._names += [f"{entry.name}/{name}" for name in entry.source.names] or [entry.name]
        limits = [entry.source.max_lanes for entry in self.entries]
        self.max_lanes = min((limit for limit in limits if limit is not None), default=None)

    @property
    def names(self) -> list[str]:
        """See `Source.names`: the sources that have rows, such as "code", "web/en" and "web/de"."""
        return self._names

    @property
    def target_fractions(self) -> dict[str, float]:
        """Target fraction of trained tokens of each source, nested ones too, within its own mixture."""
        fractions = {}
        for entry, weight in zip(self.entries, self.weights, strict=False):
            fractions[entry.name] = round(weight / TOTAL_WEIGHT, 7)
            if (mix := mix_of(entry)) is not None:
                inner = mix.target_fractions
                fractions |= {f"{entry.name}/{name}": fraction for name, fraction in inner.items()}
        return fractions

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
        number, *rest = row_id
        return self._first_name[number] + self.entries[number].source.source_index(tuple(rest))

    def encoder(self, row_id: RowId) -> Encode | None:
        """See `Source.encoder`: the source's own, or that of the mixture around it."""
        entry = self.entries[row_id[0]]
        own = entry.source.encoder(row_id[1:])
        return entry.encoder if own is None else own

    def leaves(self, default: Encode) -> list[Leaf]:
        """Return the sources that have rows, in the order of `names`."""
        found: list[Leaf] = []
        for entry in self.entries:
            encoder = default if entry.encoder is None else entry.encoder
            weight = self.target_fractions[entry.name]
            if (mix := mix_of(entry)) is None:
                found.append(Leaf(entry.name, entry.source, encoder, weight))
                continue
            found += [
                leaf._replace(name=f"{entry.name}/{leaf.name}", weight=weight * leaf.weight)
                for leaf in mix.leaves(encoder)
            ]
        return found

    def fingerprint(self) -> str:
        """Digest names, order, ``stop`` and the sources; not the weights."""
        return digest("mix", self.stop, [(entry.name, entry.source.fingerprint()) for entry in self.entries])

    def identity(self) -> dict[str, Any]:
        """See `Source.identity`; without the weights."""
        names = ", ".join(entry.name for entry in self.entries)
        own = {"source": "Mix", "stop": self.stop, "names": names}
        return {**own, **{f"{entry.name}/": identity_of(entry.source) for entry in self.entries}}

    def examples(self, count: int = EXAMPLES) -> list[Example]:
        """See `Source.examples`: some of each source."""
        each = max(1, count // len(self.entries))
        return [
            Example((number, *row.row_id), row.data)
            for number, entry in enumerate(self.entries)
            for row in entry.source.examples(each)
        ]

    def corpora(self) -> list[Corpus]:
        """See `Source.corpora`."""
        return [corpus for entry in self.entries for corpus in entry.source.corpora()]

    def listing(self) -> list[File]:
        """See `Source.listing`."""
        return [file for entry in self.entries for file in entry.source.listing()]

    def divisible(self) -> list[Divisible]:
        """See `Source.divisible`."""
        return [part for entry in self.entries for part in entry.source.divisible()]

    def read(self, reading: Reading) -> MixtureScheduler:
        """See `Source.read`. Each row that is read must be charged."""
        if reading.start is None:
            return self._scheduler(reading, Weighing(self.weights), None)
        numbers = iter(reading.start)
        weighing = Weighing.from_numbers(numbers, count=len(self.weights))
        weighing.change(self.weights, after=reading.replayed)
        return self._scheduler(reading, weighing, numbers)

    def _scheduler(
        self, reading: Reading, weighing: Weighing, start: Iterator[int] | None, offset: int = 0
    ) -> MixtureScheduler:
        return MixtureScheduler(
            [entry.name for entry in self.entries],
            opens=partial(self._open, reading, offset),
            locate=self.locate,
            stop=self.stop,
            weighing=weighing,
            offset=offset,
            reading=reading,
            start=start,
        )

    def _open(
        self,
        reading: Reading,
        offset: int,
        number: int,
        *,
        turn: int,
        start: Cursor | None,
        weighing: Weighing,
    ) -> Reader:
        entry = self.entries[number]
        # A seed of its own, or sources of equal size would be permuted alike, pairs of aligned rows side by side.
        own = replace(
            reading,
            epoch=reading.epoch << TURN_BITS | turn,
            seed=crc32(f"{reading.seed} {entry.name}".encode()),
            start=start,
            replayed=0,
        )
        if (mix := mix_of(entry)) is None:
            return entry.source.read(own)
        numbers = None if start is None else iter(start)
        return mix._scheduler(own, weighing, numbers, offset + self._first_weight[number])

    def locate(self, row_id: RowId) -> str:
        """See `Source.locate`; begins with the source's name."""
        entry = self.entries[row_id[0]]
        return f"{entry.name}: {entry.source.locate(row_id[1:])}"

    def shard(self, row_id: RowId) -> str:
        """See `Source.shard`; begins with the source's name."""
        entry = self.entries[row_id[0]]
        return f"{entry.name}/{entry.source.shard(row_id[1:])}"

    def fetch(self, row_id: RowId) -> Mapping[str, Any]:
        """See `Source.fetch`."""
        return self.entries[row_id[0]].source.fetch(row_id[1:])

    @property
    def retry_budget(self) -> float:
        """See `Source.retry_budget`: the longest of the sources'."""
        return max(entry.source.retry_budget for entry in self.entries)

    def natural_lanes(self) -> int:
        """Return as many lanes as the smallest source fills: each must have rows in each lane."""
        return min(entry.source.natural_lanes() for entry in self.entries)

    @property
    def way_out(self) -> str:
        """See `Source.way_out`: that of the source with the fewest lanes."""
        return self._narrowest().source.way_out

    def _narrowest(self) -> Entry:
        return next(entry for entry in self.entries if entry.source.max_lanes == self.max_lanes)

    def narrowest(self) -> str:
        """Return name and kind of the source that allows the fewest lanes."""
        entry = self._narrowest()
        if (mix := mix_of(entry)) is not None:
            return f"{entry.name}/{mix.narrowest()}"
        return f"{entry.name} ({type(entry.source).__name__})"

    def probe(self, count: int) -> tuple[list[Mapping[str, Any]], float]:
        """See `Source.probe`; about as many rows of each source, which may need different encoders."""
        rows: list[Mapping[str, Any]] = []
        total = 0.0
        for entry in self.entries:
            some, scale = entry.source.probe(max(1, count // len(self.entries)))
            rows += some
            total += len(some) * scale
        return rows, total / max(1, len(rows))


def mix_of(entry: Entry) -> Mix | None:
    """Return the source of an entry if it is a mixture itself."""
    return entry.source if isinstance(entry.source, Mix) else None
