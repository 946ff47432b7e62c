"""Generated corpora, and records of the packs that a loader returns, which processes can exchange and compare."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import active_children
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from streampack import (
    IGNORE_INDEX,
    Batch,
    Group,
    IterablePackedDataset,
    JSONLSource,
    Ledger,
    PackedDataLoader,
    ParquetSource,
    Sample,
    TokenShardSource,
)
from tests.harness.corpus import STRIDE, Numbers, write
from tests.harness.processes import Ranks

SOURCES: dict[str, Callable[..., Any]] = {
    "jsonl": JSONLSource,
    "parquet": ParquetSource,
    "token shards": TokenShardSource,
}


class Trees(Numbers):
    """Encode the same tokens as groups: of 4 tokens or more, a prompt and three answers; one answer is continued."""

    def __call__(self, row: Mapping[str, Any], /) -> Sample:  # noqa: D102 - the class says it
        tokens, part = super().__call__(row).tokens, row["n"] // 4
        lengths, parents = [part, part, part, row["n"] - 3 * part], [-1, 0, 0, 1]
        if not part:
            lengths, parents = [row["n"]], [-1]
        labels = tokens.copy()
        labels[: lengths[0]] = IGNORE_INDEX
        fields = {"row": [row["i"]] * len(lengths), "segment": range(len(lengths))}
        return Group(
            tokens, labels, lengths=lengths, parents=parents, fields=fields, token_fields={"id": tokens}
        )


@dataclass(frozen=True)
class Corpus:
    """Samples of given lengths, and the settings under which they are packed."""

    lengths: Sequence[int]
    folder: str | None = None  # holds the rows as three JSONL files; None: the rows are a map-style dataset
    settings: Mapping[str, Any] = field(default_factory=dict)
    bad: int | None = None  # row that cannot be encoded
    grouped: bool = False  # rows become groups

    @classmethod
    def make(
        cls,
        count: int,
        *,
        folder: Path | None = None,
        longest: int = 12,
        grouped: bool = False,
        **settings: Any,
    ) -> Corpus:
        """Draw mostly short samples, shuffled, packed by ``exact_fit`` to 24 tokens, emitted by cost in windows."""
        rng = np.random.default_rng(settings.get("seed", 0))
        lengths = np.minimum(rng.integers(1, longest + 1, count), rng.integers(1, longest + 1, count))
        settings = {
            "max_seq_len": 24, "buffer_size": 16, "num_lanes": 12, "shuffle": 32,
            "seed": 0, "balance_window": 8, **settings,
        }  # fmt: skip
        corpus = cls(lengths.tolist(), str(folder) if folder else None, settings, grouped=grouped)
        if folder:
            corpus.write()
        return corpus

    def rows(self) -> list[dict[str, int]]:
        """Return the rows that `Numbers` encodes."""
        return [{"i": i, "n": n} for i, n in enumerate(self.lengths)]

    def write(self) -> None:
        """Write the rows to three JSONL files of different sizes."""
        assert self.folder is not None
        rows = self.rows()
        bounds = [0, len(rows) // 2, len(rows) * 5 // 6, len(rows)]
        for number, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                write(Path(self.folder) / f"{number}.jsonl", rows[start:stop])

    def source(self) -> Any:
        """Build a new source."""
        return JSONLSource(sorted(Path(self.folder).glob("*.jsonl"))) if self.folder else self.rows()

    def encoder(self) -> Any:
        """Build a new encoder."""
        encoder = Trees("trees") if self.grouped else Numbers()
        encoder.bad = self.bad
        return encoder

    def dataset(self) -> IterablePackedDataset:
        """Build a new dataset, as a new process would."""
        settings = {"untrained": "keep", **self.settings}
        return IterablePackedDataset(self.source(), encoder=self.encoder(), **settings)

    def expected_tokens(self, epochs: int = 1) -> Counter[int]:
        """Count how often each token must occur in ``epochs`` epochs."""
        limit, overlong = self.settings["max_seq_len"], self.settings.get("overlong", "split")
        kept = [row for row in self.rows() if row["n"] <= limit or overlong != "drop"]
        cut = [row | {"n": min(row["n"], limit)} for row in kept] if overlong == "truncate" else kept
        return tokens_of([cut], epochs)


@dataclass(frozen=True)
class Files(Corpus):
    """Files of one kind, of this machine or behind URLs."""

    kind: str = "jsonl"
    paths: str | tuple[str, ...] = ()  # the files, or their folder
    options: Mapping[str, Any] = field(default_factory=dict)  # of the source
    good: Sequence[list[dict[str, int]]] = ()  # the rows of the files that can be read

    def source(self) -> Any:  # noqa: D102 - see Corpus
        return SOURCES[self.kind](self.paths, **self.options)

    def encoder(self) -> Any:  # noqa: D102 - see Corpus
        return None if self.kind == "token shards" else Numbers()

    def expected_tokens(self, epochs: int = 1) -> Counter[int]:  # noqa: D102 - see Corpus
        return tokens_of(self.good, epochs)


def tokens_of(files: Iterable[list[dict[str, int]]], times: int = 1) -> Counter[int]:
    """Count the tokens of all rows ``times`` times."""
    rows = [row for of_file in files for row in of_file]
    return Counter({STRIDE * row["i"] + 1 + k: times for row in rows for k in range(row["n"])})


class PackRecord(NamedTuple):
    """One pack that a loader returned."""

    digest: str  # of its arrays, segment lengths and provenance
    tokens: tuple[int, ...]  # without padding


Step = list[PackRecord]  # packs of one step, of one rank or of all; without null packs


def record_packs(batch: Batch) -> Step:
    """Record the packs of a batch, without null packs, and check that null packs train nothing."""
    packs = []
    for i, fragments in enumerate(batch.fragments):
        used = sum(f.stop - f.start for f in fragments)
        lengths = batch.seq_lens[i]
        assert int(lengths.sum()) == batch.tokens.shape[1], "the segments of a pack do not fill it"
        if not fragments:
            assert (batch.labels[i] == IGNORE_INDEX).all(), "a null pack trains tokens"
            continue
        arrays = (batch.tokens[i], batch.labels[i], batch.input_pos[i], lengths[lengths > 0])
        digest = hashlib.blake2b(repr(fragments).encode(), digest_size=12)
        for array in arrays:
            digest.update(array.numpy().tobytes())
        if batch.groups is not None:
            groups, segments = batch.groups, len(fragments)
            ids = groups.token_fields["id"][i, :used]
            assert (ids == batch.tokens[i, :used]).all(), "a field of another token"
            fields = [values[i, :segments].tolist() for values in groups.fields.values()]
            known = [groups.parents[i], groups.first_labels[i, :segments].tolist(), fields]
            digest.update(repr(known).encode())
        packs.append(PackRecord(digest.hexdigest(), tuple(batch.tokens[i, :used].tolist())))
    return packs


class RankResult(NamedTuple):
    """What one rank returned from part of a run."""

    steps: list[Step]
    states: list[bytes]  # after the last step; with ``every_state``, before the first and after each
    warned: bool  # that lanes do not divide evenly
    ledger: Ledger  # of the rank's lanes


def run_rank(
    corpus: Corpus,
    state: bytes | None = None,
    *,
    workers: int = 0,
    batch_size: int = 2,
    steps: int | None = None,
    every_state: bool = False,
    groups: Callable[[], Mapping[str, Any]] = dict,
) -> RankResult:
    """Start a run or resume one from ``state``, and iterate for ``steps`` steps or to the end. Called in a rank.

    With ``every_state``, return the state before the first step and after each. ``groups`` returns arguments of
    `PackedDataLoader` that say which ranks get the same batches.
    """
    warnings.filterwarnings("ignore", message="the corpus changed|.* cannot be read and are")
    loader = PackedDataLoader(
        corpus.dataset(), batch_size=batch_size, num_workers=workers, timeout=60, **groups()
    )
    iterator: Any = None
    try:
        if state is not None:
            loader.load_state_dict(load_state(state))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            iterator = iter(loader)
        states, done = [save_state(loader.state_dict())] if every_state else [], []
        while (steps is None or len(done) < steps) and (batch := next(iterator, None)) is not None:
            done.append(record_packs(batch))
            if every_state:
                states.append(save_state(loader.state_dict()))
        if not every_state:
            states.append(save_state(loader.state_dict()))
        uneven = any("do not divide" in str(warning.message) for warning in caught)
        return RankResult(done, states, uneven, loader.ledger())
    finally:
        end(loader, iterator)


def end(loader: Any, iterator: Any) -> None:
    """End the workers of an iteration, and the loader's process group; there is no public way for either.

    Workers first: forked from this process, they hold copies of the sockets that the group is about to close.
    """
    if iterator is not None:
        iterator.packs.close()
    if loader.rank_sync.group is not None:
        dist.destroy_process_group(loader.rank_sync.group)


def worker_pids() -> list[int]:
    """Return the process ids of this rank's living workers, in their order."""
    return sorted(process.pid for process in active_children() if process.pid is not None)


