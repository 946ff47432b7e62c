"""Corpora, and what a loader makes of them, in a form that can be compared across processes."""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from streampack import IGNORE_INDEX, Batch, IterablePackedDataset, JSONLSource, PackedDataLoader, Sample

STRIDE = 1000  # sample i has the tokens 1000 i + 1, 1000 i + 2, ...


class Numbers:
    """Encodes ``{"i": 3, "n": 4}`` as the tokens 3001 to 3004, the first third of them not trained."""

    def __init__(self, *, bad: int = -1) -> None:
        self.bad = bad  # the row that cannot be encoded
        self.calls = 0

    def __call__(self, row: Mapping[str, Any], /) -> Sample:  # noqa: D102 - the class says it
        self.calls += 1
        if row["i"] == self.bad:
            raise ValueError("is out of order")
        tokens = STRIDE * row["i"] + 1 + np.arange(row["n"], dtype=np.int64)
        labels = tokens.copy()
        labels[: row["n"] // 3] = IGNORE_INDEX
        return Sample(tokens, labels)

    def fingerprint(self) -> str:
        """The same for all, whichever row is bad."""
        return "numbers"


@dataclass(frozen=True)
class Corpus:
    """Samples of given lengths, and the settings under which they are packed."""

    lengths: Sequence[int]
    folder: str | None = None  # of three JSONL files with these rows; without it, the rows are map-style data
    settings: Mapping[str, Any] = field(default_factory=dict)
    bad: int = -1

    @classmethod
    def make(
        cls, count: int, *, folder: Path | None = None, longest: int = 12, seed: int = 0, **settings: Any
    ) -> Corpus:
        """Mostly short samples, shuffled, packed by ``exact_fit`` to 24 tokens."""
        rng = np.random.default_rng(seed)
        lengths = np.minimum(rng.integers(1, longest + 1, count), rng.integers(1, longest + 1, count))
        defaults = {
            "max_seq_len": 24,
            "buffer_size": 16,
            "num_lanes": 12,
            "shuffle": True,
            "shuffle_window": 32,
            "seed": seed,
        }
        corpus = cls(lengths.tolist(), str(folder) if folder else None, {**defaults, **settings})
        if folder:
            corpus.write()
        return corpus

    def rows(self) -> list[dict[str, int]]:
        """For `Numbers`."""
        return [{"i": i, "n": n} for i, n in enumerate(self.lengths)]

    def write(self) -> None:
        """The rows as three files of different sizes."""
        assert self.folder is not None
        rows = self.rows()
        bounds = [0, len(rows) // 2, len(rows) * 5 // 6, len(rows)]
        for number, (start, stop) in enumerate(pairwise(bounds)):
            place = Path(self.folder) / f"{number}.jsonl"
            place.unlink(missing_ok=True)
            if start < stop:
                place.write_text("".join(json.dumps(row) + "\n" for row in rows[start:stop]))

    def dataset(self) -> IterablePackedDataset:
        """A new one, as a new process would make it."""
        source: Any = self.rows()
        if self.folder:
            source = JSONLSource(sorted(Path(self.folder).glob("*.jsonl")))
        return IterablePackedDataset(
            source, encoder=Numbers(bad=self.bad), **{"untrained": "keep", **self.settings}
        )

    def expected(self, times: int = 1) -> Counter[int]:
        """How often every token must come in ``times`` epochs."""
        limit, overlong = self.settings["max_seq_len"], self.settings.get("overlong", "split")
        kept: Counter[int] = Counter()
        for i, n in enumerate(self.lengths):
            if n > limit and overlong == "drop":
                continue
            n = min(n, limit) if overlong == "truncate" else n
            kept.update({STRIDE * i + 1 + j: times for j in range(n)})
        return kept


class Seen(NamedTuple):
    """A pack that was handed over."""

    digest: bytes  # of every array, the boundaries and the provenance
    tokens: tuple[int, ...]  # the real ones


Step = list[Seen]  # of one rank, or of all; null packs left out


def seen(batch: Batch) -> Step:
    """The packs of a batch that hold something."""
    packs = []
    for i, fragments in enumerate(batch.fragments):
        used = sum(f.stop - f.start for f in fragments)
        lengths = batch.seq_lens[i]
        assert int(lengths.sum()) == batch.tokens.shape[1], "the segments of a pack do not fill it"
        if not fragments:
            assert (batch.labels[i] == IGNORE_INDEX).all(), "a null pack trains tokens"
            continue
        parts = (batch.tokens[i], batch.labels[i], batch.input_pos[i], lengths[lengths > 0])
        digest = hashlib.blake2b(repr(fragments).encode(), digest_size=12)
        for part in parts:
            digest.update(part.numpy().tobytes())
        packs.append(Seen(digest.digest(), tuple(batch.tokens[i, :used].tolist())))
    return packs


class Ride(NamedTuple):
    """What one rank saw of a part of a run."""

    steps: list[Step]
    states: list[bytes]  # after the last step; with ``every_state``, before the first and after each
    warned: bool  # that lanes do not divide evenly
    loader_rows: int  # that this process encoded


def ride(
    corpus: Corpus,
    state: bytes | None = None,
    *,
    workers: int = 0,
    batch_size: int = 2,
    steps: int | None = None,
    every_state: bool = False,
) -> Ride:
    """In a rank: go on from a state, for some steps or to the end."""
    dataset = corpus.dataset()
    loader = PackedDataLoader(dataset, batch_size=batch_size, num_workers=workers, timeout=60)
    try:
        if state is not None:
            loader.load_state_dict(unpack(state))
        states, done = [], []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            iterator = iter(loader)
        if every_state:
            states.append(pack(loader.state_dict()))
        while (steps is None or len(done) < steps) and (batch := next(iterator, None)) is not None:
            done.append(seen(batch))
            if every_state:
                states.append(pack(loader.state_dict()))
        if not every_state:
            states.append(pack(loader.state_dict()))
        uneven = any("do not divide evenly" in str(w.message) for w in warned)
        return Ride(done, states, uneven, dataset.lane_config.encode.calls)  # type: ignore[attr-defined]
    finally:
        if loader.rank_sync.group is not None:
            dist.destroy_process_group(loader.rank_sync.group)


def pack(state: Mapping[str, Any]) -> bytes:
    """As a checkpoint keeps it: through ``torch.save``, which copies every byte."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def unpack(state: bytes) -> dict[str, Any]:
    """The inverse of `pack`, under ``weights_only``."""
    loaded: dict[str, Any] = torch.load(io.BytesIO(state), weights_only=True)
    return loaded


def together(rides: Sequence[Ride]) -> list[Step]:
    """The steps of all ranks, each as the packs of rank 0, then of rank 1, and so on.

    Raises:
        AssertionError: if the ranks made different numbers of steps.
    """
    counts = [len(r.steps) for r in rides]
    assert len(set(counts)) == 1, f"the ranks made {counts} steps"
    return [
        [pack for step in steps for pack in step] for steps in zip(*(r.steps for r in rides), strict=True)
    ]


def digests(steps: Iterable[Step]) -> Counter[bytes]:
    """How often every pack came."""
    return Counter(pack.digest for step in steps for pack in step)


def count_tokens(steps: Iterable[Step]) -> Counter[int]:
    """How often every token came."""
    counts: Counter[int] = Counter()
    for step in steps:
        for pack in step:
            counts.update(pack.tokens)
    return counts


def check_exactly(steps: Iterable[Step], corpus: Corpus, times: int = 1) -> None:
    """Every token of the corpus came ``times`` times."""
    got, wanted = count_tokens(steps), corpus.expected(times)
    lost, twice = wanted - got, got - wanted
    assert lost == twice == Counter(), f"{lost.total()} tokens lost, {twice.total()} too many"
