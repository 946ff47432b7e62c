"""Simulation of a run of any number of ranks from lengths alone: the packs of each rank in each step.

`Planner` chooses the packs as it does in training. The assignment of packs to ranks and steps is the loader's
arithmetic, here on whole arrays; ``tests/benchmarks/test_scale.py`` compares it, pack by pack, with real loaders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from streampack.distributed.rank_sync import combine_counts
from streampack.loader.agreed_batches import ROUND
from streampack.packing.planner import Planner, Span
from streampack.packing.settings import Packing
from streampack.sources.files import divide
from streampack.sources.jsonl import LEAST_PART

Ints = npt.NDArray[np.int64]


class Corpus(NamedTuple):
    """Samples in lanes: lane ``l`` reads ``samples[ends[l - 1]:ends[l]]``, in this order."""

    samples: Ints  # [samples] row numbers
    lengths: Ints  # [samples] their tokens, in the same order
    ends: Ints  # [lanes]

    def lane(self, number: int) -> slice:
        """Return the slice of a lane's samples."""
        return slice(int(self.ends[number - 1]) if number else 0, int(self.ends[number]))


def by_bytes(lengths: Ints, row_bytes: Ints, rows_per_file: int, num_lanes: int) -> Corpus:
    """Put the rows of JSONL files of ``rows_per_file`` rows each into the lanes that `JSONLSource` gives them."""
    begins = np.concatenate([[0], np.cumsum(row_bytes)])
    files = begins[np.append(np.arange(0, len(lengths), rows_per_file), len(lengths))]
    lanes = divide(np.diff(files).tolist(), num_lanes, least=LEAST_PART)
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
    pulled: Ints  # [packs] pieces that the lane had read when the pack was complete
    pack: Ints  # [samples] the pack of each sample of `Corpus.lengths`; -1: none


