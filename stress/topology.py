"""Runs of drawn corpora on several topologies, with resumes between them, compared with a run of one process."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streampack import JSONLSource, MapSource, Mix
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
from stress.job import Run, job
from stress.kills import kill_and_resume
from tests.harness.corpus import write
from tests.harness.processes import RankPools, Ranks, run_forked

EXACT: dict[str, Any] = {"strategy": "exact_fit"}
SPLIT: dict[str, Any] = {"split_across_pack": True}
FILLING = (EXACT, EXACT, *({"strategy": name} for name in ("best_fit", "first_fit", "next_fit")), SPLIT)


@dataclass(frozen=True)
class Layout:
    """How 8 ranks are grouped by a mesh."""

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    data: tuple[str, ...]  # the dimensions along which batches differ

    def data_ranks(self) -> list[int]:
        """Return each rank's group, from the definition: ranks differ where their places along ``data`` do."""
        along = [number for number, name in enumerate(self.dims) if name in self.data]
        data = [tuple(place[number] for number in along) for place in np.ndindex(*self.shape)]
        return [sorted(set(data)).index(place) for place in data]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `PackedDataLoader`. Called in a rank."""
        return {"data_ranks": mesh(self.shape, self.dims)[self.data]}


@cache
def mesh(shape: tuple[int, ...], dims: tuple[str, ...]) -> DeviceMesh:
    """Make a mesh, once, because its process groups stay. Called in a rank."""
    return init_device_mesh("cpu", shape, mesh_dim_names=dims)


class Stage(NamedTuple):
    """A part of a run: from the state of the stage before, for a number of steps (None: to the end)."""

    ranks: int  # with a layout: groups of ranks
    workers: int = 0
    steps: int | None = None
    layout: Layout | None = None


@dataclass(frozen=True)
class Case:
    """A corpus and a run over it, where each stage has its own topology."""

    corpus: Corpus
    stages: Sequence[Stage]
    per_step: int = 6  # packs that all ranks have together in a step
    endless: int | None = None  # the number of steps of an endless corpus, where no lane ends
    # Another check, of the corpus and the state after the run. Called in a rank.
    judge: Callable[[Any, bytes], None] | None = None


Draw = Callable[[int, Path], Case]


def run_stages(
    pools: RankPools, corpus: Corpus, stages: Sequence[Stage], per_step: int, state: bytes | None = None
) -> tuple[list[Step], list[bool], bytes]:
    """Run stage after stage, each resuming the one before.

    Returns:
        All steps; for each stage, whether it warned that lanes do not divide evenly; and the last state.
    """
    steps: list[Step] = []
    warned = []
    for ranks, workers, count, layout in stages:
        part = partial(run_rank, workers=workers, batch_size=per_step // ranks, steps=count)
        if layout is None:
            results = pools[ranks].run(part, corpus, state)
        else:
            size = len(layout.data_ranks())
            results = pools[size].run(partial(part, groups=layout.arguments), corpus, state)
        warned.append(any(result.warned for result in results))
        states = {result.states[-1] for result in results}
        assert len(states) == 1, "the ranks' states differ"
        [state] = states
        steps += global_steps(results if layout is None else one_of_each(layout, results))
    assert state is not None
    return steps, warned, state


def one_of_each(layout: Layout, results: Sequence[RankResult]) -> list[RankResult]:
    """Check that batches are equal within groups and disjoint across; return a result of each group, by data rank."""
    groups: dict[int, RankResult] = {}
    for rank, (data_rank, result) in enumerate(zip(layout.data_ranks(), results, strict=True)):
        first = groups.setdefault(data_rank, result)
        assert result.steps == first.steps, f"{layout}: rank {rank} has other batches than its group"
    found = [groups[data_rank] for data_rank in sorted(groups)]
    seen = [set(count_packs(result.steps)) for result in found]
    assert len(set().union(*seen)) == sum(map(len, seen)), f"{layout}: groups have the same packs"
    return found


def common_steps(corpus: Corpus, per_step: int) -> int:
    """Count the steps of the first epoch before a lane has no more packs."""
    dataset = corpus.dataset()
    num_lanes = dataset.lanes_for(1)
    counts = Counter(dict.fromkeys(range(num_lanes), 0))
    counts.update(item["lane"] for item in dataset if item["epoch"] == 0)
    return min(counts.values()) * num_lanes // per_step


def check_case(pools: RankPools, case: Case) -> Counter[str]:
    """Compare a case's run with one process: the packs of the first steps, all packs, the last state; and count tokens.

    Every sample must come once an epoch, and a warning where the ranks of a stage do not divide the lanes.
    """
    corpus, per_step = case.corpus, case.per_step
    steps, warned, state = run_stages(pools, corpus, case.stages, per_step)
    reference, _, end = run_stages(pools, corpus, [Stage(1, 0, case.endless)], per_step)
    uneven = any(corpus.settings["num_lanes"] % stage.ranks for stage in case.stages)  # whatever the workers
    assert any(warned) == uneven, f"warned of lanes that do not divide evenly: {warned}"
    if case.endless is None:
        check_coverage(reference, corpus, epochs=corpus.settings["epochs"])
        same = 0 if uneven else pools[1].run(common_steps, corpus, per_step)[0]
    else:
        same = case.endless
        assert [len(step) for step in steps] == [per_step] * same, "null packs: a lane has ended"
    for step in range(min(same, len(reference))):
        assert count_packs([steps[step]]) == count_packs([reference[step]]), f"other packs in step {step}"
    assert count_packs(steps) == count_packs(reference), "other packs"
    assert load_state(state)["lanes"] == load_state(end)["lanes"], "the lanes end in another state"
    if case.judge is not None:
        pools[1].run(case.judge, corpus, state)
    packs, resumes = sum(map(len, steps)), len(case.stages) - 1
    return Counter(resumes=resumes, packs=packs, steps=len(reference), equal=same)


def check_cases(run: Run, draw: Draw, full: int, quick: int) -> str:
    """Draw and check cases by number; return what was done."""
    count, done = run.count(full, quick), Counter[str]()
    with RankPools() as pools:
        for number in range(count):
            with tempfile.TemporaryDirectory() as name:
                case = draw(number, Path(name))
                try:
                    done += check_case(pools, case)
                except AssertionError as error:
                    raise AssertionError(f"case {number}: {error}; {case}") from error
    return (
        f"{count:,} cases, {done['resumes']:,} resumes, {done['packs']:,} packs: those of one process, in "
        f"{done['equal']:,} of {done['steps']:,} steps, until a lane ends, also step by step; 0 counterexamples"
    )


def cases(name: str, shows: str, *, full: int, quick: int, limit: int) -> Callable[[Draw], Draw]:
    """Make a job of a function that draws a case by its number, in a folder."""

    def register(draw: Draw) -> Draw:
        job(name, shows, limit=limit)(partial(check_cases, draw=draw, full=full, quick=quick))
        return draw

    return register


# Kinds of cases.


@cases(
    "generated",
    "1,000 generated cases (lengths, lanes, buffer, policies, cuts, topologies)",
    full=1000, quick=25, limit=420,
)  # fmt: skip
def generate(number: int, folder: Path) -> Case:
    """Draw a small corpus and a run over it on three topologies."""
    rng = random.Random(number)
    limit = rng.choice([1, 4, 16, 24, 64])
    overlong = rng.choice(["split", "drop", "truncate"])
    longest = rng.choice([limit, 2 * limit, 4 * limit])
    count = rng.choice([1, 2, 3, 7, 20, 60, 150])
    drawn = {
        "uniform": [rng.randint(1, longest) for _ in range(count)],
        "short": [min(rng.randint(1, longest) for _ in range(3)) for _ in range(count)],
        "skewed": [longest if rng.random() < 0.1 else 1 for _ in range(count)],
        "equal": [max(1, limit // 2)] * count,
    }[rng.choice(["uniform", "short", "skewed", "equal"])]
    stages = [
        Stage(rng.choice([1, 2, 3]), rng.choice([0, 0, 0, 1, 2]), None if last else rng.randint(0, 12))
        for last in (False, False, True)
    ]
    most = max(stage.ranks * max(1, stage.workers) for stage in stages)
    settings = {
        "max_seq_len": limit,
        **rng.choice(FILLING),
        "overlong": overlong,
        "buffer_size": rng.choice([1, 2, 5, 16, 128]),
        "shuffle": (rng.random() < 0.8) * rng.choice([1, 3, 32]) or False,
        "seed": rng.randrange(1000),
        "epochs": rng.choice([1, 1, 2, 3]),
        "num_lanes": max(most, rng.choice([most, most + 1, 6, 12, 13])),
        "balance_window": rng.choice([0, 1, 5, 64]),
    }
    if overlong == "drop" and min(drawn) > limit:
        drawn[0] = limit  # a run without a pack is an error
    return Case(Corpus(drawn, None, settings), stages)


@cases(
    "elastic",
    "4 -> 2 -> 3 -> 1 ranks, 0 to 4 workers: the same packs in every step, every sample once",
    full=15, quick=2, limit=240,
)  # fmt: skip
def elastic(number: int, folder: Path, *, grouped: bool = False) -> Case:
    """Draw a run on 4 -> 2 -> 3 -> 1 ranks, whose lanes are a multiple of all consumers."""
    corpus = Corpus.make(144 * 30, folder=folder, epochs=2, num_lanes=144, seed=number // 5, grouped=grouped)
    same = common_steps(corpus, 12)
    assert same > 10, f"only {same} steps before a lane ends"
    counts = [same // 4 + 1, same // 4, same // 3, None]
    workers = [(number + i) % 5 for i in range(4)]
    return Case(corpus, list(map(Stage, (4, 2, 3, 1), workers, counts)), per_step=12)


@cases(
    "uneven",
    "lanes that do not divide evenly: warned, every sample exactly once",
    full=15, quick=1, limit=180,
)  # fmt: skip
def uneven(number: int, folder: Path) -> Case:
    """Draw 7, 13 and 19 lanes on 1 to 3 ranks with 0 to 2 workers."""
    corpus = Corpus.make(900, folder=folder, epochs=2, num_lanes=(7, 13, 19)[number % 3], seed=number // 3)
    return Case(corpus, [Stage(2, 2, 9), Stage(3, 0, 11), Stage(3, 2, 13), Stage(1, 2, 8), Stage(2, 2)])


@cases(
    "epoch-edges",
    "resumed at the end of an epoch, after the end of a lane, on the first pack of epoch 2",
    full=120, quick=20, limit=300,
)  # fmt: skip
def epoch_edge(number: int, folder: Path) -> Case:
    """Cut three short epochs after any step: in most of an epoch's 11 steps, one of the 12 lanes has ended."""
    corpus = Corpus.make(360, epochs=3, num_lanes=12, seed=0)
    after = ((2, 2), (1, 0), (3, 2))[number // 40 % 3]
    return Case(corpus, [Stage(2, 2, number % 40), Stage(*after)])


@cases(
    "skewed",
    "lanes skewed 100:1, finite epoch, 4 ranks, 50 runs: equal steps, no hang, every sample once",
    full=50, quick=4, limit=300,
)  # fmt: skip
def skewed(number: int, folder: Path) -> Case:
    """Give one lane 100 packs and the others one each, every lane in turn."""
    lanes, workers = ((4, 0), (8, 2))[number % 2]
    # Map-style rows: lane l owns l, l + lanes, ...; 100 samples of one token make one pack.
    lengths = [100 if i % lanes == number // 2 % lanes else 1 for i in range(lanes * 100)]
    epochs = 1 + number // 2 % 2
    settings = {"max_seq_len": 100, "num_lanes": lanes, "shuffle": True, "seed": number, "epochs": epochs}
    return Case(Corpus(lengths, None, settings), [Stage(4, workers)], per_step=8)


# One document, one of several packs, fewer than lanes, one larger than all others.
ODD = [
    (lengths, files, filling, stages)
    for stages in ([Stage(4, 2)], [Stage(3, 0, 1), Stage(4, 0, 1), Stage(2, 2)], [Stage(1, 0)])
    for filling in (EXACT, SPLIT)
    for files in (False, True)
    for lengths in ([5], [100], [7, 3, 20], [900, *[2] * 40])
]


@cases(
    "odd-corpora",
    "an empty lane, fewer documents than lanes, a one-document corpus: equal steps, every sample once",
    full=len(ODD), quick=12, limit=180,
)  # fmt: skip
def odd(number: int, folder: Path) -> Case:
    """Make odd corpora, as a dataset and as files, for 1 to 4 ranks."""
    lengths, files, filling, stages = ODD[number]
    settings: dict[str, Any] = {"max_seq_len": 24, "num_lanes": 24, "shuffle": True, "epochs": 2}
    corpus = Corpus(lengths, str(folder) if files else None, {**settings, "overlong": "split", **filling})
    if files:
        corpus.write()
    return Case(corpus, stages, per_step=12)


TWO = (
    Layout((2, 4), ("dp", "tp"), ("dp",)),
    Layout((2, 2, 2), ("pp", "dp", "cp"), ("dp",)),
    Layout((4, 2), ("tp", "dp"), ("dp",)),
)
FOUR = (
    Layout((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), ("dp_replicate", "dp_shard")),
    Layout((2, 4), ("tp", "dp"), ("dp",)),
)
ONE = (Layout((1, 8), ("dp", "tp"), ("dp",)), Layout((1, 2, 4), ("dp", "pp", "cp"), ("dp",)))


@cases(
    "data-groups",
    "8 ranks in 2 groups, dp x tp and dp x cp x pp: equal batches within, disjoint across, resumed on 2, 4, 1 groups",
    full=12, quick=4, limit=300,
)  # fmt: skip
def data_groups(number: int, folder: Path) -> Case:
    """Resume 8 ranks in groups on the same groups, and in chains on other numbers of groups."""
    corpus = Corpus.make(1200, folder=folder, epochs=2, num_lanes=24)
    n = number // 2
    two, four, one = Stage(2, layout=TWO[n % 3]), Stage(4, layout=FOUR[n % 2]), Stage(1, layout=ONE[n % 2])
    if number % 2:
        first = (two, four, one)[n % 3]
        return Case(corpus, [first._replace(steps=5 + n), first._replace(workers=n % 2)], per_step=8)
    steps, workers = (4 + n, 3, 6, 2 + n, None), (n % 2, 0, 1 - n % 2, 0, 0)
    chain = zip((two, four, one, four, two), workers, steps, strict=True)
    return Case(corpus, [stage._replace(workers=w, steps=k) for stage, w, k in chain], per_step=8)


FIRST = 100_000  # number of the large source's first row
WEIGHT = 0.002  # of the small source


@dataclass(frozen=True)
class Mixture(Corpus):
    """``folder`` holds compressed files of a few rows; the rows of ``lengths`` are beside them in memory."""

    def source(self) -> Any:  # noqa: D102 - see Corpus
        small = JSONLSource(sorted(Path(str(self.folder)).glob("*.gz")))
        large = MapSource([{"i": FIRST + i, "n": n} for i, n in enumerate(self.lengths)])
        entries = [
            {"name": "small", "source": small, "weight": WEIGHT},
            {"name": "large", "source": large, "weight": 1 - WEIGHT},
        ]
        return Mix(entries, stop="never")


@cases(
    "small-sources",
    "2 compressed files of weight 0.002 beside a large source: no run ends, weights within 0.2 points, the same packs",
    full=6, quick=2, limit=240,
)  # fmt: skip
def small_source(number: int, folder: Path) -> Case:
    """Mix two files of 200, 5 or 1 rows with a large source, in 8 or 32 lanes."""
    rows = (200, 5, 1)[number // 2]
    rng = np.random.default_rng(rows)
    for file in range(2):
        lines = [{"i": rows * file + i, "n": int(rng.integers(4, 100))} for i in range(rows)]
        write(folder / f"{file}.jsonl.gz", lines)
    settings = {
        "max_seq_len": 256, "buffer_size": 16, "num_lanes": (8, 32)[number % 2], "shuffle": 32,
        "epochs": None,
    }  # fmt: skip
    corpus = Mixture(rng.integers(4, 200, 20_000).tolist(), str(folder), settings)
    stages = [Stage(4, 2, 62), Stage(2, 1, 31), Stage(1, 3, 32)]
    return Case(corpus, stages, per_step=16, endless=125, judge=check_weight)


def check_weight(corpus: Corpus, state: bytes) -> None:
    """Check that the small source gave something, and not more than its weight says."""
    dataset = corpus.dataset()
    dataset.load_state_dict(load_state(state))
    small, large = dataset.source_stats().values()
    assert small.trained > 0, "the small source gave nothing"
    off = abs(small.trained / (small.trained + large.trained) - WEIGHT)
    assert off < 0.002, f"its fraction is {off:.4f} from its weight"


# Jobs.


@job("every-step", "restored at every step of a 500-pack run, and 20 times in a row: identical", limit=300)
def every_step(run: Run) -> str:
    """Resume 2 ranks from every state, also where batches do not divide the workers; then 20 times in new processes."""
    with tempfile.TemporaryDirectory() as name:
        corpus = Corpus.make(run.count(1500, 180), folder=Path(name), epochs=2)
        for workers, batch_size in [(3, 7), (2, 5), (2, 1)][: run.count(3, 1)]:
            restore_each(corpus, workers, batch_size)
        whole = restore_each(corpus, 2, 2)
        steps = global_steps(whole)
        done, state = 0, None
        leap = max(1, len(steps) // 20)
        for number in range(20):
            results = run_forked(partial(run_rank, workers=2, steps=leap), 2, corpus, state)
            assert global_steps(results) == steps[done : done + leap]
            done, state = done + leap, results[0].states[-1]
            assert state == whole[0].states[done], f"the state grew or changed by resume {number}"
    return (
        f"{len(steps)} steps of {sum(map(len, steps))} packs, restored after each, also with 7, 5 and 1 packs a batch "
        f"on 3 and 2 workers; 20 resumes in a row, each state equal to that of the run without; at most "
        f"{max(map(len, whole[0].states)):,} bytes"
    )


def restore_each(corpus: Corpus, workers: int, batch_size: int) -> list[RankResult]:
    """Check that 2 ranks, restored after any step, have the same packs and state after 3 more; return the whole run."""
    part = partial(run_rank, workers=workers, batch_size=batch_size)
    with Ranks(2) as ranks:
        whole: list[RankResult] = ranks.run(partial(part, every_state=True), corpus)
        check_coverage(global_steps(whole), corpus, epochs=2)
        states = whole[0].states
        restored = ranks.run(resume_from_each, partial(part, steps=3), corpus, states, timeout=220)
    for rank, found in enumerate(restored):
        for k, result in enumerate(found):
            assert result.steps == whole[rank].steps[k : k + 3], f"rank {rank}: other packs after step {k}"
            if k + 3 < len(states):
                assert result.states[-1] == states[k + 3], f"another state 3 steps after {k}"
    return whole


def resume_from_each(
    part: Callable[[Corpus, bytes], RankResult], corpus: Corpus, states: list[bytes]
) -> list[RankResult]:
    """Run a part from each state. Called in a rank."""
    return [part(corpus, state) for state in states]


@job("groups", "groups: killed at 50 points, resumed at every step and on 4 -> 2 -> 3 -> 1 ranks", limit=600)
def groups(run: Run) -> str:
    """Kill and resume runs of groups, whose packs are recorded with their prefixes and fields."""
    with tempfile.TemporaryDirectory() as name:
        killed = kill_and_resume(Path(name), run.count(50, 2), grouped=True)
    with tempfile.TemporaryDirectory() as name:
        corpus = Corpus.make(run.count(900, 200), folder=Path(name), epochs=2, grouped=True)
        steps = len(restore_each(corpus, 2, 2)[0].steps)
    return f"{killed}; restored after each of {steps} steps; {check_cases(run, partial(elastic, grouped=True), 3, 1)}"
