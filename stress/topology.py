"""Resumes at every step, many in a row, on other ranks and workers, at the ends of epochs, and of odd corpora."""

from __future__ import annotations

import pickle
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from streampack import IterablePackedDataset, PackedDataLoader
from stress.corpus import (
    Corpus,
    Numbers,
    Step,
    check_coverage,
    count_packs,
    global_steps,
    load_state,
    record_packs,
    run_rank,
    save_state,
)
from stress.job import Run, job
from tests.harness.processes import RankPools, Ranks

Stage = tuple[int, int, int | None]  # ranks, workers, steps (None: to the end)

EXACT: dict[str, Any] = {"strategy": "exact_fit"}
SPLIT: dict[str, Any] = {"split_across_pack": True}
FILLING = (EXACT, EXACT, *({"strategy": name} for name in ("best_fit", "first_fit", "next_fit")), SPLIT)


def run_stages(
    pools: RankPools, corpus: Corpus, stages: Sequence[Stage], *, per_step: int, state: bytes | None = None
) -> tuple[list[Step], list[bool], bytes]:
    """Run stage after stage, each resuming the one before.

    Returns:
        All steps; for each stage, whether it warned that lanes do not divide evenly; and the last state.
    """
    steps: list[Step] = []
    warned = []
    for ranks, workers, count in stages:
        part = partial(run_rank, workers=workers, batch_size=per_step // ranks, steps=count)
        results = pools[ranks].run(part, corpus, state)
        steps += global_steps(results)
        warned.append(any(result.warned for result in results))
        states = {result.states[-1] for result in results}
        assert len(states) == 1, "the ranks' states differ"
        [state] = states
    assert state is not None
    return steps, warned, state


def check_steps(steps: list[Step], reference: list[Step], *, same: int = 0) -> None:
    """Check that a run made the packs of another, and each of its first ``same`` steps those of the other's step."""
    for step in range(same):
        assert count_packs([steps[step]]) == count_packs([reference[step]]), f"other packs in step {step}"
    assert count_packs(steps) == count_packs(reference), "other packs"


def common_steps(corpus: Corpus, per_step: int) -> int:
    """Count the steps of the first epoch before a lane has no more packs."""
    dataset = corpus.dataset()
    num_lanes = dataset.lanes_for(1)
    counts = Counter(dict.fromkeys(range(num_lanes), 0))
    counts.update(item["lane"] for item in dataset if item["epoch"] == 0)
    return min(counts.values()) * num_lanes // per_step


@job("every-step", "restored at every step of a 500-pack run, and 20 times in a row: identical", limit=240)
def every_step(run: Run) -> str:
    """Resume 2 ranks x 2 workers from every state: the same packs, and the same bytes of the states that follow."""
    packs = run.count(500, 60)
    with tempfile.TemporaryDirectory() as name:
        corpus = Corpus.make(packs * 3, folder=Path(name), epochs=2)
        with Ranks(2) as ranks:
            whole = ranks.run(partial(run_rank, workers=2, every_state=True), corpus)
            steps = global_steps(whole)
            check_coverage(steps, corpus, epochs=2)
            assert sum(map(len, steps)) >= packs
            restored = ranks.run(resume_from_each, corpus, whole[0].states, 3, timeout=220)
            for rank, found in enumerate(restored):
                for k, (rest, after) in enumerate(found):
                    assert rest == whole[rank].steps[k : k + 3], f"rank {rank}: other packs after step {k}"
                    if k + 3 <= len(steps):
                        assert after == whole[0].states[k + 3], f"another state 3 steps after {k}"
            # 20 in a row, each in new processes.
            done, state = 0, None
            leap = max(1, len(steps) // 20)
            for number in range(20):
                run.progress(number, 20, "resumes in a row")
                with Ranks(2) as fresh:
                    results = fresh.run(partial(run_rank, workers=2, steps=leap), corpus, state)
                assert global_steps(results) == steps[done : done + leap]
                done, state = done + leap, results[0].states[-1]
                assert state == whole[0].states[done], f"the state grew or changed by resume {number}"
    size = max(
        len(pickle.dumps(lane)) for state in whole[0].states for lane in load_state(state)["lanes"].values()
    )
    return (
        f"{len(steps)} steps of {sum(map(len, steps))} packs, restored after each; 20 resumes in a row, each state "
        f"equal to that of the run without; the largest of a lane {size} bytes"
    )


def resume_from_each(corpus: Corpus, states: list[bytes], ahead: int) -> list[tuple[list[Step], bytes]]:
    """Load each state; return the next ``ahead`` steps and the state after them. Called in a rank."""
    found = []
    loader = PackedDataLoader(corpus.dataset(), batch_size=2, num_workers=2)
    for state in states:
        loader.load_state_dict(load_state(state))
        iterator = iter(loader)
        rest = [record_packs(batch) for _ in range(ahead) if (batch := next(iterator, None)) is not None]
        live = loader.state_dict()
        frozen = save_state(live)
        next(iterator, None)
        assert save_state(live) == frozen, "a state changed while the loader went on"
        found.append((rest, frozen))
        del iterator
    return found


@job(
    "elastic",
    "4 -> 2 -> 3 -> 1 ranks, 0 to 4 workers: the same packs in every step, every sample once",
    limit=240,
)
def elastic(run: Run) -> str:
    """Resume on other ranks and workers: the lanes are a multiple of all, and a step has 12 packs on each."""
    lanes, per_step, stages = 144, 12, 0
    with tempfile.TemporaryDirectory() as name, RankPools() as pools:
        for shuffle_seed in range(run.count(3, 1)):
            size = lanes * 30
            corpus = Corpus.make(size, folder=Path(name), epochs=2, num_lanes=lanes, seed=shuffle_seed)
            reference, _, end = run_stages(pools, corpus, [(1, 0, None)], per_step=per_step)
            check_coverage(reference, corpus, epochs=2)
            same = common_steps(corpus, per_step)
            assert same > 10, f"only {same} steps before a lane ends"
            for first in range(5 if not run.quick else 2):
                workers = [(first + i) % 5 for i in range(4)]
                counts = [same // 4 + 1, same // 4, same // 3, None]
                chain = list(zip((4, 2, 3, 1), workers, counts, strict=True))
                steps, warned, state = run_stages(pools, corpus, chain, per_step=per_step)
                stages += len(chain)
                run.progress(stages, 60, "stages")
                assert not any(warned)
                check_steps(steps, reference, same=same)
                assert load_state(state) == load_state(end)
                check_coverage(steps, corpus, epochs=2)
    return (
        f"{stages} stages of {stages // 4} runs, {lanes} lanes; the first {same} steps of "
        f"{len(reference)} hold the same packs; every sample once in each of 2 epochs"
    )


@job(
    "same-order",
    "the same topology, batch sizes that do not divide the workers, cut anywhere: the same order",
    limit=240,
)
def same_order(run: Run) -> str:
    """Resume 2 ranks x 3 workers with 7 packs a batch, and others like it, after random steps."""
    cuts = 0
    rng = random.Random(4)
    with tempfile.TemporaryDirectory() as name, Ranks(2) as ranks:
        corpus = Corpus.make(1500, folder=Path(name), epochs=2)
        for workers, batch_size in [(3, 7), (2, 5), (2, 1), (3, 2)][: run.count(4, 2)]:
            part = partial(run_rank, workers=workers, batch_size=batch_size)
            whole = ranks.run(partial(part, every_state=True), corpus)
            check_coverage(global_steps(whole), corpus, epochs=2)
            total = len(whole[0].steps)
            for cut in rng.sample(range(total), min(total, run.count(40, 4))):
                results = ranks.run(part, corpus, whole[0].states[cut])
                for rank, result in enumerate(results):
                    assert result.steps == whole[rank].steps[cut:], (
                        f"rank {rank}: other packs after step {cut}"
                    )
                cuts += 1
                run.progress(cuts, 160, "cuts")
    return f"{cuts} cuts at random steps, run to the end: every rank returns the same packs in the same order"


@job("uneven", "lanes that do not divide evenly: warned, every sample exactly once", limit=180)
def uneven(run: Run) -> str:
    """Run 7, 13 and 19 lanes on 1 to 3 ranks with 0 to 2 workers."""
    stages = 0
    with tempfile.TemporaryDirectory() as name, RankPools() as pools:
        for lanes in (7, 13, 19)[: run.count(3, 1)]:
            for seed in range(run.count(5, 1)):
                corpus = Corpus.make(900, folder=Path(name), epochs=2, num_lanes=lanes, seed=seed)
                chain: list[Stage] = [(2, 2, 9), (3, 0, 11), (3, 2, 13), (1, 2, 8), (2, 2, None)]
                steps, warned, _ = run_stages(pools, corpus, chain, per_step=6)
                assert warned == [lanes % ranks > 0 for ranks, _, _ in chain]
                check_coverage(steps, corpus, epochs=2)
                reference, _, _ = run_stages(pools, corpus, [(1, 0, None)], per_step=6)
                check_steps(steps, reference)
                stages += len(chain)
    return f"{stages} stages, warned unless alone; every sample once in each of 2 epochs, in the packs of one process"


@job(
    "epoch-edges",
    "resumed at the end of an epoch, after the end of a lane, on the first pack of epoch 2",
    limit=240,
)
def epoch_edges(run: Run) -> str:
    """Resume after every step from the first lane's end to the next epoch, on the same and other topologies."""
    resumes = 0
    with RankPools() as pools:
        for seed in range(run.count(2, 1)):
            corpus = Corpus.make(360, epochs=3, num_lanes=12, seed=seed)
            per_step = 6
            part = partial(run_rank, workers=2, batch_size=per_step // 2, every_state=True)
            whole = pools[2].run(part, corpus)
            steps = global_steps(whole)
            check_coverage(steps, corpus, epochs=3)
            single = replace(corpus, settings={**corpus.settings, "epochs": 1})
            one_epoch = len(run_stages(pools, single, [(2, 2, None)], per_step=per_step)[0])
            same = common_steps(corpus, per_step)
            assert same < one_epoch
            for epoch in (1, 2, 3):
                end = epoch * one_epoch
                for k in range(end - one_epoch + same - 1, min(end + 4, len(steps)) + 1):
                    for ranks, workers in ((2, 2), (1, 0), (3, 2))[: run.count(3, 2)]:
                        rest, _, _ = run_stages(
                            pools,
                            corpus,
                            [(ranks, workers, None)],
                            per_step=per_step,
                            state=whole[0].states[k],
                        )
                        assert count_packs(steps[:k] + rest) == count_packs(steps), (
                            f"step {k} to {ranks} x {workers}"
                        )
                        if ranks == 2:
                            assert rest == steps[k:]
                        resumes += 1
                        run.progress(resumes, 300, "resumes")
    return f"{resumes} resumes around the ends of 3 epochs: 0 lost, 0 twice"


@job("generated", "1,000 generated cases (lengths, lanes, buffer, policies, cuts, topologies)", limit=420)
def generated(run: Run) -> str:
    """Run generated corpora on three topologies each, and compare with one process."""
    cases = run.count(1000, 25)
    kinds: Counter[str] = Counter()
    packs = 0
    with RankPools() as pools:
        for number in range(cases):
            run.progress(number, cases, "cases")
            rng = random.Random(number)
            corpus, chain = generate(rng)
            try:
                steps, warned, state = run_stages(pools, corpus, chain, per_step=6)
                reference, _, end = run_stages(pools, corpus, [(1, 0, None)], per_step=6)
                times = corpus.settings["epochs"]
                check_coverage(reference, corpus, epochs=times)
                ours, theirs = load_state(state), load_state(end)
                assert ours["lanes"] == theirs["lanes"], "the lanes end in another state"
                lanes = corpus.settings["num_lanes"]
                even = all(lanes % ranks == 0 for ranks, _, _ in chain)  # whatever the workers
                assert even == (not any(warned))
                check_steps(steps, reference, same=common_steps(corpus, 6) if even else 0)
            except AssertionError as error:
                raise AssertionError(f"case {number}: {error}; {corpus}; {chain}") from error
            kinds[corpus.settings.get("strategy", "split_across_pack")] += 1
            kinds["even" if even else "uneven"] += 1
            packs += sum(map(len, steps))
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return f"{cases:,} cases ({counts}), {packs:,} packs; 0 counterexamples"


def generate(rng: random.Random) -> tuple[Corpus, list[Stage]]:
    """Draw a small corpus and a run over it on three topologies."""
    limit = rng.choice([1, 4, 16, 24, 64])
    overlong = rng.choice(["split", "drop", "truncate"])
    longest = rng.choice([limit, 2 * limit, 4 * limit])
    count = rng.choice([1, 2, 3, 7, 20, 60, 150])
    shape = rng.choice(["uniform", "short", "skewed", "equal"])
    lengths = {
        "uniform": lambda: rng.randint(1, longest),
        "short": lambda: min(rng.randint(1, longest), rng.randint(1, longest), rng.randint(1, longest)),
        "skewed": lambda: longest if rng.random() < 0.1 else 1,
        "equal": lambda: max(1, limit // 2),
    }[shape]
    stages: list[Stage] = []
    for last in (False, False, True):
        workers = rng.choice([0, 0, 0, 1, 2])
        stages.append((rng.choice([1, 2, 3]), workers, None if last else rng.randint(0, 12)))
    most = max(ranks * max(1, workers) for ranks, workers, _ in stages)
    settings = {
        "max_seq_len": limit,
        **rng.choice(FILLING),
        "overlong": overlong,
        "buffer_size": rng.choice([1, 2, 5, 16, 128]),
        "shuffle": rng.random() < 0.8,
        "shuffle_window": rng.choice([1, 3, 32]),
        "seed": rng.randrange(1000),
        "epochs": rng.choice([1, 1, 2, 3]),
        "num_lanes": rng.choice([most, most + 1, 6, 12, 13]) if most <= 6 else most,
    }
    settings["num_lanes"] = max(most, settings["num_lanes"])
    settings["balance_window"] = rng.choice([0, 1, 5, 64])
    drawn = [lengths() for _ in range(count)]
    if overlong == "drop" and min(drawn) > limit:
        drawn[0] = limit  # a run without a pack is an error
    return Corpus(drawn, None, settings), stages


@job(
    "skewed",
    "lanes skewed 100:1, finite epoch, 4 ranks, 50 runs: equal steps, no hang, every sample once",
    limit=300,
)
def skewed(run: Run) -> str:
    """Give one lane 100 packs and the others one each, every lane in turn."""
    runs = run.count(50, 4)
    with Ranks(4) as ranks:
        for number in range(runs):
            run.progress(number, runs, "runs")
            lanes, workers = ((4, 0), (8, 2))[number % 2]
            heavy = number // 2 % lanes
            # Map-style rows: lane l owns l, l + lanes, ...; 100 samples of one token make one pack.
            lengths = [100 if i % lanes == heavy else 1 for i in range(lanes * 100)]
            epochs = 1 + number // 2 % 2
            settings = {
                "max_seq_len": 100,
                "num_lanes": lanes,
                "shuffle": True,
                "seed": number,
                "epochs": epochs,
            }
            corpus = Corpus(lengths, None, settings)
            results = ranks.run(partial(run_rank, workers=workers), corpus, timeout=60)
            check_coverage(global_steps(results), corpus, epochs=epochs)
            packs = [sum(map(len, result.steps)) for result in results]
            assert max(packs) == epochs * (99 + lanes // 4)
            assert min(packs) == epochs * lanes // 4
    return (
        f"{runs} runs with 1 and 2 lanes a rank, 1 and 2 epochs; equal steps on all ranks, every sample once"
    )


@job(
    "odd-corpora",
    "an empty lane, fewer documents than lanes, a one-document corpus: equal steps, every sample once",
    limit=180,
)
def odd_corpora(run: Run) -> str:
    """Run odd corpora on 1 to 4 ranks with 0 to 2 workers, and resume them in the middle."""
    cases = 0
    with tempfile.TemporaryDirectory() as name, RankPools() as pools:
        corpora = (
            [5],  # one document
            [100],  # one document of several packs
            [7, 3, 20],  # fewer documents than lanes
            [900, *[2] * 40],  # one document larger than all others
        )
        for lengths in corpora:
            for folder in (None, name):
                for filling in (EXACT, SPLIT)[: run.count(2, 1)]:
                    settings = {
                        "max_seq_len": 24, "num_lanes": 24, "shuffle": True, "overlong": "split", "epochs": 2,
                        **filling,
                    }  # fmt: skip
                    corpus = Corpus(lengths, folder, settings)
                    if folder:
                        corpus.write()
                    for chain in ([(4, 2, None)], [(3, 0, 1), (4, 0, 1), (2, 2, None)], [(1, 0, None)]):
                        steps, _, _ = run_stages(pools, corpus, chain, per_step=12)
                        check_coverage(steps, corpus, epochs=2)
                        cases += 1
        for ranks, workers in ((2, 2), (2, 0), (1, 2)):
            read = Counter(token for tokens in pools[ranks].run(iterate_unsplit, workers) for token in tokens)
            wanted = Corpus([3] * 100, None, {"max_seq_len": 24}).expected_tokens()
            assert read == wanted, f"{ranks} ranks x {workers} workers: not every sample once"
            cases += 1
    return (
        f"{cases} runs of {len(corpora)} corpora, map-style and JSONL, and of a dataset that gives every worker "
        "everything; equal steps on all ranks, every sample once"
    )


class UnsplitDataset(IterableDataset[dict[str, int]]):
    """A user's dataset that gives all rows to every worker."""

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"i": i, "n": 3} for i in range(100))


def iterate_unsplit(workers: int) -> list[int]:
    """Return the tokens that are read of a dataset that gives all rows to every worker. Called in a rank."""
    dataset = IterablePackedDataset(UnsplitDataset(), encoder=Numbers(), max_seq_len=24)
    loader = PackedDataLoader(dataset, num_workers=workers)
    found = [token for batch in loader for pack in record_packs(batch) for token in pack.tokens]
    if loader.rank_sync.group is not None:
        dist.destroy_process_group(loader.rank_sync.group)
    return found
