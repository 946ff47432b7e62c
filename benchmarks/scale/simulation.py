"""A run of any number of ranks, from lengths alone: what each rank trains on in each step.

`Planner` chooses the packs as it does in training. Which rank takes which pack at which step is here the loader's
arithmetic on whole arrays; ``tests/benchmarks/test_scale.py`` compares it, pack by pack, with real loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streampack.distributed.rank_sync import verdict
from streampack.loader.iteration import ROUND
from streampack.packing.planner import Planner, Span
from streampack.packing.settings import Packing
from streampack.sources.files import divide

Ints = npt.NDArray[np.int64]


class Corpus(NamedTuple):
    """Samples in lanes: lane ``l`` reads ``samples[ends[l - 1]:ends[l]]``, in this order."""

    samples: Ints  # [samples] their numbers
    lengths: Ints  # [samples] their tokens, in the same order
    ends: Ints  # [lanes]

    def lane(self, number: int) -> slice:
        """Which samples are a lane's."""
        return slice(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))


def by_bytes(lengths: Ints, row_bytes: Ints, rows_per_file: int, num_lanes: int) -> Corpus:
    """The rows of JSONL files of ``rows_per_file`` rows each, in the lanes that `JSONLSource` gives them."""
    begins = np.concatenate([[0], np.cumsum(row_bytes)])
    files = begins[np.append(np.arange(0, len(lengths), rows_per_file), len(lengths))]
    lanes = divide(np.diff(files).tolist(), num_lanes)
    starts = np.array([files[part.file] + part.start for parts in lanes for part in parts])
    owners = np.repeat(np.arange(num_lanes), [len(parts) for parts in lanes])
    order = np.argsort(starts)
    # A row belongs to the part in which its first byte lies; within a lane, parts come in the corpus' order.
    owner = owners[order][np.searchsorted(starts[order], begins[:-1], side="right") - 1]
    samples = np.argsort(owner, kind="stable")
    return Corpus(samples, lengths[samples], np.cumsum(np.bincount(owner, minlength=num_lanes)))


class Packs(NamedTuple):
    """The packs of all lanes, lane by lane, each lane's from its first."""

    lane: Ints  # [packs]
    number: Ints  # [packs] of the pack within its lane
    tokens: Ints  # [packs]
    cost: Ints  # [packs] sum of squared lengths: pairs of tokens that attention looks at, twice
    pulled: Ints  # [packs] pieces that its lane had read when it was closed
    pack: Ints  # [samples] which of these packs holds it, in the order of `Corpus.lengths`; -1: none


class Coming:
    """The samples of a lane from number ``pulled`` on."""

    def __init__(self, lengths: list[int], pulled: int) -> None:
        self.lengths = lengths
        self.pulled = pulled

    def next(self) -> Span | None:
        """Return the next one."""
        if self.pulled == len(self.lengths):
            return None
        self.pulled += 1
        return Span(self.pulled - 1, 0, self.lengths[self.pulled - 1])


