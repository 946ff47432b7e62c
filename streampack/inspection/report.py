"""The report of an inspection: plain frozen dataclasses, and their JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from streampack.inspection.packs import PackView
from streampack.loader.batching import Batching
from streampack.packing.settings import Packing
from streampack.packing.strategies import PADDED

VERSION = 4
"""Version of the JSON's format. It rises when a name or a meaning changes, but not when a name is added."""

PADDED_BATCH = 8
"""Samples in a padded batch if the run's batches hold one pack: a single sample would need no padding."""


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """Ranks, workers and batches of a run.

    Args:
        ranks: of the run.
        workers: processes of each rank that make packs.
        batch_size: packs in a batch.
        packs_per_step: packs in an optimizer step over all ranks; None: ``accumulation`` batches of each rank.
        accumulation: see ``packs_per_step``.
        max_steps: of the run, for the passes over a mixture's sources.
    """

    ranks: int = 1
    workers: int = 0
    batch_size: int = 1
    packs_per_step: int | None = None
    accumulation: int = 1
    max_steps: int | None = None

    @property
    def batching(self) -> Batching:
        """How the ranks divide the packs of a step, with one lane each."""
        packs = self.packs_per_step or self.ranks * self.batch_size * self.accumulation
        return Batching(self.batch_size, packs, self.ranks, self.ranks)

    def padded_batch(self, packing: Packing) -> int:
        """Return the number of samples in a padded batch: the run's own, or one to compare its packs with."""
        return self.batch_size if self.batch_size > 1 or packing.strategy == PADDED else PADDED_BATCH


@dataclass(frozen=True)
class Settings:
    """The settings of the run that an inspection predicts."""

    packing: Packing
    shape: RunShape
    lanes: int
    balance_window: int


@dataclass(frozen=True)
class Coverage:
    """How much of the corpus was read."""

    rows: int  # read
    rows_in_all: float | None  # of one epoch; None if it is unknown
    exact: bool  # every row of an epoch was read, in the order of the run's first epoch
    error: float  # relative standard error of the epoch's tokens; 0 if exact

    def __str__(self) -> str:
        """Describe the rows that were read."""
        if self.exact:
            return f"all {self.rows:,} rows of an epoch"
        if self.rows_in_all is None:
            return f"the first {self.rows:,} rows"
        return f"{self.rows:,} of about {self.rows_in_all:,.0f} rows"


@dataclass(frozen=True)
class LongRow:
    """One of the longest rows, and where it is."""

    place: str
    tokens: int
    trained: int


@dataclass(frozen=True)
class Lengths:
    """Lengths of the samples before they are cut or dropped."""

    samples: int
    tokens: int
    trained: int  # tokens with a label other than -100, without the first of each sample
    mean: float
    quantiles: dict[str, int]  # "0.5" -> the median
    longest: list[LongRow]


@dataclass(frozen=True)
class Loss:
    """Rows that are dropped or cut off for one reason of the ledger."""

    reason: str  # one of `streampack.accounting.DROP_REASONS`
    rows: int
    tokens: int
    fraction: float  # of all tokens
    error: float  # standard error of the fraction; 0 if exact
    stops: bool  # whether a run stops at the first such row
    examples: list[str]  # each a place and what is wrong


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Packs, padding, steps and tokens of an epoch for one way to make batches."""

    name: str
    chosen: bool = False  # whether it is the config's own
    packs: float  # for padding, samples
    padding: float  # fraction of the tokens forwarded
    error: float  # standard error of the padding; 0 if exact
    steps: float
    samples_per_step: float = 0.0
    tokens: float  # forwarded, padding included
    speedup: float = 1.0  # tokens forwarded with padded batches / with this one
    last_packs: float = 0.0  # fraction of the tokens: padding in the last pack of each lane
    sequence_ends: float = 0.0  # fraction of the tokens: padding at the ends of sequences (`pad_seqs_to`)
    media: float | None = (
        None  # fraction of ``max_media`` that is used; None without it and for padded batches
    )


@dataclass(frozen=True)
class SourceShare:
    """A source of a mixture in one epoch, and in the complete run if its length is known."""

    name: str
    weight: float  # target fraction of the trained tokens
    rows: float  # of one pass
    tokens: float
    fraction: float  # expected fraction of the trained tokens
    passes: float  # over the source in one epoch of the mixture
    passes_in_run: float | None


@dataclass(frozen=True)
class Advice:
    """A recommendation."""

    title: str
    why: str
    yaml: str


@dataclass(frozen=True)
class Report:
    """The report of an inspection."""

    title: str
    settings: Settings
    coverage: Coverage
    lengths: Lengths
    losses: list[Loss]
    outcomes: list[Outcome]
    packs: list[PackView]
    sources: list[SourceShare]
    advice: list[Advice]
    assumed: list[str]
    first: list[str] = field(default_factory=list)  # lines of `first_look` and `mixing_lines`

    @property
    def chosen(self) -> Outcome:
        """The outcome of the config's own settings."""
        return next(outcome for outcome in self.outcomes if outcome.chosen)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {"version": VERSION, **asdict(self)}