class LaneReader:
    """A reader of a lane's samples, from number ``pulled`` on."""

    def __init__(self, lengths: list[int], pulled: int) -> None:
        self.lengths = lengths
        self.pulled = pulled

    def next(self) -> Span | None:
        """Return the next sample, None at the end."""
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
) -> Packs:
    """Plan the packs of all lanes in one epoch.

    With ``before``, plan those that follow the first ``handed[lane]`` of its packs, from what a state has then: the
    waiting pieces, and the place to read on.  # handed: [lanes]
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
        reader = LaneReader(lengths, begin)
        planner = Planner(packing, reader.next)
        planner.restore(waiting, offset=0)
        while placed := planner.next_pack():
            sizes = [stop - start for _, start, stop in placed]
            pack[[own.start + span.index for span, _, _ in placed]] = len(rows)
            cost = sum(size * size for size in sizes)
            rows.append((lane, number, sum(sizes), cost, reader.pulled))
            number += 1
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return Packs(*columns, pack)


class Topology(NamedTuple):
    """The number of ranks, and of packs in a step and a batch."""

    ranks: int
    packs_per_step: int
    batch_size: int = 1
    num_lanes: int = 0  # 0: as many as ranks

    @property
    def lanes(self) -> int:
        """Lanes, which take turns in the slots of an epoch."""
        return self.num_lanes or self.ranks

    @property
    def share(self) -> int:
        """The most packs of a step that one rank has."""
        begins = np.arange(1 if self.lanes % self.ranks == 0 else self.lanes)
        ranks = np.arange(min(self.ranks, self.lanes))[:, None]
        counts = self.own_slots(ranks, begins + self.packs_per_step) - self.own_slots(ranks, begins)
        return int(counts.max())

    def own_slots(self, rank: Ints, slot: Ints) -> Ints:
        """Count the slots below ``slot`` that are those of a rank's lanes."""
        rounds, lane = np.divmod(slot, self.lanes)
        below = [-(-np.maximum(0, lanes - rank) // self.ranks) for lanes in (self.lanes, lane)]
        return np.asarray(rounds * below[0] + below[1])

    @property
    def batches_per_step(self) -> int:
        """Batches of every rank in a step."""
        return -(-self.share // self.batch_size)

    @property
    def packs_per_batch(self) -> int:
        """Packs of a batch, null packs included."""
        return -(-self.share // self.batches_per_step)

    @property
    def places(self) -> int:
        """Packs of a step over all ranks, null packs included."""
        return self.ranks * self.batches_per_step * self.packs_per_batch


class Dealt(NamedTuple):
    """The rank, step and batch of each pack."""

    rank: Ints  # [packs]
    step: Ints  # [packs]
    batch: Ints  # [packs] of its rank, over all steps
    steps: int  # of every rank


def deal(packs: Packs, topology: Topology, *, slot: int = 0) -> Dealt:
    """Assign packs to ranks and steps, where step 0 begins at ``slot`` of the epoch.

    A slot is that of lane ``slot % num_lanes``, and a rank fills those of its lanes with its packs in the order of
    (number, lane).
    """
    ranks, per_step, lanes = topology.ranks, topology.packs_per_step, topology.lanes
    rank = packs.lane % ranks
    order = np.lexsort((packs.lane, packs.number, rank))
    counts = np.bincount(rank, minlength=ranks)
    place = np.empty_like(rank)  # among its rank's
    place[order] = np.arange(len(rank)) - np.repeat(np.cumsum(counts) - counts, counts)
    place += topology.own_slots(rank, np.full_like(rank, slot))
    rounds, lane = np.divmod(place, (lanes - 1 - rank) // ranks + 1)
    step = (rounds * lanes + lane * ranks + rank - slot) // per_step
    within = place - topology.own_slots(rank, slot + step * per_step)
    batch = step * topology.batches_per_step + within // topology.packs_per_batch
    last = np.zeros(ranks, dtype=np.int64)
    np.maximum.at(last, rank, batch + 1)
    return Dealt(rank, step, batch, -(-agreed(last) // topology.batches_per_step))


def agreed(counts: Ints) -> int:
    """Return the batches that ranks agree on, round by round, if rank r has packs for the first ``counts[r]``."""
    batches = rounds = 0
    while True:
        size = min(2**rounds, ROUND)
        more, _ = combine_counts(np.clip(counts - batches, 0, size).tolist())
        batches += more
        rounds += 1
        if more < size:
            return batches


def handed_after(packs: Packs, dealt: Dealt, steps: int, num_lanes: int) -> Ints:
    """Count the packs of each lane in the first ``steps`` steps.  # [lanes]"""
    return np.bincount(packs.lane[dealt.step < steps], minlength=num_lanes)


def first_lane_end(packs: Packs, num_lanes: int, packs_per_step: int) -> int:
    """Return the first step in which a lane lacks a pack. Steps before it are equal on any ranks."""
    counts = np.bincount(packs.lane, minlength=num_lanes)
    return int((counts * num_lanes + np.arange(num_lanes)).min()) // packs_per_step


def cost_of_ranks(packs: Packs, dealt: Dealt, ranks: int, cost: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Sum ``cost`` over each rank's packs of each step.  # [steps, ranks]"""
    spent = np.bincount(dealt.step * ranks + dealt.rank, weights=cost, minlength=dealt.steps * ranks)
    return spent.reshape(-1, ranks)


def sorted_in_windows(packs: Packs, cost: npt.NDArray[Any], window: int) -> Packs:
    """Sort every ``window`` packs of a lane by cost, the costliest first, as a lane could that holds so many."""
    order = np.lexsort((-cost, packs.number // window, packs.lane))
    moved = packs.number.copy()
    moved[order] = packs.number  # both are in the order of lanes and windows
    return packs._replace(number=moved)


def samples_of(corpus: Corpus, packs: Packs, count: int) -> Sequence[list[int]]:
    """Return the sample numbers in each of ``count`` packs, in the order in which the lane read them."""
    held: list[list[int]] = [[] for _ in range(count)]
    for sample, pack in zip(corpus.samples.tolist(), packs.pack.tolist(), strict=True):
        if pack >= 0:
            held[pack].append(sample)
    return held
