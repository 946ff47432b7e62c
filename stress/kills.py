"""SIGKILL of all processes, of a rank, of a worker; and an error that one rank raises."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from streampack import IterablePackedDataset, PackedDataLoader
from stress.corpus import (
    Corpus,
    Step,
    check_coverage,
    digests_of,
    global_steps,
    load_state,
    record_packs,
    run_rank,
    save_state,
    worker_pids,
)
from stress.job import Run, job
from tests.harness.processes import ExitWith, Ranks, run_forked
from tests.harness.workers import DeadlyRow

SAVE_EVERY = 4  # steps
MAX_DELAY = 10.0  # seconds within which every rank must raise


def wait_until(reached: Callable[[], bool], seconds: float, what: str | None = None) -> None:
    """Wait until something is reached: if ``what`` says its name, it must be."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            assert what is None, f"{what} was not reached in {seconds:g} s"
            return
        time.sleep(0.002)


@job("kill-all", "SIGKILL of the whole process tree at 50 random points: the same packs", limit=420)
def kill_all(run: Run) -> str:
    """Kill 2 ranks x 2 workers, which save every few steps, and resume from the last saved state."""
    with tempfile.TemporaryDirectory() as name:
        return kill_and_resume(Path(name), run.count(50, 3))


def kill_and_resume(folder: Path, kills: int, *, grouped: bool = False) -> str:
    """Kill a run of three epochs at random points, resume it, and compare it with one that ran through."""
    count = max(900, kills * 110)
    corpus = Corpus.make(count, folder=folder, epochs=3, balance_window=64, grouped=grouped)
    rng = random.Random(1)
    results = run_forked(run_rank, 2, corpus, timeout=120)
    check_coverage(global_steps(results), corpus, epochs=3)
    reference = digests_of(results)
    total = len(reference[0])
    counted = starts = 0
    while counted < kills:
        before, starts = saved_step(folder), starts + 1
        assert before < total - 40, "the corpus is too small for this number of kills"
        with Ranks(2) as ranks:
            ranks.start(train_and_save, corpus, folder, 0.002)
            # Anywhere from the start of the first process to a few saved states later.
            target = rng.randrange(0, 4 * SAVE_EVERY)
            wait_until(lambda step=before + target: last_logged_step(folder) >= step, 60)
            time.sleep(rng.random() * 0.02)
            ranks.kill()
        assert saved_step(folder) >= before
        counted += saved_step(folder) > before
    run_forked(train_and_save, 2, corpus, folder, 0.0, timeout=120)
    repeated = sum(check_log(folder, rank, reference[rank]) for rank in range(2))
    packs = sum(len(step) for steps in reference for step in steps)
    return (
        f"{counted} kills after new progress, of {starts}; {total} steps, {packs:,} packs, 3 epochs; {repeated} "
        "batches made twice, all identical; 0 lost, 0 twice"
    )


def train_and_save(corpus: Corpus, folder: Path, pause: float) -> None:
    """Resume, log the packs of every step, and save the loader's state every few steps. Called in a rank."""
    rank = dist.get_rank()
    loader = PackedDataLoader(corpus.dataset(), batch_size=2, num_workers=2)
    step = 0
    path = folder / "state.pt"
    if path.exists():
        saved = load_state(path.read_bytes())
        step = saved["step"]
        loader.load_state_dict(saved["stream"])
    with (folder / f"log-{rank}").open("a") as log:
        log.write("\n")  # a kill may have left half a line
        for batch in loader:
            step += 1
            log.write(json.dumps([step, [pack.digest for pack in record_packs(batch)]]) + "\n")
            log.flush()
            time.sleep(pause)
            if step % SAVE_EVERY == 0:
                state = loader.state_dict()
                if rank == 0:
                    temporary = path.with_suffix(".part")
                    temporary.write_bytes(save_state({"step": step, "stream": state}))
                    temporary.replace(path)


def saved_step(folder: Path) -> int:
    """Return the step of the saved state, 0 if there is none."""
    path = folder / "state.pt"
    return int(load_state(path.read_bytes())["step"]) if path.exists() else 0


def last_logged_step(folder: Path) -> int:
    """Return the last step that rank 0 logged, 0 if there is none."""
    return max((step for step, _ in read_log(folder, 0)[-2:]), default=0)


def read_log(folder: Path, rank: int) -> list[tuple[int, list[str]]]:
    """Return the steps that a rank logged with the digests of their packs; lines that a kill cut off are skipped."""
    lines = []
    with suppress(FileNotFoundError):
        for text in (folder / f"log-{rank}").read_text().splitlines():
            with suppress(ValueError):
                lines.append((*json.loads(text),))
    return lines


def check_log(folder: Path, rank: int, reference: list[list[str]]) -> int:
    """Check that a rank logged every step, always with the reference's packs; return how many steps it repeated."""
    times: Counter[int] = Counter()
    for step, digests in read_log(folder, rank):
        assert digests == reference[step - 1], f"rank {rank}, step {step}: other packs"
        times[step] += 1
    assert sorted(times) == list(range(1, len(reference) + 1)), f"rank {rank}: steps are missing"
    return times.total() - len(reference)


