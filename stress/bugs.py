"""Jobs that plant one known bug at a time, and require that the checks of this folder, or the test suite, find it."""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

from stress.corpus import Corpus, check_exactly, digests, ride, seen, together, unpack
from stress.job import Run, job
from stress.planted import BUGS
from stress.ranks import Pools, processes
from stress.topology import _ride, common_steps, relay

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 90  # seconds for one bug; a bug that makes the checks hang is seen
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
"""Test files that could find them, those that take the least time first."""


@job("bugs-checks", "20 known bugs, planted one at a time: the checks of these jobs find them", limit=600)
def bugs_checks(run: Run) -> str:
    """Without a bug, the same checks must pass."""
    said = planted_and_checked(None)
    assert said is None, f"without a bug: {said}"
    names = list(BUGS)[:: 1 if not run.quick else 7]
    missed, seen_by = [], []
    for number, name in enumerate(names):
        run.progress(number, len(names), "bugs")
        said = planted_and_checked(name)
        if said is None:
            missed.append(name)
        else:
            seen_by.append(f"{name}: {said}")
            sys.stderr.write(f"  {name}: {said[:160]}\n")
    assert not missed, f"{len(names) - len(missed)} of {len(names)} seen; not {', '.join(missed)}"
    return f"{len(names)} of {len(names)} seen ({', '.join(names)}); without a bug, all checks pass"


def planted_and_checked(name: str | None) -> str | None:
    """Return the first failure of the checks with that bug planted; None if they all pass."""
    context = mp.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_plant_and_check, args=(name, theirs))
    process.start()
    theirs.close()
    said: str | None = f"hung for {LIMIT} s"
    if ours.poll(LIMIT):
        try:
            said = ours.recv()
        except EOFError:
            said = f"died with exit code {process.exitcode}"
    for pid in descendants(process.pid or 0):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.join()
    return said


def descendants(root: int) -> list[int]:
    """Return the pids of a process's children, their children, and so on."""
    parents = {pid: parent for pid, (parent, *_) in processes().items()}
    found = [root]
    for above in found:
        found += [pid for pid, parent in parents.items() if parent == above]
    return found[1:]


def _plant_and_check(name: str | None, pipe: object) -> None:
    if name is not None:
        BUGS[name]()
    said = None
    for check in (windows_differ, epochs_and_orders, resumes, equal_steps, mended):
        try:
            check()
        except BaseException as error:
            said = f"{check.__name__}: {type(error).__name__}: {(str(error) or traceback.format_exc())}"
            said = f"{said.splitlines()[0]} … {said.splitlines()[-1]}" if "\n" in said else said
            break
    pipe.send(said)  # type: ignore[attr-defined]


def windows_differ() -> None:
    """Check that no two windows of a lane have the same permutation."""
    from streampack import JSONLSource
    from streampack.sources import Reading

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


