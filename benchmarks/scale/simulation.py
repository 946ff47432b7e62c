"""Simulation of a run of any number of ranks from lengths alone: the rank, step and batch of each pack.

The packs of a lane are the same on any number of ranks, also after a resume, so each lane is planned once. Who takes
which pack at which step is the loader's arithmetic, here on whole arrays; ``tests/benchmarks/test_scale.py`` compares
it, pack by pack, with real loaders.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streampack.sources.formats.lines import LEAST_PART

# private: how files are cut into lanes has no public name
from streampack.sources.mechanics.files import divide

Ints = npt.NDArray[np.int64]


def by_bytes(row_bytes: Ints, rows_per_file: int, num_lanes: int) -> list[Ints]:
    """Return the numbers of each lane's rows, for JSONL files cut as `JSONLSource` cuts them."""
    begins = np.concatenate([[0], np.cumsum(row_bytes)])
    files = begins[np.append(np.arange(0, len(row_bytes), rows_per_file), len(row_bytes))]
    lanes = divide(np.diff(files).tolist(), num_lanes, least=LEAST_PART)
    starts = np.array([files[part.file] + part.start for parts in lanes for part in parts])
    owners = np.repeat(np.arange(num_lanes), [len(parts) for parts in lanes])
    order = np.argsort(starts)
    # A row belongs to the part in which its first byte lies; within a lane, parts come in the corpus' order.
    owner = owners[order][np.searchsorted(starts[order], begins[:-1], side="right") - 1]
    rows = np.argsort(owner, kind="stable")
    return np.split(rows, np.cumsum(np.bincount(owner, minlength=num_lanes))[:-1])


class Packs(NamedTuple):
    """The packs of all lanes, lane by lane, each lane's from its first."""

    lane: Ints  # [packs]
    number: Ints  # [packs] of the pack within its lane

    @classmethod
    def of(cls, counts: Ints) -> Packs:
        """Make them of the number of packs of each lane.  # counts: [lanes]"""
        lane = np.repeat(np.arange(len(counts)), counts)
        return cls(lane, np.arange(len(lane)) - np.repeat(np.cumsum(counts) - counts, counts))

    def where(self, chosen: npt.NDArray[np.bool_]) -> Packs:
        """Return some of the packs."""
        return Packs(self.lane[chosen], self.number[chosen])


class Topology(NamedTuple):
    """The number of ranks and lanes, and of packs in a step and a batch."""

    ranks: int
    packs_per_step: int
    lanes: int  # which take turns in the slots of an epoch
    batch_size: int = 1

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


class Assigned(NamedTuple):
    """The rank, step and batch of each pack."""

    rank: Ints  # [packs]
    step: Ints  # [packs]
    batch: Ints  # [packs] of its rank, over all steps
    steps: int  # of every rank: ranks whose lanes have ended add null packs


def assign(packs: Packs, topology: Topology, *, slot: int = 0) -> Assigned:
    """Assign packs to ranks and steps, where step 0 begins at ``slot`` of the epoch.

    A slot is that of lane ``slot % lanes``, and a rank fills those of its lanes with its packs in the order of
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
    return Assigned(rank, step, batch, int(step.max()) + 1)


def first_lane_end(packs: Packs, topology: Topology) -> int:
    """Return the first step in which a lane lacks a pack. Steps before it are equal on any ranks."""
    counts = np.bincount(packs.lane, minlength=topology.lanes)
    return int((counts * topology.lanes + np.arange(topology.lanes)).min()) // topology.packs_per_step


def same_steps(one: tuple[Packs, Ints], other: tuple[Packs, Ints]) -> int:
    """Count the steps, from the first on, that have the same packs in two runs, each given as packs and their steps."""

    def of_steps(packs: Packs, step: Ints) -> list[Ints]:
        keys = packs.number << 32 | packs.lane
        order = np.lexsort((keys, step))
        return np.split(keys[order], np.cumsum(np.bincount(step))[:-1])

    pairs = list(zip(of_steps(*one), of_steps(*other), strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if not np.array_equal(a, b)), len(pairs))