@job("kill-rank", "SIGKILL of a rank: its peers raise in under 10 s, its workers go with it", limit=240)
def kill_rank(run: Run) -> str:
    """Kill each of 3 ranks x 2 workers in turn."""
    kills = run.count(15, 2)
    rng = random.Random(2)
    slowest = 0.0
    corpus = Corpus.make(4000, num_lanes=12, epochs=None)
    for number in range(kills):
        victim = number % 3
        with Ranks(3) as ranks:
            ranks.start(exit_after_error, corpus)
            time.sleep(0.5 + rng.random())
            killed = time.monotonic()
            os.kill(ranks.processes[victim].pid, signal.SIGKILL)
            results = ranks.collect(MAX_DELAY + 5, dead=(victim,))
            for raised in filter(None, results):
                assert raised.when > killed, f"a rank had ended before the kill: {raised}"
                assert raised.steps, "the kill came before the first step"
                slowest = max(slowest, raised.when - killed)
            ranks.wait_for_exit(killed + MAX_DELAY)
    assert slowest < MAX_DELAY
    return f"{kills} kills of one of 3 ranks; the slowest peer raised after {slowest:.2f} s; no worker outlived a rank"


class Raised(NamedTuple):
    """An error that a rank raised."""

    kind: str  # its type
    message: str
    when: float
    last: float  # when the rank returned its last batch
    steps: int


def iterate_until_error(corpus: Corpus, workers: int = 2, pause: float = 0.0) -> Raised:
    """Iterate until an error. Called in a rank."""
    steps, last = 0, time.monotonic()
    try:
        for _ in PackedDataLoader(corpus.dataset(), batch_size=2, num_workers=workers, timeout=600):
            steps, last = steps + 1, time.monotonic()
            time.sleep(pause)
    except Exception as caught:
        return Raised(type(caught).__name__, str(caught), time.monotonic(), last, steps)
    raise AssertionError("no error")


def exit_after_error(corpus: Corpus) -> ExitWith:
    """Iterate slowly until an error, then exit, as training would. Called in a rank."""
    return ExitWith(iterate_until_error(corpus, pause=0.005))


@job("error", "an error on one rank is raised on all in under 10 s", limit=120)
def error(run: Run) -> str:
    """Iterate over a row that cannot be encoded, early, in the middle and late, on 3 ranks."""
    slowest, cases = 0.0, 0
    corpus = Corpus.make(1800, num_lanes=12, epochs=2)
    with Ranks(3) as ranks:
        for workers in (0, 2):
            for bad in (0, 5, 1000, 1799)[: run.count(4, 2)]:
                results = ranks.run(iterate_until_error, replace(corpus, bad=bad), workers, timeout=60)
                slowest = max(slowest, *(raised.when - raised.last for raised in results))
                own = [raised.message for raised in results if raised.kind == "ValueError"]
                others = [raised.message for raised in results if raised.kind == "OtherRankFailed"]
                assert (len(own), len(others)) == (1, 2), results
                assert f"sample {bad}: cannot be encoded" in own[0]
                assert all(own[0] in text for text in others), results
                cases += 1
    assert slowest < MAX_DELAY
    return f"{cases} bad rows on 3 ranks, workers 0 and 2; the slowest rank raised {slowest:.2f} s after its last batch"


@job(
    "kill-worker",
    "SIGKILL of a worker, 20 times: restarted, the same packs; again and again: an error",
    limit=240,
)
def kill_worker(run: Run) -> str:
    """Kill workers of 2 ranks x 2 workers: the run continues unchanged, except with a row that always kills."""
    kills = run.count(20, 3)
    # Large packs, so that few of them are queued between worker and trainer: a death is noticed only after those.
    corpus = Corpus.make(kills * 400, longest=900, max_seq_len=1536, epochs=2)
    with Ranks(2) as ranks:
        results = ranks.run(run_rank, corpus)
        check_coverage(global_steps(results), corpus, epochs=2)
        killed = ranks.run(iterate_killing_workers, corpus, kills, timeout=200)
        for rank, found in enumerate(killed):
            assert found.restarts == kills, f"rank {rank} restarted {found.restarts} workers of {kills}"
            assert found.steps == results[rank].steps, f"rank {rank} returned other packs"
        raised = ranks.run(iterate_over_a_deadly_row, corpus, kills * 300 + 1, timeout=200)
        apart = max(raised) - min(raised)
        assert apart < MAX_DELAY
    return (
        f"{kills} kills on each of 2 ranks: {len(results[0].steps)} steps identical; a row that kills its worker every "
        f"time: both raised, {apart:.2f} s apart"
    )


def iterate_over_a_deadly_row(corpus: Corpus, at: int) -> float:
    """Return when this rank raised. Called in a rank."""
    data = IterablePackedDataset(corpus.source(), encoder=DeadlyRow(at), untrained="keep", **corpus.settings)
    try:
        for _ in PackedDataLoader(data, batch_size=2, num_workers=2, timeout=600):
            pass
    except RuntimeError as caught:
        if "died of signal SIGKILL, as after each of 3 restarts" in str(caught):
            return time.monotonic()
        raise
    raise AssertionError("the row that kills its worker was passed by")


class Killed(NamedTuple):
    """Result of a rank whose workers were killed."""

    steps: list[Step]
    restarts: int


def iterate_killing_workers(corpus: Corpus, kills: int) -> Killed:
    """Kill workers at random. Called in a rank."""
    rng = random.Random(dist.get_rank())
    loader = PackedDataLoader(corpus.dataset(), batch_size=2, num_workers=2, timeout=600)
    steps: list[Step] = []
    seen: set[int] = set()
    killed = 0
    for batch in loader:
        steps.append(record_packs(batch))
        workers = worker_pids()
        seen.update(workers)
        # Not before the last kill was noticed: two deaths of one process count once.
        if workers and len(seen) - 2 == killed < kills and len(steps) > 3:
            time.sleep(rng.random() * 0.01)
            os.kill(rng.choice(workers), signal.SIGKILL)
            killed += 1
    return Killed(steps, len(seen) - 2)