def epochs_and_orders() -> None:
    """Check that epochs come once, in other orders, as in a single process; null packs train nothing."""
    with tempfile.TemporaryDirectory() as name, Pools() as pools:
        for folder in (None, Path(name)):
            corpus = Corpus.make(331, folder=folder, epochs=2)
            alone = pools[1].run(ride, corpus)
            steps = together(alone)
            check_exactly(steps, corpus, times=2)
            kept = [tokens for step in steps for tokens in (pack.tokens for pack in step)]
            half = len(steps) // 2
            assert steps[:half] != steps[half:], "both epochs have the same order"
            assert kept[: len(kept) // 4] != kept[len(kept) // 2 : len(kept) // 2 + len(kept) // 4]
            assert len(digests(steps[:half]) & digests(steps[half:])) < len(kept) / 4, "epochs repeat"
            three = pools[1].run(_ride, corpus, None, 3, 2, None)
            assert together(three) == steps, "three workers make another order"


def resumes() -> None:
    """Check that a chain of resumes on other ranks and workers gives the same packs and the same end."""
    with tempfile.TemporaryDirectory() as name, Pools() as pools:
        corpora = [
            Corpus.make(300, folder=Path(name), epochs=2),
            Corpus.make(200, longest=80, split_across_pack=True, epochs=2),
            Corpus.make(250, longest=40, overlong="drop", epochs=2),
            Corpus.make(250, longest=40, overlong="split", epochs=1),
        ]
        for corpus in corpora:
            reference, _, end = relay(pools, corpus, [(1, 0, None)], per_step=6)
            check_exactly(reference, corpus, times=corpus.settings["epochs"])
            for stages in (
                [(2, 2, 4), (2, 0, 3), (2, 2, 2), (2, 0, None)],
                [(1, 0, 5), (3, 0, 4), (2, 2, len(reference) // 3), (1, 0, None)],
                [(2, 0, len(reference) - 2), (1, 0, None)],
                [(2, 0, len(reference) // 2), (2, 0, None)],
            ):
                steps, _, last = relay(pools, corpus, stages, per_step=6)  # type: ignore[arg-type]
                check_exactly(steps, corpus, times=corpus.settings["epochs"])
                assert digests(steps) == digests(reference), "other packs"
                assert unpack(last)["lanes"] == unpack(end)["lanes"], "the lanes end in another state"
                for step in range(common_steps(corpus, 6)):
                    assert digests([steps[step]]) == digests([reference[step]]), f"other packs in step {step}"
        frozen()
        more_lanes(pools)


def frozen() -> None:
    """Check that a state does not change while the loader goes on."""
    from streampack import PackedDataLoader

    loader = PackedDataLoader(Corpus.make(100).dataset(), batch_size=2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    before = repr(state)
    assert seen(next(iterator))
    loader.state_dict()
    assert repr(state) == before, "a state changed while the loader went on"


def more_lanes(pools: Pools) -> None:
    """Check that a resume keeps the number of lanes that the first run chose."""
    corpus = Corpus.make(3000, num_lanes=None)
    steps, _, _ = relay(pools, corpus, [(1, 0, 20), (3, 0, 20), (2, 2, None)], per_step=6)
    check_exactly(steps, corpus)


def equal_steps() -> None:
    """Check that ranks with unequal lanes make equally many steps."""
    lengths = [24 if i % 4 == 1 else 1 for i in range(200)]
    corpus = Corpus(lengths, None, {"max_seq_len": 24, "num_lanes": 4, "epochs": 2})
    with Pools() as pools:
        check_exactly(together(pools[4].run(ride, corpus)), corpus, times=2)


def mended() -> None:
    """Check that a worker that dies loses and repeats nothing."""
    from stress.kills import with_dying_workers

    corpus = Corpus.make(900, longest=900, max_seq_len=1536, epochs=2)
    with Pools() as pools:
        rides = pools[2].run(ride, corpus)
        for (steps, restarts), wanted in zip(pools[2].run(with_dying_workers, corpus, 2), rides, strict=True):
            assert restarts == 2, f"{restarts} restarts"
            assert steps == wanted.steps, "other packs after a worker's death"


@job("bugs-suite", "the same 20 bugs: the test suite finds them", limit=3600)
def bugs_suite(run: Run) -> str:
    """Run pytest for each bug over the tests that could find it, until the first failure."""
    files = [ROOT / "tests" / file for file in SUITE]
    files = files[:1] if run.quick else files
    names = list(BUGS)[: run.count(len(BUGS), 2)]
    seconds = time.monotonic()
    said, _ = suite(None, files)
    assert said is None, f"without a bug: {said}"
    seconds = time.monotonic() - seconds
    missed = []
    for number, name in enumerate(names):
        run.progress(number, len(names), "bugs")
        said, _ = suite(name, files)
        if said is None:
            missed.append(name)
        sys.stderr.write(f"  {name}: {said}\n")
    if not run.quick:
        assert not missed, f"{len(names) - len(missed)} of {len(names)} seen; not {', '.join(missed)}"
    return (
        f"{len(names) - len(missed)} of {len(names)} seen by {', '.join(file.name for file in files)}, which take "
        f"{seconds:.0f} s and pass without a bug"
    )


def suite(name: str | None, files: list[Path]) -> tuple[str | None, float]:
    """Return the first test that fails, None if all pass; and the seconds."""
    env = os.environ | {"STRESS_BUG": name or ""}
    command = [
        *(sys.executable, "-m", "pytest", "-x", "-q", "-p", "stress.planted", "-p", "no:cacheprovider"),
        *("-m", "not slow and not gpu", "-W", "default", "--no-header", "--tb=no"),
        *(str(file.relative_to(ROOT)) for file in files),
    ]
    begun = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        for pid in descendants(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate()
        return "hung", time.monotonic() - begun
    seconds = time.monotonic() - begun
    if process.returncode == 0:
        return None, seconds
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return (found[1] if found else output[-300:]), seconds