def run_apart(
    function: Callable[..., Any], *arguments: Any, size: int = 1, timeout: float = 120
) -> list[Any]:
    """Run a function in processes that are ranks of one another and have not joined yet; return the results."""
    with Ranks(size, join=False) as ranks:
        return ranks.run(function, *arguments, timeout=timeout)


def save_state(state: Mapping[str, Any]) -> bytes:
    """Serialize a state with ``torch.save``, as a checkpoint does."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def load_state(state: bytes) -> dict[str, Any]:
    """Load what `save_state` returned, with ``weights_only=True``."""
    loaded: dict[str, Any] = torch.load(io.BytesIO(state), weights_only=True)
    return loaded


def global_steps(results: Sequence[RankResult]) -> list[Step]:
    """Join the ranks' steps: each global step has the packs of rank 0, then of rank 1, and so on.

    Raises:
        AssertionError: if the ranks made different numbers of steps.
    """
    counts = [len(result.steps) for result in results]
    assert len(set(counts)) == 1, f"the ranks made {counts} steps"
    return [
        [pack for step in steps for pack in step]
        for steps in zip(*(result.steps for result in results), strict=True)
    ]


def digests_of(results: Sequence[RankResult]) -> list[list[list[str]]]:
    """Return the digests of all packs, by rank and step."""
    return [[[pack.digest for pack in step] for step in result.steps] for result in results]


def count_packs(steps: Iterable[Step]) -> Counter[str]:
    """Count how often each pack occurs, by digest."""
    return Counter(pack.digest for step in steps for pack in step)


def found_in(steps: Iterable[Step]) -> Counter[int]:
    """Count the tokens of packs."""
    return Counter(token for step in steps for pack in step for token in pack.tokens)


def check_tokens(found: Counter[int], expected: Counter[int]) -> None:
    """Check that each token was found as often as it must be."""
    lost, extra = expected - found, found - expected
    assert lost == extra == Counter(), f"{lost.total()} tokens lost, {extra.total()} too many"


def check_coverage(steps: Iterable[Step], corpus: Corpus, epochs: int = 1) -> None:
    """Check that every token of the corpus occurs exactly once in each epoch."""
    check_tokens(found_in(steps), corpus.expected_tokens(epochs))
