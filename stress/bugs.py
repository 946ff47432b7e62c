"""Jobs that plant one known bug at a time, and require that the checks of the other jobs, or the tests, find it."""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from streampack import JSONLSource, PackedDataLoader
from streampack.sources import Reading
from stress.corpus import (
    Corpus,
    check_coverage,
    count_packs,
    global_steps,
    load_state,
    record_packs,
    run_rank,
)
from stress.job import Run, job
from stress.kills import iterate_killing_workers
from stress.planted import BUGS
from stress.ranks import RankPools, kill_tree
from stress.topology import Stage, check_steps, common_steps, run_stages

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 90  # seconds for one bug; a bug that makes the checks hang counts as seen
SUITE = (
    "streaming/test_lane_state.py",
    "distributed/test_rank_sync.py",
    "loader/test_workers.py",
    "loader/test_data_loader.py",
    "sources/test_sources.py",
    "sources/test_shuffling.py",
    "streaming/test_dataset.py",
    "streaming/test_dataset_resume.py",
    "streaming/test_dataset_states.py",
    "streaming/test_lane.py",
    "distributed/test_processes.py",
)
"""Test files that the bugs are looked for with, the fastest first."""


@job("bugs-checks", "20 known bugs, planted one at a time: the checks of these jobs find them", limit=600)
def bugs_checks(run: Run) -> str:
    """Run the checks without a bug, then with each."""
    failure = first_failing_check(None)
    assert failure is None, f"without a bug: {failure}"
    names = list(BUGS)[:: run.count(1, 7)]
    missed = missed_bugs(run, names, first_failing_check)
    assert not missed, f"{len(names) - len(missed)} of {len(names)} seen; not {', '.join(missed)}"
    return f"{len(names)} of {len(names)} seen ({', '.join(names)}); without a bug, all checks pass"


@job("bugs-suite", "the same 20 bugs: the test suite finds them", limit=3600)
def bugs_suite(run: Run) -> str:
    """Run pytest over `SUITE` without a bug, then with each bug up to the first failure."""
    files = [ROOT / "tests" / file for file in SUITE]
    files = files[: run.count(len(files), 1)]
    names = list(BUGS)[: run.count(len(BUGS), 2)]
    begun = time.monotonic()
    failure = first_failing_test(None, files)
    assert failure is None, f"without a bug: {failure}"
    seconds = time.monotonic() - begun
    missed = missed_bugs(run, names, partial(first_failing_test, files=files))
    if not run.quick:
        assert not missed, f"{len(names) - len(missed)} of {len(names)} seen; not {', '.join(missed)}"
    return (
        f"{len(names) - len(missed)} of {len(names)} seen by {', '.join(file.name for file in files)}, which take "
        f"{seconds:.0f} s and pass without a bug"
    )


def missed_bugs(run: Run, names: list[str], first_failure: Callable[[str], str | None]) -> list[str]:
    """Return the bugs with which nothing fails; print what fails with the others."""
    missed = []
    for number, name in enumerate(names):
        run.progress(number, len(names), "bugs")
        failure = first_failure(name)
        # An AttributeError is no bug that was found, but one that no longer fits the code.
        if failure is None or "AttributeError" in failure:
            missed.append(name)
        sys.stderr.write(f"  {name}: {str(failure)[:160]}\n")
    return missed