def plan(
    corpus: Corpus,
    packing: Packing,
    *,
    before: Packs | None = None,
    handed: Ints | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Packs:
    """What every lane makes in one epoch.

    With ``before``, only what it makes after its first ``handed[lane]`` of those packs, planned anew from
    what a state says then: which pieces wait, and where reading goes on.  # handed: [lanes]
    """
    rows: list[tuple[int, int, int, int, int]] = []
    pack = np.full(len(corpus.lengths), -1)
    for lane in range(len(corpus.ends)):
        own = corpus.lane(lane)
        lengths = corpus.lengths[own].tolist()
        number, begin = 0, 0
        waiting: list[Span] = []
        if before is not None and handed is not None and (number := int(handed[lane])):
            last = int(np.searchsorted(before.lane, lane)) + number - 1
            begin = int(before.pulled[last])
            numbers = np.flatnonzero(before.pack[own][:begin] > last).tolist()
            waiting = [Span(piece, 0, lengths[piece]) for piece in numbers]
        coming = Coming(lengths, begin)
        planner = Planner(packing, coming.next)
        planner.restore(waiting, offset=0)
        while placed := planner.next_pack():
            sizes = [stop - start for _, start, stop in placed]
            pack[[own.start + span.index for span, _, _ in placed]] = len(rows)
            cost = sum(size * size for size in sizes)
            rows.append((lane, number, sum(sizes), cost, coming.pulled))
            number += 1
        tick()
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return Packs(*columns, pack)


class Topology(NamedTuple):
    """Who takes packs, and how many at once."""

    ranks: int
    packs_per_step: int
    batch_size: int = 1

    @property
    def share(self) -> int:
        """Packs of a step that a rank has, at most."""
        return -(-self.packs_per_step // self.ranks)

    @property
    def batches_per_step(self) -> int:
        """Of every rank."""
        return -(-self.share // self.batch_size)

    @property
    def packs_per_batch(self) -> int:
        """Null packs included."""
        return -(-self.share // self.batches_per_step)

    @property
    def places(self) -> int:
        """Packs of a step over all ranks, null packs included."""
        return self.ranks * self.batches_per_step * self.packs_per_batch


class Dealt(NamedTuple):
    """Who trains on which pack, and when."""

    rank: Ints  # [packs]
    step: Ints  # [packs]
    batch: Ints  # [packs] of its rank, over all steps
    steps: int  # that every rank makes


def deal(packs: Packs, topology: Topology, *, slot: int = 0) -> Dealt:
    """The packs' ranks and steps, where step 0 begins at ``slot`` of the epoch.

    A rank has the slots ``rank, rank + ranks, ...`` and puts its packs there by (number, lane).
    """
    ranks, per_step, _ = topology
    rank = packs.lane % ranks
    order = np.lexsort((packs.lane, packs.number, rank))
    counts = np.bincount(rank, minlength=ranks)
    place = np.empty_like(rank)  # among its rank's
    place[order] = np.arange(len(rank)) - np.repeat(np.cumsum(counts) - counts, counts)
    slots = slot + (rank - slot) % ranks + place * ranks
    step = (slots - slot) // per_step
    within = (slots - slot - step * per_step) // ranks
    batch = step * topology.batches_per_step + within // topology.packs_per_batch
    last = np.zeros(ranks, dtype=np.int64)
    np.maximum.at(last, rank, batch + 1)
    return Dealt(rank, step, batch, -(-agreed(last) // topology.batches_per_step))


def agreed(counts: Ints) -> int:
    """How many batches there are, where rank r has a share of the first ``counts[r]``; told round by round."""
    batches = rounds = 0
    while True:
        size = min(2**rounds, ROUND)
        more, _ = verdict(np.clip(counts - batches, 0, size).tolist())
        batches += more
        rounds += 1
        if more < size:
            return batches


def handed_after(packs: Packs, dealt: Dealt, steps: int, num_lanes: int) -> Ints:
    """How many packs of each lane the first ``steps`` steps trained on.  # [lanes]"""
    return np.bincount(packs.lane[dealt.step < steps], minlength=num_lanes)


def first_dry(packs: Packs, num_lanes: int, packs_per_step: int) -> int:
    """When a lane first lacks a pack for its slot. Steps before it are the same wherever ranks divide the lanes."""
    counts = np.bincount(packs.lane, minlength=num_lanes)
    return int((counts * num_lanes + np.arange(num_lanes)).min()) // packs_per_step


def cost_of_ranks(packs: Packs, dealt: Dealt, ranks: int, cost: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The sum of ``cost`` over each rank's packs of each step.  # [steps, ranks]"""
    spent = np.bincount(dealt.step * ranks + dealt.rank, weights=cost, minlength=dealt.steps * ranks)
    return spent.reshape(-1, ranks)


def sorted_in_windows(packs: Packs, cost: npt.NDArray[Any], window: int) -> Packs:
    """Every ``window`` packs of a lane by cost, the costliest first; what a lane would hand out that holds so many."""
    order = np.lexsort((-cost, packs.number // window, packs.lane))
    moved = packs.number.copy()
    moved[order] = packs.number  # both go lane by lane, window by window
    return packs._replace(number=moved)


def samples_of(corpus: Corpus, packs: Packs, count: int) -> Sequence[list[int]]:
    """The sample numbers in each of ``count`` packs, in the order in which the lane read them."""
    held: list[list[int]] = [[] for _ in range(count)]
    for sample, pack in zip(corpus.samples.tolist(), packs.pack.tolist(), strict=True):
        if pack >= 0:
            held[pack].append(sample)
    return held
