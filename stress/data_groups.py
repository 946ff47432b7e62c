"""Groups of ranks that are given the same batches, on meshes with tensor, context and pipeline parallelism."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streampack.loader import data_loader
from stress.corpus import (
    Corpus,
    RankResult,
    Step,
    check_coverage,
    count_packs,
    global_steps,
    load_state,
    run_rank,
)
from stress.job import Run, job, require_failure
from stress.topology import check_steps, common_steps
from tests.harness.processes import RankPools

RANKS = 8
PER_STEP = 8  # packs


@dataclass(frozen=True)
class Layout:
    """How 8 ranks are grouped: by a mesh, or without names by numbers.

    Attributes:
        shape: of the mesh.
        dims: names of the mesh's dimensions.
        data: those along which batches differ.
        by_number: give the data rank and the number of data ranks instead of the mesh.
    """

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    data: tuple[str, ...]
    by_number: bool = False

    def data_ranks(self) -> list[int]:
        """Return each rank's group, from the definition: ranks differ where their places along ``data`` do."""
        places = [np.unravel_index(rank, self.shape) for rank in range(RANKS)]
        data = [
            tuple(place[self.dims.index(name)] for name in sorted(self.data, key=self.dims.index))
            for place in places
        ]
        numbers = sorted(set(data))
        return [numbers.index(place) for place in data]

    @property
    def groups(self) -> int:
        """The number of groups."""
        return len(set(self.data_ranks()))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `PackedDataLoader`. Called in a rank."""
        if self.by_number:
            return {"data_rank": self.data_ranks()[dist.get_rank()], "data_world_size": self.groups}
        return {"mesh": mesh(self.shape, self.dims), "data_dims": self.data}


@cache
def mesh(shape: tuple[int, ...], dims: tuple[str, ...]) -> DeviceMesh:
    """Make a mesh, once, because its process groups stay. Called in a rank."""
    return init_device_mesh("cpu", shape, mesh_dim_names=dims)


TWO = (
    Layout((2, 4), ("dp", "tp"), ("dp",)),
    Layout((2, 2, 2), ("pp", "dp", "cp"), ("dp",)),
    Layout((4, 2), ("tp", "dp"), ("dp",), by_number=True),
)
FOUR = (
    Layout((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), ("dp_replicate", "dp_shard")),
    Layout((2, 4), ("tp", "dp"), ("dp",)),
)
ONE = (Layout((1, 8), ("dp", "tp"), ("dp",)), Layout((1, 2, 4), ("dp", "pp", "cp"), ("dp",), by_number=True))

Stage = tuple[Layout, int, int | None]  # with workers, and steps (None: to the end)


@job(
    "data-groups",
    "8 ranks in 2 groups, dp x tp and dp x cp x pp: equal batches within, disjoint across, resumed on 2, 4, 1 groups",
    limit=240,
)
def data_groups(run: Run) -> str:
    """Run each layout, resume it on itself, and in chains on other numbers of groups."""
    with tempfile.TemporaryDirectory() as name:
        corpus = Corpus.make(1200, folder=Path(name), epochs=2, num_lanes=24)
        with RankPools() as pools:
            reference = global_steps(pools[1].run(partial(run_rank, batch_size=PER_STEP), corpus))
            same = common_steps(corpus, PER_STEP)
            check_coverage(reference, corpus, epochs=2)
            check = partial(check_run, pools, corpus, reference, same)
            layouts = (*TWO, *FOUR, *ONE)[:: run.count(1, 4)]
            chains: list[list[Stage]] = [
                [(layout, 0, 5 + i), (layout, i % 2, None)] for i, layout in enumerate(layouts)
            ]
            for i in range(run.count(4, 1)):
                two, four, one = TWO[i % 3], FOUR[i % 2], ONE[i % 2]
                chains.append(
                    [(two, i % 2, 4 + i), (four, 0, 3), (one, 1 - i % 2, 6), (four, 0, 2 + i), (two, 0, None)]
                )
            ends = []
            for number, chain in enumerate(chains):
                run.progress(number, len(chains), "runs")
                ends.append(check(chain))
            assert all(end["lanes"] == ends[0]["lanes"] for end in ends), "the lanes end in other states"
        whole: list[Stage] = [(TWO[0], 0, None)]
        for place, message in ((by_remainder, "a group have other batches"), (one_group, "the same packs")):
            with planted(place), RankPools() as pools:
                require_failure(lambda pools=pools: check_run(pools, corpus, reference, same, whole), message)
    resumes = sum(len(chain) - 1 for chain in chains)
    return (
        f"{len(chains)} runs over {len(layouts)} layouts, {resumes} resumes on as many groups and on others: the packs "
        f"of one process, in the first {same} of {len(reference)} steps also step by step; all ranks' states equal; "
        "with wrong groups planted, the checks fail"
    )


def check_run(
    pools: RankPools, corpus: Corpus, reference: list[Step], same: int, stages: Sequence[Stage]
) -> dict[str, Any]:
    """Run stage after stage, compare with one process, and return the last state."""
    steps: list[Step] = []
    state: bytes | None = None
    for layout, workers, count in stages:
        part = partial(
            run_rank,
            workers=workers,
            batch_size=PER_STEP // layout.groups,
            steps=count,
            groups=layout.arguments,
        )
        results = pools[RANKS].run(part, corpus, state)
        states = {result.states[-1] for result in results}
        assert len(states) == 1, "the ranks' states differ"
        [state] = states
        steps += global_steps(one_of_each(layout, results))
    check_steps(steps, reference, same=same)
    check_coverage(steps, corpus, epochs=2)
    assert state is not None
    return load_state(state)


def one_of_each(layout: Layout, results: Sequence[RankResult]) -> list[RankResult]:
    """Check that batches are equal within groups and disjoint across; return a result of each group, by data rank."""
    groups: dict[int, RankResult] = {}
    for rank, (data_rank, result) in enumerate(zip(layout.data_ranks(), results, strict=True)):
        first = groups.setdefault(data_rank, result)
        assert result.steps == first.steps, (
            f"{layout}: ranks of a group have other batches, such as rank {rank}"
        )
    found = [groups[data_rank] for data_rank in sorted(groups)]
    seen = [set(count_packs(result.steps)) for result in found]
    assert len(set().union(*seen)) == sum(map(len, seen)), f"{layout}: groups have the same packs"
    return found


# Bugs that the checks must see.


@contextmanager
def planted(place: Any) -> Iterator[None]:
    """Let loaders in ranks that are forked meanwhile take their groups from a function."""
    with patch.object(data_loader, "data_place", place):
        yield


def by_remainder(**arguments: Any) -> tuple[int, int]:
    """Group ranks across the dimension that they should be grouped along."""
    return dist.get_rank() % 2, 2


def one_group(**arguments: Any) -> tuple[int, int]:
    """Give all ranks the same batches."""
    return 0, 1