def first_failing_check(bug: str | None) -> str | None:
    """Run all checks in a process with that bug planted; return the first failure, None if all pass."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_plant_and_check, args=(bug, theirs))
    process.start()
    theirs.close()
    failure: str | None = f"hung for {LIMIT} s"
    if ours.poll(LIMIT):
        try:
            failure = ours.recv()
        except EOFError:
            failure = f"died with exit code {process.exitcode}"
    kill_tree(process.pid or 0)
    process.join()
    return failure


def _plant_and_check(bug: str | None, pipe: Connection) -> None:
    if bug is not None:
        BUGS[bug]()
    failure = None
    for check in (check_windows, check_epochs, check_resumes, check_equal_steps, check_worker_restart):
        try:
            check()
        except BaseException as error:
            lines = f"{check.__name__}: {type(error).__name__}: {str(error) or traceback.format_exc()}".splitlines()
            failure = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
            break
    pipe.send(failure)


def check_windows() -> None:
    """Check that no two windows of a lane have the same permutation."""
    with tempfile.TemporaryDirectory() as name:
        corpus = Corpus.make(400, folder=Path(name))
        source = JSONLSource(sorted(Path(name).glob("*.jsonl")))
        rows = [row.data["i"] for row in source.read(Reading(0, num_lanes=1, seed=3, shuffle_window=40))]
    assert sorted(rows) == list(range(len(corpus.lengths)))
    orders = []
    for start in range(0, 400, 40):
        window = rows[start : start + 40]
        orders.append(tuple(sorted(range(40), key=window.__getitem__)))
    assert len(set(orders)) == len(orders), "two windows have the same order"


def check_epochs() -> None:
    """Check that every epoch has every token once, in another order, and that workers do not change the order."""
    with tempfile.TemporaryDirectory() as name, RankPools() as pools:
        for folder in (None, Path(name)):
            corpus = Corpus.make(331, folder=folder, epochs=2)
            steps = global_steps(pools[1].run(run_rank, corpus))
            check_coverage(steps, corpus, epochs=2)
            packs = [pack.tokens for step in steps for pack in step]
            half = len(steps) // 2
            assert steps[:half] != steps[half:], "both epochs have the same order"
            quarter = len(packs) // 4
            assert packs[:quarter] != packs[2 * quarter : 3 * quarter], "both epochs begin alike"
            assert len(count_packs(steps[:half]) & count_packs(steps[half:])) < quarter, "epochs repeat packs"
            with_workers = pools[1].run(partial(run_rank, workers=3), corpus)
            assert global_steps(with_workers) == steps, "three workers make another order"


def check_resumes() -> None:
    """Check that resumes on other ranks and workers give the same packs and the same last state."""
    with tempfile.TemporaryDirectory() as name, RankPools() as pools:
        corpora = [
            Corpus.make(300, folder=Path(name), epochs=2),
            Corpus.make(200, longest=80, split_across_pack=True, epochs=2),
            Corpus.make(250, longest=40, overlong="drop", epochs=2),
            Corpus.make(250, longest=40, overlong="split", epochs=1),
        ]
        for corpus in corpora:
            reference, _, end = run_stages(pools, corpus, [(1, 0, None)], per_step=6)
            check_coverage(reference, corpus, epochs=corpus.settings["epochs"])
            chains: list[list[Stage]] = [
                [(2, 2, 4), (2, 0, 3), (2, 2, 2), (2, 0, None)],
                [(1, 0, 5), (3, 0, 4), (2, 2, len(reference) // 3), (1, 0, None)],
                [(2, 0, len(reference) - 2), (1, 0, None)],
                [(2, 0, len(reference) // 2), (2, 0, None)],
            ]
            for stages in chains:
                steps, _, last = run_stages(pools, corpus, stages, per_step=6)
                check_coverage(steps, corpus, epochs=corpus.settings["epochs"])
                check_steps(steps, reference, same=common_steps(corpus, 6))
                assert load_state(last)["lanes"] == load_state(end)["lanes"], "the lanes end in another state"
        check_state_is_a_copy()
        check_num_lanes(pools)


def check_state_is_a_copy() -> None:
    """Check that a state does not change while the loader goes on."""
    loader = PackedDataLoader(Corpus.make(100).dataset(), batch_size=2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    before = repr(state)
    assert record_packs(next(iterator))
    loader.state_dict()
    assert repr(state) == before, "a state changed while the loader went on"


def check_num_lanes(pools: RankPools) -> None:
    """Check that a resume keeps the number of lanes that the first run chose."""
    corpus = Corpus.make(3000, num_lanes=None)
    steps, _, _ = run_stages(pools, corpus, [(1, 0, 20), (3, 0, 20), (2, 2, None)], per_step=6)
    check_coverage(steps, corpus)


def check_equal_steps() -> None:
    """Check that ranks whose lanes differ in length make equally many steps."""
    lengths = [24 if i % 4 == 1 else 1 for i in range(200)]
    corpus = Corpus(lengths, None, {"max_seq_len": 24, "num_lanes": 4, "epochs": 2})
    with RankPools() as pools:
        check_coverage(global_steps(pools[4].run(run_rank, corpus)), corpus, epochs=2)


def check_worker_restart() -> None:
    """Check that no pack is lost or repeated when a worker dies."""
    corpus = Corpus.make(900, longest=900, max_seq_len=1536, epochs=2)
    with RankPools() as pools:
        results = pools[2].run(run_rank, corpus)
        killed = pools[2].run(iterate_killing_workers, corpus, 2)
    for (steps, restarts), undisturbed in zip(killed, results, strict=True):
        assert restarts == 2, f"{restarts} restarts"
        assert steps == undisturbed.steps, "other packs after a worker's death"


def first_failing_test(bug: str | None, files: list[Path]) -> str | None:
    """Run pytest with that bug planted; return the first test that fails, None if all pass."""
    env = os.environ | {"STRESS_BUG": bug or ""}
    command = [
        *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "stress.planted", "-p", "no:cacheprovider"),
        *("-m", "not slow and not gpu", "-W", "default", "--no-header", "--tb=no"),
        *(str(file.relative_to(ROOT)) for file in files),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        process.communicate()
        return "hung"
    if process.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return found[1] if found else output[-300:]
