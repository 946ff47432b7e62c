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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from stress.planted import BUGS, forget_runs, plant, read_trace
from stress.ranks import RankPools, kill_tree
from stress.topology import Stage, check_steps, common_steps, run_stages

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 90  # seconds of the checks with one bug; longer proves nothing, since the machine may be slow
SUITE_LIMIT = 600  # the same for the test suite
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
    failure = check_outcome(None).failure
    assert failure is None, f"without a bug: {failure}"
    names = list(BUGS)[:: run.count(1, 7)]
    return f"{try_bugs(run, names, check_outcome)} ({', '.join(names)}); without a bug, all checks pass"


@job("bugs-suite", "the same 20 bugs: the test suite finds them", limit=3600)
def bugs_suite(run: Run) -> str:
    """Run pytest over `SUITE` without a bug, then with each bug up to the first failure."""
    files = [ROOT / "tests" / file for file in SUITE]
    files = files[: run.count(len(files), 1)]
    names = list(BUGS)[: run.count(len(BUGS), 2)]
    begun = time.monotonic()
    failure = suite_outcome(None, files).failure
    assert failure is None, f"without a bug: {failure}"
    seconds = time.monotonic() - begun
    seen = try_bugs(run, names, partial(suite_outcome, files=files))
    return f"{seen} by {', '.join(file.name for file in files)}, which take {seconds:.0f} s and pass without a bug"


@dataclass(frozen=True)
class Outcome:
    """What became of one bug.

    Attributes:
        failure: the check or test that failed first; None if all passed.
        broken: why the outcome says nothing about the checks, if so: the bug could not be planted, did not run in what
            failed, or broke by itself; or the checks could not be run to a failure.
    """

    failure: str | None
    broken: str | None = None

    @property
    def seen(self) -> bool:
        """Whether a check failed because of the bug."""
        return self.failure is not None and self.broken is None


def try_bugs(run: Run, names: Sequence[str], outcome_of: Callable[[str], Outcome]) -> str:
    """Plant each bug; return how many were seen, and raise for those that were not or that prove nothing."""
    assert names, "no bug to plant"
    outcomes = {}
    for number, name in enumerate(names):
        run.progress(number, len(names), "bugs")
        outcome = outcomes[name] = outcome_of(name)
        said = outcome.broken or outcome.failure or "NOT SEEN"
        sys.stderr.write(f"  {name}: {said[:160]}\n")
    broken = [f"{name} ({outcome.broken})" for name, outcome in outcomes.items() if outcome.broken]
    missed = [name for name, outcome in outcomes.items() if not outcome.broken and not outcome.seen]
    seen = f"{sum(outcome.seen for outcome in outcomes.values())} of {len(names)} seen"
    assert not broken, f"{seen}; these prove nothing: {', '.join(broken)}"
    assert not missed, f"{seen}; not {', '.join(missed)}"
    return seen


def judge(failure: str | None, trace: Sequence[str], *, broken: str | None = None) -> Outcome:
    """Return the outcome of a run with a bug planted, by what failed and what the bug's trace says.

    Args:
        failure: the check or test that failed first; None if all passed.
        trace: what `read_trace` returned.
        broken: why the checks did not end, if so.
    """
    wrong = [line for line in trace if line not in {"planted", "ran", "ran here"}]
    if wrong:
        return Outcome(failure, wrong[0])
    if broken:
        return Outcome(failure, broken)
    if "planted" not in trace:
        return Outcome(failure, f"was not planted: {failure}")
    if "ran" not in trace:
        return Outcome(failure, "never ran")
    if failure is not None and "ran here" not in trace:
        return Outcome(failure, f"did not run in what failed: {failure}")
    return Outcome(failure)


def check_outcome(bug: str | None) -> Outcome:
    """Run all checks in a process with that bug planted, None for no bug."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        context = mp.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_plant_and_check, args=(bug, trace, theirs))
        process.start()
        theirs.close()
        failure = broken = f"did not end in {LIMIT} s"
        if ours.poll(LIMIT):
            try:
                failure, broken = ours.recv(), None
            except EOFError:
                process.join()
                # No check lets its own process die: what killed it may have nothing to do with the bug.
                failure = broken = f"the checks died with exit code {process.exitcode}"
        kill_tree(process.pid or 0)
        process.join()
        return Outcome(failure) if bug is None else judge(failure, read_trace(trace), broken=broken)


def _plant_and_check(bug: str | None, trace: Path, pipe: Connection) -> None:
    os.environ["STRESS_BUG_TRACE"] = str(trace)
    if bug is not None:
        plant(bug)
    failure = None
    for check in (check_windows, check_epochs, check_resumes, check_equal_steps, check_worker_restart):
        forget_runs()
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


def suite_outcome(bug: str | None, files: Sequence[Path]) -> Outcome:
    """Run pytest up to the first failure with that bug planted, None for no bug."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        env = os.environ | {"STRESS_BUG": bug or "", "STRESS_BUG_TRACE": str(trace)}
        command = [
            *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "stress.planted", "-p", "no:cacheprovider"),
            *("-m", "not slow and not gpu", "-W", "default", "--no-header", "--tb=no"),
            *(str(file) for file in files),
        ]
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        failure: str | None = None
        broken = None
        try:
            output, _ = process.communicate(timeout=SUITE_LIMIT)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            process.communicate()
            failure = broken = f"did not end in {SUITE_LIMIT} s"
        else:
            if process.returncode == 1:
                found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
                failure = found[1] if found else output[-300:]
            elif process.returncode != 0:  # the tests were not run
                failure = broken = f"pytest ended with {process.returncode}: {output[-300:]}"
        return Outcome(failure) if bug is None else judge(failure, read_trace(trace), broken=broken)
